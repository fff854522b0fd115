"""What a sleeper means for drains, supplies, budgets and the end of its node (ADR 92)."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.core.answers.why import explain
from shoal.core.scheduling.sleeping import doze
from shoal.core.state.events.runs import JobFinished
from shoal.core.state.events.sleep import JobTouched
from shoal.core.state.events.supply import OrderUnused
from shoal.core.state.load import restore
from shoal.core.state.round import Round
from shoal.core.state.state import Snapshot
from shoal.model.budget import BudgetPeriod, Spending
from shoal.model.job import MemberRef, Outcome, Phase, SleepCause
from shoal.model.node import NodeIntent
from shoal.model.policy import Tenant
from shoal.model.reason import render
from shoal.model.report import Accepted, Refused, SetEnd, SleepJob, WakeJob
from tests.core.build import Cluster
from tests.core.supplier import Pool, supply
from tests.core.test_sleep import cluster, nap, rouse

MINUTE_MS = 60_000


def asleep(made: Cluster, **fields: Any) -> str:
    job = made.run(**{"gpus": 1, **fields})
    assert isinstance(made.ask(SleepJob(job, "ann")), Accepted)
    nap(made, job)
    assert made.job(job).phase is Phase.ASLEEP
    return job


# -- drains ------------------------------------------------------------------------------------


def test_one_that_must_not_run_twice_is_woken_by_a_drain_and_finishes() -> None:
    made = cluster()
    job = asleep(made, restart="never")
    answer = made.intend("a", NodeIntent.DRAINING)
    assert answer == Accepted(
        "a",
        f"it is empty when {job} (asleep) have ended, which must not run twice (restart: never); "
        "those that sleep are woken",
    )
    assert made.job(job).phase is Phase.WAKING
    rouse(made, job)
    assert made.job(job).phase is Phase.RUNNING
    assert isinstance(made.ask(SleepJob(job, "ann")), Refused)
    made.end(job)
    assert not made.state.placed["a"]


def test_it_waits_for_its_gpu_and_may_not_be_put_to_sleep_again() -> None:
    made = cluster()
    job = asleep(made, restart="never")
    holder = made.run(gpus=1, restart="never")
    made.intend("a", NodeIntent.DRAINING)
    assert made.job(job).phase is Phase.ASLEEP and made.job(job).wants
    answer = made.ask(SleepJob(job, "ann"))
    assert isinstance(answer, Refused) and "to finish before a is gone" in answer.message
    made.end(holder)
    assert made.job(job).phase is Phase.WAKING


def test_one_that_is_falling_asleep_when_the_drain_begins_is_woken_as_well() -> None:
    made = cluster()
    job = made.run(gpus=1, restart="never")
    made.ask(SleepJob(job, "ann"))
    made.deliver()
    made.intend("a", NodeIntent.DRAINING)
    nap(made, job)
    assert made.job(job).phase is Phase.WAKING


def test_a_budget_that_is_used_up_does_not_keep_it_on_a_node_that_is_drained() -> None:
    made = cluster(tenants=(Tenant(name="red", budget_gpu_hours=1),))
    job = asleep(made, restart="never", tenant="red")
    spend(made, "red")
    assert made.state.accounts.held_by("red")
    made.intend("a", NodeIntent.DRAINING)
    assert made.job(job).phase is Phase.WAKING


def spend(made: Cluster, tenant: str) -> None:
    spent = Spending(tenant=tenant, period=BudgetPeriod.MONTH, gpu_us=3_600_000_000)
    made.step(spendings=(spent,))


def test_a_known_end_of_its_node_wakes_it_in_time_to_finish() -> None:
    made = cluster(silent_after_ms=MINUTE_MS)
    job = asleep(made, restart="never", estimate_ms=10 * MINUTE_MS)
    made.ask(SetEnd("a", made.now_ms + 60 * MINUTE_MS, "ann"))
    wait(made, 40 * MINUTE_MS)
    assert made.job(job).phase is Phase.ASLEEP
    wait(made, 10 * MINUTE_MS)
    assert made.job(job).phase is Phase.WAKING
    (touched,) = [event for event in made.log if isinstance(event, JobTouched)]
    assert touched.why == "is waking to finish before a is gone: it must not run twice"


def wait(made: Cluster, milliseconds: int) -> None:
    end_ms = made.now_ms + milliseconds
    while made.now_ms < end_ms:
        made.wait(min(MINUTE_MS, end_ms - made.now_ms))
        made.deliver()
        made.hear(*made.books)


# -- supplied nodes ----------------------------------------------------------------------------


def supplied(**fields: Any) -> tuple[Pool, str]:
    """A job runs on a paid node that can put it to sleep."""
    pool = Pool(supply(idle_ms=5 * MINUTE_MS), **fields)
    job = pool.submit(gpus=8)
    pool.bring("o1", sleep="freeze")
    pool.cluster.hear("gpu-1")
    assert pool.cluster.job(job).phase is Phase.RUNNING
    return pool, job


def test_a_sleeper_does_not_keep_a_paid_node_for_ever() -> None:
    pool, job = supplied()
    pool.cluster.ask(SleepJob(job, "ann"))
    assert "if nothing else runs there for 5m, its node is given back" in pool.cluster.job(job).why
    nap(pool.cluster, job)
    pool.wait(4 * MINUTE_MS)
    assert pool.asked == {"gpu": 1}
    pool.wait(2 * MINUTE_MS)
    assert pool.cluster.job(job).phase is Phase.STOPPING
    pool.cluster.exit(job, 137)
    pool.wait(2_000)
    assert pool.released == ["o1"]
    assert pool.cluster.job(job).phase is Phase.WAITING, "it runs again elsewhere"
    assert list(pool.cluster.state.orders) == ["o2"]


def test_one_that_wakes_in_time_keeps_it() -> None:
    pool, job = supplied()
    pool.cluster.ask(SleepJob(job, "ann"))
    nap(pool.cluster, job)
    pool.wait(4 * MINUTE_MS)
    pool.cluster.ask(WakeJob(job, "ann"))
    rouse(pool.cluster, job)
    pool.wait(4 * MINUTE_MS)
    assert pool.asked == {"gpu": 1}
    assert pool.cluster.state.orders["o1"].unused_ms is None


def test_one_that_nobody_used_ends_with_its_paid_node() -> None:
    """Started again elsewhere, it would be idle there, too, on another paid node."""
    pool, job = supplied()
    round_ = Round(pool.cluster.state, pool.cluster.policy, pool.cluster.now_ms)
    doze(round_, pool.cluster.job(job), SleepCause.IDLE, "idle")
    pool.cluster.log.extend(round_.events)
    pool.cluster.hear("gpu-1")
    nap(pool.cluster, job)
    pool.wait(6 * MINUTE_MS)
    pool.cluster.exit(job, 137)
    pool.wait(MINUTE_MS)
    assert pool.released == ["o1"]
    (ended,) = [event for event in pool.cluster.log if isinstance(event, JobFinished)]
    assert ended.outcome is Outcome.CANCELLED
    assert "it was unused, and gpu-1, where it was asleep, is being released" in ended.why
    assert not pool.cluster.state.orders


# -- idle time is a fact -----------------------------------------------------------------------


def test_the_idle_time_of_a_paid_node_goes_on_under_the_next_controller() -> None:
    pool, job = supplied()
    pool.cluster.end(job)
    for _ in range(4):  # a new controller every 2 minutes
        pool.wait(2 * MINUTE_MS)
        pool.cluster.take_over()
    assert pool.released == ["o1"]


def test_a_snapshot_keeps_the_idle_time_and_few_events_tell_it() -> None:
    pool, job = supplied()
    pool.cluster.end(job)
    pool.wait(2 * MINUTE_MS)
    since_ms = pool.cluster.state.orders["o1"].unused_ms
    assert since_ms is not None
    raw = msgspec.json.encode(pool.cluster.state.snapshot())
    loaded = restore(msgspec.json.decode(raw, type=Snapshot))
    assert loaded.orders["o1"].unused_ms == since_ms
    told = [event for event in pool.cluster.log if isinstance(event, OrderUnused)]
    assert [event.since_ms for event in told] == [since_ms]


# -- a GPU that somebody else fills --------------------------------------------------------------


def full(made: Cluster, job: str, why: str) -> None:
    """Its node was told to wake it, and could not."""
    made.deliver()
    member = made.job(job).members[0]
    ref = MemberRef(job, made.job(job).attempt, 0)
    made.books[member.slice.node].stays_asleep(ref, why)
    made.hear(member.slice.node)


FREE_AND_NEEDED = "GPU 0 has 5413 MB free, and it needs 11204 MB"


def test_it_stays_asleep_says_what_is_free_and_needed_and_is_tried_again() -> None:
    made = cluster()
    job = asleep(made)
    made.ask(WakeJob(job, "ann"))
    for _ in range(4):  # many more than two minutes
        assert made.job(job).phase is Phase.WAKING
        full(made, job, FREE_AND_NEEDED)
        assert (made.job(job).phase, made.job(job).attempt) == (Phase.ASLEEP, 1)
        why = render(explain(made.state, made.job(job), made.policy, made.now_ms))
        assert FREE_AND_NEEDED in why and "tried again in 1m" in why, why
        made.deliver()
        made.wait(59_000)
        made.hear("a")
        assert made.job(job).phase is Phase.ASLEEP
        made.wait(1_000)
        made.hear("a")
    rouse(made, job)
    assert made.job(job).phase is Phase.RUNNING
    assert made.job(job).full_ms == 0


def test_asleep_it_holds_no_gpu_and_others_may_run_there() -> None:
    made = cluster()
    job = asleep(made)
    made.ask(WakeJob(job, "ann"))
    full(made, job, FREE_AND_NEEDED)
    other = made.run(gpus=1)
    assert made.job(other).phase is Phase.RUNNING
    assert made.job(job).phase is Phase.ASLEEP


def test_a_drain_does_not_wait_for_a_gpu_that_somebody_else_fills() -> None:
    """It saves its work, but cannot be woken to do so: it goes on elsewhere from its checkpoint."""
    made = cluster()
    job = asleep(made, checkpoint_ms=MINUTE_MS, preemptible=True)
    made.ask(WakeJob(job, "ann"))
    full(made, job, FREE_AND_NEEDED)
    made.intend("a", NodeIntent.DRAINING)
    assert made.job(job).phase is Phase.STOPPING


def test_an_answer_about_an_earlier_try_is_taken_once() -> None:
    made = cluster()
    job = asleep(made)
    made.ask(WakeJob(job, "ann"))
    full(made, job, FREE_AND_NEEDED)
    assert made.books["a"].refused
    made.deliver()  # the controller knows
    assert not made.books["a"].refused
