"""A store that fails, clients that go away, parts that raise: the loop goes on and stays true."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop
from shoal.control.store.sqlite import SqliteStore
from shoal.core.state.events.cluster import ControllerStarted
from shoal.core.state.events.log import Event
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.state import State
from shoal.model.job import Job, JobSpec, MemberRef
from shoal.model.policy import Policy
from shoal.model.report import Accepted, Cancel, Submit
from shoal.ports import StoreError
from tests.control.test_loop import SPEC, BookEngine, HandClock, Rig

BLOCKED = JobSpec(command=("true",), gpus=4, members=1)


class Sick(SqliteStore):
    """Fails as often as it is told to, and counts."""

    commits_to_fail = 0
    epochs_to_fail = 0
    commits_to_deny = 0  # they are stored, and answered with an error
    loads_to_fail = 0
    snapshots_to_fail = 0

    def commit(self, events: Sequence[Event], finished: Sequence[Job]) -> int:
        epoch = any(isinstance(event, ControllerStarted) for event in events)
        if epoch and self.epochs_to_fail:
            self.epochs_to_fail -= 1
            raise StoreError("the disk is full")
        if not epoch and self.commits_to_fail:
            self.commits_to_fail -= 1
            raise StoreError("the disk is full")
        last = super().commit(events, finished)
        if not epoch and self.commits_to_deny:
            self.commits_to_deny -= 1
            raise StoreError("the answer was lost")
        return last

    def load(self) -> tuple[State, int]:
        if self.loads_to_fail:
            self.loads_to_fail -= 1
            raise StoreError("the file is locked")
        return super().load()

    def snapshot(self, seq: int, body: bytes) -> list[str]:
        if self.snapshots_to_fail:
            self.snapshots_to_fail -= 1
            raise StoreError("the disk is full")
        return super().snapshot(seq, body)


class SickRig(Rig):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.sick = Sick(path / "db")
        self.engine = BookEngine()
        self.loop = ControlLoop(
            self.sick, self.engine, HandClock(), Policy(), LogStore(path / "logs")
        )

    def reloaded(self) -> State:
        """What the next controller would begin with."""
        return SqliteStore(self.path / "db").load()[0]


@pytest.fixture
def sick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SickRig:
    monkeypatch.setattr("shoal.control.loop.RECOVERY_PAUSE_S", 0)
    return SickRig(tmp_path)


def test_a_load_that_fails_after_a_failed_commit_leaves_nothing_unstored_behind(
    sick: SickRig,
) -> None:
    async def work() -> None:
        await sick.loop.request(Submit(SPEC, "stored"))
        sick.sick.commits_to_fail, sick.sick.loads_to_fail = 1, 2
        with pytest.raises(StoreError):
            await sick.loop.request(Submit(SPEC, "lost"))
        while True:  # refused while the store cannot be read
            try:
                answer = await sick.loop.request(Submit(SPEC, "after"))
                break
            except StoreError:
                continue
        assert answer == Accepted("j2")

    sick.run(work())
    assert sorted(sick.loop.state.keys) == ["after", "stored"]
    assert sorted(sick.reloaded().keys) == ["after", "stored"]


def test_an_epoch_that_was_not_stored_is_never_used(sick: SickRig) -> None:
    async def work() -> None:
        await sick.loop.request(Submit(SPEC, "a"))
        sick.sick.commits_to_fail, sick.sick.epochs_to_fail = 1, 3
        with pytest.raises(StoreError):
            await sick.loop.request(Submit(SPEC, "b"))
        while True:
            try:
                await sick.loop.request(Submit(SPEC, "c"))
                break
            except StoreError:
                continue

    sick.run(work())
    epochs = [
        recorded.event.epoch
        for recorded in sick.sick.events(0, 99)
        if isinstance(recorded.event, ControllerStarted)
    ]
    assert epochs == [1, 2]
    assert {envelope.epoch for envelope in sick.engine.sent} <= set(epochs)
    assert sick.reloaded().epoch == 2


def test_followers_see_every_event_also_of_a_commit_whose_outcome_was_unknown(
    sick: SickRig,
) -> None:
    """A job that was submitted by it gets its notices in time, a tenant that it removed loses its
    secrets: each of them only knows what it is told."""
    seen: list[tuple[int, Event]] = []

    class Witness:
        def stepped(self, _: object, events: Sequence[Event], seq: int) -> None:
            seen.extend(enumerate(events, seq - len(events) + 1))

    async def story() -> None:
        sick.loop.followers.append(Witness())
        work = asyncio.create_task(sick.loop.run())
        await sick.loop.request(Submit(BLOCKED, "one"))
        sick.sick.commits_to_deny = 1
        with pytest.raises(StoreError, match="the answer was lost"):
            await sick.loop.request(Submit(BLOCKED, "two"))
        again = await sick.loop.request(Submit(BLOCKED, "two"))
        assert again == Accepted("j2", "this submission was already accepted")
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    asyncio.run(story())
    assert seen == [(one.seq, one.event) for one in sick.sick.events(1, 1000)]
    assert sum(isinstance(event, JobSubmitted) for _, event in seen) == 2


def test_a_client_that_went_away_does_not_stop_the_loop(sick: SickRig) -> None:
    """Its submission is known to be finished, so it is answered without a step."""

    async def work() -> None:
        await sick.loop.request(Submit(SPEC, "k"))
        while not sick.engine.book.alive:
            await sick.loop.changed("j1", 1)
        sick.engine.book.exited(MemberRef("j1", 1, 0), 0)
        sick.loop.heard(sick.engine.book.report())
        while "j1" in sick.loop.state.jobs:
            await sick.loop.changed("j1", 1)
        gone = asyncio.create_task(sick.loop.request(Submit(SPEC, "k")))
        await asyncio.sleep(0)
        gone.cancel()
        assert await sick.loop.request(Submit(SPEC, "next")) == Accepted("j2")

    sick.run(work())


def test_a_cancel_and_a_submission_with_the_same_key_at_the_same_moment_make_one_job(
    sick: SickRig,
) -> None:
    async def work() -> None:
        await sick.loop.request(Submit(BLOCKED, "first"))
        await sick.loop.request(Submit(BLOCKED, "k"))  # waits: no room
        cancelled, again = await asyncio.gather(
            sick.loop.request(Cancel("j2", "me")), sick.loop.request(Submit(BLOCKED, "k"))
        )
        assert cancelled == Accepted("j2")
        assert isinstance(again, Accepted)
        assert again.id == "j2"
        assert await sick.loop.request(Submit(SPEC, "later")) == Accepted("j3")

    sick.run(work())
    submitted = [r.event for r in sick.sick.events(0, 99) if isinstance(r.event, JobSubmitted)]
    assert [event.key for event in submitted] == ["first", "k", "later"]


def test_a_store_that_holds_two_jobs_with_one_key_goes_on(tmp_path: Path) -> None:
    """As an earlier version could leave it behind: the first job keeps the key."""
    store = SqliteStore(tmp_path / "db")
    jobs = [Job(id=f"j{n}", number=n, spec=SPEC, key="k", submitted_ms=1) for n in (1, 2)]
    for job in jobs:
        store.commit([ControllerStarted(at_ms=1, epoch=job.number)], [job])
    assert store.keyed("k") == "j1"
    assert store.job("j2") is not None


def test_a_snapshot_that_cannot_be_written_harms_no_request(
    sick: SickRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.control.loop.EVENTS_PER_SNAPSHOT", 1)
    sick.sick.snapshots_to_fail = 1

    async def work() -> None:
        assert await sick.loop.request(Submit(SPEC, "a")) == Accepted("j1")
        assert await sick.loop.request(Submit(SPEC, "b")) == Accepted("j2")
        while not sick.sick.snapshot_seq:
            await sick.loop.request(Submit(SPEC))

    sick.run(work())
    assert sick.sick.snapshots_to_fail == 0
    assert sick.engine.resends == 0, "nothing was rebuilt"


def test_a_follower_or_an_engine_that_raises_leaves_no_request_without_an_answer(
    sick: SickRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def stepped(self, *_: Any) -> None:
            raise RuntimeError("a mistake in a follower")

    def raising(*_: Any) -> None:
        raise OSError("no room in the socket's buffer")

    sick.loop.followers.append(Broken())
    monkeypatch.setattr(sick.engine, "send", raising)

    async def work() -> None:
        assert await sick.loop.request(Submit(SPEC, "a")) == Accepted("j1")
        assert await sick.loop.request(Submit(SPEC, "b")) == Accepted("j2")

    sick.run(work())
