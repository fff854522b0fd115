"""What every store promises, shown with a file and with a real server, and compared with a list in
memory that keeps the same promises in the simplest way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from harness.postgres import Postgres
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st

from shoal.control.store import events as event_store
from shoal.control.store import keeping
from shoal.control.store.events import EventStore, Warm
from shoal.control.store.marks import ATTEMPTS_AHEAD, JOBS_AHEAD, ServedNumbers
from shoal.core.state.events.base import JobEvent, NodeEvent
from shoal.core.state.events.cluster import ControllerStarted
from shoal.core.state.events.log import QUIET, Event, Recorded
from shoal.core.state.events.nodes import NodeReady
from shoal.core.state.events.queue import JobLabelled, JobSubmitted
from shoal.core.state.events.runs import JobCheckpointed, JobFinished, JobRunning
from shoal.core.state.state import State
from shoal.database.base import Database
from shoal.database.lease import Lease
from shoal.database.postgres import PostgresDatabase
from shoal.database.sqlite import SqliteDatabase
from shoal.model.array import ELEMENT_NUMBERS
from shoal.model.columns import COLUMNS
from shoal.model.finding import EVERY_JOB, LAST_ENDED, JobFilter, Order
from shoal.model.job import Job, JobSpec, Outcome, Phase
from shoal.ports import StoreDamaged, StoreError, Used
from tests.control.test_sqlite_store import as_bytes, history

SETTINGS = settings(
    max_examples=25,
    phases=[Stage.explicit, Stage.generate],  # a failure is small enough as it is
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Place:
    """Where a store is, so that it can be opened again."""

    def __init__(self, path: Path, server: Postgres | None) -> None:
        self.path = path
        self.closing = ExitStack()
        self.kept: Database | None = None
        self.lease: Lease | None = None
        if server is not None:
            self.url = server.database()
            self.lease = Lease(self.url)
            self.closing.callback(self.lease.close)
            assert self.lease.take("a")

    def database(self) -> Database:
        made: Database
        if self.lease is None:
            made = SqliteDatabase(self.path / "db", durable=False)
        else:
            made = PostgresDatabase(self.url, self.lease)
        self.closing.callback(made.close)
        return made

    def open(self) -> EventStore:
        return EventStore(self.database())

    def emptied(self) -> EventStore:
        """The same one for every example, because each takes a moment to open."""
        self.kept = self.kept or self.database()
        store = EventStore(self.kept)
        for table in ("events", "jobs", "snapshots", "meta"):
            change(store, f"DELETE FROM {table}")
        return EventStore(self.kept)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    server = None
    if request.param == "postgres":
        server = request.getfixturevalue("postgres_server")
    made = Place(tmp_path, server)
    yield made
    made.closing.close()


def change(store: EventStore, query: str, *values: object) -> None:
    with store.database.transaction() as cursor:
        cursor.execute(query, values)


def test_what_was_stored_is_loaded_again_from_the_beginning_or_a_snapshot(place: Place) -> None:
    state, steps = history(5)
    store = place.open()
    for number, done in enumerate(steps):
        last = store.commit(done.events, done.finished)
        if number == 3:
            loaded, seq = store.load()
            assert store.snapshot(seq, as_bytes(loaded)) == []
    for again in (store, place.open()):
        loaded, seq = again.load()
        assert (as_bytes(loaded), seq) == (as_bytes(state), last)
        assert 0 < again.snapshot_seq < seq
    assert store.newest_ms() == 5000
    assert store.keyed("key-2") == "j3"
    assert (store.keyed("key-5"), store.keyed("")) == (None, None)
    found = store.ended("j3")
    assert found is not None
    assert (found.id, found.outcome) == ("j3", Outcome.SUCCEEDED)
    assert (store.ended("j6"), store.job("j6")) == (None, None)


def test_a_standby_follows_and_its_state_is_where_the_next_leader_begins(place: Place) -> None:
    state, steps = history(6)
    leader, standby = place.open(), place.open()
    seq, followed = 0, State()
    for done in steps[:4]:
        leader.commit(done.events, done.finished)
        seq = standby.follow(followed, seq)
    for done in steps[4:]:
        leader.commit(done.events, done.finished)
    standby.warm = Warm(followed, seq, leader.events(seq - 1, 1)[0])
    loaded, last = standby.load()
    assert loaded is followed
    assert (as_bytes(loaded), last) == (as_bytes(state), leader.load()[1])
    assert standby.load()[0] is not followed, "a state is taken once"
    standby.commit([ControllerStarted(at_ms=9000, epoch=1)], [])


def test_a_standby_whose_log_is_not_the_databases_begins_from_what_is_there(place: Place) -> None:
    """A server took over that had not got the last events, and went on with others: the numbers are
    the same, and nothing else is."""
    _, steps = history(6)
    leader = place.open()
    for done in steps[:4]:
        last = leader.commit(done.events, done.finished)
    followed, seq = place.open().load()
    newest = leader.events(seq - 1, 1)[0]
    for lost in (2, 0):  # the events that another leader has stored in their place
        change(leader, "DELETE FROM events WHERE seq > ?", last - 2)
        again = place.open()
        for number in range(lost):
            again.commit([NodeReady(at_ms=7_000 + number, node="n1")], [])
        standby = place.open()
        before = standby.used(1, 0)
        standby.warm = Warm(followed, seq, newest)
        loaded, _ = standby.load()
        assert loaded is not followed
        used = standby.used(loaded.next_job, loaded.epoch)
        assert used.first_job > before.first_job, "what was lost may have used more"
        assert used.first_attempt and used.epoch > loaded.epoch
    behind = place.open()
    behind.warm = Warm(followed, seq, None, lost=True)
    assert behind.load()[0] is not followed


def test_a_commit_is_stored_as_a_whole_or_not_at_all(place: Place) -> None:
    _, steps = history(3)
    store, other = place.open(), place.open()
    for done in steps[:2]:
        last = store.commit(done.events, done.finished)
    with pytest.raises(StoreError):  # it does not know what the first has stored
        other.commit(steps[2].events, steps[2].finished)
    assert len(store.events(0, 1000)) == last
    assert [job.id for job in store.finished(9)] == ["j1"]
    assert other.load()[1] == last
    assert other.commit(steps[2].events, steps[2].finished) == last + len(steps[2].events)
    with pytest.raises(StoreError):
        store.commit(steps[2].events, [])
    assert len(place.open().events(0, 1000)) == last + len(steps[2].events)


def test_damage_is_named_and_an_older_snapshot_helps(place: Place) -> None:
    state, steps = history(5)
    store = place.open()
    for done in steps:
        last = store.commit(done.events, done.finished)
        store.snapshot(last, as_bytes(store.load()[0]))
    change(store, "UPDATE snapshots SET body = ? WHERE seq = ?", b"{}", last)
    assert as_bytes(store.load()[0]) == as_bytes(state)
    assert "the snapshot at event" in " ".join(store.alarms.texts)
    [before] = [store.snapshot_seq]
    change(store, "UPDATE events SET body = ? WHERE seq = ?", b"?", before + 1)
    with pytest.raises(StoreDamaged, match=f"event {before + 1} cannot be read"):
        store.load()
    change(store, "DELETE FROM events WHERE seq = ?", before + 1)
    with pytest.raises(StoreDamaged, match=f"event {before + 1} is missing"):
        store.load()


def test_history_that_cannot_be_read_is_left_out_and_reported(place: Place) -> None:
    _, steps = history(4)
    store = place.open()
    for done in steps:
        store.commit(done.events, done.finished)
    change(store, "UPDATE jobs SET crc = crc + 1 WHERE id = ?", "j2")
    change(store, "UPDATE events SET body = ? WHERE seq = ?", b"\xff", 2)
    assert [job.id for job in store.finished(9)] == ["j4", "j3", "j1"]
    assert store.job("j2") is None
    assert 2 not in [one.seq for one in store.events(0, 99)]
    assert store.newest_ms() == 4000
    assert "left out" in " ".join(store.alarms.texts)


def test_old_history_goes_with_a_snapshot(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "EVENTS_KEPT", 3)
    monkeypatch.setattr(keeping, "FINISHED_JOBS_KEPT", 2)
    state, steps = history(8)
    store = place.open()
    for done in steps:
        last = store.commit(done.events, done.finished)
    assert sorted(store.snapshot(last, as_bytes(state))) == [f"j{n}" for n in range(1, 7)]
    assert [one.seq for one in store.events(0, 99)] == [last - 2, last - 1, last]
    assert as_bytes(place.open().load()[0]) == as_bytes(state)


def fill(store: EventStore, tenant: str, numbers: range, **fields: str) -> int:
    """Quick jobs: each is submitted, saves its work twice, and ends."""
    spec, last = JobSpec(command=("true",), tenant=tenant, env=fields), 0
    for number in numbers:
        job, at_ms = f"j{number}", 10 * number
        events: list[Event] = [JobSubmitted(at_ms=at_ms, job=job, spec=spec)]
        events += [JobCheckpointed(at_ms=at_ms, job=job, attempt=1, step=n) for n in (1, 2)]
        last = store.commit([*events, finish(job, at_ms)], [record(job, spec=spec)])
    return last


def ids(store: EventStore, tenant: str) -> list[str]:
    return [job.id for job in store.finished(999, wanted=JobFilter(tenant=tenant))]


def test_who_has_most_finished_jobs_gives_first(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "FINISHED_JOBS_KEPT", 20)
    store = place.open()
    fill(store, "blue", range(1, 6))
    last = fill(store, "red", range(6, 106))
    assert len(store.snapshot(last, b"{}")) == 85
    assert ids(store, "blue") == [f"j{n}" for n in range(5, 0, -1)], "the oldest of all"
    assert ids(store, "red") == [f"j{n}" for n in range(105, 90, -1)]
    assert [store.tenants().get(job) for job in ("j1", "j6", "j105")] == ["blue", None, "red"]
    change(store, "UPDATE jobs SET tenant = NULL, bytes = NULL WHERE number > ?", 0)
    last = fill(store, "red", range(106, 116))
    assert len(store.snapshot(last, b"{}")) == 10, "records of earlier versions count as well"
    assert len(ids(store, "blue")) == 5


def test_large_records_of_one_tenant_do_not_push_out_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "FINISHED_BYTES_MAX", 50_000)
    store = place.open()
    fill(store, "blue", range(1, 6))
    last = fill(store, "red", range(6, 26), text="x" * 10_000)
    store.snapshot(last, b"{}")
    assert len(ids(store, "blue")) == 5
    assert ids(store, "red") == ["j25", "j24", "j23", "j22"]


def test_a_flood_of_events_leaves_what_others_want_to_know_of_their_jobs(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "FINISHED_JOBS_KEPT", 20)
    monkeypatch.setattr(keeping, "EVENTS_KEPT", 60)
    store = place.open()
    live = JobSubmitted(at_ms=1, job="j1", spec=JobSpec(command=("true",), tenant="blue"))
    store.commit([live], [])
    fill(store, "blue", range(2, 5))
    before = {job: store.history(job, 99) for job in ("j1", "j2", "j3", "j4")}
    for start in range(5, 205, 50):
        last = fill(store, "red", range(start, start + 50))
        store.snapshot(last, b"{}")
    kept = [one.seq for one in store.events(0, 9_999)]
    assert kept[0] > len(before), "the log was cut"
    assert kept == list(range(kept[0], last + 1)), "and has no gap"
    assert {job: store.history(job, 99) for job in before} == before
    assert store.history("j60", 99) == [], "of jobs that are dropped, nothing is left"
    [(orphans,)] = store.database.read(
        "SELECT count(*) FROM job_events WHERE job != 'j1' AND job NOT IN (SELECT id FROM jobs)"
    )
    assert orphans == 0


def test_the_log_is_bounded_in_bytes_but_a_load_always_finds_what_it_needs(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "EVENT_BYTES_MAX", 100_000)
    store = place.open()
    marks = []
    for start in range(1, 61, 10):
        marks.append(fill(store, "red", range(start, start + 10), text="x" * 4_000))
        store.snapshot(marks[-1], b"{}")
    oldest = store.events(0, 1)[0].seq
    assert marks[1] < oldest <= marks[-2] + 1


def test_a_key_stays_with_the_first_job_and_a_retried_element_replaces_its_record(
    place: Place,
) -> None:
    store = place.open()
    store.commit([finish("j1", 1)], [record("j1", key="k\0")])
    store.commit([finish("j2", 2)], [record("j2", key="k\0")])
    assert store.keyed("k\0") == "j1"
    store.commit([finish("j3.1", 3)], [record("j3.1", why="first")])
    store.commit([finish("j3.1", 4)], [record("j3.1", why="second")])
    again = store.job("j3.1")
    assert again is not None
    assert again.why == "second"
    assert [job.id for job in store.finished(9)] == ["j2", "j1"]
    assert [job.id for job in store.finished(9, wanted=JobFilter(array="j3"))] == ["j3.1"]
    labels = {"run": "a"}
    store.commit([JobLabelled(at_ms=5, job="j1", labels=labels)], [])
    labeled = store.job("j1")
    assert labeled is not None
    assert labeled.spec.labels == labels


def test_numbers_are_never_given_out_twice(place: Place) -> None:
    database = place.database()
    store = EventStore(database, ServedNumbers(database))
    _, steps = history(2)
    store.commit([ControllerStarted(at_ms=1, epoch=7)], [])
    for done in steps:
        store.commit(done.events, done.finished)
    for table in ("events", "jobs", "snapshots"):
        change(store, f"DELETE FROM {table}")
    again = EventStore(database, ServedNumbers(database))
    used = again.used(1, 0)
    assert used.epoch == 7
    assert 3 < used.first_job <= 4 + JOBS_AHEAD
    assert 1 < used.first_attempt <= 2 + ATTEMPTS_AHEAD
    known = Used(used.first_job, used.epoch)
    assert again.used(*known[:2]) == known, "a log as new as the marks is believed"
    assert again.used(used.first_job, 6).first_attempt, "one that lacks an epoch is not"


# -- against a model ---------------------------------------------------------------------------

JOBS = [f"j{n}" for n in range(1, 5)] + ["j5.0", "j5.12", "j50.1"]
NAMES = ["", "train", "tr_in", "Train", "t.rain-2"]


def record(job: str, why: str = "", key: str = "", spec: JobSpec | None = None) -> Job:
    whole, _, element = job[1:].partition(".")
    return Job(
        id=job,
        number=int(whole) * ELEMENT_NUMBERS + (int(element) + 1 if element else 0),
        spec=spec or JobSpec(command=("true",)),
        key=key,
        phase=Phase.FINISHED,
        outcome=Outcome.FAILED if why else Outcome.SUCCEEDED,
        finished_ms=1,
        why=why,
    )


def finish(job: str, at_ms: int) -> JobFinished:
    outcome = Outcome.SUCCEEDED
    return JobFinished(at_ms=at_ms, job=job, attempt=1, outcome=outcome, code=0, why="")


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[list[Event], list[Job]]]:
    """Commits as a controller might make them; what they say need not make sense."""
    made, at_ms = [], 0
    left = draw(st.permutations(JOBS))
    for _ in range(draw(st.integers(1, 6))):
        events: list[Event] = []
        finished: list[Job] = []
        for _ in range(draw(st.integers(1, 6))):
            at_ms += draw(st.integers(0, 2))
            job = draw(st.sampled_from(JOBS))
            kind = draw(st.integers(0, 3))
            if kind == 0:
                events.append(JobRunning(at_ms=at_ms, job=job, attempt=1))
            elif kind == 1:
                events.append(JobCheckpointed(at_ms=at_ms, job=job, attempt=1, step=at_ms))
            elif kind == 2 or not left:
                node = draw(st.sampled_from(["n1", "n2"]))
                events.append(NodeReady(at_ms=at_ms, node=node))
            else:
                job = left.pop()
                events.append(finish(job, at_ms))
                spec = JobSpec(
                    command=("true",),
                    name=draw(st.sampled_from(NAMES)) or None,
                    tenant=draw(st.sampled_from(["t1", "t2"])),
                    labels=draw(st.sampled_from([{}, {"run": "a"}, {"run": "b", "x": "1"}])),
                    service=draw(st.sampled_from(["", "", "web"])),
                )
                ended = record(job, draw(st.sampled_from(["", "it failed"])), spec=spec)
                ended = msgspec.structs.replace(ended, submitted_ms=draw(st.integers(0, at_ms)))
                finished.append(msgspec.structs.replace(ended, finished_ms=at_ms))
        made.append((events, finished))
    return made


FILTERS = st.builds(
    JobFilter,
    tenant=st.sampled_from(["", "", "t1", "t2"]),
    name=st.sampled_from(["", "", "tr*", "tr_in", "?rain", "t.*", "*%*", "[tT]rain"]),
    states=st.sampled_from([(), (), ("failed",), ("finished",), ("succeeded", "failed")]),
    labels=st.sampled_from([(), (), ("run=a",), ("run",), ("!run",), ("run=a|b",), ("run!=a",)]),
    since_ms=st.integers(0, 12),
    array=st.sampled_from(["", "", "j5", "j50", "j1"]),
    text=st.sampled_from(["", "", "TRAIN", "j2", "run=a tr", "rain true", "%", "a_b"]),
    service=st.sampled_from(["", "", "", "web"]),
    until_ms=st.sampled_from([0, 0, 7]),
)
SORTS = [column.name for column in COLUMNS.values() if column.sorts]
ORDERS = st.builds(Order, st.sampled_from(SORTS), st.booleans(), st.just(50))


class Model:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ends: dict[str, tuple[int, Job]] = {}

    def commit(self, events: list[Event], finished: list[Job]) -> None:
        first = len(self.events)
        self.events += events
        ends = {e.job: n for n, e in enumerate(events, first + 1) if isinstance(e, JobFinished)}
        for job in finished:
            self.ends[job.id] = (ends[job.id], job)

    def recorded(self) -> list[Recorded]:
        return [Recorded(seq, event) for seq, event in enumerate(self.events, 1)]

    def shown(self, after: int, limit: int, job: str, node: str, notable: bool) -> list[Recorded]:
        found = [
            one
            for one in self.recorded()
            if (not job or (isinstance(one.event, JobEvent) and one.event.job == job))
            and (not node or (isinstance(one.event, NodeEvent) and one.event.node == node))
            and not (notable and type(one.event).__name__ in QUIET)
        ]
        if after < 0:
            return found[-min(limit, -after) :] if limit else []
        return [one for one in found if one.seq > after][:limit]

    def finished(self, limit: int, after: int, wanted: JobFilter, before: str) -> list[Job]:
        ordered = sorted(self.ends.values(), key=lambda one: (one[0], one[1].number), reverse=True)
        if before:
            ids = [job.id for _, job in ordered]
            ordered = ordered[ids.index(before) + 1 :] if before in ids else []
        return [
            job
            for end, job in ordered
            if end > after
            and (job.id.startswith(f"{wanted.array}.") if wanted.array else "." not in job.id)
            and wanted.matches(job)
        ][:limit]

    def listed(self, wanted: JobFilter, order: Order) -> list[Job]:
        jobs = self.finished(1000, -1, wanted, "")
        return sorted(jobs, key=lambda j: order.mark(j, self.ends[j.id][0]), reverse=order.down)

    def history(self, job: str, limit: int) -> list[Recorded]:
        mine = [r for r in self.recorded() if isinstance(r.event, JobEvent) and r.event.job == job]
        saves = [one for one in mine if isinstance(one.event, JobCheckpointed)]
        shown = [one for one in mine if one not in saves][-limit:]
        marks = [one.seq for one in shown] + [1 << 62]
        newest = [max((s.seq for s in saves if s.seq < mark), default=0) for mark in marks]
        return [one for one in mine if one in shown or one.seq in newest]


@SETTINGS
@given(
    batches=batches(),
    looks=st.lists(
        st.tuples(
            st.integers(-40, 40),
            st.integers(1, 30),
            st.sampled_from(["", *JOBS]),
            st.sampled_from(["", "n1"]),
            st.booleans(),
        ),
        max_size=4,
    ),
    searches=st.lists(
        st.tuples(st.integers(1, 5), st.integers(-1, 30), FILTERS, ORDERS), max_size=4
    ),
    times=st.lists(st.integers(0, 30), max_size=3),
)
def test_reads_answer_as_a_simple_list_would(
    place: Place,
    batches: list[tuple[list[Event], list[Job]]],
    looks: list[tuple[int, int, str, str, bool]],
    searches: list[tuple[int, int, JobFilter, Order]],
    times: list[int],
) -> None:
    store, model = place.emptied(), Model()
    for events, finished in batches:
        assert store.commit(events, finished) == len(model.events) + len(events)
        model.commit(events, finished)
    assert store.events(0, 1000) == model.recorded()
    for after, limit, job, node, notable in looks:
        shown = store.events(after, limit, job, node, notable)
        assert shown == model.shown(after, limit, job, node, notable)
        assert store.history(job or "j1", limit) == model.history(job or "j1", limit)
    for limit, after, wanted, order in [*searches, (2, -1, EVERY_JOB, LAST_ENDED)]:
        before, pages = "", []
        while page := store.finished(limit, after, wanted, before):
            assert page == model.finished(limit, after, wanted, before)
            pages += page
            before = page[-1].id
        assert pages == model.finished(1000, after, wanted, "")
        found = store.listed(limit, wanted, order, None)
        jobs = found.jobs
        while found.next is not None:
            found = store.listed(limit, wanted, order, found.next)
            jobs += found.jobs
        assert [job for _, job in jobs] == model.listed(wanted, order)
        assert store.count(wanted) >= len(jobs)
    for at_ms in times:
        earlier = [one.seq for one in model.recorded() if one.event.at_ms < at_ms]
        assert store.seq_at(at_ms) == max(earlier, default=0)


def test_old_snapshots_are_thinned_and_go_with_their_events(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_store, "EVENTS_PER_OLD_SNAPSHOT", 30)
    monkeypatch.setattr(keeping, "EVENTS_KEPT", 100)
    store = place.open()
    for seq in range(10, 201, 10):
        store.snapshot(seq, b"x" * 100)

    def kept() -> list[int]:
        return [seq for (seq,) in store.database.read("SELECT seq FROM snapshots ORDER BY seq")]

    assert kept() == [120, 150, 180, 190, 200], "one of 30, and the newest two"
    monkeypatch.setattr(event_store, "OLD_SNAPSHOT_BYTES_MAX", 450)
    store.snapshot(210, b"x" * 100)
    assert kept() == [180, 200, 210], "the oldest go when they are too large"
