"""A switch to plug hosts into."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.hosts import Net, missing


@pytest.fixture(scope="session")
def hosts_possible() -> None:
    reason = missing()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def net(hosts_possible: None) -> Iterator[Net]:
    # Short, so that Ray keeps its sockets inside, and nothing of it stays.
    scratch = Path(tempfile.mkdtemp(prefix="sn-"))
    made = Net(scratch)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(scratch, ignore_errors=True)
