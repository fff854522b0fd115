"""The replay: exact on small cases, the same every time, and no GPU-millisecond unaccounted for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.policies import SHIPPED
from shoal.core.state.events.log import Event, Recorded
from shoal.model.job import Job, JobSpec
from shoal.model.policy import Policy, Tenant
from shoal.sim.replay.clusters import (
    NEVER_MS,
    Cause,
    Conditions,
    Failures,
    Slowness,
    alike,
    gangs_for,
    read_causes,
)
from shoal.sim.replay.metrics import Outcome, as_it_was, summarize
from shoal.sim.replay.readers import read_trace
from shoal.sim.replay.readers.history import read_history
from shoal.sim.replay.replay import Progress, Replay, replay, too_large
from shoal.sim.replay.traces import Arrival, Gangs, Trace, TraceError, stretch

GOLDEN = Path(__file__).parent.parent / "golden"
SHARED = Path(
    os.environ.get("SHOAL_TRACES")
    or Path(__file__).parent.parent.parent.parent / "shared" / "traces"
)

PLAIN = Conditions(start_up_ms=0, stop_ms=0, restart_cost_ms=0)


def trace_of(*jobs: tuple[int, int, int]) -> Trace:
    """Jobs as (submit, work, GPUs), times in seconds."""
    gangs = Gangs(8)
    return Trace(
        "made up",
        [
            Arrival(submit * 1000, work * 1000, gangs.spec(gpus), row, f"t{row % 3}")
            for row, (submit, work, gpus) in enumerate(jobs, 2)
        ],
    )


def times(outcome: Outcome) -> dict[int, tuple[int, int]]:
    """By row: when it was first placed and when it ended, in seconds."""
    records = outcome.records
    return {
        row: (placed // 1000, finished // 1000)
        for row, placed, finished in zip(
            records.row, records.placed_ms, records.finished_ms, strict=True
        )
    }


def accounts(outcome: Outcome) -> dict[str, int]:
    """The ledger's accounts in GPU-milliseconds."""
    assert outcome.ledger is not None
    return {one.account: one.gpu_us // 1000 for one in outcome.ledger.accounts}


def assert_accounts_add_up(outcome: Outcome) -> None:
    levels, ledger = outcome.levels, outcome.ledger
    assert ledger is not None and not any("balance" in note for note in ledger.notes)
    sums = levels.sums
    whole = levels.total * levels.now_ms
    assert sum(sums[name] for name in ("down", "held", "wanted", "idle")) == whole
    assert levels.held == levels.waiting == levels.live == 0
    assert ledger.capacity_gpu_us == whole
    held = [one.gpu_us for one in ledger.accounts if one.group in ("used", "overhead", "wasted")]
    assert sum(held) == sums["held"]


def test_jobs_run_one_after_another_when_they_fill_the_node() -> None:
    outcome = replay(
        trace_of((0, 100, 8), (10, 50, 8)), alike(1, gpus=8), Policy(), PLAIN, check_every=1
    )
    assert times(outcome) == {2: (0, 100), 3: (100, 150)}
    assert_accounts_add_up(outcome)
    assert accounts(outcome) == {"useful": 8 * 150_000}


def test_start_up_time_is_held_but_not_useful() -> None:
    outcome = replay(
        trace_of((0, 100, 8)),
        alike(1, gpus=8),
        Policy(),
        Conditions(start_up_ms=20_000),
        check_every=1,
    )
    assert times(outcome) == {2: (0, 120)}
    assert accounts(outcome)["startup"] == 8 * 20_000
    assert summarize(outcome).goodput == pytest.approx(100 / 120)


def test_a_gang_is_as_slow_as_its_slowest_member() -> None:
    conditions = msgspec.structs.replace(PLAIN, slow_nodes=Slowness(0.5, 0.5))
    outcome = replay(trace_of((0, 100, 16)), alike(2, gpus=8), Policy(), conditions, check_every=1)
    assert times(outcome) == {2: (0, 200)}
    assert accounts(outcome)["straggler"] == 8 * 100_000
    assert_accounts_add_up(outcome)


def test_stragglers_are_slow_for_one_attempt() -> None:
    conditions = msgspec.structs.replace(PLAIN, stragglers=Slowness(1.0, 0.25))
    outcome = replay(trace_of((0, 100, 1)), alike(1, gpus=8), Policy(), conditions)
    assert times(outcome) == {2: (0, 400)}


def test_a_job_that_fails_ends_failed_after_its_work() -> None:
    trace = read_trace(GOLDEN / "traces" / "plain.csv", Gangs(8))
    outcome = replay(trace, alike(2, gpus=8), Policy(), PLAIN, check_every=1)
    assert summarize(outcome).failed == 1
    assert len(outcome.records) == len(trace.arrivals)


class FailAt(Replay):
    """The node n1 fails at a given time, by the given cause."""

    def fail_at(self, time_ms: int, cause: Cause) -> FailAt:
        cluster = self.cluster
        cluster.conditions = msgspec.structs.replace(
            cluster.conditions, failures=Failures(0.0, repair_ms=1000_000, causes=(cause,))
        )
        cluster.order = cluster.order[:1]
        cluster.at(time_ms, cluster._fail, None)
        return self


def failing(checkpoint_ms: int, *, breaks: bool = True, nodes: int = 2) -> Outcome:
    conditions = Conditions(
        start_up_ms=0, stop_ms=5000, checkpoint_ms=checkpoint_ms, restart_cost_ms=7000
    )
    one = FailAt(trace_of((0, 100, 8)), alike(nodes, gpus=8), Policy(), conditions, "", 0)
    return one.fail_at(65_000, Cause("bad luck", 1, breaks)).run(check_every=1)


@pytest.mark.parametrize(
    ("checkpoint_ms", "lost_s"), [(0, 0), (10_000, 5), (30_000, 5), (60_000, 5), (NEVER_MS, 65)]
)
def test_work_since_the_last_checkpoint_is_lost_with_a_node(
    checkpoint_ms: int, lost_s: int
) -> None:
    outcome = failing(checkpoint_ms)
    assert times(outcome) == {2: (0, 65 + 7 + 35 + lost_s)}
    assert accounts(outcome).get("recompute", 0) == 8 * lost_s * 1000
    assert accounts(outcome)["startup"] == 8 * 7000
    assert outcome.requeues == {"node-loss": 1}
    assert outcome.failures == {"bad luck": 1}
    assert_accounts_add_up(outcome)


def test_a_broken_node_comes_back_after_its_repair() -> None:
    outcome = failing(0, nodes=1)
    assert times(outcome) == {2: (0, 65 + 1000 + 7 + 35)}
    assert accounts(outcome)["lost"] == 8 * 1000_000
    assert_accounts_add_up(outcome)


def test_a_software_failure_leaves_the_node_in_service() -> None:
    outcome = failing(0, breaks=False, nodes=1)
    assert times(outcome) == {2: (0, 65 + 7 + 35)}
    assert "lost" not in accounts(outcome)
    assert_accounts_add_up(outcome)


def test_the_rest_of_a_gang_is_stopped_when_one_node_breaks() -> None:
    conditions = Conditions(start_up_ms=0, stop_ms=5000, checkpoint_ms=0, restart_cost_ms=0)
    one = FailAt(trace_of((0, 100, 16)), alike(3, gpus=8), Policy(), conditions, "", 0)
    outcome = one.fail_at(50_000, Cause("bad luck", 1)).run(check_every=1)
    # The other node's member takes 5 s to stop; then both halves run again elsewhere.
    assert times(outcome) == {2: (0, 105)}
    assert accounts(outcome)["recompute"] == 8 * 5000
    assert_accounts_add_up(outcome)


def test_jobs_too_large_for_the_cluster_are_found_before_the_replay() -> None:
    trace = trace_of((0, 1, 8), (0, 1, 24))
    assert list(too_large(trace, alike(2, gpus=8))) == [3]
    with pytest.raises(TraceError, match="made up: row 3: members asks for 3 members"):
        replay(trace, alike(2, gpus=8), Policy())


def test_what_can_be_said_about_failures_in_the_world_is_said_by_cause() -> None:
    failures = read_causes(GOLDEN / "traces" / "causes.csv", repair_ms=600_000)
    failures = msgspec.structs.replace(failures, per_1000_node_days=100_000.0)
    conditions = Conditions(failures=failures)
    trace = trace_of(*[(i * 60, 3000, 8) for i in range(40)])
    outcome = replay(trace, alike(4, gpus=8), Policy(), conditions, check_every=1)
    assert set(outcome.failures) == {"Faulty GPU", "Software Bug"}
    assert summarize(outcome).requeues_by_failure > 0
    assert_accounts_add_up(outcome)


JOB = st.tuples(st.integers(0, 500), st.integers(0, 300), st.integers(0, 24))


@settings(max_examples=10, deadline=None)
@given(
    jobs=st.lists(JOB, min_size=1, max_size=25),
    rate=st.sampled_from([0.0, 50_000.0, 1_000_000.0]),
    breaks=st.booleans(),
    checkpoint_ms=st.sampled_from([0, 7000, NEVER_MS]),
    start_up_ms=st.sampled_from([0, 3000]),
    slow=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 5),
)
def test_every_gpu_millisecond_is_in_one_account_whatever_happens(
    jobs: list[tuple[int, int, int]],
    rate: float,
    breaks: bool,
    checkpoint_ms: int,
    start_up_ms: int,
    slow: float,
    seed: int,
) -> None:
    conditions = Conditions(
        start_up_ms=start_up_ms,
        checkpoint_ms=checkpoint_ms,
        failures=Failures(rate, 20_000, (Cause("x", 1, breaks), Cause("y", 1))),
        slow_nodes=Slowness(slow, 0.7),
        stragglers=Slowness(slow, 0.9),
    )
    trace = trace_of(*sorted(jobs))
    outcome = replay(trace, alike(3, gpus=8), Policy(), conditions, seed=seed, check_every=1)
    assert_accounts_add_up(outcome)
    assert sorted(outcome.records.row) == [arrival.row for arrival in trace.arrivals]
    if all(outcome.records.succeeded):
        # All the work was done. After a failure the ledger counts the work since the newest save
        # that was reported as lost, though a job may have saved more than it reported.
        work = sum(a.work_ms * a.spec.members * a.spec.gpus for a in trace.arrivals)
        done = accounts(outcome)
        assert done.get("useful", 0) + (done.get("recompute", 0) if rate else 0) >= work


