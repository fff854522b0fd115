"""The kept folders of a node: made for members, copied to the head, and waited for at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from shoal.agent.confine.tenant import own
from shoal.agent.faults import CannotStart
from shoal.agent.keeping.copying import Copying, Message
from shoal.agent.keeping.fetching import Fetching, note_attempt
from shoal.model.commands import Launch
from shoal.model.job import MemberRef
from shoal.model.kept import OUTPUT, FileAnswer, FileWanted, Kind
from shoal.model.report import MemberExit

OUTPUTS = "outputs"  # in a node's folder: one for each job that has members here
# An exit waits so long for the member's files to arrive, unless none arrives for a while; the rest
# comes after the exit.
OUTPUT_S_MAX = 30.0
STALLED_S = 10.0
CHECKPOINT_S_MAX = 300.0  # longer: a job that moves needs its checkpoint where it goes


class Keeping:
    def __init__(
        self,
        directory: Path,
        root: str,
        send: Callable[[Message], bool],
        want: Callable[[FileWanted], None],
    ) -> None:
        """`root` holds the checkpoint folders of jobs; it may be an address."""
        self._outputs = Path(os.path.realpath(directory)) / OUTPUTS
        self._root = root
        self.copying = Copying(send)
        self.fetching = Fetching(root, want)
        self._connected_at: float | None = None
        self._removing: set[asyncio.Task[None]] = set()

    # -- the beginning ---------------------------------------------------------------------

    def output(self, launch: Launch, *, apart: bool) -> dict[str, str]:
        """Its output folder, which it shares with the job's other members on this node."""
        if not launch.keeps or launch.env.get(OUTPUT):
            return {}
        path = self._outputs / launch.ref.job
        try:
            _make_folder(path)
            if apart:
                own(path, launch.uid)
        except OSError as error:
            raise CannotStart(f"cannot make its output folder: {error.strerror}") from error
        self.copying.watch(launch.ref, Kind.OUTPUT, path, _reader(launch, apart=apart))
        return {OUTPUT: str(path)}

    def checkpoints(self, launch: Launch, path: str, *, apart: bool) -> None:
        """The member begins with this folder: what is saved in it from now on is the newest."""
        if not launch.travels or "://" in path or not path.startswith(f"{self._root}/"):
            return
        with contextlib.suppress(OSError):
            note_attempt(self._root, launch.ref)
        if launch.copies:
            found = self.fetching.found.pop(launch.ref.job, {})
            self.copying.watch(
                launch.ref, Kind.CHECKPOINT, Path(path), _reader(launch, apart=apart)
            )
            self.copying.fetched(launch.ref, Kind.CHECKPOINT, found)

    def recall(self, ref: MemberRef) -> None:
        """A member of an earlier life may have left files that the head does not have."""
        path = self._outputs / ref.job
        if path.is_dir():
            user = path.stat().st_uid
            self.copying.watch(ref, Kind.OUTPUT, path, user if user else None, over=True)

    def sweep(self, jobs: set[str]) -> None:
        """At the start: folders of jobs that have no member here any more are at the head."""
        with contextlib.suppress(OSError):
            for path in self._outputs.iterdir():
                if path.name not in jobs:
                    shutil.rmtree(path, ignore_errors=True)

    # -- the link --------------------------------------------------------------------------

    def reconnected(self) -> None:
        self._connected_at = time.monotonic()
        self.copying.reconnected()

    def disconnected(self) -> None:
        self._connected_at = None
        self.copying.disconnected()

    def take(self, answer: FileAnswer) -> None:
        self.copying.take(answer)

    # -- the end ---------------------------------------------------------------------------

    def ended(self, ref: MemberRef) -> None:
        self.copying.ended(ref)

    def waits(self, exit_: MemberExit, ended_at: float) -> bool:
        """Should the exit wait for files? A job that is done needs no checkpoint elsewhere. Time
        without a controller does not count, because nobody could take the exit."""
        ref = exit_.ref
        if self._connected_at is None:
            return False
        since = max(ended_at, self._connected_at)
        waited_s = time.monotonic() - since
        if time.monotonic() - max(since, self.copying.moved_at(ref)) > STALLED_S:
            return False
        if waited_s <= OUTPUT_S_MAX and not self.copying.complete(ref, (Kind.OUTPUT,)):
            return True
        if exit_.code == 0 and not exit_.stopped:
            return False
        return waited_s <= CHECKPOINT_S_MAX and not self.copying.complete(ref, (Kind.CHECKPOINT,))

    def complete(self, ref: MemberRef) -> bool:
        return self.copying.complete(ref)

    def forget(self, ref: MemberRef) -> None:
        for path in self.copying.forget(ref):
            if _was_empty(path):
                continue
            removing = asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            task: asyncio.Task[None] = asyncio.ensure_future(removing)
            self._removing.add(task)
            task.add_done_callback(self._removing.discard)


def _make_folder(path: Path) -> None:
    """Ours alone; the folder around it is there but for the first time."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)


def _was_empty(path: Path) -> bool:
    """Most jobs keep nothing. What is large is removed beside the loop."""
    with contextlib.suppress(OSError):
        os.rmdir(path)
        return True
    return False


def _reader(launch: Launch, *, apart: bool) -> int | None:
    """The owner of the files that may be read. In a container, other users may be its own."""
    return launch.uid if apart and not launch.image else None
