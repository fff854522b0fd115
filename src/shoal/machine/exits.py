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
import signal
from collections.abc import Iterator
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
# Signals that every process gets when a machine goes down: such an exit is not a result.
FROM_OUTSIDE = tuple(
    128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
)

log = logging.getLogger("shoal.agent")

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
    has stored it. The file is empty when it has stored all. While a thread is `_busy` with the
    disk, nobody else touches the file."""

    def __init__(self, members: Path) -> None:
        self._members = members
        self._path = members / JOURNAL
        self._handle = -1
        self._kept = {exit_.ref: _line(exit_) for exit_ in read_exits(members)}
        self._waiting: dict[MemberRef, tuple[bytes, asyncio.Future[None]]] = {}
        self._stored: list[MemberRef] = []  # by the controller, while the disk was busy
        self._busy: asyncio.Task[None] | None = None

    async def keep(self, exit_: MemberExit) -> None:
        """An exit is on disk before it is reported, unless the disk is sick: then it is only in the
        agent's memory."""
        done = asyncio.get_running_loop().create_future()
        self._waiting[exit_.ref] = _line(exit_), done
        if self._busy is None:
            self._busy = asyncio.create_task(self._write())
        try:
            await asyncio.wait_for(asyncio.shield(done), WRITE_S_MAX)
        except OSError as error:  # a timeout, too
            why = str(error) or "the disk is too slow"
            log.warning("the exit of %s is only in memory: %s", exit_.ref, why)

    def stored(self, ref: MemberRef) -> None:
        """The controller has stored it."""
        if self._busy is not None:
            self._stored.append(ref)
        elif self._kept.pop(ref, None) is not None:
            with contextlib.suppress(OSError):  # at worst, it is reported once more
                self._strike_out(ref)

    def _strike_out(self, ref: MemberRef) -> None:
        with contextlib.suppress(FileNotFoundError):  # an earlier version kept it there
            os.unlink(self._members / str(ref) / EXIT)
        if self._kept:
            os.write(self._open(), msgspec.json.encode(str(ref)) + b"\n")
        else:
            os.ftruncate(self._open(), 0)

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, {}
            problem = None
            try:
                await asyncio.to_thread(self._append, b"".join(line for line, _ in batch.values()))
                self._kept.update((ref, line) for ref, (line, _) in batch.items())
            except (OSError, RuntimeError) as error:  # the second: no more threads
                problem = OSError(str(error))
            for _, done in batch.values():
                if problem is None:
                    done.set_result(None)
                else:
                    done.set_exception(problem)
                    done.exception()  # whoever waited may have given up
        self._busy = None
        for ref in self._stored:
            self.stored(ref)
        self._stored.clear()

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