def test_the_same_seed_gives_the_same_replay_and_another_seed_another() -> None:
    conditions = Conditions(failures=Failures(100_000.0, 60_000), slow_nodes=Slowness(0.3, 0.5))
    trace = trace_of(*[(i * 7, 200 + i, 1 + i % 16) for i in range(60)])

    def run(seed: int) -> bytes:
        outcome = replay(trace, alike(4, gpus=8), Policy(), conditions, seed=seed)
        records, segments = outcome.records, outcome.segments
        columns = [records.row, records.placed_ms, records.finished_ms, records.attempts]
        columns += [segments.node, segments.mask, segments.begin_ms, segments.end_ms]
        columns += [outcome.levels.times, outcome.levels.held_over_time]
        return b"".join(column.tobytes() for column in columns)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_progress_is_told_now_and_then() -> None:
    heard: list[tuple[int, int]] = []
    trace = trace_of(*[(i, 1, 1) for i in range(600)])
    replay(trace, alike(1, gpus=8), Policy(), progress=lambda done, now: heard.append((done, now)))
    assert len(heard) >= 3
    assert heard == sorted(heard)


def test_a_cluster_without_gpus_is_accounted_for_in_cpus() -> None:
    gangs = Gangs(0, cpus_count=True)
    trace = Trace("cpus", [Arrival(0, 10_000, gangs.spec(0, members=1, cpu_milli=2000), 2)])
    outcome = replay(trace, alike(1, gpus=0, cpu_milli=4000), Policy(), PLAIN, check_every=1)
    assert summarize(outcome).utilization == 0.5


