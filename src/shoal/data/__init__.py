"""Reads the samples of a volume, shard by shard, in an order that a run keeps across kills and
sizes: `shoal.data.open("imagenet")`."""

from shoal.data.reading import Data, open  # noqa: A004
from shoal.data.shards import DataError

__all__ = ["Data", "DataError", "open"]
