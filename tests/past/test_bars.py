"""Bars are what the state held, at every moment of storms; reasons are in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.control.past.bars import HANDLERS, Bar, Book, Span
from shoal.control.past.store import BarStore, PlaceInLog
from shoal.core.state.events.base import EventBase
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeIntended, NodeJoined, NodeLost
from shoal.core.state.events.runs import (
    JobAdopted,
    JobFinished,
    JobPlaced,
    JobStopping,
    MemberExited,
    MemberLost,
)
from shoal.core.state.events.sleep import JobAsleep, JobDozing, JobWaking
from shoal.model.job import Outcome, SleepCause, StopCause
from shoal.model.node import NodeIntent, NodeSpec, node_word
from shoal.model.resources import Slice
from tests.past.histories import Held, events_of, held, moments

SEEDS = (403, 405, 409, 413, 415, 418, 419, 421, 424)  # with jobs that hold GPUs
SLEEPY = (5, 23, 26, 156)  # jobs sleep, wake and are refused
ADOPTED = (2058,)  # a job that was given up with a silent node still runs there


def bars_of(seed: int, sleeps: bool = False) -> tuple[list[Bar], list[Span]]:
    """All bars of a history; the book is drained after every step, as a busy follower does."""
    book, bars, spans = Book(), dict[int, Bar](), dict[int, Span]()
    for _, events, _ in moments(events_of(seed, sleeps)):
        for event in events:
            book.take(event)
        changed = book.drain()
        bars.update((bar.number, bar) for bar in changed.bars)
        spans.update((span.number, span) for span in changed.spans)
    assert not book.jobs, "nothing is remembered of jobs that have ended"
    return list(bars.values()), list(spans.values())


def covers(one: Bar | Span, at_ms: int) -> bool:
    return one.begin_ms <= at_ms and (one.end_ms is None or at_ms < one.end_ms)


def held_by(bars: list[Bar], at_ms: int) -> Held:
    found = [
        (bar.node, bar.gpus, bar.job, bar.attempt, bar.member) for bar in bars if covers(bar, at_ms)
    ]
    assert len(found) == len(set(found)), "a bar twice"
    return set(found)


def agree(seed: int, sleeps: bool = False) -> int:
    bars, spans = bars_of(seed, sleeps)
    for at_ms, _, state in moments(events_of(seed, sleeps)):
        assert held_by(bars, at_ms) == held(state), (seed, at_ms)
        words = {span.node: span.state for span in spans if covers(span, at_ms)}
        for node in state.order:
            word = node_word(node.health, node.record.standing, node.intent)
            assert words.get(node.id, "ready") == word, (seed, at_ms, node.id)
    assert all(bar.cause and bar.why for bar in bars if bar.end_ms is not None)
    return len(bars)


def test_at_every_moment_of_a_storm_the_bars_are_what_the_state_holds() -> None:
    assert sum(agree(seed) for seed in (*SEEDS, *ADOPTED)) > 100
    assert sum(agree(seed, sleeps=True) for seed in SLEEPY) > 50


@pytest.mark.parametrize(
    ("kind", "seed", "sleeps"),
    [
        (MemberExited, 424, False),
        (NodeLost, 2058, False),
        (JobAdopted, 2058, False),
        (JobAsleep, 156, True),
        (JobWaking, 156, True),
    ],
)
def test_a_book_that_misses_one_kind_of_event_is_found_out(
    kind: type[EventBase], seed: int, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert any(isinstance(event, kind) for event in events_of(seed, sleeps))
    monkeypatch.delitem(HANDLERS, kind)
    with pytest.raises(AssertionError):
        agree(seed, sleeps)


def test_a_book_that_is_stored_and_loaded_after_every_step_goes_on_as_one(tmp_path: Path) -> None:
    for seed, sleeps in ((2058, False), (156, True)):
        store, last = BarStore(tmp_path / f"{seed}.db"), 0
        for at_ms, events, state in moments(events_of(seed, sleeps)):
            book = store.load()
            for event in events:
                book.take(event)
            last += len(events)
            store.write(book.drain(), {}, PlaceInLog(last, 0, at_ms, 0))
            now = store.bars(at_ms, at_ms + 1)
            assert {
                (bar.node, tuple(map(int, bar.gpus.split(","))), bar.job, bar.attempt, bar.member)
                for bar in now
            } == held(state)
        store.close()


def test_a_book_that_begins_with_a_state_goes_on_as_one_that_saw_everything() -> None:
    for seed, sleeps in ((424, False), (2058, False), (156, True)):
        history = list(events_of(seed, sleeps))
        half, late = Book(), dict[int, Bar]()
        middle_ms = history[len(history) // 2].at_ms
        for at_ms, events, state in moments(events_of(seed, sleeps)):
            if at_ms == middle_ms:
                half.seed(state, at_ms)
            elif at_ms > middle_ms:
                for event in events:
                    half.take(event)
            late.update((bar.number, bar) for bar in half.drain().bars)
            if at_ms >= middle_ms:
                assert held_by(list(late.values()), at_ms) == held(state), (seed, at_ms)


def told(*events: Event) -> list[tuple[str, str]]:
    book = Book()
    for event in events:
        book.take(event)
    return [(bar.cause, bar.why) for bar in book.drain().bars]


def placed(members: int = 1) -> JobPlaced:
    slices = tuple(Slice(f"n{number + 1}", gpus=(0, 1)) for number in range(members))
    return JobPlaced(at_ms=10, job="j1", attempt=1, slices=slices, master="", why="")


def exited(code: int, member: int = 0, stopped: bool = False) -> MemberExited:
    return MemberExited(
        at_ms=20, job="j1", attempt=1, member=member, node="n1", code=code, stopped=stopped
    )


def stopping(cause: StopCause, why: str) -> JobStopping:
    return JobStopping(at_ms=15, job="j1", attempt=1, cause=cause, why=why)


def test_a_bar_says_why_it_ended() -> None:
    assert told(placed()) == [("", "")]
    assert told(placed(), exited(0)) == [("succeeded", "succeeded")]
    assert told(placed(), exited(3)) == [("failure", "failed with code 3")]
    assert told(placed(), exited(137)) == [("failure", "ended by signal 9")]
    for cause, why in (
        (StopCause.CANCEL, "cancelled by ada"),
        (StopCause.PREEMPT, "is preempted to make room for j9"),
        (StopCause.DRAIN, "n2 is being drained"),
    ):
        assert told(placed(), stopping(cause, why), exited(143, stopped=True)) == [(cause, why)]
        assert told(placed(), stopping(cause, why), exited(0, stopped=True)) == [(cause, why)]
    gang = told(
        placed(2),
        exited(3),
        stopping(StopCause.FAILURE, "member 0 exited 3"),
        exited(0, 1, stopped=True),
    )
    assert gang == [("failure", "failed with code 3"), ("failure", "member 0 exited 3")]
    dead = NodeLost(at_ms=20, node="n1", incarnation=1, dead=True, why="its agent died")
    assert told(placed(), dead) == [("node-loss", "node n1 died: its agent died")]
    lost = MemberLost(at_ms=20, job="j1", attempt=1, member=0, node="n1", why="it vanished")
    assert told(placed(), lost) == [("lost", "it vanished")]


def test_a_sleeper_has_no_bar_and_wakes_on_other_gpus() -> None:
    dozing = JobDozing(
        at_ms=15, job="j1", attempt=1, cause=SleepCause.USER, host_mb=(0,), why="asked by ada"
    )
    asleep = JobAsleep(at_ms=20, job="j1", attempt=1, took_ms=5, memory_mb=1, why="it sleeps")
    waking = JobWaking(at_ms=30, job="j1", attempt=1, gpus=((2, 3),), why="room")
    book = Book()
    for event in (placed(), dozing, asleep, waking, exited(0)):
        book.take(event)
    bars = book.drain().bars
    assert [(bar.gpus, bar.begin_ms, bar.cause, bar.why) for bar in bars] == [
        ((0, 1), 10, "asleep", "asked by ada"),
        ((2, 3), 30, "succeeded", "succeeded"),
    ]


def test_what_a_book_remembers_does_not_grow_with_what_has_ended() -> None:
    book = Book()
    spec = NodeSpec(id="n1", cpu_milli=1, memory_mb=1, gpus=2)
    book.take(NodeJoined(at_ms=1, node="n1", spec=spec, incarnation=1))
    for _ in range(1_000):
        for event in (placed(), stopping(StopCause.CANCEL, "no"), exited(0)):
            book.take(event)
        book.take(
            JobFinished(at_ms=21, job="j1", attempt=1, outcome=Outcome.CANCELLED, code=1, why="no")
        )
        book.take(NodeIntended(at_ms=22, node="n1", intent=NodeIntent.CORDONED))
        book.take(NodeIntended(at_ms=23, node="n1", intent=NodeIntent.OPEN))
        book.drain()
    assert not book.open and not book.jobs and not any(book.held.values())
    assert len(book.spans) == 1
