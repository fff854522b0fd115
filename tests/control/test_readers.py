"""Readers see what is stored, and nothing of a step that is on its way to the store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from shoal.api.app import build
from shoal.api.feed import Feed
from shoal.api.reach import Reach
from shoal.control.gateway_link import GatewayLink
from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop, Unreadable
from shoal.control.store.sqlite import SqliteStore
from shoal.core.state.events.log import Event, Recorded
from shoal.core.state.events.runs import JobPlaced
from shoal.core.state.events.services import ServiceStopped
from shoal.core.state.state import State
from shoal.model.job import Job, Outcome, Phase
from shoal.model.policy import Policy
from shoal.model.report import SetService
from shoal.model.service import GatewayEntry, Scale, ServiceLoad, ServiceSpec, Wanted
from shoal.ports import StoreError
from tests.control.test_loop import SPEC, BookEngine, HandClock, Rig

SERVICE = ServiceSpec(name="web", replica=SPEC, scale=Scale(least=1, most=1))
PATHS = ("jobs", "services", "nodes", "status", "jobs/j1", "queue", "events?job=j1")
WRONG_S = 0.3  # long enough for a reader that does not wait to show what it saw
TOKEN = "t" * 32


class HeldStore(SqliteStore):
    """The commit of a placement waits until it is released."""

    fails = False
    loads_fail = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reached, self.released = threading.Event(), threading.Event()

    def commit(self, events: Sequence[Event], finished: Sequence[Job]) -> int:
        if any(isinstance(event, JobPlaced) for event in events):
            self.reached.set()
            assert self.released.wait(60)
            if self.fails:
                raise StoreError("the disk is full")
        return super().commit(events, finished)

    def load(self) -> tuple[State, int]:
        if self.loads_fail:
            raise StoreError("the file is locked")
        return super().load()


class HeldRig(Rig):
    def __init__(self, path: Path) -> None:
        self.held = HeldStore(path / "db")
        self.engine = BookEngine()
        self.loop = ControlLoop(
            self.held, self.engine, HandClock(), Policy(), LogStore(path / "logs")
        )
        self.app = build(self.loop, TOKEN)

    async def read(self, path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        headers = {"authorization": f"Bearer {TOKEN}", "host": "localhost"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(f"/v1/{path}", headers=headers)

    async def hold(self) -> asyncio.Task[object]:
        """A service is asked for; its first step is decided, and its commit has begun."""
        asked: asyncio.Task[object] = asyncio.create_task(self.loop.request(SetService(SERVICE)))
        assert await asyncio.to_thread(self.held.reached.wait, 60)
        return asked


class RecordingBalancer:
    def __init__(self) -> None:
        self.seen = threading.Event()

    def look(self, wanted: Wanted) -> dict[str, ServiceLoad]:
        if wanted.services:
            self.seen.set()
        return {}


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HeldRig:
    monkeypatch.setattr("shoal.control.loop.RECOVERY_PAUSE_S", 0.01)
    monkeypatch.setattr("shoal.control.gateway_link.LOOK_S", 0.01)
    return HeldRig(tmp_path)


def test_a_step_is_seen_by_nobody_before_it_is_stored_and_by_all_after(rig: HeldRig) -> None:
    async def work() -> None:
        await rig.loop.changed("", 5)
        balancer, feed = RecordingBalancer(), Feed(rig.loop)
        page = feed.open()
        await page.pieces.get()  # the cluster as it was
        link = asyncio.create_task(GatewayLink(rig.loop, balancer, GatewayEntry).run())
        asked = await rig.hold()
        reads = {path: asyncio.create_task(rig.read(path)) for path in PATHS}
        news = asyncio.create_task(page.pieces.get())
        early, _ = await asyncio.wait(reads.values(), timeout=WRONG_S)
        for read in early:
            assert "j1" not in read.result().text, read.result().url
            assert "web" not in read.result().text, read.result().url
        assert not news.done(), "the page was sent a step that is not stored"
        assert not balancer.seen.is_set(), "the gateway was given a service that is not stored"
        assert not asked.done()
        rig.held.released.set()
        await asked
        await asyncio.wait(reads.values())
        assert reads["jobs/j1"].result().json()["state"] in ("starting", "running")
        assert reads["jobs"].result().json()[0]["id"] == "j1"
        assert reads["services"].result().json()[0]["name"] == "web"
        assert b"j1" in (await news or b"")
        assert await asyncio.to_thread(balancer.seen.wait, 20)
        link.cancel()
        feed.end()

    rig.run(work())


def test_finished_jobs_are_listed_while_a_step_is_being_stored(
    rig: HeldRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read in a thread, which must not look at the state: a step may begin meanwhile."""
    reading, go_on = threading.Event(), threading.Event()

    def finished(*_: object, **__: object) -> list[Job]:
        reading.set()
        assert go_on.wait(60)
        over = Job(id="j9", number=9, spec=SPEC, phase=Phase.FINISHED, why="it exited 0")
        over.outcome = Outcome.SUCCEEDED
        return [over]

    monkeypatch.setattr(rig.held, "finished", finished)

    async def work() -> None:
        await rig.loop.changed("", 5)
        listing = asyncio.create_task(rig.read("jobs?finished=true"))
        assert await asyncio.to_thread(reading.wait, 60)
        asked = await rig.hold()
        go_on.set()
        await asyncio.wait([listing], timeout=WRONG_S)
        rig.held.released.set()
        await asked
        answer = await listing
        assert answer.status_code == 200, answer.text
        assert [(row["id"], row["why"]) for row in answer.json()] == [("j9", "it exited 0")]

    rig.run(work())


