"""Where members were placed: a node is believed about its own, also after their attempt."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from functools import partial

from shoal.core.state.events.runs import JobPlaced
from shoal.model.job import Job, MemberRef
from shoal.ports import Store

log = logging.getLogger("shoal.control.placements")

EVENTS_MAX = 2_000  # of a job that are looked at: hundreds of attempts
REMEMBERED_MAX = 256  # attempts
LOOKUPS_MAX = 256  # members that the store is asked about at a time
WAITING_MAX = 64  # messages about one of them; an agent has fewer on their way


class Place(enum.Enum):
    """Whether a member was placed on the node that speaks of it."""

    NOWHERE = "it was not"
    NEWEST = "in the newest attempt of its job"
    EARLIER = "in an attempt that others have followed"
    UNKNOWN = "the store cannot say now"


Then = Callable[[Place], None]


class Placements:
    """The state has the newest attempts of live jobs. The store has the others: it is asked in a
    thread when a node was away, and ships what is left."""

    def __init__(self, live: Callable[[str], Job | None], store: Store) -> None:
        self._live = live
        self._store = store
        self._earlier: dict[tuple[str, int], tuple[str, ...]] = {}
        self._waiting: dict[MemberRef, list[tuple[str, Then]]] = {}

    def ask(self, ref: MemberRef, node: str, then: Then) -> None:
        """Calls `then` at once if memory knows, and otherwise when the store has answered. Those
        who ask about one member are answered in turn."""
        waiting = self._waiting.get(ref)
        job = self._live(ref.job)
        nodes = self._known(job, ref)
        if waiting is None and nodes is not None:
            then(_place(job, nodes, node, ref))
        elif waiting is not None and len(waiting) < WAITING_MAX:
            waiting.append((node, then))
        elif waiting is not None or len(self._waiting) >= LOOKUPS_MAX:
            then(Place.UNKNOWN)
        else:
            self._waiting[ref] = [(node, then)]
            look = partial(self._look_up, ref, job is not None)
            found = asyncio.get_running_loop().run_in_executor(None, look)
            found.add_done_callback(partial(self._found, ref))

    def _known(self, job: Job | None, ref: MemberRef) -> tuple[str, ...] | None:
        if job is None:
            return None
        if 0 < ref.attempt < job.attempt:
            return self._earlier.get((job.id, ref.attempt))
        return _nodes(job) if ref.attempt == job.attempt else ()

    def _look_up(self, ref: MemberRef, live: bool) -> tuple[Job | None, tuple[str, ...]]:
        """In a thread: the record of a job that has ended, and the nodes of this attempt."""
        record = self._store.job(ref.job)
        if record is None and not live:
            return None, ()
        if record is not None and record.attempt == ref.attempt:
            return record, _nodes(record)
        nodes: tuple[str, ...] = ()
        for recorded in self._store.history(ref.job, EVENTS_MAX):
            event = recorded.event
            if isinstance(event, JobPlaced) and event.attempt == ref.attempt:
                nodes = tuple(slice_.node for slice_ in event.slices)
        return record, nodes

    def _found(
        self, ref: MemberRef, found: asyncio.Future[tuple[Job | None, tuple[str, ...]]]
    ) -> None:
        waiting = self._waiting.pop(ref)
        if found.cancelled():
            return
        error = found.exception()
        if error is not None:
            log.error("the placement of %s cannot be looked up: %s", ref, error)
            for _, then in waiting:
                then(Place.UNKNOWN)
            return
        record, nodes = found.result()
        job = self._live(ref.job) or record
        if job is not None and ref.attempt < job.attempt:
            self._earlier[job.id, ref.attempt] = nodes
            while len(self._earlier) > REMEMBERED_MAX:
                del self._earlier[next(iter(self._earlier))]
        for node, then in waiting:
            then(_place(job, nodes, node, ref))


def _nodes(job: Job) -> tuple[str, ...]:
    return tuple(member.slice.node for member in job.members)


def _place(job: Job | None, nodes: tuple[str, ...], node: str, ref: MemberRef) -> Place:
    if job is None:
        # It ended between the two looks; the next one finds its record.
        return Place.UNKNOWN if nodes else Place.NOWHERE
    if not (0 <= ref.member < len(nodes) and nodes[ref.member] == node):
        return Place.NOWHERE
    return Place.NEWEST if ref.attempt == job.attempt else Place.EARLIER
