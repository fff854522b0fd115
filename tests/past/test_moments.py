"""A moment that is rebuilt is the state that was, and is shown as the present is."""

from __future__ import annotations

import asyncio
import os
import random
from itertools import islice
from pathlib import Path

import msgspec
import pytest
from storm.disk import image_of

from shoal.api import moment
from shoal.api.moment import Moments as Readers
from shoal.api.moment_reader import MomentAsk, MomentReader, MomentView
from shoal.api.principal import THE_OPERATOR, Principal
from shoal.api.problems import Refusal
from shoal.control.past import log as past_moments
from shoal.control.past.log import Log, Moments, NotYet, TooEarly
from shoal.control.store.sqlite import SqliteStore
from shoal.core.state.events.queue import JobSubmitted
from shoal.database.sqlite import SqliteDatabase
from shoal.model.identity import Role
from shoal.model.policy import Others
from shoal.tick import Tick
from tests.past.histories import events_of, held, moments

SEEDS = (405, 413, 424)
SEED = 424


def logged(home: Path, seed: int = SEED, every: int = 40) -> SqliteStore:
    """The log of a history, with snapshots of it."""
    store = SqliteStore(home / "shoal.db")
    tick = Tick(store, None, lambda *_: None)
    for number, (_, events, _) in enumerate(moments(events_of(seed))):
        store.commit(events, [])
        if number % every == every - 1:
            tick.load()
            store.snapshot(*tick.snapshot())
    return store


def ask(at_ms: int, who: Principal = THE_OPERATOR) -> MomentAsk:
    return MomentAsk(at_ms=at_ms, now_ms=1 << 50, who=who, others=Others.NOTHING)


def test_any_moment_is_the_state_that_was_in_whatever_order_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_moments, "MOMENT_EVENTS_AT_ONCE", 25)
    for seed in SEEDS:
        home = tmp_path / str(seed)
        home.mkdir()
        store = logged(home, seed)
        was = {at_ms: image_of(state) for at_ms, _, state in moments(events_of(seed))}
        rebuilt = Moments(Log(store.database))
        times = random.Random(seed).choices(list(was), k=40)
        for at_ms in [*times, *sorted(times)]:
            state, seq = rebuilt.at(at_ms, 60)
            assert image_of(state) == was[at_ms], (seed, at_ms)
            assert seq == sum(event.at_ms <= at_ms for event in events_of(seed))
        store.close()


def test_a_moment_before_the_log_or_too_far_to_read_at_once_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_moments, "MOMENT_EVENTS_AT_ONCE", 5)
    store = logged(tmp_path)
    seq = Log(store.database).snapshots()[0]
    with store.database.transaction() as cursor:
        cursor.execute("DELETE FROM events WHERE seq < ?", (seq,))
    rebuilt, oldest_ms = Moments(Log(store.database)), events_of(SEED)[seq - 1].at_ms
    with pytest.raises(TooEarly) as early:
        rebuilt.at(oldest_ms - 1, 60)
    assert early.value.oldest_ms == oldest_ms == rebuilt.oldest_ms()
    last_ms, tries = events_of(SEED)[-1].at_ms, 0
    while True:
        tries += 1
        try:
            state, _ = rebuilt.at(last_ms, 0)
            break
        except NotYet:
            continue
    assert tries > 1, "each try goes on from the last one"
    assert image_of(state) == image_of(store.load()[0])
    status, body = MomentReader(store.database).answer(ask(1))
    assert status == 422
    assert f"at_ms={oldest_ms}".encode() in body
    store.close()


def test_the_answer_is_what_the_page_would_have_shown_then(tmp_path: Path) -> None:
    store = logged(tmp_path)
    reader = MomentReader(SqliteDatabase(tmp_path / "shoal.db"))
    waiting = 0
    for at_ms, _, state in islice(moments(events_of(SEED)), 0, None, 15):
        status, body = reader.answer(ask(at_ms))
        assert status == 200, body
        view = msgspec.json.decode(body, type=MomentView)
        assert view.at_ms == view.snapshot.status.now_ms == at_ms
        shown = {
            (line.id, part.gpus, part.job, part.member)
            for line in view.snapshot.nodes
            for part in line.held
        }
        known = {line.id for line in view.snapshot.nodes}
        was = {(node, gpus, job, member) for node, gpus, job, _, member in held(state)}
        assert shown == {one for one in was if one[0] in known}
        assert not view.queue or state.queue.size  # jobs on hold are counted and not in line
        assert all(row.why and not row.foreseen for row in view.queue)
        assert all(one.event.at_ms <= at_ms for one in view.events)
        waiting += len(view.queue)
    assert waiting
    store.close()


def test_a_tenant_sees_nothing_of_others_in_the_past(tmp_path: Path) -> None:
    store = logged(tmp_path)
    tenants = {e.spec.tenant for e in events_of(SEED) if isinstance(e, JobSubmitted)}
    others = {e.job for e in events_of(SEED) if isinstance(e, JobSubmitted)}
    who = Principal(user="eve", tenant="nobody", role=Role.MEMBER)
    reader = MomentReader(store.database)
    assert tenants
    for at_ms, _, _ in islice(moments(events_of(SEED)), 0, None, 40):
        status, body = reader.answer(ask(at_ms, who))
        view = msgspec.json.decode(body, type=MomentView)
        assert status == 200
        assert not view.queue and not view.snapshot.jobs and not view.snapshot.ended
        assert {part.job for line in view.snapshot.nodes for part in line.held} <= {""}
        assert not [job for job in others if f'"{job}"'.encode() in body]
    store.close()


def test_the_process_is_started_once_ends_unasked_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged(tmp_path).close()
    at_ms = events_of(SEED)[-1].at_ms

    async def use() -> None:
        readers = Readers(tmp_path)
        bodies = await asyncio.gather(*(readers.ask(ask(at_ms)) for _ in range(3)))
        assert len(set(bodies)) == 1
        process = readers._process
        assert process is not None
        assert os.getpriority(os.PRIO_PROCESS, process.pid) > os.getpriority(os.PRIO_PROCESS, 0)
        monkeypatch.setattr(moment, "IDLE_S", 0.0)
        assert await readers.ask(ask(at_ms)) == bodies[0]
        await process.wait()  # nobody asks any more
        process = await readers._start(tmp_path)
        readers._process = process
        os.kill(process.pid, 9)
        with pytest.raises(Refusal, match="has ended; ask again"):
            await readers.ask(ask(at_ms))
        await process.wait()
        monkeypatch.setattr(moment, "IDLE_S", 60.0)
        assert await readers.ask(ask(at_ms)) == bodies[0]
        monkeypatch.setattr(moment, "ASKING_MAX", 0)
        with pytest.raises(Refusal, match="being read already"):
            await readers.ask(ask(at_ms))
        with pytest.raises(Refusal, match="no home"):
            await Readers(None).ask(ask(at_ms))
        process = readers._process
        assert process is not None
        readers.end()
        await process.wait()
        await asyncio.sleep(0)  # its pipes are closed

    asyncio.run(asyncio.wait_for(use(), 90))
