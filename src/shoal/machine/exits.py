"""Exits on a node's disk, from a member's end until the controller has stored it.

The agent writes them into one journal, all that are waiting at once. Its next life reports them,
and an engine that sees the agent die reads them: finished work is not repeated because the node
died before it could report it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from shoal.machine.files import sync_folder, write_private
from shoal.model.job import MemberRef
from shoal.model.report import MemberExit

MEMBERS = "members"  # the folder of a node that has one for each member
JOURNAL = "exits"  # beside these
JOURNAL_BYTES_MAX = 1024 * 1024  # then it is written anew, with only those that are needed
EXIT = "exit"  # of an earlier version: a file in a member's folder
EXIT_BYTES_MAX = 64 * 1024
WRITE_S_MAX = 5.0  # an exit waits no longer than this for the disk
TOO_SLOW = "the disk is too slow"
STRIKE_S = (
    0.5  # what the controller has stored is struck out this much later, if nobody ends before
)
# Signals that every process gets when a machine goes down: such an exit is not a result.
FROM_OUTSIDE = tuple(
    128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
)

log = logging.getLogger("shoal.agent")

Batch = dict[MemberRef, tuple[bytes, Callable[[], None] | None]]  # lines, and what to do then

_decode = msgspec.json.Decoder(MemberExit | str).decode


def member_ref(folder: str) -> MemberRef | None:
    """The member that a folder belongs to; None if it is not a member's folder."""
    try:
        job, attempt, member = folder.split(".")
        return MemberRef(job, int(attempt), int(member))
    except ValueError:
        return None


