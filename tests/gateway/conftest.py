"""A world for each test, gone after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.gateway.binary import GatewayError, find_binary
from tests.gateway.world import World


@pytest.fixture
def world() -> Iterator[World]:
    try:
        find_binary()
    except GatewayError as error:
        pytest.skip(str(error))
    made = World()
    yield made
    made.close()