def test_a_policy_that_must_know_run_times_is_told_the_truth() -> None:
    for name, estimate_ms in (("srtf", 5000), ("srsf", 5000), ("fair", 0), ("tiresias", 0)):
        one = Replay(trace_of((0, 5, 1)), alike(1, gpus=8), SHIPPED[name], PLAIN, "", 0)
        assert one._spec(one.trace.arrivals[0]).estimate_ms == estimate_ms


@pytest.mark.parametrize(
    ("name", "nodes", "gpus", "where"),
    [
        pytest.param("philly-pollux/jobs.csv.gz", 100, 8, {}, marks=pytest.mark.soak),
        ("microsoft-itp/jobs.csv.gz", 64, 8, {"cluster": "cluster02"}),
    ],
)
def test_a_public_trace_is_replayed(
    name: str, nodes: int, gpus: int, where: dict[str, str]
) -> None:
    if not (SHARED / name).exists():
        pytest.skip(f"needs {name} in ../shared/traces, or where SHOAL_TRACES says")
    trace = read_trace(SHARED / name, Gangs(gpus), where=where)
    trace = stretch(trace, jobs=min(500, len(trace.arrivals)))
    outcome = replay(trace, alike(nodes, gpus=gpus), Policy(), check_every=97)
    assert_accounts_add_up(outcome)
    assert len(outcome.records) == len(trace.arrivals)
    assert summarize(outcome).failed == 0


