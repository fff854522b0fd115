"""Output that is shipped fairly, and never takes more of a node's disk than it may."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shoal.agent import shipping
from shoal.agent.shipping import (
    BEHIND_BYTES,
    CHUNK_BYTES,
    WINDOW_BYTES,
    Shipping,
    last_words,
    parting_words,
)
from shoal.control.clock import SystemClock
from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop
from shoal.control.store.sqlite import SqliteStore
from shoal.model.commands import Envelope
from shoal.model.job import MemberRef
from shoal.model.report import LogChunk
from shoal.ports import Inbox

LOUD, QUIET = MemberRef("j1", 1, 0), MemberRef("j2", 1, 0)
MIB = 1024 * 1024


class NoEngine:
    fences = False

    async def start(self, inbox: Inbox) -> None: ...

    def send(self, node: str, envelope: Envelope) -> None: ...

    async def resend(self) -> None: ...

    async def close(self) -> None: ...


class Node:
    """Its members' files, and a controller that answers when it is asked to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sent: list[LogChunk] = []
        self.logs = LogStore(path / "logs")
        self.shipping = Shipping(self.sent.append)

    def watch(self, ref: MemberRef, *, fresh: bool = True) -> None:
        self.shipping.watch(ref, self.path / str(ref), fresh=fresh)

    def write(self, ref: MemberRef, data: bytes) -> None:
        with (self.path / str(ref)).open("ab") as file:
            file.write(data)

    def answer(self) -> None:
        chunks, self.sent[:] = list(self.sent), []
        for chunk in chunks:
            self.shipping.kept(chunk.ref, self.logs.append(chunk))

    def ship(self, ref: MemberRef) -> None:
        for _ in range(1000):
            self.shipping.pump()
            self.answer()
            if self.shipping.complete(ref):
                return
        raise AssertionError("it is never complete")

    def disk(self, ref: MemberRef) -> int:
        return (self.path / str(ref)).stat().st_blocks * 512

    def log(self, ref: MemberRef) -> bytes:
        text, offset = b"", 0
        while (read := self.logs.read(ref, offset)).data:
            text, offset = text + read.data, read.next
        return text


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_line_does_not_wait_for_a_flood(node: Node) -> None:
    node.watch(LOUD)
    node.watch(QUIET)
    node.write(LOUD, b"y\n" * WINDOW_BYTES * 4)
    node.shipping.pump()
    assert sum(len(chunk.data) for chunk in node.sent) == WINDOW_BYTES
    node.write(QUIET, b"done\n")
    node.answer()
    node.shipping.pump()
    node.answer()
    assert node.shipping.complete(QUIET), "it comes in the next turn"
    assert not node.shipping.complete(LOUD)


def test_two_floods_get_the_same_share(node: Node) -> None:
    for ref in (LOUD, QUIET):
        node.watch(ref)
        node.write(ref, b"y" * WINDOW_BYTES * 2)
    node.shipping.pump()
    assert [chunk.ref for chunk in node.sent].count(LOUD) == WINDOW_BYTES // CHUNK_BYTES // 2


def test_what_is_shipped_is_given_back_to_the_disk(node: Node) -> None:
    node.watch(LOUD)
    said = [f"{number}\n".encode().ljust(MIB, b".") for number in range(60)]
    most = 0
    for data in said:
        node.write(LOUD, data)
        node.ship(LOUD)
        most = max(most, node.disk(LOUD))
    assert most <= 2 * BEHIND_BYTES + 3 * MIB
    assert node.log(LOUD) == b"".join(said)


def test_what_cannot_be_shipped_keeps_its_beginning_and_its_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "AHEAD_BYTES_MAX", 8 * MIB)
    node.watch(LOUD)
    for number in range(100):
        node.write(LOUD, f"{number}\n".encode().ljust(MIB, b"."))
        node.shipping.bound_all()
        assert node.disk(LOUD) <= 10 * MIB
    node.ship(LOUD)
    text = node.log(LOUD)
    assert text.startswith(b"0\n") and b"1\n" in text and b"\n[shoal: " in text
    assert text.endswith(b"99\n".ljust(MIB, b".")) and b"98\n" in text
    dropped = int(text.split(b"[shoal: ")[1].split(b" ")[0].replace(b",", b""))
    notice = text.split(b"\n[shoal: ")[1].split(b"]\n")[0]
    assert len(text) + dropped - len(notice) - len("\n[shoal: ]\n") == 100 * MIB, "told exactly"


