"""What Slurm says is read the same, whichever version says it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.engines.slurm.read import (
    SlurmJob,
    absence,
    chosen,
    features,
    is_over,
    jobs_of_json,
    jobs_of_lines,
    node_named,
    orders,
    partition_names,
    phase_of,
    refusal,
    status,
    unreachable,
    version,
)
from shoal.model.supply import OrderPhase

PENDING, RUNNING, ENDED = OrderPhase.PENDING, OrderPhase.RUNNING, OrderPhase.ENDED
NAME = "shoal-1a2b3c4d-o12"


def number(value: int, *, infinite: bool = False) -> dict[str, Any]:
    return {"set": True, "infinite": infinite, "number": value}


# One job as three versions print it, with fields that we do not read, too.
V22_05 = {
    "meta": {"Slurm": {"version": {"major": 22, "micro": 8, "minor": 5}}},
    "errors": [],
    "jobs": [
        {
            "account": "",
            "array_task_id": None,
            "end_time": 1794826952,
            "exit_code": 256,
            "job_id": 7,
            "job_state": "RUNNING",
            "name": NAME,
            "nodes": "n[1-2]",
            "state_reason": "None",
            "user_name": "ann",
            "time_limit": 10,
        }
    ],
}
V23_02: dict[str, Any] = {
    "jobs": [
        {
            "array_task_id": number(0),
            "end_time": number(1794826952),
            "exit_code": {"status": "ERROR", "return_code": 1},
            "job_id": 7,
            "job_state": "RUNNING",
            "name": NAME,
            "nodes": "n[1-2]",
            "state_reason": "None",
            "user_name": "ann",
            "time_limit": number(10),
        }
    ],
    "meta": {"plugins": {"data_parser": "v0.0.39"}},
    "last_backfill": number(0),
}
V24_05: dict[str, Any] = {
    "jobs": [
        {
            "end_time": number(1794826952),
            "exit_code": {
                "status": ["ERROR"],
                "return_code": number(1),
                "signal": {"id": number(0), "name": ""},
            },
            "job_id": 7,
            "job_state": ["RUNNING"],
            "name": NAME,
            "nodes": "n[1-2]",
            "state_reason": "None",
            "user_name": "ann",
        }
    ],
    "warnings": [],
}
LINES = f"7\t{NAME}\tann\tRUNNING\tNone\t1794826952\tn[1-2]\n"


@pytest.mark.parametrize("answer", [V22_05, V23_02, V24_05], ids=["22.05", "23.02", "24.05"])
def test_every_version_says_the_same(answer: dict[str, Any]) -> None:
    assert jobs_of_json(json.dumps(answer).encode()) == [
        SlurmJob(
            id="7",
            name=NAME,
            user="ann",
            state="RUNNING",
            ends_s=1794826952,
            nodes="n[1-2]",
            code=1,
        )
    ]


def test_lines_say_the_same_as_json() -> None:
    (line,) = jobs_of_lines(LINES)
    (whole,) = jobs_of_json(json.dumps(V22_05).encode())
    assert (line.id, line.name, line.user, line.state, line.reason, line.ends_s, line.nodes) == (
        (whole.id, whole.name, whole.user, whole.state, whole.reason, whole.ends_s, whole.nodes)
    )


@pytest.mark.parametrize("end", [0, None, number(0, infinite=True), {"set": False}])
def test_a_job_without_a_limit_has_no_end(end: object) -> None:
    job = V24_05["jobs"][0] | {"end_time": end}
    assert jobs_of_json(json.dumps({"jobs": [job]}).encode())[0].ends_s is None


@pytest.mark.parametrize("limit", [None, number(0, infinite=True)])
def test_a_job_without_a_limit_has_no_end_though_slurm_makes_one_up(limit: object) -> None:
    job = V24_05["jobs"][0] | {"time_limit": limit}
    assert jobs_of_json(json.dumps({"jobs": [job]}).encode())[0].ends_s is None


@pytest.mark.parametrize("end", ["NONE", "N/A", "Unknown", "0", ""])
def test_a_line_without_a_limit_has_no_end(end: str) -> None:
    assert jobs_of_lines(f"7\t{NAME}\tann\tRUNNING\tNone\t{end}\tn1")[0].ends_s is None


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"jobs": [{"job_id": "x"}]}'])
def test_json_that_is_broken_is_said_to_be(data: bytes) -> None:
    with pytest.raises(ValueError, match="squeue --json"):
        jobs_of_json(data)


def test_a_line_that_is_broken_is_said_to_be() -> None:
    with pytest.raises(ValueError, match="2 fields instead of 7"):
        jobs_of_lines("7\tx")


def job(state: str, *flags: str, reason: str = "", id_: str = "7", name: str = NAME) -> SlurmJob:
    return SlurmJob(id=id_, name=name, user="ann", state=state, flags=flags, reason=reason)


STATES = [
    ("PENDING", (), PENDING, False),
    ("PENDING", ("REQUEUED",), PENDING, False),
    ("REQUEUED", (), PENDING, False),
    ("REQUEUE_HOLD", (), PENDING, False),
    ("SPECIAL_EXIT", (), PENDING, False),
    ("CONFIGURING", (), RUNNING, False),
    ("RUNNING", (), RUNNING, False),
    ("RUNNING", ("CONFIGURING",), RUNNING, False),
    ("SUSPENDED", (), RUNNING, False),
    ("COMPLETING", (), RUNNING, False),
    ("CANCELLED", ("COMPLETING",), RUNNING, False),
    ("STAGE_OUT", (), RUNNING, False),
    ("A_WORD_OF_SLURM_31", (), RUNNING, False),
    ("COMPLETED", (), ENDED, False),
    ("TIMEOUT", (), ENDED, False),
    ("CANCELLED", (), ENDED, True),
    ("PREEMPTED", (), ENDED, True),
    ("NODE_FAIL", (), ENDED, True),
    ("BOOT_FAIL", (), ENDED, True),
    ("OUT_OF_MEMORY", (), ENDED, True),
    ("FAILED", (), ENDED, True),
    ("LAUNCH_FAILED", (), ENDED, True),
    ("REVOKED", (), ENDED, True),
]


@pytest.mark.parametrize(("state", "flags", "phase", "failed"), STATES)
def test_every_state_has_its_phase(
    state: str, flags: tuple[str, ...], phase: OrderPhase, failed: bool
) -> None:
    assert phase_of(job(state, *flags)) == (phase, failed)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Resources", "Resources"),
        ("Priority", "Priority"),
        ("PartitionTimeLimit", "PartitionTimeLimit (lasts: longer than the partition allows)"),
        ("QOSMaxJobsPerUserLimit", "QOSMaxJobsPerUserLimit (a quota of the QOS: "),
        ("AssocGrpGRES", "AssocGrpGRES (a quota of the account: "),
        ("JobHeldAdmin", "JobHeldAdmin (an administrator holds the job: scontrol release)"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "ReqNodeNotAvail, UnavailableNodes:n1 (nodelist"),
        ("", ""),
    ],
)
def test_a_waiting_order_gives_slurms_reason_and_the_field_to_change(
    reason: str, said: str
) -> None:
    assert status(job("PENDING", reason=reason), "o12").reason.startswith(said)


def test_an_order_that_ended_says_how() -> None:
    assert status(job("NODE_FAIL", reason="NodeDown"), "o12").reason == "NODE_FAIL: NodeDown"
    assert status(job("PREEMPTED"), "o12").reason == "PREEMPTED"
    words = "n1: python is not there"
    failed = status(job("FAILED", reason="NonZeroExitCode"), "o12", words)
    assert failed.reason == f"FAILED: NonZeroExitCode: {words}" and failed.failed
    assert status(job("CANCELLED"), "o12", words).reason == "CANCELLED"
    words = "/usr/bin/python3: No module named 'shoal'"
    failed = status(job("FAILED", reason="NonZeroExitCode"), "o12", words)
    assert failed.reason.startswith("python: ") and words in failed.reason
    long = status(job("FAILED", reason="NonZeroExitCode"), "o12", "x" * 1000)
    assert len(long.reason) == 300


def test_jobs_of_others_and_of_other_clusters_are_not_seen() -> None:
    jobs = [job("RUNNING"), job("RUNNING", name="train"), job("RUNNING", name="shoal-99999999-o1")]
    assert orders(jobs, "1a2b3c4d") == {"o12": [jobs[0]]}


def test_of_several_jobs_for_one_order_the_living_one_counts() -> None:
    old, live, late = job("CANCELLED"), job("RUNNING", id_="8"), job("FAILED", id_="10")
    assert orders([late, live, old], "1a2b3c4d")["o12"] == [old, live, late]
    assert chosen([old, live, late]) is live
    assert chosen([old, late]) is late


@pytest.mark.parametrize(
    ("text", "found"),
    [("slurm 23.11.4", (23, 11)), ("slurm-wlm 22.05.8", (22, 5)), ("slurm 25.05.0-0rc1", (25, 5))],
)
def test_a_version_is_read(text: str, found: tuple[int, int]) -> None:
    assert version(text) == found and version("nothing") is None


# What Slurm 22.05 printed, and the field that is named for it.
REFUSALS = [
    ("sbatch: error: invalid partition specified: nope\n", "partition: invalid partition"),
    ("sbatch: error: Batch job submission failed: Invalid partition name specified", "partition: "),
    (
        "sbatch: error: Batch job submission failed: Invalid account or account/partition "
        "combination specified",
        "account: ",
    ),
    (
        "sbatch: error: Batch job submission failed: User's group not permitted to use this "
        "partition",
        "partition: ",
    ),
    ("sbatch: error: Batch job submission failed: Invalid qos specification", "qos: "),
    ("sbatch: error: Invalid generic resource (gres) specification", "gpus: "),
    ("sbatch: error: Batch job submission failed: Invalid feature specification", "constraint: "),
    (
        "sbatch: error: Batch job submission failed: Requested reservation is invalid",
        "reservation: ",
    ),
    (
        "sbatch: error: Batch job submission failed: Invalid node name specified",
        "nodelist or exclude: ",
    ),
    ("sbatch: error: Memory specification can not be satisfied", "memory: "),
    (
        "sbatch: error: Batch job submission failed: Requested node configuration is not available",
        "gpus, cpus, memory or constraint: ",
    ),
    (
        "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or "
        "exceeds some limit)",
        "lasts: ",
    ),
    ("sbatch: error: QOSMaxSubmitJobPerUserLimit\n", "most (a quota of Slurm's): "),
    (
        "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job "
        "violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
        "most (a quota of Slurm's): AssocMaxSubmitJobLimit; Job violates",
    ),
    ("slurm_update error: Invalid user id", "account (no permission): "),
    ("sbatch: error: something new", "something new"),
    ("", "it gave no reason"),
]


@pytest.mark.parametrize(("stderr", "said"), REFUSALS)
def test_a_refusal_names_the_field_of_the_supply(stderr: str, said: str) -> None:
    assert refusal(stderr).startswith(said) and "\n" not in refusal(stderr)


def test_a_slurmctld_that_does_not_answer_refuses_nothing() -> None:
    away = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    assert unreachable(away) and not any(unreachable(stderr) for stderr, _ in REFUSALS)
    assert absence(away).startswith("slurmctld does not answer: slurm_load_jobs error: Unable")
    nowhere = "fetch_config: DNS SRV lookup failed\nCould not establish a configuration source"
    assert unreachable(nowhere)
    assert absence(nowhere).startswith("no Slurm is configured on this machine")


def test_a_job_that_ended_while_it_was_cancelled_is_over() -> None:
    assert is_over("scancel: error: Kill job error on job id 1: Invalid job id specified")
    assert is_over("scancel: error: Kill job error: Job/step already completing or completed")
    assert not is_over("scancel: error: Kill job error: Access/permission denied")


def test_a_nodes_line_is_read_though_values_have_spaces() -> None:
    text = (
        "NodeName=n1 Arch=aarch64 CPULoad=0.99 AvailableFeatures=fast,x ActiveFeatures=fast,rack1 "
        "OS=Linux 6.18 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=512000 Comment=a word\n"
        "NodeName=n2 ActiveFeatures=(null)\n"
    )
    assert node_named(text, "n1")["OS"] == "Linux 6.18 #1 SMP PREEMPT_DYNAMIC @0"
    assert features(node_named(text, "n1")) == ["fast", "rack1"]
    assert features(node_named(text, "n2")) == [] and node_named(text, "n3") == {}


def test_partitions_are_read() -> None:
    text = "PartitionName=main AllowGroups=ALL Default=YES\nPartitionName=short MaxTime=01:00:00\n"
    assert partition_names(text) == ["main", "short"]
