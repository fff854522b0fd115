"""When a waiting job is said to start: by what runs, what is ahead, what was stopped for it."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.core.answers.outlook import outlook
from shoal.core.policies import SHIPPED
from shoal.core.scheduling.predict import predict
from shoal.core.state.room import Room
from shoal.model.job import Phase
from shoal.model.policy import Preempt
from shoal.model.reason import render
from tests.core.build import POLICY, Cluster

HOUR_MS = 3_600_000
NO_CPU: dict[str, Any] = {"cpu_milli": 0}


def said(cluster: Cluster, job_id: str) -> tuple[int, int] | None:
    """The range, from now on."""
    assert cluster.job(job_id).phase is Phase.WAITING
    found = predict(cluster.state, cluster.job(job_id), cluster.now_ms)
    return found and (found.early_ms - cluster.now_ms, found.late_ms - cluster.now_ms)


def one_node(**numbers: Any) -> Cluster:
    cluster = Cluster(msgspec.structs.replace(SHIPPED["backfill"], **numbers))
    cluster.join("a", gpus=4)
    return cluster


def test_the_first_opening_is_when_what_runs_ends() -> None:
    cluster = one_node()
    cluster.run(gpus=4, estimate_ms=HOUR_MS, **NO_CPU)
    assert said(cluster, cluster.submit(gpus=4, estimate_ms=HOUR_MS, **NO_CPU)) == (HOUR_MS,) * 2


def test_who_has_others_ahead_waits_for_its_turn_at_most() -> None:
    cluster = one_node()
    cluster.run(gpus=4, estimate_ms=HOUR_MS, **NO_CPU)
    waits = [cluster.submit(gpus=4, estimate_ms=2 * HOUR_MS, **NO_CPU) for _ in range(3)]
    assert said(cluster, waits[0]) == (HOUR_MS, HOUR_MS)
    assert said(cluster, waits[1]) == (HOUR_MS, 3 * HOUR_MS)
    assert said(cluster, waits[2]) == (HOUR_MS, 5 * HOUR_MS)


def test_who_may_not_start_before_a_time_starts_then_at_the_earliest() -> None:
    cluster = one_node()
    cluster.run(gpus=3, estimate_ms=HOUR_MS, **NO_CPU)
    cluster.submit(gpus=4, estimate_ms=2 * HOUR_MS, **NO_CPU)
    begin_ms = cluster.now_ms + 60_000
    small = cluster.submit(gpus=1, estimate_ms=60_000, begin_ms=begin_ms, **NO_CPU)
    assert said(cluster, small) == (60_000, 3 * HOUR_MS), "there is room, but it is not yet time"


def test_jobs_without_gpus_are_predicted_by_cpus() -> None:
    cluster = Cluster(SHIPPED["backfill"])
    cluster.join("a", cpus=4)
    cluster.run(cpu_milli=4000, estimate_ms=HOUR_MS)
    cluster.submit(cpu_milli=4000, estimate_ms=HOUR_MS)
    assert said(cluster, cluster.submit(cpu_milli=3000)) == (HOUR_MS, 2 * HOUR_MS)


def test_who_fits_but_is_held_back_does_not_start_now() -> None:
    """It would delay the one in front, whose room is set aside."""
    cluster = one_node()
    cluster.run(gpus=2, estimate_ms=HOUR_MS, **NO_CPU)
    cluster.submit(gpus=4, estimate_ms=HOUR_MS, **NO_CPU)
    assert said(cluster, cluster.submit(gpus=1, estimate_ms=3 * HOUR_MS, **NO_CPU)) == (
        HOUR_MS,
        2 * HOUR_MS,
    )


def test_what_nobody_has_seen_end_goes_on_about_as_long_as_it_has_run() -> None:
    cluster = one_node()
    cluster.run(gpus=4, **NO_CPU)
    cluster.wait(1_000)
    cluster.hear("a")
    waits = cluster.submit(gpus=4, **NO_CPU)
    assert said(cluster, waits) is None  # a second says nothing
    cluster.wait(99_000)
    cluster.hear("a")
    found = said(cluster, waits)
    assert found is not None and found[0] == 100_000 and 200_000 <= found[1] <= 900_000


def test_who_takes_turns_starts_at_its_first_opening_at_the_latest() -> None:
    policy = msgspec.structs.replace(POLICY, order="fair", preempt=Preempt.RANK)
    cluster = Cluster(policy)
    cluster.join("a", gpus=4)
    turns: dict[str, Any] = {"preemptible": True, "checkpoint_ms": 60_000, **NO_CPU}
    cluster.run(gpus=4, estimate_ms=HOUR_MS, **turns)
    assert said(cluster, cluster.submit(gpus=4, **turns)) == (0, HOUR_MS)


def test_who_others_were_stopped_for_starts_within_their_grace_time() -> None:
    cluster = Cluster(msgspec.structs.replace(POLICY, run_ms_min=0))
    cluster.join("a", gpus=4)
    cluster.run(gpus=4, preemptible=True, stop_grace_ms=7_000, **NO_CPU)
    cluster.wait(1_000)
    job_id = cluster.submit(gpus=4, priority=10, **NO_CPU)
    assert job_id in cluster.state.claims
    assert said(cluster, job_id) == (0, 7_000)


def test_no_start_is_predicted_for_a_running_job() -> None:
    cluster = one_node()
    job_id = cluster.run(gpus=1, **NO_CPU)
    assert predict(cluster.state, cluster.job(job_id), cluster.now_ms) is None


# -- others will be stopped for it -----------------------------------------------------------


def with_run_min(**numbers: Any) -> Cluster:
    quiet = {"silent_after_ms": 10**9, "grace_ms": 10**9, "run_ms_min": 60_000}
    cluster = Cluster(msgspec.structs.replace(POLICY, **quiet, **numbers))
    cluster.join("a", gpus=4)
    return cluster


def test_who_may_stop_others_starts_when_they_have_run_for_the_minimum() -> None:
    """However long those would have run: it was promised in 3 h to 4 d, and started at once."""
    cluster = with_run_min()
    low = cluster.run(gpus=4, preemptible=True, stop_grace_ms=7_000, time_limit_ms=99 * HOUR_MS)
    cluster.wait(20_000)
    high = cluster.submit(gpus=4, priority=10)
    assert said(cluster, high) == (40_000, 47_000)
    found = outlook(cluster.state, cluster.job(high), cluster.policy, cluster.now_ms)
    assert f"{low} will be stopped for it, in 40s at the earliest" in render(found.why)
    cluster.wait(40_000)
    cluster.hear("a")
    assert cluster.job(low).phase is Phase.STOPPING


def test_only_those_are_named_that_have_to_go_and_the_last_of_them_decides() -> None:
    cluster = with_run_min()
    first = cluster.run(gpus=1, preemptible=True, **NO_CPU)
    cluster.wait(10_000)
    second = cluster.run(gpus=2, preemptible=True, **NO_CPU)
    cluster.run(gpus=1, priority=99, preemptible=True, **NO_CPU)
    cluster.wait(10_000)
    high = cluster.submit(gpus=3, priority=10, **NO_CPU)
    found = predict(cluster.state, cluster.job(high), cluster.now_ms)
    assert found is not None and found.stops is not None
    assert {victim.job.id for victim in found.stops.victims} == {first, second}
    assert found.early_ms - cluster.now_ms == 50_000
    one = cluster.submit(gpus=1, priority=11, **NO_CPU)
    found = predict(cluster.state, cluster.job(one), cluster.now_ms)
    assert found is not None and found.stops is not None
    assert [victim.job.id for victim in found.stops.victims] == [first]
    assert found.early_ms - cluster.now_ms == 40_000


def test_who_ends_before_it_may_be_stopped_decides() -> None:
    cluster = with_run_min()
    cluster.run(gpus=4, preemptible=True, estimate_ms=30_000)
    cluster.wait(10_000)
    assert said(cluster, cluster.submit(gpus=4, priority=10)) == (20_000, 20_000)


def test_nobody_is_named_if_the_policy_stops_nobody_or_nobody_would_give_way() -> None:
    for numbers, priority in (({"preempt": Preempt.NEVER}, 10), ({}, 0)):
        cluster = with_run_min(**numbers)
        cluster.run(gpus=4, preemptible=True, estimate_ms=HOUR_MS)
        waits = cluster.submit(gpus=4, priority=priority)
        assert said(cluster, waits) == (HOUR_MS, HOUR_MS)
        found = outlook(cluster.state, cluster.job(waits), cluster.policy, cluster.now_ms)
        assert "for it" not in found.why


def test_a_prediction_changes_nothing() -> None:
    cluster = with_run_min()
    cluster.run(gpus=4, preemptible=True)
    high = cluster.submit(gpus=4, priority=10)
    before = msgspec.json.encode(cluster.state.snapshot()), list(map(vars_of, cluster.state.rooms))
    assert said(cluster, high) is not None
    after = msgspec.json.encode(cluster.state.snapshot()), list(map(vars_of, cluster.state.rooms))
    assert before == after


def vars_of(room: Room) -> tuple[object, ...]:
    return (tuple(room.gpu_milli), room.cpu_milli, room.memory_mb, room.level)
