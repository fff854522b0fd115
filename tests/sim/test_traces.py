"""Every trace format is read as its documentation says, and stretched as asked."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from shoal.core.state.events.log import Event, Recorded
from shoal.core.state.events.nodes import NodeIntended, NodeJoined
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobFinished, JobPlaced, JobRunning
from shoal.model.job import JobSpec, Outcome
from shoal.model.node import NodeIntent, NodeSpec
from shoal.model.resources import Slice
from shoal.sim.replay.clusters import gangs_for, read_causes, read_nodes
from shoal.sim.replay.readers import read_trace
from shoal.sim.replay.readers.history import read_history
from shoal.sim.replay.traces import Arrival, Gangs, Trace, TraceError, stretch

GOLDEN = Path(__file__).parent.parent / "golden" / "traces"

# format -> (submit_ms, work_ms, members, GPUs of each, tenant) of every job, in order
EXPECTED = {
    "plain.csv": [
        (0, 3_600_000, 1, 8, "red"),
        (60_000, 1_800_000, 2, 8, "blue"),
        (90_000, 600_000, 1, 4, "red"),
        (90_000, 600_000, 1, 4, "green"),
        (120_000, 7_200_000, 3, 4, "blue"),
        (300_000, 60_000, 1, 1, "green"),
        (400_000, 900_000, 2, 4, "red"),
        (4_000_000, 30_000, 1, 0, "green"),
    ],
    "sacct.txt": [
        (0, 30_000, 1, 0, "text"),
        (60_000, 3_600_000, 2, 8, "vision"),
        (660_000, 600_000, 1, 1, "text"),
    ],
}


def told(arrival: Arrival) -> tuple[int, int, int, int, str]:
    spec = arrival.spec
    return arrival.submit_ms, arrival.work_ms, spec.members, spec.gpus, arrival.tenant


@pytest.mark.parametrize("name", EXPECTED)
def test_a_format_is_known_by_its_columns_and_read_as_documented(name: str) -> None:
    trace = read_trace(GOLDEN / name, Gangs(8))
    assert [told(arrival) for arrival in trace.arrivals] == EXPECTED[name]


def test_a_packed_trace_is_the_same_trace(tmp_path: Path) -> None:
    packed = tmp_path / "plain.csv.gz"
    packed.write_bytes(gzip.compress((GOLDEN / "plain.csv").read_bytes()))
    assert (
        read_trace(packed, Gangs(8)).arrivals == read_trace(GOLDEN / "plain.csv", Gangs(8)).arrivals
    )


def test_a_plain_row_keeps_its_exit_code_checkpoints_and_priority() -> None:
    arrivals = read_trace(GOLDEN / "plain.csv", Gangs(8)).arrivals
    assert [a.exit_code for a in arrivals] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert [a.checkpoint_ms for a in arrivals] == [None, 300_000, None, None, None, None, 0, None]
    assert [a.spec.priority for a in arrivals] == [0, 0, 0, 0, 0, 5, 0, 0]


def test_slurm_jobs_come_without_steps_and_without_those_that_never_ran() -> None:
    trace = read_trace(GOLDEN / "sacct.txt", Gangs(8, cpus_count=True, memory_counts=True))
    prep, train, eval_ = trace.arrivals
    assert trace.skipped == 1
    assert (train.spec.cpu_milli, train.spec.memory_mb) == (16_000, 256 * 1024)
    assert (prep.spec.cpu_milli, prep.spec.memory_mb) == (8_000, 16 * 1024)
    assert eval_.spec.memory_mb == 64_000
    assert [a.spec.time_limit_ms for a in trace.arrivals] == [1_800_000, 86_400_000, 7_200_000]
    assert [a.exit_code for a in trace.arrivals] == [0, 0, 1]


def test_rows_can_be_chosen_by_a_column() -> None:
    trace = read_trace(GOLDEN / "plain.csv", Gangs(8), where={"tenant": "blue"})
    assert [told(a)[2:] for a in trace.arrivals] == [(2, 8, "blue"), (3, 4, "blue")]
    assert trace.arrivals[0].submit_ms == 0


@pytest.mark.parametrize(
    ("gpus", "per_node", "expected"),
    [
        (0, 8, (1, 0)),
        (1, 8, (1, 1)),
        (8, 8, (1, 8)),
        (16, 8, (2, 8)),
        (12, 8, (3, 4)),
        (9, 8, (9, 1)),
        (128, 8, (16, 8)),
        (6, 4, (3, 2)),
        (5, 0, (1, 5)),
    ],
)
def test_a_large_job_becomes_members_that_fill_nodes_exactly(
    gpus: int, per_node: int, expected: tuple[int, int]
) -> None:
    members, each = Gangs(per_node).split(gpus)
    assert (members, each) == expected
    assert members * each == gpus


def test_equal_jobs_share_one_spec() -> None:
    gangs = Gangs(8)
    assert gangs.spec(16, priority=1) is gangs.spec(16, priority=1)
    assert gangs.spec(16, priority=1) is not gangs.spec(16, priority=2)


def test_unsorted_rows_are_put_in_order(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("submit_s,duration_s,gpus\n50,1,1\n10,2,1\n50,3,1\n")
    arrivals = read_trace(path, Gangs(8)).arrivals
    assert [(a.submit_ms, a.work_ms) for a in arrivals] == [
        (0, 2000),
        (40_000, 1000),
        (40_000, 3000),
    ]


# -- stretching ------------------------------------------------------------------------------


def small(times_s: list[int]) -> Trace:
    spec = Gangs(8).spec(1)
    return Trace("small", [Arrival(t * 1000, 1000, spec, row) for row, t in enumerate(times_s)])


def test_load_brings_arrivals_closer_together() -> None:
    times = [a.submit_ms for a in stretch(small([0, 10, 30]), load=2).arrivals]
    assert times == [0, 5000, 15_000]


def test_jobs_takes_the_first_or_plays_the_trace_again() -> None:
    trace = small([0, 10, 30])
    assert [a.row for a in stretch(trace, jobs=2).arrivals] == [0, 1]
    again = stretch(trace, jobs=7).arrivals
    assert [a.row for a in again] == [0, 1, 2, 0, 1, 2, 0]
    assert [a.submit_ms for a in again] == [0, 10_000, 30_000, 45_000, 55_000, 75_000, 90_000]


@pytest.mark.parametrize("scale", [0.5, 1.5, 2.0, 3.0])
def test_scale_keeps_the_time_and_multiplies_the_jobs(scale: float) -> None:
    trace = small(list(range(0, 10_000, 10)))
    scaled = stretch(trace, scale=scale, seed=4).arrivals
    assert len(scaled) == pytest.approx(scale * 1000, rel=0.1)
    times = [a.submit_ms for a in scaled]
    assert times == sorted(times)
    assert times[-1] <= trace.arrivals[-1].submit_ms
    assert scaled == stretch(trace, scale=scale, seed=4).arrivals


# -- a cluster's own log ---------------------------------------------------------------------


def log(*events: Event) -> list[Recorded]:
    return [Recorded(seq, event) for seq, event in enumerate(events, 1)]


def test_a_log_gives_back_the_jobs_that_ran_and_the_nodes() -> None:
    node = NodeSpec(id="n1", gpus=8, cpu_milli=16_000, memory_mb=64_000)
    gone = NodeSpec(id="n2", gpus=8, cpu_milli=16_000, memory_mb=64_000)
    spec = JobSpec(command=("python", "train.py"), gpus=8, env={"A": "x" * 1000}, priority=3)
    events = log(
        NodeJoined(at_ms=1000, node="n1", spec=node, incarnation=1),
        NodeJoined(at_ms=1000, node="n2", spec=gone, incarnation=1),
        JobSubmitted(at_ms=5000, job="j1", spec=spec),
        JobSubmitted(at_ms=6000, job="j2", spec=spec),
        JobSubmitted(at_ms=7000, job="j3", spec=spec),
        JobPlaced(at_ms=7000, job="j1", attempt=1, slices=(Slice("n1", (0,)),), master="", why=""),
        JobRunning(at_ms=8000, job="j1", attempt=1),
        JobFinished(at_ms=20_000, job="j1", attempt=1, outcome=Outcome.FAILED, code=7, why=""),
        JobRunning(at_ms=21_000, job="j2", attempt=1),
        NodeIntended(at_ms=50_000, node="n2", intent=NodeIntent.REMOVED),
    )
    history = read_history(lambda after, limit: events[after : after + min(limit, 3)], "log")
    assert history.nodes == [node]
    trace = history.trace(gangs_for([node]))
    first, second = trace.arrivals
    assert (first.submit_ms, first.work_ms, first.exit_code) == (0, 12_000, 7)
    assert (second.submit_ms, second.work_ms, second.exit_code) == (1000, 29_000, 0)
    assert trace.skipped == 1
    assert first.spec.priority == 3
    assert not first.spec.env
    assert first.spec.cpu_milli == 1000
    assert history.trace(Gangs(8)).arrivals[0].spec.cpu_milli == 0


def test_an_empty_log_is_told_as_such() -> None:
    history = read_history(lambda after, limit: [], "log")
    with pytest.raises(TraceError, match="names no node"):
        _ = history.nodes
    with pytest.raises(TraceError, match="no job that ran"):
        history.trace(Gangs(8))


# -- nodes and failures ----------------------------------------------------------------------


def test_nodes_come_from_a_list_with_counts() -> None:
    nodes = read_nodes(GOLDEN / "nodes.csv")
    assert [(n.id, n.gpus, n.cpu_milli, n.memory_mb) for n in nodes] == [
        ("big-1", 8, 64_000, 512 * 1024),
        ("big-2", 8, 64_000, 512 * 1024),
        ("small", 4, 32_000, 256 * 1024),
    ]


def test_a_table_of_causes_gives_the_rate_and_what_breaks_nodes() -> None:
    failures = read_causes(GOLDEN / "causes.csv", repair_ms=1000)
    assert failures.per_1000_node_days == pytest.approx(40_000 / (2048 * 54))
    assert [(c.name, c.breaks_node) for c in failures.causes] == [
        ("Faulty GPU", True),
        ("Software Bug", False),
    ]
