"""Jobs that sleep: what they hold is booked, what they lend out is noted, and all of it adds up."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from shoal.core.nodebook import NodeBook
from shoal.core.state.events.log import Event
from shoal.core.state.events.runs import (
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobStopping,
    MemberExited,
    MemberLost,
)
from shoal.core.state.events.services import ReplicaReady
from shoal.core.state.events.sleep import JobAsleep, JobAwake, JobDozing, JobWaking, SleepRefused
from shoal.ledger.accounts import HOUR_MS, Account, Only
from shoal.ledger.book import Book
from shoal.ledger.live import events_of
from shoal.ledger.store import LedgerStore
from shoal.model.job import SleepCause, StopCause
from shoal.model.node import NodeIntent
from shoal.model.policy import Policy
from shoal.model.report import SleepJob, WakeJob
from shoal.model.service import ReplicaLoad, ServiceLoad
from tests.core.build import Cluster
from tests.ledger.test_accounts import Explanation, S, started
from tests.ledger.worlds import Books, by_node, capacity, same_as


def doze(story: Explanation, job: str = "j1") -> None:
    at = {"at_ms": story.now_ms, "attempt": 1}
    story.tell(JobDozing(**at, job=job, cause=SleepCause.USER, host_mb=(0,), why=""))


def sleep(story: Explanation, job: str = "j1") -> None:
    at = {"at_ms": story.now_ms, "attempt": 1}
    story.tell(JobAsleep(**at, job=job, took_ms=0, memory_mb=0, why=""))


def wake(story: Explanation, *gpus: int, job: str = "j1") -> None:
    story.tell(JobWaking(at_ms=story.now_ms, attempt=1, job=job, gpus=(gpus,), why=""))


def awake(story: Explanation, job: str = "j1") -> None:
    story.tell(JobAwake(at_ms=story.now_ms, attempt=1, job=job, took_ms=0, why=""))


def lent(story: Explanation, tmp_path: Path) -> tuple[int, int]:
    """Seconds asleep, and GPU-seconds lent out, as the store adds them up."""
    story.book.advance(story.now_ms)
    story.book.settle()
    store = LedgerStore(tmp_path / "ledger.db")
    store.put(story.book.drain(), b"", 1)
    nap = store.naps(0, 1 << 40, Only(job="j1"))
    assert store.naps(0, 1 << 40) == nap
    store.close()
    return nap.slept_ms // S, nap.lent_us // 1_000_000


def test_a_job_holds_its_gpus_while_it_falls_asleep_and_wakes_and_none_between() -> None:
    story = started()  # 4 s of start-up
    story.after(10)
    doze(story)
    story.after(3)
    sleep(story)
    story.after(100)
    wake(story, 0, 1)
    story.after(2)
    awake(story)
    story.after(5)
    assert story.seconds() == {"startup": 8, "useful": 30, "asleep": 10, "free": 200}


def test_what_a_sleeper_lends_out_is_a_memo_by_hour(tmp_path: Path) -> None:
    story = started()
    doze(story)
    sleep(story)
    story.after(2 * HOUR_MS / S)
    wake(story, 0, 1)
    awake(story)
    story.after(50)
    doze(story)
    sleep(story)
    story.after(10)
    assert lent(story, tmp_path) == (2 * 3600 + 10, 2 * (2 * 3600 + 10))


def test_a_store_from_before_naps_is_brought_up_to_date(tmp_path: Path) -> None:
    import sqlite3

    LedgerStore(tmp_path / "ledger.db").close()
    with sqlite3.connect(tmp_path / "ledger.db") as file:
        file.execute("DROP TABLE naps")
        file.execute("DROP TABLE energy")
        file.execute("CREATE TABLE power (hour, machine, watt_ms, gpu_us)")
        file.execute("PRAGMA user_version = 1")
    file.close()
    story = started()
    doze(story)
    sleep(story)
    story.after(7)
    assert lent(story, tmp_path) == (7, 14)


def test_others_hold_what_a_sleeper_has_lent() -> None:
    story = started()
    doze(story)
    sleep(story)
    story.submit("j2")
    story.place("j2")
    story.runs("j2")
    story.after(20)
    assert story.seconds() == {"startup": 8, "useful": 40}


def test_a_sleeper_may_wake_on_other_gpus() -> None:
    story = Explanation(gpus=4)
    story.submit()
    story.place()
    story.runs()
    doze(story)
    sleep(story)
    wake(story, 2, 3)
    awake(story)
    story.submit("j2")
    story.place("j2")  # on the GPUs that the first had
    story.runs("j2")
    story.after(10)
    story.exit()
    assert story.book.cluster.nodes["n1"].held == [1000, 1000, 0, 0]
    assert story.seconds() == {"useful": 40}


def test_a_refusal_is_time_without_work() -> None:
    story = started()
    doze(story)
    story.after(3)
    story.tell(SleepRefused(at_ms=story.now_ms, job="j1", attempt=1, member=0, node="n1", why=""))
    story.after(2)
    awake(story)
    story.after(1)
    assert story.seconds() == {"startup": 8, "useful": 2, "asleep": 10}


def test_beats_that_count_the_sleep_do_not_make_it_work(tmp_path: Path) -> None:
    story = started()
    story.after(1)
    story.beat(steps=1, step=1, compute_us=1_000_000)
    doze(story)
    story.after(2)
    sleep(story)
    story.after(100)
    wake(story, 0, 1)
    story.after(2)
    awake(story)
    story.after(4)  # for the process, its step took all this time, most of it in a collective
    story.beat(steps=2, step=2, compute_us=3_000_000, wait_us=106_000_000)
    story.after(1)
    story.beat(steps=3, step=3, compute_us=4_000_000, wait_us=106_000_000)
    assert story.seconds() == {"startup": 8, "useful": 12, "asleep": 8, "free": 200}
    assert lent(story, tmp_path) == (0, 0)  # all of it was drained before


def test_a_job_stopped_in_its_sleep_holds_nothing(tmp_path: Path) -> None:
    story = started()
    story.after(10)
    doze(story)
    sleep(story)
    story.after(5)
    story.stop(StopCause.CANCEL)
    story.after(5)
    story.exit()
    story.finish()
    story.after(5)
    assert story.book.cluster.nodes["n1"].held == [0, 0]
    assert lent(story, tmp_path) == (5, 10)


def test_sleep_saves_nothing_for_one_that_saves_every_minute() -> None:
    story = started(checkpoint_ms=60 * S)
    story.after(50)
    doze(story)
    sleep(story)
    story.after(300)
    wake(story, 0, 1)
    awake(story)
    story.after(5)
    story.exit(code=1)
    story.requeue(StopCause.FAILURE)
    assert story.seconds() == {"startup": 8, "recompute": 110, "free": 600}


def test_a_replica_is_warm_again_after_its_sleep() -> None:
    story = started(service="chat")
    story.tell(ReplicaReady(at_ms=story.now_ms, service="chat", job="j1"))
    doze(story)
    load = ServiceLoad(service="chat", replicas={"j1": ReplicaLoad(up=True, in_flight=1)})
    story.book.hear((), [load])  # a late look at it
    story.after(3)
    sleep(story)
    wake(story, 0, 1)
    awake(story)
    story.after(4)
    assert story.seconds() == {"startup": 8, "asleep": 6, "warm": 8}


# -- histories -------------------------------------------------------------------------------


class Naps:
    """A cluster in which jobs sleep and wake at random, and things go wrong in the middle."""

    def __init__(self, seed: int) -> None:
        self.rng, self.seen = random.Random(seed), Counter[str]()
        self.cluster = Cluster(Policy(run_ms_min=0, silent_after_ms=40_000, grace_ms=30_000))
        self.books = Books()
        self.read = 0
        for name, gpus in (("a", 2), ("b", 4), ("c", 1)):
            self.cluster.join(name, gpus=gpus, sleep="freeze", remaps=name == "b")

    def turn(self) -> None:
        rng, made = self.rng, self.cluster
        made.wait(rng.randrange(1, 20_000))
        jobs = list(made.state.jobs)
        some = rng.choice(jobs) if jobs else ""
        match rng.randrange(12):
            case 0 | 1 | 2:
                fields = {"gpus": rng.randrange(1, 3), "members": rng.randrange(1, 3)}
                made.submit(**fields, priority=rng.randrange(3), preemptible=rng.random() < 0.7)
            case 3 | 4 if some:
                made.ask(SleepJob(some))
            case 5 | 6 if some:
                made.ask(WakeJob(some))
            case 7 if some:
                made.cancel(some)
            case 8 if some and made.job(some).members:
                made.exit(some, rng.randrange(2), rng.randrange(len(made.job(some).members)))
            case 9:
                intent = rng.choice([NodeIntent.OPEN, NodeIntent.CORDONED, NodeIntent.DRAINING])
                made.intend(rng.choice(list(made.books)), intent)
            case 10 if rng.random() < 0.3:
                made.reboot(rng.choice(list(made.books)))
        self.follow()
        made.deliver()
        for book in made.books.values():
            self._work(book)
        made.hear(*(name for name in made.books if rng.random() < 0.8))
        self.follow()
        made.deliver()

    def _work(self, book: NodeBook) -> None:
        for ref in list(book.dozing):
            if self.rng.random() < 0.1:
                book.refuses(ref, "the driver is too old")
            elif self.rng.random() < 0.6:
                book.slept(ref, 0, 100)
        for ref in list(book.waking):
            if self.rng.random() < 0.6:
                book.awoke(ref, 50)
        for ref in list(book.stopping):
            if self.rng.random() < 0.6:
                book.exited(ref, 143)

    def follow(self) -> None:
        new = self.cluster.log[self.read :]
        self.read = len(self.cluster.log)
        self.seen.update(type(event).__name__ for event in new)
        if new:
            self.books.stepped(new)
            if self.rng.random() < 0.1:
                self.books.crash()
            same_as(self.books.book.cluster, self.cluster.state)
            opened = Book()
            for event in events_of(self.cluster.state, self.cluster.now_ms):
                opened.take(event)
            same_as(opened.cluster, self.cluster.state)


def noted(events: list[Event], end_ms: int) -> Counter[str]:
    """GPU-microseconds that each job lent, counted from nothing but the log."""
    told, since, gpus = Counter[str](), dict[str, int](), dict[str, dict[int, int]]()

    def until(job: str, at_ms: int) -> None:
        if job in since:
            told[job] += sum(gpus[job].values()) * (at_ms - since[job])
            since[job] = at_ms

    for event in events:
        match event:
            case JobPlaced():
                shares = [len(slice_.gpus) * slice_.gpu_milli for slice_ in event.slices]
                gpus[event.job] = dict(enumerate(shares))
            case JobAsleep():
                since[event.job] = event.at_ms
            case JobWaking() | JobStopping() | JobRequeued() | JobFinished():
                until(event.job, event.at_ms)
                since.pop(event.job, None)
            case MemberExited() | MemberLost():
                until(event.job, event.at_ms)
                gpus[event.job].pop(event.member, None)
    for job in since:
        until(job, end_ms)
    return +told


def test_histories_with_naps_add_up_and_a_ledger_may_begin_anywhere_in_them() -> None:
    seen, accounts = Counter[str](), set[Account]()
    for seed in range(15):
        story = Naps(seed)
        for _ in range(60):
            story.turn()
        books, end_ms = story.books, story.cluster.now_ms
        amounts = books.close(end_ms)
        assert by_node(amounts) == capacity(books.events, end_ms), seed
        assert books.totals.lent == noted(books.events, end_ms), seed
        seen, accounts = seen + story.seen, accounts | {place.account for place in amounts}
    assert Account.ASLEEP in accounts
    assert seen["JobAsleep"] > 30
    assert seen["SleepRefused"] > 5
    assert seen["JobWaking"] > 5
