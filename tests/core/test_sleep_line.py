"""Who wakes when: sleepers among jobs that wait, and turns."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from shoal.core.answers.outlook import outlook
from shoal.core.answers.why import explain
from shoal.core.policies import SHIPPED
from shoal.core.scheduling.predict import predict
from shoal.model.job import MemberRef, Phase
from shoal.model.policy import Policy, Preempt
from shoal.model.reason import render
from shoal.model.report import Accepted, SleepJob, WakeJob
from tests.core.build import Cluster
from tests.core.test_sleep import CALM, cluster, nap, rouse


def asleep(made: Cluster, **fields: Any) -> str:
    """A job that was put to sleep by hand."""
    job = made.run(**fields)
    assert isinstance(made.ask(SleepJob(job, "ann")), Accepted)
    nap(made, job)
    assert made.job(job).phase is Phase.ASLEEP
    return job


class Town:
    """Nodes that do what they are told: a member takes `cost_ms` to fall asleep and to wake."""

    def __init__(self, made: Cluster, cost_ms: int = 500) -> None:
        self.made, self.cost_ms = made, cost_ms
        self.ready_ms: dict[MemberRef, int] = {}
        self.ran: Counter[str] = Counter()
        self.switched: Counter[str] = Counter()  # GPU time that went into sleeping and waking
        self.done_ms: dict[str, int] = {}

    def run(self, until_ms: int, tick_ms: int = 1_000) -> None:
        made = self.made
        while made.now_ms < until_ms:
            made.deliver()
            for book in made.books.values():
                for ref in [*book.dozing, *book.waking]:
                    due = self.ready_ms.setdefault(ref, made.now_ms + self.cost_ms)
                    if due <= made.now_ms:
                        del self.ready_ms[ref]
                        if ref in book.dozing:
                            book.slept(ref, 0, self.cost_ms)
                        else:
                            book.awoke(ref, self.cost_ms)
            made.hear(*made.books)
            for job in list(made.state.jobs.values()):
                gpus = job.spec.gpus * len(job.members)
                if job.phase is Phase.RUNNING:
                    self.ran[job.id] += tick_ms * gpus
                elif job.phase in (Phase.DOZING, Phase.WAKING):
                    self.switched[job.id] += tick_ms * gpus
                if self.ran[job.id] >= self.done_ms.get(job.id, 10**12):
                    for number in range(len(job.members)):
                        made.end(job.id, member=number)
            made.wait(tick_ms)


def test_three_jobs_on_one_gpu_get_the_same_time() -> None:
    made = cluster(turn_cost_percent=5)
    town = Town(made)
    jobs = [made.submit(gpus=1) for _ in range(3)]
    town.run(2_000_000)
    times = [town.ran[job] for job in jobs]
    assert max(times) - min(times) <= 120_000
    assert sum(times) >= 0.94 * 2_000_000


def test_when_a_job_gets_its_turn_is_predicted() -> None:
    """However long the others run: nobody waits for their end."""
    made = cluster("a", gpus=2, turn_cost_percent=5, turn_ms_min=30_000)
    town = Town(made)
    long: dict[str, Any] = {"gpus": 1, "estimate_ms": 36_000_000}
    for _ in range(2):
        made.submit(**long)
    town.run(4_000)
    waits = [made.submit(**long) for _ in range(5)]
    expected = [predict(made.state, made.job(job), made.now_ms) for job in waits]
    seen = outlook(made.state, made.job(waits[0]), made.policy, made.now_ms)
    assert "j2 will be put to sleep for it, in 27s at the earliest" in render(seen.why)
    starts_ms: dict[str, int] = {}
    while len(starts_ms) < len(waits):
        town.run(made.now_ms + 1_000)
        for job in waits:
            if made.job(job).phase is Phase.RUNNING:
                starts_ms.setdefault(job, made.now_ms)
        assert made.now_ms < 200_000, starts_ms
    for job, range_ms in zip(waits, expected, strict=True):
        assert range_ms is not None
        ticks_ms = 4_000 + starts_ms[job] // 20  # its nodes are heard once a second
        assert range_ms.early_ms <= starts_ms[job] <= range_ms.late_ms + ticks_ms, job


def test_tenants_get_the_same_time_however_many_jobs_they_have() -> None:
    made = cluster(turn_cost_percent=5)
    town = Town(made)
    mine = made.submit(gpus=1, tenant="ann")
    others = [made.submit(gpus=1, tenant="bob") for _ in range(4)]
    town.run(3_000_000)
    bobs = sum(town.ran[job] for job in others)
    assert 0.8 < town.ran[mine] / bobs < 1.25
    assert min(town.ran[job] for job in others) > 0.15 * bobs


def test_a_gang_gets_its_turn_among_small_jobs() -> None:
    made = cluster("a", "b", gpus=2, turn_cost_percent=5)
    town = Town(made)
    small = [made.submit(gpus=1) for _ in range(6)]
    gang = made.submit(gpus=2, members=2)
    town.run(2_000_000)
    assert town.ran[gang] > 400_000
    assert min(town.ran[job] for job in small) > 150_000


def test_jobs_of_a_lower_priority_do_not_end_the_turn_of_others() -> None:
    made = cluster(turn_cost_percent=5)
    town = Town(made)
    high = made.submit(gpus=1, priority=5)
    low = made.submit(gpus=1)
    town.run(300_000)
    assert town.ran[high] > 280_000
    assert not town.ran[low]


@pytest.mark.parametrize("cost_ms", [500, 4_000, 20_000])
def test_switching_takes_no_more_than_its_share_of_the_time(cost_ms: int) -> None:
    made = Cluster(Policy(**{**CALM, "turn_cost_percent": 5}))
    made.join("a", gpus=1, sleep="freeze")
    town = Town(made, cost_ms)
    for _ in range(3):
        made.submit(gpus=1)
    tick_ms = 500 if cost_ms < 10_000 else 2_000
    town.run(100_000 + 30 * cost_ms, tick_ms)  # until the costs of all are known
    town.ran.clear()
    town.switched.clear()
    town.run(made.now_ms + 150 * max(cost_ms, 8_000), tick_ms)
    share = sum(town.switched.values()) / (sum(town.ran.values()) + sum(town.switched.values()))
    assert share < 0.055


def test_without_turns_no_job_sleeps_for_one_that_is_alike() -> None:
    made = cluster()
    town = Town(made)
    first = made.submit(gpus=1)
    second = made.submit(gpus=1)
    town.run(600_000)
    assert not town.ran[second]
    assert made.job(first).naps == 0


def test_time_slice_comes_with_shoal() -> None:
    policy = SHIPPED["time-slice"]
    assert (policy.order, policy.turn_cost_percent) == ("fair", 5)


def test_a_sleeper_that_has_waited_for_too_long_has_its_node_kept() -> None:
    made = cluster(gpus=2, patience_ms=60_000, preempt=Preempt.NEVER)
    big = asleep(made, gpus=2)
    one = made.run(gpus=1)
    made.ask(WakeJob(big, "ann"))
    made.wait(61_000)
    two = made.submit(gpus=1)
    assert made.job(two).phase is Phase.WAITING
    why = render(explain(made.state, made.job(two), made.policy, made.now_ms))
    assert why == f"a is kept for {big}, which sleeps there and has waited 1m 1s to wake"
    made.end(one)
    assert made.job(big).phase is Phase.WAKING
    rouse(made, big)
    assert made.job(big).phase is Phase.RUNNING
    made.end(big)
    assert made.job(two).phase is Phase.STARTING


def test_before_that_smaller_jobs_use_what_is_free() -> None:
    made = cluster(gpus=2, patience_ms=60_000, preempt=Preempt.NEVER)
    big = asleep(made, gpus=2)
    made.run(gpus=1)
    made.ask(WakeJob(big, "ann"))
    two = made.submit(gpus=1)
    assert made.job(two).phase is Phase.STARTING


def test_a_job_of_higher_priority_is_not_kept_from_a_sleepers_node() -> None:
    made = cluster(gpus=2, patience_ms=60_000, preempt=Preempt.NEVER)
    big = asleep(made, gpus=2)
    made.run(gpus=1)
    made.ask(WakeJob(big, "ann"))
    made.wait(61_000)
    two = made.submit(gpus=1, priority=1)
    assert made.job(two).phase is Phase.STARTING


def test_a_job_that_waited_before_the_sleeper_passes_one_like_it_that_did_not() -> None:
    """The first of the two failed and is tried again, so it is behind the sleeper by now."""
    rules: dict[str, Any] = {"order": "fifo", "turn_cost_percent": 5, "reservations": 0}
    made = cluster(gpus=2, patience_ms=60_000, preempt=Preempt.NEVER, **rules)
    big = made.run(gpus=2)
    alike = {"gpus": 1, "no_sleep": True, "restart": "on-failure", "retries": 1, "backoff_ms": 0}
    first = made.submit(**alike)
    made.submit(gpus=1, no_sleep=True, priority=1)
    second = made.submit(**alike)
    made.wait(1_000)
    made.ask(SleepJob(big, "ann"))
    nap(made, big)
    made.deliver()
    made.hear("a")
    made.ask(WakeJob(big, "ann"))
    made.wait(61_000)
    made.end(first, code=1)
    assert made.job(first).phase is Phase.WAITING
    assert made.job(second).phase is Phase.STARTING


def test_a_sleeper_waits_behind_a_job_that_is_ahead_of_it() -> None:
    made = cluster(preempt=Preempt.NEVER)
    sleeper = asleep(made, gpus=1)
    runs = made.run(gpus=1)
    first = made.submit(gpus=1, priority=5)
    made.ask(WakeJob(sleeper, "ann"))
    made.end(runs)
    assert made.job(first).phase is Phase.STARTING
    assert made.job(sleeper).phase is Phase.ASLEEP


def test_a_sleeper_wakes_before_jobs_that_are_behind_it() -> None:
    made = cluster(preempt=Preempt.NEVER)
    sleeper = asleep(made, gpus=1, priority=5)
    runs = made.run(gpus=1)
    second = made.submit(gpus=1)
    made.ask(WakeJob(sleeper, "ann"))
    made.end(runs)
    assert made.job(sleeper).phase is Phase.WAKING
    assert made.job(second).phase is Phase.WAITING


def test_a_sleeper_wakes_although_the_queue_is_held_for_a_job_that_needs_its_memory() -> None:
    made = cluster(gpus=2, preempt=Preempt.NEVER, patience_ms=0)
    sleeper = asleep(made, gpus=1, memory_mb=600)
    made.submit(gpus=1, memory_mb=500, priority=5)
    made.ask(WakeJob(sleeper, "ann"))
    assert made.job(sleeper).phase is Phase.WAKING


@pytest.mark.parametrize("seed", range(6))
def test_nobody_starves(seed: int) -> None:
    """Sleepers that want to wake and jobs that wait all get their work done while small jobs of
    several tenants keep coming."""
    rng = random.Random(seed)
    turns = rng.choice([0, 5])
    preempt = rng.choice([Preempt.NEVER, Preempt.RANK])
    made = cluster("a", "b", gpus=2, patience_ms=60_000, turn_cost_percent=turns, preempt=preempt)
    town = Town(made)
    tenants = ["ann", "bob", "cy"]
    watched = [asleep(made, gpus=2, members=rng.choice([1, 2]), tenant="ann")]
    watched.append(made.submit(gpus=2, members=2, tenant="bob"))
    for job in watched:
        town.done_ms[job] = 100_000
    made.ask(WakeJob(watched[0], "ann"))
    for _ in range(400):
        if all(made.job(job).phase is Phase.FINISHED for job in watched):
            break
        if len(made.state.jobs) < 12:
            job = made.submit(gpus=1, tenant=rng.choice(tenants), estimate_ms=30_000)
            town.done_ms[job] = rng.randrange(5_000, 30_000)
        town.run(made.now_ms + 4_000)
    assert [made.job(job).phase for job in watched] == [Phase.FINISHED] * 2
