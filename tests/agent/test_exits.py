"""A member's end is on its node's disk before anybody is told of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from harness.waiting import until

from shoal.agent.members import Members
from shoal.machine.exits import MEMBERS, Exits, read_exits
from shoal.model.commands import Acknowledge
from shoal.model.job import MemberRef
from shoal.model.node import NodeSpec
from shoal.model.report import MemberExit
from tests.agent.rig import Rig, rig

REF, KILLED = MemberRef("j1", 1, 0), MemberRef("j2", 1, 0)
EXIT = MemberExit(REF, 3, "ValueError: no", step=7)
OTHER = MemberExit(KILLED, 0)


async def keep(exits: Exits, exit_: MemberExit) -> None:
    done = asyncio.Event()
    exits.keep(exit_, done.set)
    await done.wait()


async def on_disk_are(folder: Path, *expected: MemberExit) -> None:
    """What is stored is struck out a moment later."""
    await asyncio.to_thread(until, lambda: read_exits(folder) == expected)


def test_an_exit_is_read_as_it_was_kept_until_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.machine.exits.STRIKE_S", 0.01)

    async def live() -> None:
        exits = Exits(tmp_path)
        await keep(exits, EXIT)
        await keep(exits, OTHER)
        assert read_exits(tmp_path) == (EXIT, OTHER)
        exits.stored(REF)
        exits.stored(REF)
        await on_disk_are(tmp_path, OTHER)
        exits.stored(KILLED)
        await on_disk_are(tmp_path)

    asyncio.run(live())
    assert (tmp_path / "exits").stat().st_size == 0, "nothing grows"


def test_what_is_stored_is_struck_out_with_the_next_exit(tmp_path: Path) -> None:
    async def live() -> None:
        exits = Exits(tmp_path)
        await keep(exits, EXIT)
        exits.stored(REF)
        await keep(exits, OTHER)
        assert read_exits(tmp_path) == (OTHER,)
        exits.close()

    asyncio.run(live())


def test_exits_of_the_same_moment_wait_for_the_disk_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    many = [MemberExit(MemberRef("j1", 1, member), 0) for member in range(200)]

    async def live() -> None:
        exits = Exits(tmp_path)
        await asyncio.gather(*(keep(exits, exit_) for exit_ in many))

    asyncio.run(live())
    assert len(synced) == 1
    assert read_exits(tmp_path) == tuple(many)


def test_the_next_life_goes_on_with_the_journal(tmp_path: Path) -> None:
    """Also if the last one ended within a line, or was of a version with a file for each."""
    (tmp_path / str(KILLED)).mkdir()
    (tmp_path / str(KILLED) / "exit").write_bytes(msgspec.json.encode(OTHER))
    (tmp_path / "exits").write_bytes(b'{"ref": ["j9", 1, 0], "co')

    async def live() -> None:
        exits = Exits(tmp_path)
        await keep(exits, EXIT)
        assert read_exits(tmp_path) == (EXIT, OTHER)
        exits.stored(KILLED)
        assert not (tmp_path / str(KILLED) / "exit").exists()
        await on_disk_are(tmp_path, EXIT)

    asyncio.run(live())
    assert read_exits(tmp_path) == (EXIT,)


def test_a_long_journal_is_written_anew_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.machine.exits.JOURNAL_BYTES_MAX", 2_000)

    async def live() -> None:
        exits = Exits(tmp_path)
        await keep(exits, EXIT)
        for number in range(2, 200):
            ref = MemberRef(f"j{number}", 1, 0)
            await keep(exits, MemberExit(ref, 0))
            exits.stored(ref)
        await on_disk_are(tmp_path, EXIT)
        assert (tmp_path / "exits").stat().st_size < 3_000

    asyncio.run(live())


def test_an_exit_that_is_stored_while_the_disk_is_slow_is_not_reported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _: slow.wait())
    monkeypatch.setattr("shoal.machine.exits.WRITE_S_MAX", 0.05)

    async def live() -> None:
        exits = Exits(tmp_path)
        await keep(exits, EXIT)  # gives up, so it is reported, and stored
        exits.stored(REF)
        slow.set()
        monkeypatch.undo()
        await keep(exits, OTHER)
        assert read_exits(tmp_path) == (OTHER,)

    asyncio.run(live())


def test_a_full_disk_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def live() -> None:
        exits = Exits(tmp_path)
        await keep(exits, EXIT)
        write = os.write
        with monkeypatch.context() as full:
            full.setattr(os, "write", lambda handle, data: write(handle, data[:9]))
            await keep(exits, OTHER)
        assert "the disk is full" in caplog.text
        third = MemberExit(MemberRef("j3", 1, 0), 0)
        await keep(exits, third)
        assert read_exits(tmp_path) == (EXIT, third)

    asyncio.run(live())


@pytest.mark.parametrize("data", [b"", b"{", b"null", b'{"ref": ["j9", 1, 0], "code": 0}', b'"x"'])
def test_what_is_damaged_is_no_exit(tmp_path: Path, data: bytes) -> None:
    (tmp_path / str(REF)).mkdir()
    (tmp_path / str(REF) / "exit").write_bytes(data)
    assert read_exits(tmp_path) == ()
    assert read_exits(tmp_path / "nowhere") == ()
    (tmp_path / "exits").write_bytes(data[:3] + b"\n")
    assert read_exits(tmp_path) == ()


def on_disk(node: Rig) -> tuple[MemberRef, ...]:
    return tuple(exit_.ref for exit_ in read_exits(node.directory / MEMBERS))


def test_the_next_life_of_a_node_tells_what_ended_in_the_last() -> None:
    """Nobody acknowledged it; the agent and its keeper are killed; nobody may run it again."""
    with rig() as node:
        wait_for = node.directory / "go"
        script = f"while ! test -e {wait_for}; do sleep 0.02; done; echo bye; exit 3"
        node.launch(REF, "/bin/sh", "-c", script)
        node.launch(KILLED, sys.executable, "-c", "import time; print('up'); time.sleep(600)")
        assert node.says(KILLED, "up")
        node.hang_up()
        wait_for.touch()
        node.wait(lambda: on_disk(node) == (REF,))
        node.restart(signal.SIGKILL)
        assert node.report is not None and node.report.exits == (MemberExit(REF, 3, "bye"),)
        assert node.says(REF, "bye"), "and its output comes, too"
        node.order(Acknowledge(node="n1", incarnation=node.report.incarnation, ref=REF))
        node.wait(lambda: not (node.directory / MEMBERS / str(REF)).exists())


def test_what_ends_because_the_agent_is_told_to_end_is_no_result() -> None:
    with rig() as node:
        script = "import signal, sys, time\n"
        script += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        script += "print('up')\ntime.sleep(600)"
        node.launch(REF, sys.executable, "-c", script)
        assert node.says(REF, "up")
        node.restart(signal.SIGTERM)
        assert node.report is not None and node.report.exits == ()


@pytest.mark.parametrize(
    ("order", "code", "ago_s", "closing", "expected"),
    [
        ("o1", 143, 0.0, False, True),  # its agent may not know yet that the node ends
        ("o1", 143, 60.0, False, False),  # somebody else ended it
        ("o1", 143, 60.0, True, True),
        ("o1", 1, 0.0, True, False),  # it failed by itself
        ("", 143, 0.0, False, False),  # no engine ends this machine
    ],
)
def test_a_member_that_an_engine_ends_with_its_machine_has_no_result(
    order: str, code: int, ago_s: float, closing: bool, expected: bool
) -> None:
    members: Any = Members.__new__(Members)
    members._book = SimpleNamespace(spec=NodeSpec(id="n1", cpu_milli=0, memory_mb=0, order=order))
    members._closing = closing
    member: Any = SimpleNamespace(ended_at=time.monotonic() - ago_s)
    assert members._goes_with_the_node(member, MemberExit(REF, code)) is expected


def test_a_member_that_somebody_ends_is_reported_on_an_ordered_machine_as_well() -> None:
    with rig() as node:
        spec = NodeSpec(id="n1", cpu_milli=16_000, memory_mb=4_000, order="o1")
        (node.directory / "spec.json").write_bytes(msgspec.json.encode(spec))
        node.restart(signal.SIGTERM)
        node.launch(REF, "/bin/sh", "-c", "kill -TERM $$; sleep 600")
        assert node.exit(REF).code == 143
