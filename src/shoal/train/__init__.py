"""What a training script imports: `ctx = shoal.train.init()`, then `steps`, `save` and
`restore`."""

from shoal.train.context import Context, init
from shoal.train.errors import TrainError

__all__ = ["Context", "TrainError", "init"]
