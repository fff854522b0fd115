"""One cluster for the tests of the SDK: they kill its controller, but nothing else of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.cluster import Live, live_cluster


@pytest.fixture(scope="package")
def live() -> Iterator[Live]:
    with live_cluster(nodes=2, gpus=8) as cluster:
        yield cluster
