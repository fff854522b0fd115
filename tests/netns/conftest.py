"""A switch to plug hosts into."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.hosts import Net, missing, switched


@pytest.fixture(scope="session")
def hosts_possible() -> None:
    reason = missing()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def net(hosts_possible: None) -> Iterator[Net]:
    with switched() as made:
        yield made
