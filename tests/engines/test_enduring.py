"""What must not end begins again: a link to an agent, above all."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from shoal.engines.agentlink import write_spec
from shoal.engines.local import LocalEngine
from shoal.machine import enduring as module
from shoal.machine.enduring import enduring
from shoal.model.node import NodeSpec

SPEC = NodeSpec(id="n1", cpu_milli=1000, memory_mb=100)


def test_work_that_fails_begins_again_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE_FIRST_S", 0.001)
    tries: list[None] = []

    async def work() -> None:
        tries.append(None)
        if len(tries) < 3:
            raise OSError(errno.EMFILE, "Too many open files")

    asyncio.run(enduring("the work", work))
    assert len(tries) == 3
    assert "the work failed: [Errno 24] Too many open files" in caplog.text


def test_an_agent_that_cannot_be_started_once_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One OSError lost the node until the controller was started again."""
    monkeypatch.setattr(module, "PAUSE_FIRST_S", 0.001)
    tries: list[Path] = []
    came = asyncio.Event()

    def start(directory: Path, env: dict[str, str]) -> NoReturn:
        tries.append(directory)
        if len(tries) == 1:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        came.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    async def live() -> None:
        engine = LocalEngine([SPEC], tmp_path / "nodes", tmp_path / "checkpoints", start)
        await engine.start(None)  # type: ignore[arg-type]
        async with asyncio.timeout(120):
            await came.wait()
        await engine.close()

    asyncio.run(live())
    assert len(tries) >= 2


def test_a_spec_that_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    write_spec(tmp_path, SPEC)
    before = os.stat(tmp_path / "spec.json").st_ino
    write_spec(tmp_path, SPEC)
    assert os.stat(tmp_path / "spec.json").st_ino == before
