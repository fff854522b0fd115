"""Copies of checkpoints on nodes: the head chooses who holds one, and counts it when it is there.

The node that saved a snapshot holds the first copy, and another one gets the second from it,
through its door. Then the index switches. Nodes that are not to hold a copy any more are told so,
now or when they speak of it next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from zlib import crc32

from shoal.control.kept_files import Copy, Index
from shoal.control.loop import ControlLoop
from shoal.control.outputs import GIB, OutputStore
from shoal.core.state.facts import Node
from shoal.model.blocks import BadManifest, decode_manifest, encode_manifest
from shoal.model.job import Job, MemberRef
from shoal.model.kept import (
    COUNTED,
    NO_PEER,
    CopyHeld,
    FileAnswer,
    HoldCopy,
    Kind,
    Snapshot,
    held_key,
    path_problem,
)
from shoal.model.node import NodeHealth, NodeIntent
from shoal.tick import Stage

log = logging.getLogger("shoal.control")

TRIED_MAX = 3  # nodes that are asked, one after the other
SILENT_S = 20.0  # a node that says nothing for so long does not hold it
LOOK_S = 10.0
AGAIN_MAX = 2  # copies that are made again at a time

Answer = Callable[[FileAnswer], None]


class Making:
    """A copy on its way to a node. `answer` is None for one that is made again."""

    def __init__(
        self, snapshot: Snapshot, node: str, copy: Copy, bound: int, answer: Answer | None
    ) -> None:
        self.snapshot, self.node, self.copy = snapshot, node, copy
        self.bound, self.answer = bound, answer
        self.tried: list[str] = []
        self.heard_at = 0.0


class Holders:
    """`push` sends a node something that it did not ask for."""

    def __init__(
        self,
        loop: ControlLoop,
        store: OutputStore,
        push: Callable[[str, FileAnswer], bool],
        counted: Callable[[Snapshot, tuple[str, ...]], None],
    ) -> None:
        self._loop = loop
        self._store = store
        self._push = push
        self._counted = counted
        self._making: dict[tuple[str, str], Making] = {}  # by job and manifest

    def settle(self, snapshot: Snapshot, node: str, bound: int, answer: Answer) -> None:
        job, serial = snapshot.ref.job, snapshot.serial
        try:
            copy = Copy(*_checked(snapshot, bound), (node,))
        except (BadManifest, ValueError) as error:
            answer(FileAnswer(Kind.CHECKPOINT, serial, 0, str(error)))
            return
        if self._loop.blocks.peer(node, held_key(job, copy.manifest), node) is None:
            problem = "its node has not opened its door yet"
            answer(FileAnswer(Kind.CHECKPOINT, serial, 0, problem, again=True))
            return
        for key in [key for key, one in self._making.items() if key[0] == job and one.node == node]:
            del self._making[key]
        self._making[job, copy.manifest] = making = Making(snapshot, node, copy, bound, answer)
        self._ask(making)

    def heard(self, held: CopyHeld, node: str) -> None:
        making = self._making.get((held.job, held.manifest))
        if making is None or not making.tried or making.tried[-1] != node:
            if held.got is None and not held.problem:
                self.tidy(held.job, (node,), held.manifest)
            return
        making.heard_at = time.monotonic()
        if held.problem:
            log.warning("a checkpoint of %s is not held there: %s", held.job, held.problem)
            self._ask(making)
        elif held.got is not None:
            if making.answer is not None:
                kept = max(1, min(held.got, making.copy.size))
                making.answer(FileAnswer(Kind.CHECKPOINT, making.snapshot.serial, kept))
        else:
            del self._making[held.job, held.manifest]
            self._count(making, (*making.copy.holders, node))

    def wishes(self, job: str, index: Index, node: str) -> tuple[HoldCopy, ...]:
        """What a node that is to start a member fetches from others; from itself first."""
        return tuple(self._wish(job, copy, node) for copy in index.held.values())

    def dropped(self, job: str, index: Index) -> None:
        self.tidy(job, {node for copy in index.held.values() for node in copy.holders})

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._loop.policy.checkpoint_peers and self._loop.tick.stage is not Stage.UNLOADED:
                self.look()

    def look(self) -> None:
        """Who is silent does not hold it. Copies of live jobs that lost a holder are made again, a
        few at a time."""
        for making in list(self._making.values()):
            if time.monotonic() - making.heard_at > SILENT_S:
                self._ask(making)
        for job in self._loop.tick.state.jobs.values():
            if len(self._making) >= AGAIN_MAX:
                return
            if job.attempt and job.id in self._loop.tick.state.heard.copied:
                with contextlib.suppress(OSError):  # at the next look
                    self._make_again(job)

    # -- how -------------------------------------------------------------------------------

    def _make_again(self, job: Job) -> None:
        index = self._store.index(job.id)
        for node, copy in index.held.items():
            alive = tuple(one for one in copy.holders if self._is_up(one))
            if not 0 < len(alive) < 2 or (job.id, copy.manifest) in self._making:
                continue
            try:
                data, _ = encode_manifest(self._store.manifest(job.id, copy))
            except (OSError, BadManifest):
                continue
            ref = MemberRef(job.id, index.attempt, 0)
            snapshot = Snapshot(ref, 0, tuple(index.of[node]), data)
            left = Copy(copy.manifest, copy.size, alive)
            bound = self._loop.policy.checkpoint_copy_mb << 20
            self._making[job.id, copy.manifest] = Making(snapshot, node, left, bound, None)
            self._ask(self._making[job.id, copy.manifest])

    def _ask(self, making: Making) -> None:
        """The next node; without one, the head itself has to be the second holder."""
        copy, job = making.copy, making.snapshot.ref.job
        while len(making.tried) < TRIED_MAX:
            chosen = self._choose(making)
            if chosen is None:
                break
            making.tried.append(chosen)
            making.heard_at = time.monotonic()
            record = self._loop.tick.state.jobs.get(job)
            tenant = record.spec.tenant if record is not None else ""
            wish = self._wish(job, copy, chosen, tenant, making.bound)
            if wish.peers and self._push(chosen, _wish(wish)):
                return
        del self._making[job, copy.manifest]
        if making.answer is not None:
            making.answer(FileAnswer(Kind.CHECKPOINT, making.snapshot.serial, 0, NO_PEER))

    def _choose(self, making: Making) -> str | None:
        """On another disk than the first copy; on another machine if there is one."""
        state = self._loop.tick.state
        there = [state.nodes[one].spec for one in making.copy.holders if one in state.nodes]
        roots, machines = {one.checkpoints for one in there}, {one.address for one in there}
        busy: dict[str, int] = {}
        for other in self._making.values():
            for name in other.tried[-1:]:
                busy[name] = busy.get(name, 0) + 1
        found = [
            node
            for node in state.order
            if self._is_up(node.id)
            and node.id not in (*making.tried, *making.copy.holders)
            and node.spec.checkpoints not in roots
            and node.intent is NodeIntent.OPEN
        ]

        def rank(node: Node) -> tuple[bool, int, int]:
            turn = (node.index - crc32(making.snapshot.ref.job.encode())) % len(state.order)
            return node.spec.address in machines, busy.get(node.id, 0), turn

        return min(found, key=rank).id if found else None

    def _is_up(self, node: str) -> bool:
        record = self._loop.tick.state.nodes.get(node)
        return record is not None and record.health is NodeHealth.READY and not record.dead

    def _wish(self, job: str, copy: Copy, node: str, tenant: str = "", bound: int = 0) -> HoldCopy:
        key = held_key(job, copy.manifest)
        order = sorted(copy.holders, key=lambda one: one != node)
        peers = (self._loop.blocks.peer(one, key, node) for one in order)
        there = tuple(peer for peer in peers if peer is not None)
        return HoldCopy(job, copy.manifest, (), tenant, copy.size, bound, there)

    def tidy(self, job: str, nodes: Iterable[str], but: str = "") -> None:
        """These nodes remove what they need not hold of the job. A node that needs `but` is left
        alone."""
        with contextlib.suppress(OSError):  # nobody knows which: they keep them
            for node in nodes:
                if but not in (wanted := self._wanted(job, node)):
                    self._push(node, _wish(HoldCopy(job, keep=wanted)))

    def _wanted(self, job: str, node: str) -> tuple[str, ...]:
        """The copies that count, and those that are being made."""
        held = self._store.index(job).held.values()
        making = [one for key, one in self._making.items() if key[0] == job]
        return (
            *(copy.manifest for copy in held if node in copy.holders),
            *(one.copy.manifest for one in making if node in (one.node, *one.tried[-1:])),
        )

    def _count(self, making: Making, holders: tuple[str, ...]) -> None:
        here = asyncio.get_running_loop()
        snapshot, job = making.snapshot, making.snapshot.ref.job
        copy = Copy(making.copy.manifest, making.copy.size, holders)
        before = None
        with contextlib.suppress(OSError):
            before = self._store.index(job).held.get(making.node)

        def counted(problem: str, again: bool) -> None:
            self.tidy(job, {*(before.holders if before else ()), *making.tried, making.node})
            if not problem:
                self._counted(snapshot, holders)
            if making.answer is not None:
                kept = 0 if problem else COUNTED
                answer = FileAnswer(Kind.CHECKPOINT, snapshot.serial, kept, problem, again)
                making.answer(answer)

        def done(problem: str, again: bool) -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(counted, problem, again)

        self._store.hold(snapshot, making.node, copy, done)


def _wish(hold: HoldCopy) -> FileAnswer:
    return FileAnswer(Kind.CHECKPOINT, 0, 0, hold=hold)


def _checked(snapshot: Snapshot, bound: int) -> tuple[str, int]:
    """The name of its manifest and the bytes of its files, if both say the same."""
    manifest = decode_manifest(snapshot.manifest)
    sizes = {file.path: file.size for file in snapshot.files}
    if sizes != {file.path: file.size for file in manifest.files}:
        raise ValueError("its manifest has other files than it says")
    wrong = next((path_problem(path) for path in sizes if path_problem(path)), "")
    size = sum(sizes.values())
    if wrong or size > bound:
        over = f"{size / GIB:.4g} GiB, and {bound / GIB:.4g} GiB may travel"
        raise ValueError(wrong or over)
    return encode_manifest(manifest)[1], size
