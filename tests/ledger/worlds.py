"""Histories for the ledger: a fuzzed world whose witness keeps the books, and a plain count of
what they must add up to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from unittest.mock import patch

import msgspec
from storm.fuzz import Run, Size

from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeIntended, NodeJoined
from shoal.core.state.state import State
from shoal.ledger import members
from shoal.ledger.accounts import HOUR_MS, Place
from shoal.ledger.book import Book
from shoal.ledger.book_state import BookState
from shoal.model.job import Job
from shoal.model.neighbor import wish_of
from shoal.model.node import NodeIntent
from shoal.model.report import NodeReport, Report
from shoal.model.service import ServiceLoad
from tests.ledger.totals import Totals

GPU_US = 1000  # thousandths of a GPU


class Books:
    """The book of a world: hears what the controller hears, reads what it commits."""

    def __init__(self) -> None:
        self.book = Book()
        self.totals = Totals()
        self.heard: list[NodeReport] = []
        self.loads: list[ServiceLoad] = []
        self.events: list[Event] = []

    def stepped(self, events: Sequence[Event]) -> None:
        report = Report(nodes=tuple(self.heard), services=tuple(self.loads))
        self.book.stepped(report, events, events[0].at_ms)
        self.heard, self.loads = [], []
        self.events += events

    def close(self, now_ms: int) -> dict[Place, int]:
        """Everything up to now, the open time of members included."""
        self.book.advance(now_ms)
        self.book.settle()
        self.totals.put(self.book.drain())
        amounts = dict(self.totals.amounts)
        for place, amount in self.book.open().items():
            amounts[place] = amounts.get(place, 0) + amount
        return {place: amount for place, amount in amounts.items() if amount}

    def crash(self) -> None:
        """Go on from what is stored: as a controller that was killed."""
        self.totals.put(self.book.drain())
        self.book = Book(again(self.book.cluster))
        self.heard, self.loads = [], []


def again(booked: BookState) -> BookState:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(booked), type=BookState)


@contextlib.contextmanager
def kept(seed: int, size: Size | None = None) -> Iterator[tuple[Run, Books]]:
    """A fuzzed run whose every commit and report reaches the books."""
    run, books = Run(seed, size or Size(), checked=False), Books()
    committed, heard = run.truth.committed, run.truth.heard
    served = run.world.controller.served

    def on_commit(events: Sequence[Event]) -> None:
        committed(events)
        if events:
            books.stepped(events)
            # The tick is inside its commit, so its state is what is now stored.
            same_as(books.book.cluster, run.world.controller._tick.state)

    def on_hear(report: NodeReport) -> None:
        heard(report)
        books.heard.append(report)

    def on_load(load: ServiceLoad) -> None:
        served(load)
        books.loads.append(load)

    with (
        patch.object(members, "IDLE_MS", 500),
        patch.object(run.world.controller, "served", on_load),
        patch.object(run.truth, "committed", on_commit),
        patch.object(run.truth, "heard", on_hear),
    ):
        yield run, books


def same_as(booked: BookState, state: State) -> None:
    """What the book thinks of the cluster is what the controller thinks of it."""
    reserved = {index for one in state.reservations.values() for index in one.nodes}
    for node in state.order:
        mine, room = booked.nodes[node.id], state.rooms[node.index]
        free = [
            1000 - held - claimed for held, claimed in zip(mine.held, mine.claimed, strict=True)
        ]
        assert free == room.gpu_milli, node.id
        assert (mine.away is None) == node.schedulable, node.id
        assert bool(mine.reserved) == (node.index in reserved), node.id
    stands = (*state.queue.lane, *state.queue.capped_lane)
    standing = {job.id for job in map(state.job_numbered, stands) if job.spec.gpus}
    held = {job.id for job in map(state.job_numbered, state.queue.held) if wants_gpus_here(job)}
    # Their time came while no controller was there: the next step lets them into the queue.
    due = [number for at_ms, number in state.queue.delayed if at_ms <= booked.now_ms]
    late = {state.job_numbered(number).id for number in due}
    queued = {job_id for job_id, job in booked.jobs.items() if job.queued}
    assert queued - late == standing | held
    assert set(booked.jobs) == set(state.jobs)


def wants_gpus_here(job: Job) -> bool:
    return bool(job.spec.gpus) and not wish_of(job.spec.cluster).only


def capacity(events: Iterable[Event], end_ms: int) -> dict[tuple[int, str], int]:
    """GPUs known x time known, by hour and node, in GPU-microseconds: counted from nothing but
    who joined and who was taken away."""
    since: dict[str, int] = {}
    gpus: dict[str, int] = {}
    total: dict[tuple[int, str], int] = {}

    def count(node: str, until_ms: int) -> None:
        start_ms = since.pop(node, until_ms)
        while start_ms < until_ms:
            hour = start_ms // HOUR_MS
            stop_ms = min(until_ms, (hour + 1) * HOUR_MS)
            if gpus[node]:
                key = (hour, node)
                total[key] = total.get(key, 0) + (stop_ms - start_ms) * gpus[node] * GPU_US
            start_ms = stop_ms

    for event in events:
        if event.at_ms > end_ms:
            break
        if isinstance(event, NodeJoined):
            count(event.node, event.at_ms)
            gpus[event.node] = event.spec.gpus
            since[event.node] = event.at_ms
        elif isinstance(event, NodeIntended) and event.intent is NodeIntent.REMOVED:
            count(event.node, event.at_ms)
        elif isinstance(event, NodeIntended):  # one that was removed may be wanted again
            since.setdefault(event.node, event.at_ms)
    for node in list(since):
        count(node, end_ms)
    return total


def by_node(amounts: dict[Place, int]) -> dict[tuple[int, str], int]:
    total: dict[tuple[int, str], int] = {}
    for place, amount in amounts.items():
        key = (place.hour, place.node)
        total[key] = total.get(key, 0) + amount
    return total
