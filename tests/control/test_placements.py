"""A node is believed about members that were placed on it, and no event loop waits to find out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from shoal.control import placements
from shoal.control.placements import Place, Placements
from shoal.core.state.events.log import Recorded
from shoal.core.state.events.runs import JobPlaced
from shoal.model.job import Job, JobSpec, Member, MemberRef
from shoal.model.resources import Slice
from shoal.ports import Store, StoreError


def job_on(*nodes: str, attempt: int) -> Job:
    members = [Member(Slice(node, ())) for node in nodes]
    return Job(id="j1", number=1, spec=JobSpec(command=("x",)), attempt=attempt, members=members)


class Past:
    """What the store knows: attempt 1 was on n8 and n9. It answers when it is let."""

    def __init__(self, record: Job | None = None) -> None:
        self.record = record
        self.reads: list[str] = []
        self.away = False
        self.open = threading.Event()
        self.open.set()

    def _read(self, name: str) -> None:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        assert self.open.wait(60)
        self.reads.append(name)
        if self.away:
            raise StoreError("the server is away")

    def job(self, job_id: str) -> Job | None:
        self._read("job")
        return self.record if self.record and self.record.id == job_id else None

    def history(self, _job: str, _limit: int) -> Sequence[Recorded]:
        self._read("history")
        slices = (Slice("n8", ()), Slice("n9", ()))
        placed = JobPlaced(at_ms=1, job="j1", attempt=1, slices=slices, master="", why="")
        return [Recorded(1, placed)]


class Scene:
    def __init__(self, live: Job | None, past: Past) -> None:
        self.live: dict[str, Job] = {live.id: live} if live is not None else {}
        self.places = Placements(lambda job: self.live.get(job), cast(Store, past))

    async def place(self, node: str, *ref: Any) -> Place:
        answer: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self.places.ask(MemberRef("j1", *ref), node, answer.set_result)
        return await answer


def test_the_state_knows_the_newest_attempt_and_the_store_those_before() -> None:
    past = Past()
    scene = Scene(job_on("n1", "n2", attempt=2), past)

    async def work() -> None:
        assert await scene.place("n1", 2, 0) is Place.NEWEST
        assert await scene.place("n1", 2, 1) is Place.NOWHERE
        assert await scene.place("n1", 2, 7) is Place.NOWHERE
        assert await scene.place("n1", 3, 0) is Place.NOWHERE
        assert await scene.place("n1", 0, 0) is Place.NOWHERE
        assert not past.reads
        assert await scene.place("n9", 1, 1) is Place.EARLIER
        assert await scene.place("n8", 1, 1) is Place.NOWHERE
        assert await scene.place("n8", 1, 2) is Place.NOWHERE
        assert past.reads == ["job", "history"], "it is remembered"

    asyncio.run(work())


def test_the_record_of_a_finished_job_has_its_last_attempt() -> None:
    scene = Scene(None, Past(job_on("n1", attempt=2)))

    async def work() -> None:
        assert await scene.place("n1", 2, 0) is Place.NEWEST
        assert await scene.place("n2", 2, 0) is Place.NOWHERE
        assert await scene.place("n8", 1, 0) is Place.EARLIER

    asyncio.run(work())
    stranger = Scene(None, Past())
    assert asyncio.run(stranger.place("n1", 1, 0)) is Place.NOWHERE


def test_messages_about_a_member_are_answered_in_turn_and_a_flood_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placements, "WAITING_MAX", 2)
    past = Past()
    past.open.clear()
    scene = Scene(job_on("n1", attempt=2), past)

    async def work() -> None:
        ref, told = MemberRef("j1", 1, 0), list[tuple[str, Place]]()
        answered = asyncio.Event()

        def second(place: Place) -> None:
            told.append(("second", place))
            answered.set()

        scene.places.ask(ref, "n8", lambda place: told.append(("first", place)))
        scene.places.ask(ref, "n8", second)
        scene.places.ask(ref, "n8", lambda place: told.append(("third", place)))
        assert told == [("third", Place.UNKNOWN)], "it comes again"
        past.open.set()
        await answered.wait()
        assert told[1:] == [("first", Place.EARLIER), ("second", Place.EARLIER)]

    asyncio.run(work())


def test_while_the_store_is_away_nothing_is_decided() -> None:
    past = Past()
    past.away = True
    scene = Scene(None, past)
    assert asyncio.run(scene.place("n1", 1, 0)) is Place.UNKNOWN


def test_a_job_that_ends_while_it_is_looked_up_is_looked_up_again() -> None:
    past = Past()
    scene = Scene(job_on("n1", attempt=2), past)

    async def work() -> None:
        past.open.clear()
        asking = asyncio.create_task(scene.place("n8", 1, 0))
        await asyncio.sleep(0)
        scene.live.clear()
        past.open.set()
        assert await asking is Place.UNKNOWN

    asyncio.run(work())