class Recorder(Replay):
    """Keeps the log that a cluster would have."""

    def run(self, check_every: int = 0, progress: Progress | None = None) -> Outcome:
        self.log: list[Recorded] = []
        return super().run(check_every, progress)

    def commit(self, events: Sequence[Event], finished: Sequence[Job]) -> int:
        if hasattr(self, "log"):
            self.log += [Recorded(len(self.log) + n, e) for n, e in enumerate(events, 1)]
        return super().commit(events, finished)


@pytest.mark.parametrize("name", ["fifo", "backfill", "fair"])
@pytest.mark.parametrize("start_up_ms", [0, 3_000])
def test_the_replay_of_a_history_under_its_own_policy_is_as_it_was(
    name: str, start_up_ms: int
) -> None:
    """Elastic gangs, gangs that save and single jobs; nothing but the log goes into the replay."""
    nodes = alike(4, gpus=8)
    specs = (
        JobSpec(
            command=("a",), cpu_milli=0, members=1, members_max=4, gpus=4, checkpoint_ms=60_000
        ),
        JobSpec(command=("b",), cpu_milli=0, members=2, gpus=8),
        JobSpec(command=("c",), cpu_milli=0, gpus=1, checkpoint_ms=30_000, preemptible=True),
    )
    arrivals = tuple(
        Arrival(
            n * 40_000,
            100_000 + 7_919 * n % 500_000,
            specs[n % 3],
            n,
            checkpoint_ms=specs[n % 3].checkpoint_ms or NEVER_MS,
            waited_ms=0,
        )
        for n in range(120)
    )
    trace = Trace(name="made", arrivals=arrivals, skipped=0)
    policy = SHIPPED[name]
    lived = Recorder(trace, nodes, policy, Conditions(start_up_ms=start_up_ms), name, 0)
    lived.run()
    log = lived.log
    history = read_history(lambda after, limit: log[after : after + limit], "log")
    again = history.trace(gangs_for(nodes))
    was = as_it_was(again.arrivals)
    assert was is not None and was.jobs == 120
    found = summarize(replay(again, nodes, policy, name=name))
    assert found.completion.mean_s == pytest.approx(was.completion.mean_s, rel=0.05)
    assert found.wait.mean_s == pytest.approx(was.wait.mean_s, rel=0.05, abs=1)


def test_a_job_over_its_tenants_cap_is_submitted_again_when_there_is_room() -> None:
    """Its user waits from the moment that the trace has."""
    gangs = Gangs(8)
    jobs = [(0, 10, "red"), (0, 10, "red"), (1, 10, "red"), (1, 10, "blue")]
    arrivals = [
        Arrival(
            submit * 1000,
            work * 1000,
            msgspec.structs.replace(gangs.spec(1), tenant=tenant),
            row,
            tenant,
        )
        for row, (submit, work, tenant) in enumerate(jobs, 2)
    ]
    capped = Policy(tenants=(Tenant(name="red", jobs_max=1),))
    outcome = replay(Trace("made up", arrivals), alike(1, gpus=8), capped, PLAIN, check_every=1)
    assert times(outcome) == {2: (0, 10), 3: (10, 20), 4: (20, 30), 5: (1, 11)}
    assert_accounts_add_up(outcome)