def test_the_next_life_of_a_node_knows_what_was_dropped(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "AHEAD_BYTES_MAX", 8 * MIB)
    node.watch(LOUD)
    node.write(LOUD, b"x" * 40 * MIB + b"the end")
    node.shipping.bound_all()
    node.shipping.forget(LOUD)
    node.watch(LOUD, fresh=False)
    node.ship(LOUD)
    text = node.log(LOUD)
    assert text.startswith(b"xxx") and text.endswith(b"xthe end") and b"\0" not in text
    assert text.count(b"[shoal: ") == 1 and len(text) < 9 * MIB


def test_a_controller_that_lost_the_log_gets_what_is_left(node: Node) -> None:
    node.watch(LOUD)
    for number in range(40):
        node.write(LOUD, f"{number}\n".encode().ljust(MIB, b"."))
        node.ship(LOUD)
    node.logs.drop(LOUD.job)
    node.shipping.reconnected()
    node.answer()
    node.ship(LOUD)
    text = node.log(LOUD)
    assert text.startswith(b"\n[shoal: ") and b"\0" not in text
    assert text.endswith(b"39\n".ljust(MIB, b"."))


def test_a_file_system_without_holes_is_bounded_too(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libc:
        @staticmethod
        def fallocate(*_: object) -> int:
            return -1

    monkeypatch.setattr("shoal.machine.kernel.ctypes.CDLL", lambda *_, **__: Libc)
    monkeypatch.setattr("shoal.machine.kernel.ctypes.get_errno", lambda: errno.EOPNOTSUPP)
    monkeypatch.setattr(shipping, "AHEAD_BYTES_MAX", 8 * MIB)
    node.watch(LOUD)
    handle = os.open(node.path / str(LOUD), os.O_WRONLY | os.O_APPEND)
    for number in range(50):
        os.write(handle, f"{number}\n".encode().ljust(MIB, b"."))
        node.shipping.bound_all()
        assert node.disk(LOUD) <= 10 * MIB
    os.close(handle)
    node.ship(LOUD)
    text = node.log(LOUD)
    assert text.startswith(b"0\n") and text.endswith(b"49\n".ljust(MIB, b".")) and b"[shoal" in text


def test_an_exit_waits_for_its_output_only_so_long(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("shoal.agent.shipping.time.monotonic", lambda: now[0])
    now[0] += 1000
    assert not node.shipping.waited(100.0), "no controller is there to take the exit"
    node.shipping.reconnected()
    assert not node.shipping.waited(100.0), "it has only just come"
    now[0] += shipping.EXIT_S_MAX + 1
    assert node.shipping.waited(100.0)
    node.shipping.disconnected()
    assert not node.shipping.waited(100.0)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EIO])
def test_what_a_controller_could_not_keep_is_sent_again(
    node: Node, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a job has "succeeded", with an empty log."""
    monkeypatch.setattr(shipping, "AGAIN_S", 0.0)
    store = SqliteStore(node.path / "shoal.db")
    loop = ControlLoop(store, NoEngine(), SystemClock(), None, node.logs)
    sick = [True]

    def append(chunk: LogChunk) -> int:
        if sick[0] and chunk.data:
            raise OSError(number, os.strerror(number))
        return LogStore.append(node.logs, chunk)

    monkeypatch.setattr(node.logs, "append", append)
    written = os.urandom(3 * CHUNK_BYTES + 17)
    node.watch(QUIET)
    node.write(QUIET, written)

    def answer() -> None:
        chunks, node.sent[:] = list(node.sent), []
        for chunk in chunks:
            node.shipping.kept(chunk.ref, loop.log(chunk))

    for _ in range(3):
        node.shipping.pump()
        assert node.sent, "it is tried again"
        answer()
        assert not node.shipping.complete(QUIET)
        assert os.strerror(number) in loop.alarms.texts[0]
    sick[0] = False
    while not node.shipping.complete(QUIET):
        node.shipping.pump()
        answer()
    assert node.log(QUIET) == written
    assert loop.alarms.texts == ()
    store.close()


def test_a_member_that_cuts_its_output_loses_nothing_that_it_prints_afterwards(node: Node) -> None:
    """As `echo problem > /dev/stderr` does in a script."""
    node.watch(QUIET)
    node.write(QUIET, b"a long line that was shipped before\n")
    node.ship(QUIET)
    (node.path / str(QUIET)).write_bytes(b"problem\n")  # opened with O_TRUNC
    assert not node.shipping.complete(QUIET)
    node.write(QUIET, b"and more\n")
    node.ship(QUIET)
    assert node.log(QUIET) == b"a long line that was shipped before\nproblem\nand more\n"


def test_the_last_words_of_a_member_are_its_last_line_that_says_something(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.write_bytes(b"first\nExit code: 7\n-------\n\n")
    assert last_words(output) == "Exit code: 7"
    assert parting_words(output) == ""
    output.write_bytes(b"first\n[shoal: nobody has used it for 2h]\n")
    assert parting_words(output) == "nobody has used it for 2h"
