"""Every way in which a job ends is told by its name, and no GPU-second is told twice."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from shoal.core.answers.explain import attempts_of, last_lines, learned_of
from shoal.core.state.events.nodes import NodeChecked
from shoal.model.explanation import AttemptRecord, Cause
from shoal.model.health import CheckResult
from shoal.model.node import NodeIntent
from shoal.model.policy import Preempt
from tests.core.build import Cluster
from tests.core.training import Training, policy


def told(cluster: Cluster, tails: dict[tuple[int, int], str] | None = None) -> list[AttemptRecord]:
    found = tails or {}
    return attempts_of(cluster.log, lambda attempt, member: found.get((attempt, member), ""))


def cluster_of(count: int, **fields: Any) -> Cluster:
    cluster = Cluster(policy(**fields))
    for number in range(1, count + 1):
        cluster.join(f"n{number}", gpus=4)
    return cluster


def test_a_job_that_succeeds_has_one_attempt_and_cost_what_it_held() -> None:
    cluster = cluster_of(2)
    job = cluster.run(members=2, gpus=4)
    cluster.wait(10_000)
    cluster.end(job, 0, member=0)
    cluster.wait(5_000)
    cluster.end(job, 0, member=1)
    (one,) = told(cluster)
    assert (one.cause, one.sure, one.first) == (Cause.SUCCEEDED, True, None)
    assert (one.members, one.gpu_milli, sorted(one.nodes)) == (2, 8000, ["n1", "n2"])


def test_the_member_that_failed_first_is_named_and_not_those_that_followed() -> None:
    cluster = cluster_of(2)
    job = cluster.run(members=2, gpus=1)
    cluster.wait(1_000)
    cluster.end(job, 7, member=1, why="ValueError: bad shape")
    cluster.deliver()
    cluster.end(job, 143, member=0)
    (one,) = told(cluster, {(1, 1): "line 1\nValueError: bad shape\n"})
    assert one.cause is Cause.OWN_ERROR and one.sure
    assert one.first is not None
    assert (one.first.member, one.first.code, one.first.said) == (1, 7, "ValueError: bad shape")
    assert one.first.lines == ["line 1", "ValueError: bad shape"]
    assert one.ended_ms is not None and one.stopping_ms == one.first.at_ms <= one.ended_ms


@pytest.mark.parametrize(
    ("said", "code", "text", "cause", "evidence"),
    [
        ("", 1, "torch.OutOfMemoryError: CUDA out of memory. Tried", "out of memory", "it printed"),
        ("MemoryError", 1, "MemoryError", "out of memory", "'memoryerror'"),
        ("killed, and the kernel ran out of memory at that moment", 137, "", "out of memory",
         "the kernel killed processes"),
        ("", 137, "step 5", "exited with an error", "did not report running out of memory"),
        ("", 1, "CUDA error: uncorrectable ECC error encountered", "hardware", "ecc"),
        ("", 3, "I forgot my memory", "exited with an error", ""),
    ],
)  # fmt: skip
def test_a_cause_that_is_only_likely_says_so_and_why(
    said: str, code: int, text: str, cause: str, evidence: str
) -> None:
    cluster = cluster_of(1)
    job = cluster.run(gpus=1)
    cluster.end(job, code, why=said)
    (one,) = told(cluster, {(1, 0): text})
    assert one.cause.value == cause
    assert evidence in one.evidence
    assert one.sure == (not evidence)


def test_a_lost_node_is_told_with_what_had_to_be_done_again() -> None:
    cluster = Training(nodes="abc", gpus=1)
    job = cluster.run(members=2, gpus=1, checkpoint_ms=1000)
    cluster.walk(job, 4, saved_step=3)
    lost = cluster.job(job).members[1].slice.node
    cluster.wait(7_000)
    cluster.learn_gone(lost)
    cluster.deliver()
    cluster.end(job, 143, member=0)
    cluster.hear("a", "c")
    first = told(cluster)[0]
    assert first.cause is Cause.NODE_LOST
    assert first.first is not None and (first.first.member, first.first.node) == (1, lost)
    assert first.saved_step == 3
    # The checkpoint was told of with the first step; everything since is lost.
    assert told(cluster)[1].from_step == 3


def test_a_check_that_finds_a_fault_soon_after_names_the_hardware() -> None:
    cluster = cluster_of(1)
    job = cluster.run(gpus=1)
    cluster.end(job, 1)
    result = CheckResult(id="h1", faults=("gpu 0: lost",))
    for late_ms, cause in ((60_000, Cause.HARDWARE), (2 * 3_600_000, Cause.OWN_ERROR)):
        check = NodeChecked(
            at_ms=cluster.now_ms + late_ms, node="n1", result=result, passed=False, why=""
        )
        (one,) = attempts_of([*cluster.log, check], lambda *_: "")
        assert one.cause is cause


def cancelled(cluster: Cluster, job: str) -> None:
    cluster.cancel(job)
    cluster.deliver()
    cluster.end(job, 143)


def out_of_time(cluster: Cluster, job: str) -> None:
    cluster.wait(60_001)
    cluster.step()
    cluster.deliver()
    cluster.end(job, 143)


def drained(cluster: Cluster, job: str) -> None:
    cluster.intend("n1", NodeIntent.DRAINING)
    cluster.deliver()
    cluster.end(job, 143)


@pytest.mark.parametrize(
    ("happens", "cause"),
    [
        (cancelled, Cause.CANCELLED),
        (out_of_time, Cause.TIME_LIMIT),
        (drained, Cause.DRAINED),
    ],
)
def test_what_somebody_decided_is_no_failure(
    happens: Callable[[Cluster, str], None], cause: Cause
) -> None:
    cluster = cluster_of(1)
    job = cluster.run(gpus=1, time_limit_ms=60_000)
    happens(cluster, job)
    assert told(cluster)[0].cause is cause
    assert told(cluster)[0].first is None


def test_a_preempted_job_and_a_hang_are_told() -> None:
    cluster = Training(policy(preempt=Preempt.PRIORITY, run_ms_min=0), nodes="a", gpus=1)
    job = cluster.run(gpus=1, preemptible=True)
    cluster.walk(job, 8)
    cluster.submit(gpus=1, priority=10)
    assert told(cluster)[0].cause is Cause.PREEMPTED
    other = Training(policy(hang_after_ms=5_000), nodes="a", gpus=1)
    job = other.run(gpus=1)
    other.walk(job, 8)
    for _ in range(400):
        other.wait(1_000)
        other.tell()
        if other.job(job).stop_cause is not None:
            break
    assert told(other)[0].cause is Cause.HANG


def test_a_job_that_still_runs_has_cost_something_already() -> None:
    cluster = cluster_of(1)
    cluster.run(gpus=2, gpu_milli=1000)
    cluster.wait(3_000)
    (one,) = told(cluster)
    assert (one.cause, one.ended_ms) == (Cause.NONE, None)


def test_what_was_learned_of_nodes_is_told_once_for_each_change() -> None:
    cluster = Training(nodes="abcd", gpus=1)
    job = cluster.run(members=4, gpus=1)
    cluster.walk(job, 60, slow={2: 3})
    learned = learned_of(cluster.log, job)
    assert learned and learned[0].standing == "suspect"
    assert learned[0].about_this_job and "member 2" in learned[0].why
    pairs = list(pairwise(learned))
    assert all(a.node != b.node or a.standing != b.standing for a, b in pairs)


def test_the_last_lines_are_few_and_short() -> None:
    text = "".join(f"line {n}\n" for n in range(50)) + "\n\n  \n" + "x" * 5000
    lines = last_lines(text)
    assert len(lines) == 8
    assert lines[0] == "line 43"
    assert len(lines[-1]) == 300 and lines[-1].endswith("...")


def test_of_a_line_that_is_written_over_the_last_state_counts() -> None:
    bar = "".join(f"\r{n:3}%" for n in range(101))
    assert last_lines(f"begin\r\n{bar}\r\nRuntimeError: no\r") == [
        "begin",
        "100%",
        "RuntimeError: no",
    ]