class Exits:
    """The journal: a line of JSON for each exit, and one that names its member when the controller
    has stored it. The file is empty when it has stored all, or soon after. While the thread is
    `_busy` with the disk, nobody else touches the file."""

    def __init__(self, members: Path) -> None:
        self._members = members
        self._path = members / JOURNAL
        self._handle = -1
        self._files = {ref for ref, _ in _of_an_earlier_version(members)}
        self._kept = {exit_.ref: _line(exit_) for exit_ in read_exits(members)}
        self._waiting: Batch = {}
        self._stored: list[MemberRef] = []  # by the controller, while the disk was busy
        self._struck: list[MemberRef] = []  # to be struck out with the next write
        self._striking: asyncio.TimerHandle | None = None
        self._busy = False
        self._patience: asyncio.TimerHandle  # of those that wait
        self._orders: queue.SimpleQueue[tuple[bytes, Callable[[str], None]] | None]
        self._thread: threading.Thread | None = None

    def keep(self, exit_: MemberExit, then: Callable[[], None]) -> None:
        """`then` is called when the exit is on disk, and may be reported. If the disk is sick, it
        is called, too: then the exit is only in the agent's memory."""
        if not self._waiting:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(WRITE_S_MAX, _give_up, self._waiting, TOO_SLOW)
            if not self._busy:
                loop.call_soon(self._write)  # with what ends at the same moment
        self._waiting[exit_.ref] = _line(exit_), then

    def stored(self, ref: MemberRef) -> None:
        """The controller has stored it. If we die before it is struck out, it is reported once
        more."""
        if self._busy:
            self._stored.append(ref)
        elif self._kept.pop(ref, None) is not None:
            self._struck.append(ref)
            if ref in self._files:
                with contextlib.suppress(OSError):
                    os.unlink(self._members / str(ref) / EXIT)
            if self._striking is None:
                loop = asyncio.get_running_loop()
                self._striking = loop.call_later(STRIKE_S, self._strike_out)

    def close(self) -> None:
        """What is on its way to the disk arrives, unless the disk is too slow."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join(WRITE_S_MAX)

    def _strike_out(self) -> None:
        self._striking = None
        if self._busy:
            return  # the next write, or the end of this one, does it
        with contextlib.suppress(OSError):
            if self._kept:
                os.write(self._open(), self._strokes())
            else:
                os.ftruncate(self._open(), 0)
                self._struck.clear()

    def _strokes(self) -> bytes:
        """Lines for those that are stored; they are written at once."""
        lines = b"".join(msgspec.json.encode(str(ref)) + b"\n" for ref in self._struck)
        self._struck.clear()
        return lines

    def _write(self) -> None:
        batch, self._waiting, self._busy = self._waiting, {}, True
        lines = self._strokes() + b"".join(line for line, _ in batch.values())
        patience, loop = self._patience, asyncio.get_running_loop()

        def written(problem: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reports any more
                loop.call_soon_threadsafe(self._written, batch, patience, problem)

        try:
            self._writer().put((lines, written))
        except RuntimeError as error:  # no more threads
            loop.call_soon(self._written, batch, patience, str(error))

    def _writer(self) -> queue.SimpleQueue[tuple[bytes, Callable[[str], None]] | None]:
        """One thread, which costs each exit a fifth of what a pool of them does."""
        if self._thread is None:
            self._orders = queue.SimpleQueue()
            thread = threading.Thread(target=self._work, name="exits", daemon=True)
            thread.start()
            self._thread = thread
        return self._orders

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            lines, written = order
            try:
                self._append(lines)
                problem = ""
            except Exception as error:  # whatever it is, the next exits find this thread alive
                problem = str(error) or type(error).__name__
            written(problem)

    def _written(self, batch: Batch, patience: asyncio.TimerHandle, problem: str) -> None:
        patience.cancel()
        if not problem:
            self._kept.update((ref, line) for ref, (line, _) in batch.items())
        _give_up(batch, problem)
        self._busy = False
        for ref in self._stored:
            self.stored(ref)
        self._stored.clear()
        if self._waiting:
            self._write()

    def _append(self, lines: bytes) -> None:
        """When this returns, the exits survive a loss of power."""
        handle = self._open()
        size = os.fstat(handle).st_size
        if size > JOURNAL_BYTES_MAX:
            write_private(self._path, b"".join(self._kept.values()))
            self._close()
            handle = self._open()
            size = os.fstat(handle).st_size
        if os.write(handle, lines) != len(lines):
            os.ftruncate(handle, size)
            raise OSError("the disk is full")
        os.fdatasync(handle)

    def _open(self) -> int:
        if self._handle < 0:
            self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            sync_folder(self._members)
            if os.fstat(self._handle).st_size:
                os.write(self._handle, b"\n")  # the last life may have ended within a line
        return self._handle

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _give_up(batch: Batch, why: str) -> None:
    """Nobody waits for it any longer; `why`: it is not on the disk."""
    for ref, (line, then) in list(batch.items()):
        if then is None:
            continue
        if why:
            log.warning("the exit of %s is only in memory: %s", ref, why)
        batch[ref] = line, None
        then()


def _line(exit_: MemberExit) -> bytes:
    return msgspec.json.encode(exit_) + b"\n"


def read_exits(members: Path) -> tuple[MemberExit, ...]:
    """Exits that a dead agent could not report. What is damaged is skipped."""
    found = dict(_of_an_earlier_version(members))
    with contextlib.suppress(OSError):
        for line in (members / JOURNAL).read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                entry = _decode(line)
                if isinstance(entry, str):
                    stored = member_ref(entry)
                    if stored is not None:
                        found.pop(stored, None)
                else:
                    found[entry.ref] = entry
    return tuple(found[ref] for ref in sorted(found))


def _of_an_earlier_version(members: Path) -> Iterator[tuple[MemberRef, MemberExit]]:
    """Each was in a file of its own, in the member's folder."""
    with contextlib.suppress(OSError):
        for name in os.listdir(members):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                path = members / name / EXIT
                if path.stat().st_size <= EXIT_BYTES_MAX:
                    exit_ = _decode(path.read_bytes())
                    if isinstance(exit_, MemberExit) and exit_.ref == member_ref(name):
                        yield exit_.ref, exit_
