"""One cluster for all the tests that do not hurt it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.cluster import Live, live_cluster


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    with live_cluster(nodes=4, gpus=8) as cluster:
        yield cluster
