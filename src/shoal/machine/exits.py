"""Exits on a node's disk, from a member's end until the controller has stored it.

The agent writes them. Its next life reports them, and an engine that sees the agent die reads them:
finished work is not repeated because the node died before it could report it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from pathlib import Path

import msgspec

from shoal.model.job import MemberRef
from shoal.model.report import MemberExit

MEMBERS = "members"  # the folder of a node that has one for each member
EXIT = "exit"
EXIT_BYTES_MAX = 64 * 1024
WRITE_S_MAX = 5.0  # an exit waits no longer than this for the disk
# Signals that every process gets when a machine goes down: such an exit is not a result.
FROM_OUTSIDE = tuple(
    128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
)

log = logging.getLogger("shoal.agent")

_decode = msgspec.json.Decoder(MemberExit).decode


def member_ref(folder: str) -> MemberRef | None:
    """The member that a folder belongs to; None if it is not a member's folder."""
    try:
        job, attempt, member = folder.split(".")
        return MemberRef(job, int(attempt), int(member))
    except ValueError:
        return None


def write_exit(members: Path, exit_: MemberExit) -> None:
    """When this returns, the exit survives a loss of power."""
    folder = members / str(exit_.ref)
    temporary = folder / f".{EXIT}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        data = msgspec.json.encode(exit_)
        if os.write(handle, data) != len(data):
            raise OSError("the disk is full")
        os.fsync(handle)
    finally:
        os.close(handle)
    temporary.replace(folder / EXIT)
    for place in (folder, members):
        handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


async def keep_exit(members: Path, exit_: MemberExit) -> None:
    """An exit is on disk before it is reported, unless the disk is sick: then it is only in the
    agent's memory."""
    try:
        await asyncio.wait_for(asyncio.to_thread(write_exit, members, exit_), WRITE_S_MAX)
    except OSError as error:  # a timeout, too
        why = str(error) or "the disk is too slow"
        log.warning("the exit of %s is only in memory: %s", exit_.ref, why)


def remove_exit(members: Path, ref: MemberRef) -> None:
    """The controller has stored it."""
    with contextlib.suppress(OSError):
        os.unlink(members / str(ref) / EXIT)


def read_exits(members: Path) -> tuple[MemberExit, ...]:
    """Exits that a dead agent could not report. Damaged files are skipped."""
    found = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(members)):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                path = members / name / EXIT
                if path.stat().st_size <= EXIT_BYTES_MAX:
                    exit_ = _decode(path.read_bytes())
                    if exit_.ref == member_ref(name):
                        found.append(exit_)
    return tuple(found)
