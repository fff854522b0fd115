"""One cluster and one browser for the tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from harness.browser import Visit, chromium, missing

from shoal.control.home import ClusterConfig
from shoal.model.node import NodeSpec
from tests.live.cluster import Live, live_cluster

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NODES = tuple(
    NodeSpec(id=f"n{n}", gpus=4, cpu_milli=16_000, memory_mb=4_000, place=f"b1/r{(n + 1) // 2}")
    for n in range(1, 5)
)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(config=ClusterConfig(nodes=NODES, port=0)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    with chromium() as found:
        yield found


@pytest.fixture
def visit(browser: Browser, live: Live) -> Iterator[Visit]:
    token = live.home.token.read_text().strip()
    made = Visit(browser, live.client.url, token, width=1200, scheme="light")
    made.sign_in()
    yield made
    made.close()
