"""`gpus_max`: how many GPUs a tenant and its branches may hold at a time. A quota guarantees, a cap
forbids: what is idle beyond it is not borrowed, and nobody makes room beyond it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.core.answers.advice import advise
from shoal.core.answers.offer import offer
from shoal.core.answers.outlook import outlook
from shoal.core.answers.waits import waits_of
from shoal.core.answers.why import explain
from shoal.core.features.caps import caps_of
from shoal.core.invariants import Violation, verify
from shoal.core.state.gpu_caps import held_under
from shoal.core.state.load import restore
from shoal.model.identity import EVERY_TENANT
from shoal.model.job import Phase
from shoal.model.policy import Policy, Tenant
from shoal.model.reason import render
from shoal.model.report import NodeGone, Refused, SetPolicy, SleepJob, Submit, WakeJob
from tests.core.build import Cluster, job_spec
from tests.core.serving import Serving
from tests.core.test_sleep import nap, rouse

MINUTE_MS = 60_000
CALM: dict[str, Any] = {"run_ms_min": 0, "silent_after_ms": 10**9, "grace_ms": 10**9}


def cluster(*tenants: Tenant, gpus: int = 8, **rules: Any) -> Cluster:
    made = Cluster(Policy(tenants=tenants or (Tenant(name="east", gpus_max=2),), **CALM, **rules))
    made.join("a", gpus=gpus, cpus=64, memory_mb=64_000, sleep="freeze")
    return made


def capped(made: Cluster, tenant: str, gpus: int) -> None:
    tenants = tuple(
        msgspec.structs.replace(one, gpus_max=gpus) if one.name == tenant else one
        for one in made.policy.tenants
    )
    made.ask(SetPolicy(msgspec.structs.replace(made.policy, tenants=tenants)))


def starts(made: Cluster, *jobs: str) -> list[bool]:
    return [made.job(job).phase is not Phase.WAITING for job in jobs]


def why(made: Cluster, job: str) -> str:
    return render(explain(made.state, made.job(job), made.policy, made.now_ms))


def test_idle_gpus_beyond_the_cap_stay_idle_and_a_job_that_ends_lets_the_next_one_in() -> None:
    made = cluster()
    first = made.run(tenant="east", gpus=1)
    second, third, fourth = (made.submit(tenant="east", gpus=1) for _ in range(3))
    others = made.submit(tenant="west", gpus=4)
    assert starts(made, first, second, third, fourth, others) == [True, True, False, False, True]
    held = "east holds 2 of at most 2 GPUs (gpus_max in the policy), and it needs 1"
    assert why(made, third) == held
    waits = [render(line) for line in waits_of(made.state, made.policy, made.now_ms)]
    assert waits == ["2 jobs wait for the cap on GPUs of east"]
    assert caps_of(made.state, lambda _: True) == ["east: 2 of at most 2 GPUs"]
    made.end(first)
    assert starts(made, third, fourth) == [True, False]


def test_a_job_without_gpus_is_not_held_back() -> None:
    made = cluster()
    made.submit(tenant="east", gpus=2)
    free = made.submit(tenant="east", gpus=0)
    assert starts(made, free) == [True]


def test_the_cap_of_a_parent_holds_for_all_of_its_branches() -> None:
    made = cluster(Tenant(name="lab", gpus_max=3), Tenant(name="red", parent="lab", gpus_max=2))
    red = [made.submit(tenant="red", gpus=1) for _ in range(3)]
    lab = [made.submit(tenant="lab", gpus=1) for _ in range(2)]
    assert starts(made, *red, *lab) == [True, True, False, True, False]
    assert why(made, lab[1]).startswith("lab holds 3 of at most 3 GPUs")


def test_a_smaller_job_of_the_tenant_may_go_first_and_the_advice_says_what_would_help() -> None:
    made = cluster(Tenant(name="east", gpus_max=3))
    made.submit(tenant="east", gpus=2)
    large = made.submit(tenant="east", gpus=1, members=2)
    told = [one.text for one in advise(made.state, made.job(large), made.now_ms)]
    assert list(map(render, told)) == [
        "with 1 member instead of 2, it would start now",
        "an admin can raise gpus_max of east in the policy",
    ]
    small = made.submit(tenant="east", gpus=1)
    assert starts(made, large, small) == [False, True]


def test_parts_of_gpus_count_as_parts_and_a_part_by_memory_as_a_whole_one_until_it_starts() -> None:
    made = Cluster(Policy(tenants=(Tenant(name="east", gpus_max=1),), **CALM))
    made.join("a", gpus=4, gpu_memory_mb=80_000, gpu_model="large", cpus=64)
    by_memory = made.submit(tenant="east", gpus=1, gpu_milli=0, gpu_memory_mb=20_000)
    halves = [made.submit(tenant="east", gpus=1, gpu_milli=500) for _ in range(2)]
    assert starts(made, by_memory, *halves) == [True, True, False]
    assert held_under(made.state, "east") == 750


def test_what_could_never_start_is_refused_with_the_cap() -> None:
    made = cluster()
    answer = made.ask(Submit(job_spec(tenant="east", gpus=1, members=3)))
    said = "asks for 3 GPUs in all, but east may hold 2 at a time (gpus_max in the policy)"
    assert answer == Refused("gpus", said)
    answer = made.ask(Submit(job_spec(tenant="east", gpus=1, whole_nodes=True)))
    assert isinstance(answer, Refused) and answer.field == "whole_nodes"
    assert answer.message.endswith("ask for 8 GPUs per member, or leave whole_nodes out")


def test_a_lower_cap_stops_nobody_and_a_higher_one_lets_jobs_start() -> None:
    made = cluster(Tenant(name="east", gpus_max=3))
    running = [made.run(tenant="east", gpus=1) for _ in range(3)]
    waits = made.submit(tenant="east", gpus=1)
    capped(made, "east", 1)
    assert starts(made, *running, waits) == [True, True, True, False]
    made.end(running[0])
    made.end(running[1])
    assert starts(made, waits) == [False]
    made.end(running[2])
    assert starts(made, waits) == [True]
    more = made.submit(tenant="east", gpus=1)
    capped(made, "east", 0)
    assert starts(made, more) == [True]


def test_nobody_is_stopped_or_set_aside_for_a_job_that_waits_for_its_cap() -> None:
    made = cluster(Tenant(name="east", gpus_max=2), gpus=4)
    victim = made.run(tenant="west", gpus=2, preemptible=True)
    made.submit(tenant="east", gpus=2)
    urgent = made.submit(tenant="east", gpus=2, priority=50)
    made.wait(MINUTE_MS)
    made.step()
    assert starts(made, urgent) == [False] and made.job(victim).phase is Phase.RUNNING
    assert not made.state.claims and not made.state.reservations


def test_room_that_is_being_made_counts_before_it_is_held() -> None:
    made = cluster(Tenant(name="east", gpus_max=2), gpus=4)
    victim = made.run(tenant="west", gpus=4, preemptible=True)
    first = made.submit(tenant="east", gpus=2, priority=50)
    second = made.submit(tenant="east", gpus=2, priority=50)
    assert first in made.state.claims and second not in made.state.claims
    assert held_under(made.state, "east") == 2_000
    made.deliver()
    made.end(victim, code=143)
    assert starts(made, first, second) == [True, False]


def test_a_claim_beyond_a_cap_that_was_lowered_since_is_given_up() -> None:
    made = cluster(Tenant(name="east", gpus_max=4), gpus=4)
    victim = made.run(tenant="west", gpus=4, preemptible=True)
    first = made.submit(tenant="east", gpus=2, priority=50)
    assert first in made.state.claims
    capped(made, "east", 1)
    assert first not in made.state.claims
    made.deliver()
    made.end(victim, code=143)
    assert starts(made, first) == [False] and "at most 1 GPU" in why(made, first)


def test_an_elastic_gang_is_as_large_as_the_cap_allows() -> None:
    made = cluster(Tenant(name="east", gpus_max=3))
    job = made.run(tenant="east", gpus=1, members=1, members_max=8, checkpoint_ms=1_000)
    assert len(made.job(job).members) == 3
    made.wait(100 * MINUTE_MS)
    made.step()
    assert made.job(job).phase is Phase.RUNNING and not made.state.claims


def test_a_sleeper_wakes_only_within_the_cap() -> None:
    made = cluster(Tenant(name="east", gpus_max=1), gpus=2)
    sleeper = made.run(tenant="east", gpus=1)
    made.ask(SleepJob(sleeper, "ann"))
    nap(made, sleeper)
    other = made.run(tenant="east", gpus=1)
    made.ask(WakeJob(sleeper, "ann"))
    assert made.job(sleeper).phase is Phase.ASLEEP
    assert why(made, sleeper).endswith("east holds 1 of at most 1 GPU (gpus_max in the policy)")
    made.end(other)
    assert made.job(sleeper).phase is Phase.WAKING
    rouse(made, sleeper)
    assert made.job(sleeper).phase is Phase.RUNNING


def test_a_job_that_was_given_up_is_not_adopted_beyond_the_cap() -> None:
    made = cluster(Tenant(name="east", gpus_max=1), gpus=1)
    job = made.run(tenant="east", gpus=1)
    made.join("b", gpus=1)
    book = made.books["a"]
    made.step(gone=(NodeGone("a", book.incarnation, "it was cut off"),))
    assert made.job(job).members[0].slice.node == "b"  # it runs again there
    made.hear("a")
    assert made.job(job).attempt == 2 and held_under(made.state, "east") == 1_000


def test_a_service_under_a_cap_replaces_its_replicas_one_by_one() -> None:
    made = Serving(policy=Policy(tenants=(Tenant(name="east", gpus_max=2),), **CALM))
    made.join("g", gpus=4)
    fields: dict[str, Any] = {
        "scale": {"least": 2, "most": 2},
        "rollout": "replace",
        "replica": {"tenant": "east", "gpus": 1},
    }
    made.served(**fields)
    assert held_under(made.state, "east") == 2_000
    made.serve(**fields, version=2)
    made.tick(40)
    assert made.versions() == [2, 2]
    assert held_under(made.state, "east") == 2_000


def test_the_start_is_predicted_from_those_that_hold_the_cap_and_those_ahead() -> None:
    made = cluster(Tenant(name="east", gpus_max=1))
    made.run(tenant="east", gpus=1, time_limit_ms=10 * MINUTE_MS)
    second = made.submit(tenant="east", gpus=1, time_limit_ms=10 * MINUTE_MS)
    third = made.submit(tenant="east", gpus=1, time_limit_ms=10 * MINUTE_MS)
    for job, least_ms, most_ms in ((second, 0, 10), (third, 10, 20)):
        found = outlook(made.state, made.job(job), made.policy, made.now_ms)
        assert found.early_ms is not None and found.late_ms is not None, found
        assert found.late_ms - made.now_ms <= most_ms * MINUTE_MS
        assert found.early_ms - made.now_ms >= least_ms


def test_a_restored_state_holds_the_same_jobs_back() -> None:
    made = cluster()
    made.run(tenant="east", gpus=2)
    waits = made.submit(tenant="east", gpus=1)
    state = restore(made.state.snapshot())
    verify(state)
    assert list(state.queue.capped_lane) == [made.job(waits).number]


def test_the_invariants_notice_a_job_beyond_its_cap() -> None:
    made = cluster()
    made.run(tenant="east", gpus=2)
    made.submit(tenant="east", gpus=1)
    queue = made.state.queue
    (lane,) = queue.capped
    queue.stand_again(lane, lambda _: 0)
    with pytest.raises(Violation, match="what is held back does not match its cap on GPUs"):
        verify(made.state)


# -- what a neighbor is offered --------------------------------------------------------------------


def asked(made: Cluster, **fields: Any) -> tuple[int | None, int | None, str]:
    spec = job_spec(**{"tenant": "east", **fields})
    before = msgspec.json.encode(made.state.snapshot())
    found = offer(made.state, spec, EVERY_TENANT, made.now_ms)
    assert msgspec.json.encode(made.state.snapshot()) == before
    verify(made.state)
    return found.early_ms, found.start_ms, render(found.why)


def test_an_offer_says_what_a_submission_then_does() -> None:
    made = cluster(Tenant(name="east", gpus_max=4))
    assert asked(made, gpus=4) == (0, 0, "")
    assert asked(made, gpus=1, begin_ms=made.now_ms + 5_000) == (5_000, 5_000, "")
    assert starts(made, made.submit(tenant="east", gpus=4)) == [True]


def test_an_offer_predicts_when_gpus_come_back() -> None:
    made = cluster()
    made.run(tenant="west", gpus=8, time_limit_ms=10 * MINUTE_MS)
    made.wait(4 * MINUTE_MS)
    early_ms, start_ms, why_ = asked(made, gpus=2)
    assert early_ms is not None and start_ms is not None and not why_
    assert 0 < early_ms <= start_ms <= 6 * MINUTE_MS


def test_an_offer_counts_those_that_wait_already() -> None:
    made = cluster()
    made.run(tenant="west", gpus=8, time_limit_ms=10 * MINUTE_MS)
    made.submit(tenant="west", gpus=8, time_limit_ms=10 * MINUTE_MS, priority=50)
    _, start_ms, _ = asked(made, gpus=2)
    assert start_ms is not None and start_ms > 10 * MINUTE_MS


def test_an_offer_says_why_there_is_none() -> None:
    made = cluster(Tenant(name="east", gpus_max=4), Tenant(name="poor", budget_gpu_hours=1))
    assert asked(made, gpus=5)[2].startswith("gpus: asks for 5 GPUs in all, but east may hold 4")
    assert asked(made, gpus=1, where=("pool=none",))[2].startswith("where: ")
    made.run(tenant="west", gpus=8)
    early_ms, start_ms, why_ = asked(made, gpus=2)
    assert (early_ms, start_ms) == (None, None)
    assert why_.endswith("have no --time-limit, --estimate or history")


def test_an_offer_of_one_that_would_make_room_says_so() -> None:
    """Its tenant is within its quota, so what others have borrowed is taken back for it."""
    made = cluster(Tenant(name="east", quota_gpus=4), gpus=4)
    made.run(tenant="west", gpus=4, preemptible=True)
    _, start_ms, why_ = asked(made, gpus=2)
    assert start_ms is not None and start_ms <= MINUTE_MS, why_
