"""The live tick: nothing is said or done before it is stored."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop
from shoal.control.store.sqlite import SqliteStore
from shoal.control.storing import StoreThread
from shoal.core.nodebook import NodeBook
from shoal.core.state.events.log import Event
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobPlaced, JobRunning
from shoal.model.commands import Envelope, Launch
from shoal.model.job import Job, JobSpec, MemberRef, Phase
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import Accepted, LogChunk, Refused, Submit
from shoal.ports import EventLog, Inbox, LoopLog, LoopStore, Store, StoreError

Result = TypeVar("Result")
READS = {
    *(name for name in vars(Store) if not name.startswith("_") and name not in vars(LoopStore)),
    *(name for name in vars(EventLog) if not name.startswith("_") and name not in vars(LoopLog)),
}
SPEC = JobSpec(command=("true",), gpus=1)


class HandClock:
    def __init__(self) -> None:
        self.ms = 1_000_000

    def now_ms(self) -> int:
        return self.ms


class BookEngine:
    """One node that keeps its book and runs nothing."""

    fences = False

    def __init__(self) -> None:
        self.book = NodeBook(NodeSpec(id="n1", gpus=4, cpu_milli=4000, memory_mb=0), 1)
        self.sent: list[Envelope] = []
        self.resends = 0

    async def start(self, inbox: Inbox) -> None:
        self.inbox = inbox
        inbox.heard(self.book.report())

    def send(self, node: str, envelope: Envelope) -> None:
        self.sent.append(envelope)
        self.book.take(envelope)
        self.inbox.heard(self.book.report())

    async def resend(self) -> None:
        self.resends += 1
        self.inbox.heard(self.book.report())

    async def close(self) -> None: ...


class UnreadOnLoops(SqliteStore):
    """The loop may not read it on the thread of an event loop. These tests may, and so may the API,
    one record at a time."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return partial(_read, found) if name in READS and callable(found) else found


