"""Engines and a router for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.router.world import Engine, Router


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    started = [Engine(name) for name in ("a", "b")]
    yield started
    for one in started:
        one.close()


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    router = Router(tmp_path / "gateway")
    yield router
    router.close()
    assert "Error" not in router.log.read_text()
