"""Stands in for the agent that members tell their steps to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.train.gangs import Listener


@pytest.fixture
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    made = Listener(str(request.node.name))
    yield made
    made.close()