def test_events_of_a_service_are_read_while_a_step_is_being_stored(
    rig: HeldRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads them decides who may see them, too."""
    reading, go_on = threading.Event(), threading.Event()

    def events(*_: object, **__: object) -> list[Recorded]:
        reading.set()
        assert go_on.wait(60)
        return [Recorded(1, ServiceStopped(at_ms=1, service="web"))]

    monkeypatch.setattr(rig.held, "events", events)

    async def work() -> None:
        await rig.loop.changed("", 5)
        listing = asyncio.create_task(rig.read("events"))
        assert await asyncio.to_thread(reading.wait, 60)
        asked = await rig.hold()
        go_on.set()
        answer = await listing  # although the step is still on its way
        assert answer.status_code == 200, answer.text
        assert [row["event"]["service"] for row in answer.json()["events"]] == ["web"]
        rig.held.released.set()
        await asked

    rig.run(work())


def test_a_reader_that_forgets_to_wait_is_asked_again_when_the_step_is_stored(
    rig: HeldRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (handler,) = (one for one in rig.app.handlers if one.verb == "services.listing")
    reading, tries = asyncio.Event(), 0

    async def forgets(self: object, reach: Reach) -> list[str]:
        nonlocal tries
        tries += 1
        if tries == 1:
            reading.set()
            await asyncio.to_thread(rig.held.reached.wait, 60)
        return sorted(reach.loop.state.services)

    monkeypatch.setattr(handler, "fn", forgets)
    monkeypatch.setattr(handler, "awaits", True)

    async def work() -> None:
        await rig.loop.changed("", 5)
        listing = asyncio.create_task(rig.read("services"))
        await reading.wait()
        asked = await rig.hold()
        await asyncio.wait([listing], timeout=WRONG_S)
        rig.held.released.set()
        await asked
        answer = await listing
        assert (answer.status_code, answer.json(), tries) == (200, ["web"], 2)

    rig.run(work())


def test_after_a_failed_commit_readers_get_what_is_stored(rig: HeldRig) -> None:
    async def work() -> None:
        asked = await rig.hold()
        reads = [asyncio.create_task(rig.read(path)) for path in PATHS]
        rig.held.fails = True
        rig.held.released.set()
        with pytest.raises(StoreError, match="disk is full"):
            await asked
        for read in reads:
            answer = await read
            assert answer.status_code == (404 if answer.url.path.endswith("j1") else 200)
            assert "web" not in answer.text

    rig.run(work())


def test_when_the_store_cannot_be_read_either_readers_get_the_reason_and_not_the_step(
    rig: HeldRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.control.loop.READ_WAIT_S", WRONG_S)

    async def work() -> None:
        asked = await rig.hold()
        late = await rig.read("status")
        assert late.status_code == 503
        assert "the store has not answered for 0.3 s" in late.text
        rig.held.fails = rig.held.loads_fail = True
        rig.held.released.set()
        with pytest.raises(StoreError, match="disk is full"):
            await asked
        for path in ("status", "jobs", "jobs/j1", "nodes"):
            refused = await rig.read(path)
            assert refused.status_code == 503
            assert "the file is locked" in refused.json()["message"]
        with pytest.raises(Unreadable, match="the file is locked"):
            _ = rig.loop.state
        assert rig.loop.alarms.texts == ("nothing can be stored: the file is locked",)
        rig.held.fails = rig.held.loads_fail = False
        while (answer := await rig.read("status")).status_code == 503:
            continue
        assert answer.json()["submitted"] == 0

    rig.run(work())


def test_every_handler_is_given_the_loop_last(rig: HeldRig) -> None:
    """If another dependency came after it, a step could be decided before the handler runs."""
    given = 0
    for handler in rig.app.handlers:
        plan = rig.app.plan(handler)
        last = {name for name, _ in plan.late}
        assert last >= {"loop", "reach", "feed"} & set(handler.hints), handler.verb
        assert not last & {name for name, _ in plan.early}
        given += bool(last)
    assert given > 20


def test_the_ledgers_time_waits_for_a_step_that_is_on_its_way(rig: HeldRig) -> None:
    """A report asked for during a commit put the book past the events that it was about to get:
    a node that joined in them lost the difference of its capacity."""

    async def work() -> None:
        await rig.loop.changed("", 5)
        asked = await rig.hold()
        clock = rig.loop.clock
        assert isinstance(clock, HandClock)
        decided_ms = clock.now_ms()
        clock.ms += 31
        assert rig.loop.now_ms() == decided_ms
        rig.held.released.set()
        await asked
        assert rig.loop.now_ms() == clock.now_ms() > decided_ms

    rig.run(work())
