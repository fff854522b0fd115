"""Which node may write and read which job's kept files; the store writes them in its own thread."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial

from msgspec.structs import replace

from shoal.control.handed_work import HandedWork
from shoal.control.holders import Holders
from shoal.control.kept_files import Index
from shoal.control.loop import ControlLoop
from shoal.control.outputs import FULL, Kept, OutputStore
from shoal.control.placements import Place
from shoal.model.job import JobSpec, MemberRef, Phase
from shoal.model.kept import (
    Copied,
    CopyHeld,
    FileAnswer,
    FilePart,
    FilePiece,
    FileSent,
    FileWanted,
    Kind,
    Snapshot,
)
from shoal.model.neighbor import HOME, handed_here
from shoal.tick import Stage

UNKNOWN = "the head cannot look up now where its member was placed"
NOT_PLACED = "the controller has not placed its member there"
ALARM = "outputs"
# As train/checkpoints.py names them.
WHOLE = re.compile(r"checkpoint-\d{6,}-step-(\d{1,15})-[0-9a-f]{4}/manifest[.]json\Z")


class NotGiven(Exception):
    """Nodes hold it, and none of them gives it now."""


class FileDesk:
    def __init__(
        self,
        loop: ControlLoop,
        store: OutputStore,
        push: Callable[[str, FileAnswer], bool] = lambda *_: False,
    ) -> None:
        """`push` sends a node something that it did not ask for."""
        self._loop = loop
        # A piece of a kept file, wherever it is; set by who can ask nodes for it.
        self.part: Callable[[str, str, int, Kind], Awaitable[FilePart]] | None = None
        self.handed = HandedWork(store)
        self._here: asyncio.AbstractEventLoop | None = None
        self.store = store
        self.holders = Holders(loop, store, push, self._held)
        store.dropped = self._dropped
        store.encrypts = self._encrypts

    def take(
        self, what: FilePiece | Snapshot | CopyHeld, node: str, answer: Callable[[FileAnswer], None]
    ) -> None:
        if isinstance(what, CopyHeld):
            if self._loop.tick.stage is not Stage.UNLOADED:
                self.holders.heard(what, node)
        elif self._loop.tick.stage is Stage.UNLOADED or self._loop.store.tight:
            self._tell(_refused(what, FULL, again=True), answer)
        else:
            decided = partial(self._decided, what, node, answer)
            self._loop.placements.ask(what.ref, node, decided)

    def _decided(
        self,
        what: FilePiece | Snapshot,
        node: str,
        answer: Callable[[FileAnswer], None],
        place: Place,
    ) -> None:
        """What is here may be replaced by the newest attempt of the job alone."""
        here = asyncio.get_running_loop()

        def tell(said: FileAnswer) -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(self._tell, said, answer)

        newest = place is Place.NEWEST
        if place is Place.UNKNOWN:
            self._tell(_refused(what, UNKNOWN, again=True), answer)
        elif place is Place.NOWHERE or not (newest or _kind(what) is Kind.OUTPUT):
            answer(_refused(what, NOT_PLACED))
        elif isinstance(what, FilePiece):
            self.store.take(what, node, over=newest, answer=tell)
        else:
            bound = self._loop.policy.checkpoint_copy_mb << 20
            if what.manifest:
                self.holders.settle(what, node, bound, answer)
                return

            try:
                held = self.store.index(what.ref.job).held.values()
            except OSError as error:
                self._tell(_refused(what, str(error), again=True), answer)
                return
            nodes = {one for copy in held for one in copy.holders}

            def kept(found: Kept) -> None:
                if not here.is_closed() and found.files:
                    here.call_soon_threadsafe(self._loop.tick.copied, copied_of(found))
                if not here.is_closed() and nodes:
                    here.call_soon_threadsafe(self.holders.tidy, found.ref.job, nodes)

            self.store.settle(what, node, bound, tell, kept)

    def give(self, wanted: FileWanted, node: str) -> FileSent | None:
        if self._loop.tick.stage is Stage.UNLOADED:
            return None
        job = self._loop.tick.state.placed.get(node, {}).get(wanted.ref)
        if job is None or job.phase is Phase.STOPPING:
            return FileSent(wanted.ref, wanted.kind, wanted.path, wanted.offset, problem=NOT_PLACED)
        try:
            if not wanted.path and handed_here(job.spec) and self._brought(job.id, job.spec):
                return None  # the node asks again
            sent, index = self.store.sent(wanted), self.store.index(wanted.ref.job)
        except OSError:
            return None  # the node asks again
        if wanted.path or wanted.kind is Kind.OUTPUT or not index.held:
            return sent
        return replace(sent, held=self.holders.wishes(wanted.ref.job, index, node))

    def _brought(self, job: str, spec: JobSpec) -> bool:
        """Work that came with it is about to become its checkpoint."""
        tenant = self._loop.tick.state.identity.key(spec.tenant)
        mark = spec.labels[HOME]
        waits = self.handed.waits(tenant, mark)
        if waits:
            self.store.adopt(job, self.handed.folder(tenant, mark), lambda _: None)
        return waits

    async def adopt(self, job: str, spec: JobSpec) -> str:
        """The job has come, and begins with the work that came before it. The problem."""
        tenant, mark = self._loop.tick.state.identity.key(spec.tenant), spec.labels[HOME]
        if not await asyncio.to_thread(self.handed.waits, tenant, mark):
            return ""
        done: Future[str] = Future()
        self.store.adopt(job, self.handed.folder(tenant, mark), done.set_result)
        return await asyncio.wrap_future(done)

    def _held(self, snapshot: Snapshot, holders: tuple[str, ...]) -> None:
        if snapshot.files:
            copied = copied_of(Kept(snapshot.ref, snapshot.files))
            self._loop.tick.copied(replace(copied, held_by=holders))

    def _dropped(self, job: str, index: Index) -> None:
        """In the store's thread."""
        if index.held and self._here is not None and not self._here.is_closed():
            self._here.call_soon_threadsafe(self.holders.dropped, job, index)

    def _encrypts(self, job_id: str) -> bool:
        """In the store's thread."""
        job = self._loop.tick.state.jobs.get(job_id) or self._loop.store.job(job_id)
        return job is not None and job.spec.encrypt

    def _tell(self, said: FileAnswer, answer: Callable[[FileAnswer], None]) -> None:
        if said.problem and said.again:
            why = self.store.problem or said.problem
            self._loop.alarms.raise_(ALARM, f"files of jobs cannot be kept yet: {why}")
        elif not said.problem:
            self._loop.alarms.clear(ALARM)
        answer(said)

    def recall(self) -> None:
        """At the start: what earlier controllers have kept of jobs that live. A job that was never
        placed has no files; to look for those of 50,000 waiting jobs would take a second."""
        self._here = asyncio.get_running_loop()
        for job in [job for job in self._loop.tick.state.jobs.values() if job.attempt]:
            index = self.store.index(job.id)
            if index.attempt:
                files = [file for files in index.of.values() for file in files]
                ref = MemberRef(job.id, index.attempt, 0)
                holders = {node: None for copy in index.held.values() for node in copy.holders}
                copied = copied_of(Kept(ref, tuple(files)))
                self._loop.tick.copied(replace(copied, held_by=tuple(holders)))


def _kind(what: FilePiece | Snapshot) -> Kind:
    return what.kind if isinstance(what, FilePiece) else Kind.CHECKPOINT


def _refused(what: FilePiece | Snapshot, why: str, *, again: bool = False) -> FileAnswer:
    return FileAnswer(_kind(what), what.serial, 0, why, again=again)


def copied_of(kept: Kept) -> Copied:
    """The step is in the names of what `shoal.train` saves. One without a manifest is not whole."""
    steps = [int(found[1]) for file in kept.files if (found := WHOLE.match(file.path))]
    newest_ms = max((file.modified_ms for file in kept.files), default=0)
    return Copied(kept.ref.job, kept.ref.attempt, max(steps, default=0), newest_ms)