def _read(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    caller = sys._getframe(1).f_globals["__name__"]
    of_the_loop = caller.startswith("shoal.") and not caller.startswith("shoal.api.")
    if of_the_loop and asyncio._get_running_loop() is not None:
        raise AssertionError(f"{caller} reads the store on the event loop")
    return call(*args, **options)


class FailingStore(UnreadOnLoops):
    failures = 0

    def commit(self, events: Sequence[Event], finished: Sequence[Job]) -> int:
        if self.failures and any(isinstance(event, JobPlaced) for event in events):
            self.failures -= 1
            raise StoreError("the disk is full")
        return super().commit(events, finished)


class Rig:
    def __init__(self, path: Path) -> None:
        self.store = FailingStore(path / "db")
        self.engine = BookEngine()
        self.loop = ControlLoop(
            self.store, self.engine, HandClock(), Policy(), LogStore(path / "logs")
        )

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        async def both() -> Result:
            ticking = asyncio.create_task(self.loop.run())
            try:
                async with asyncio.timeout(120):
                    return await work
            finally:
                ticking.cancel()

        return asyncio.run(both())


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr("shoal.control.loop.RECOVERY_PAUSE_S", 0)
    return Rig(tmp_path)


def test_a_submission_is_answered_placed_and_launched(rig: Rig) -> None:
    async def work() -> None:
        assert await rig.loop.request(Submit(SPEC)) == Accepted("j1")
        while not any(isinstance(r.event, JobRunning) for r in rig.store.events(0, 99, "j1")):
            await rig.loop.changed("j1", 1)

    rig.run(work())
    assert isinstance(rig.engine.sent[0].commands[0], Launch)


def test_requests_that_name_finished_jobs_are_looked_up_beside_the_loop(rig: Rig) -> None:
    async def work() -> None:
        assert await rig.loop.request(Submit(SPEC, key="once")) == Accepted("j1")
        again = await rig.loop.request(Submit(SPEC, key="once"))
        assert isinstance(again, Accepted) and again.id == "j1"
        late = msgspec.structs.replace(SPEC, after=("j9",))
        refused = await rig.loop.request(Submit(late))
        assert isinstance(refused, Refused) and refused.field == "after"

    rig.run(work())
    assert {"keyed", "ended", "job", "history", "events"} <= READS


def test_requests_that_come_while_a_step_is_stored_are_looked_up_on_the_same_visit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    visits: list[str] = []
    more: list[asyncio.Task[Any]] = []
    real, commit = StoreThread.run, rig.store.commit

    def counted(thread: StoreThread, work: Callable[[], Any]) -> asyncio.Future[Any]:
        visits.append(work.__name__)
        return real(thread, work)

    async def ask_more() -> None:
        more.extend(asyncio.ensure_future(rig.loop.request(Submit(SPEC, key=key))) for key in "bc")
        await asyncio.sleep(0)  # both begin

    async def work() -> None:
        loop = asyncio.get_running_loop()

        def busy(events: Sequence[Event], finished: Sequence[Job]) -> int:
            if any(isinstance(event, JobPlaced) for event in events) and not more:
                asyncio.run_coroutine_threadsafe(ask_more(), loop).result(60)
            return commit(events, finished)

        monkeypatch.setattr(StoreThread, "run", counted)
        monkeypatch.setattr(rig.store, "commit", busy)
        assert await rig.loop.request(Submit(SPEC, key="a")) == Accepted("j1")
        assert await asyncio.gather(*more) == [Accepted("j2"), Accepted("j3")]

    rig.run(work())
    assert visits.count("_look_up") == 1, "for the first of them, when nothing was being stored"


def test_who_was_answered_and_asks_again_shares_a_step_with_those_who_wait(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.control.pace.GATHER_S", 3600)
    together: list[int] = []
    other: list[asyncio.Task[Any]] = []
    commit = rig.store.commit

    async def work() -> None:
        loop = asyncio.get_running_loop()

        async def ask() -> None:
            other.append(asyncio.ensure_future(rig.loop.request(Submit(SPEC, key="b"))))
            await asyncio.sleep(0)  # it begins

        def busy(events: Sequence[Event], finished: Sequence[Job]) -> int:
            entered = sum(isinstance(event, JobSubmitted) for event in events)
            if entered and not other:
                asyncio.run_coroutine_threadsafe(ask(), loop).result(60)
            together.extend([entered] if entered else [])
            return commit(events, finished)

        monkeypatch.setattr(rig.store, "commit", busy)
        assert await rig.loop.request(Submit(SPEC, key="a")) == Accepted("j1")
        assert await rig.loop.request(Submit(SPEC, key="c")) == Accepted("j3")
        assert await other[0] == Accepted("j2")
        assert await rig.loop.request(Submit(SPEC, key="d")) == Accepted("j4"), "alone: at once"

    rig.run(work())
    assert together == [1, 2, 1]


def test_a_report_that_nobody_waits_for_shares_the_next_step(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.control.pace.PAUSE_S", 3600)
    stored: list[list[str]] = []
    commit = rig.store.commit

    def noted(events: Sequence[Event], finished: Sequence[Job]) -> int:
        stored.append([type(event).__name__ for event in events])
        return commit(events, finished)

    def end(job: str) -> None:
        rig.engine.book.exited(MemberRef(job, 1, 0), 0)
        rig.loop.heard(rig.engine.book.report())

    async def work() -> None:
        monkeypatch.setattr(rig.store, "commit", noted)
        assert await rig.loop.request(Submit(SPEC)) == Accepted("j1")
        end("j1")
        assert await rig.loop.request(Submit(SPEC)) == Accepted("j2"), "its step hears of both"
        while "j1" in rig.loop.state.jobs:
            await rig.loop.changed("j1", 60)

        await rig.loop.changed("j2", 60, starts=True)  # somebody waits for its start
        assert rig.loop.state.jobs["j2"].phase is Phase.RUNNING

        whole = msgspec.structs.replace(SPEC, gpus=4)
        assert await rig.loop.request(Submit(whole)) == Accepted("j3")
        end("j2")  # nobody waits for it, but j3 waits for its room
        while rig.loop.state.jobs["j3"].phase is Phase.WAITING:
            await rig.loop.changed("", 60)

    rig.run(work())
    first = next(number for number, kinds in enumerate(stored) if "JobSubmitted" in kinds)
    assert "JobPlaced" in stored[first]
    assert {"JobRunning", "MemberExited", "JobFinished", "JobSubmitted"} <= set(stored[first + 1])


def test_these_tests_would_see_a_read_on_the_loop(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(_: StoreThread, call: Callable[[], Any]) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.set_result(call())
        return done

    monkeypatch.setattr(StoreThread, "run", here)
    with pytest.raises(AssertionError, match=r"shoal\.tick reads the store on the event loop"):
        rig.run(rig.loop.request(Submit(SPEC, key="once")))


def test_output_of_a_job_that_the_state_does_not_know_is_looked_up_beside_the_loop(
    rig: Rig,
) -> None:
    async def work() -> None:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        chunk = LogChunk(MemberRef("j7", 1, 0), 0, b"text")
        rig.loop.log_from(chunk, "n1", answer.set_result)
        assert not answer.done()
        assert await answer == 4, "it is not sent again"
        assert rig.loop.logs.kept(chunk.ref) == 0, "and not kept"

    rig.run(work())


def test_what_cannot_be_stored_is_refused_and_did_not_happen(rig: Rig) -> None:
    rig.store.failures = 1

    async def work() -> None:
        with pytest.raises(StoreError, match="disk is full"):
            await rig.loop.request(Submit(SPEC, "k"))
        assert rig.engine.sent == []
        assert await rig.loop.request(Submit(SPEC, "k")) == Accepted("j1")

    rig.run(work())
    assert rig.engine.resends == 1
    assert rig.loop.state.submitted == 1


def test_a_request_that_breaks_a_step_harms_nobody_else(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.core.step import step as real

    def breaking(*args: Any) -> Any:
        done = real(*args)
        if any(isinstance(r, Submit) and r.key == "poison" for r in args[1].requests):
            raise RuntimeError("a mistake in the core")
        return done

    monkeypatch.setattr("shoal.tick.step", breaking)

    async def work() -> None:
        assert await rig.loop.request(Submit(SPEC, "good")) == Accepted("j1")
        with pytest.raises(RuntimeError, match="a mistake"):
            await rig.loop.request(Submit(SPEC, "poison"))
        assert await rig.loop.request(Submit(SPEC, "also good")) == Accepted("j2")

    rig.run(work())
    assert sorted(rig.loop.state.keys) == ["also good", "good"]


def test_a_key_is_remembered_after_its_job_has_finished(rig: Rig) -> None:
    async def work() -> None:
        await rig.loop.request(Submit(SPEC, "k"))
        while not rig.engine.book.alive:
            await rig.loop.changed("j1", 1)
        rig.engine.book.exited(MemberRef("j1", 1, 0), 0)
        rig.loop.heard(rig.engine.book.report())
        while "j1" in rig.loop.state.jobs:
            await rig.loop.changed("j1", 1)
        answer = await rig.loop.request(Submit(SPEC, "k"))
        assert isinstance(answer, Accepted)
        assert answer.id == "j1"

    rig.run(work())


def test_a_refusal_is_an_answer(rig: Rig) -> None:
    async def work() -> None:
        await rig.loop.request(Submit(SPEC))
        answer = await rig.loop.request(Submit(JobSpec(command=("true",), gpus=5)))
        assert isinstance(answer, Refused)
        assert answer.field == "gpus"

    rig.run(work())


def test_only_the_newest_inventory_of_a_node_waits_to_be_looked_at(rig: Rig) -> None:
    reports = [rig.engine.book.report() for _ in range(5)]
    for report in reports:
        rig.loop.tick.hear(report)
    rig.loop.tick.begin(1)
    assert rig.loop.tick.decide(1).report.nodes == (reports[-1],)


def test_output_is_kept_once_however_often_it_comes(tmp_path: Path) -> None:
    logs = LogStore(tmp_path)
    ref = MemberRef("j1", 1, 0)
    assert logs.append(LogChunk(ref, 0, b"hello ")) == 6
    assert logs.append(LogChunk(ref, 0, b"hello ")) == 6
    assert logs.append(LogChunk(ref, 9, b"gap")) == 6, "a gap is not taken"
    assert logs.append(LogChunk(ref, 6, b"world")) == 11
    assert logs.append(LogChunk(ref, 0, b"")) == 11
    assert logs.read(ref, 0) == (0, b"hello world", 11, 11)
    assert logs.read(ref, -5) == (6, b"world", 11, 11)
    assert logs.read(MemberRef("j1", 1, 1), 0) == (0, b"", 0, 0)


def test_a_head_that_is_stopped_while_it_writes_a_log_takes_nothing_from_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It continues when the next head has written more. It saw a shorter file before."""
    before, after = LogStore(tmp_path), LogStore(tmp_path)

    def continued(path: Path, size: int, now_ms: int) -> None:
        """What happens between the look at the file and the write."""
        monkeypatch.undo()
        for chunk in chunks:
            after.append(chunk)

    for at in range(3):
        ref = MemberRef("j1", 1, at)
        chunks = [
            LogChunk(ref, 5, b"", dropped=5),
            LogChunk(ref, 5, b"hello "),
            LogChunk(ref, 11, b"world"),
        ]
        for chunk in chunks[:at]:
            before.append(chunk)
        monkeypatch.setattr("shoal.control.logs.note_time", continued)
        before.append(chunks[at])
        assert after.kept(ref) == 16
        assert after.read(ref, 5).data == b"hello world"


def test_endless_output_keeps_its_beginning_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is where the traceback is."""
    block = 64 * 1024
    for name, blocks in (("HEAD_BYTES", 4), ("TAIL_BYTES", 4), ("CUT_BYTES", 2)):
        monkeypatch.setattr(f"shoal.control.logs.{name}", blocks * block)
    logs = LogStore(tmp_path)
    ref = MemberRef("j1", 1, 0)
    for number in range(100):
        data = f"line {number}\n".encode().ljust(block, b".")
        assert logs.append(LogChunk(ref, number * block, data)) == (number + 1) * block
    assert (tmp_path / "j1" / "1.0.log").stat().st_blocks * 512 <= 11 * block
    text, offset = b"", 0
    while (read := logs.read(ref, offset)).data:
        text, offset = text + read.data, read.next
    assert offset == read.size == 100 * block, "a client has seen the end of it"
    assert [n for n in range(100) if f"line {n}\n".encode() in text] == [
        0,
        1,
        2,
        3,
        *range(96, 100),
    ]
    assert f"{92 * block:,} bytes of output are not kept".encode() in text
    tail = logs.read(ref, -block)
    assert (tail.start, tail.data[:8], tail.next) == (99 * block, b"line 99\n", 100 * block)
    assert logs.read(ref, -50 * block).data.startswith(b"line 96\n"), "the oldest after the gap"


def test_what_a_node_had_to_drop_is_a_gap_and_no_end(tmp_path: Path) -> None:
    logs, ref, block = LogStore(tmp_path), MemberRef("j1", 1, 0), 64 * 1024
    assert logs.append(LogChunk(ref, 0, b"a" * block)) == block
    assert logs.append(LogChunk(ref, 5 * block, b"late", 3 * block)) == block, "some are missing"
    assert logs.append(LogChunk(ref, 5 * block, b"late", 4 * block)) == 5 * block + 4
    assert logs.read(ref, 0).next == block
    assert logs.read(ref, block)[1:3] == (
        b"\n[shoal: 262,144 bytes of output are not kept here]\n",
        5 * block,
    )
    assert logs.read(ref, 5 * block).data == b"late"
