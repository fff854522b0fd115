"""Pods and machines as Kubernetes writes them, read in our words."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.engines.kubernetes import read
from shoal.engines.kubernetes.options import LABELS
from shoal.model.supply import OrderPhase

NOW = read.seconds("2026-11-16T12:00:00Z") or 0.0
Object = dict[str, Any]


def pod(
    phase: str = "Pending", *, order: str = "o1", index: int = 0, lot: int = 1, **status: Any
) -> Object:
    return {
        "metadata": {
            "name": f"shoal-c-{order}-{index}",
            "uid": f"u{index}",
            "creationTimestamp": "2026-11-16T11:00:00Z",
            "labels": {"shoal-order": order, "shoal-node": f"n{index}", "shoal-lot": str(lot)},
        },
        "spec": {"nodeName": "k1"} if phase != "Pending" else {},
        "status": {"phase": phase, **status},
    }


def container(**state: Any) -> list[Object]:
    return [{"name": "node", "state": state}]


def condition(kind: str, status: str, message: str = "", **more: str) -> Object:
    return {"type": kind, "status": status, "message": message, **more}


def deleted(found: Object, at: str) -> Object:
    found["metadata"]["deletionTimestamp"] = at
    return found


def machine(*taints: Object, ready: str = "True", cordoned: bool = False) -> Object:
    return read.machine(
        {
            "metadata": {"name": "k1"},
            "spec": {"taints": list(taints), "unschedulable": cordoned},
            "status": {"conditions": [condition("Ready", ready, "Kubelet stopped posting")]},
        }
    )


def only(*pods: Object, machines: dict[str, Object] | None = None) -> Any:
    (status,) = read.orders(pods, machines or {}, NOW, {})
    return status


UNSCHEDULED = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
PULL = 'Back-off pulling image "nope"'


@pytest.mark.parametrize(
    ("found", "phase", "reason", "failed"),
    [
        (pod(), "pending", "not scheduled yet", False),
        (
            pod(conditions=[condition("PodScheduled", "False", UNSCHEDULED)]),
            "pending",
            UNSCHEDULED,
            False,
        ),
        (
            pod(
                containerStatuses=container(waiting={"reason": "ImagePullBackOff", "message": PULL})
            ),
            "pending",
            f"ImagePullBackOff: {PULL}",
            False,
        ),
        (pod("Running"), "running", "", False),
        (deleted(pod("Running"), "2026-11-16T12:00:30Z"), "running", "being deleted", False),
        (deleted(pod("Running"), "2026-11-16T11:59:00Z"), "ended", "machine k1 does not end", True),
        (pod("Succeeded"), "ended", "shoal-c-o1-0 ended", False),
        (
            pod("Failed", reason="Evicted", message="The node was low on resource: memory."),
            "ended",
            "Evicted: The node was low on resource: memory.",
            True,
        ),
        (
            pod("Failed", conditions=[condition("DisruptionTarget", "True", "preempted by x")]),
            "ended",
            "shoal-c-o1-0 was evicted: preempted by x",
            True,
        ),
        (pod("Failed", reason="DeadlineExceeded"), "ended", "reached its time limit", False),
        (
            pod(
                "Failed",
                containerStatuses=container(
                    terminated={"exitCode": 1, "message": "a\nshoal: the token was revoked\n"}
                ),
            ),
            "ended",
            "shoal-c-o1-0 ended with code 1: shoal: the token was revoked",
            True,
        ),
        (
            pod(
                "Failed",
                containerStatuses=container(terminated={"exitCode": 137, "reason": "OOMKilled"}),
            ),
            "ended",
            "ended with code 137: OOMKilled",
            True,
        ),
    ],
)
def test_a_pods_state_is_read_and_never_guessed(
    found: Object, phase: str, reason: str, failed: bool
) -> None:
    status = only(found)
    assert (status.phase.value, status.failed) == (phase, failed)
    assert reason in status.reason and status.handle == "shoal-c-o1-0"


def test_a_lot_of_which_we_made_only_a_part_is_unknown_so_the_rest_is_made() -> None:
    assert only(pod(lot=2)).phase is OrderPhase.UNKNOWN
    assert only(pod(lot=2), pod(index=1, lot=2)).phase is OrderPhase.PENDING
    assert only(pod("Running", lot=2)).phase is OrderPhase.RUNNING


def test_an_order_ends_with_its_last_pod() -> None:
    assert only(pod("Failed"), pod("Running", index=1)).phase is OrderPhase.RUNNING
    assert only(pod("Failed"), pod("Succeeded", index=1)).failed


def test_a_machine_that_is_not_ready_is_the_reason() -> None:
    status = only(pod("Running"), machines={"k1": machine(ready="Unknown")})
    assert status.reason == "machine k1 is not ready: Kubelet stopped posting"


def test_a_reason_is_one_line_of_bounded_length() -> None:
    text = "first\nsecond " + "x" * 10_000
    status = only(pod(conditions=[condition("PodScheduled", "False", text)]))
    assert "\n" not in status.reason and len(status.reason) == 300


@pytest.mark.parametrize(
    ("taint", "left_s"),
    [
        ({"key": "cloud.google.com/impending-node-termination"}, None),
        ({"key": "ToBeDeletedByClusterAutoscaler", "value": str(int(NOW) - 60)}, 540),
        ({"key": "aws-node-termination-handler/spot-itn", "timeAdded": "2026-11-16T11:59:00Z"}, 55),
    ],
)
def test_a_notice_on_the_machine_is_an_end(taint: Object, left_s: int | None) -> None:
    (notice,) = read.notices([pod("Running")], {"k1": machine(taint)})
    assert notice.node == "n0" and "(k1)" in notice.why
    assert notice.at_s == (None if left_s is None else NOW + left_s)


def test_a_cordon_is_an_end_in_an_hour_and_ordinary_taints_are_none() -> None:
    (notice,) = read.notices([pod("Running")], {"k1": machine(cordoned=True)})
    assert (notice.in_s, notice.at_s) == (3600, None)
    usual = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    assert read.notices([pod("Running")], {"k1": machine(usual)}) == []


def test_an_eviction_and_a_time_limit_are_ends() -> None:
    evicted = deleted(pod("Running"), "2026-11-16T12:00:30Z")
    evicted["status"]["conditions"] = [condition("DisruptionTarget", "True", "Eviction API")]
    (notice,) = read.notices([evicted], {})
    assert (notice.at_s, notice.why) == (NOW + 30, "Eviction API")
    limited = pod("Running", startTime="2026-11-16T11:30:00Z")
    limited["spec"]["activeDeadlineSeconds"] = 3600
    (notice,) = read.notices([limited], {})
    assert (notice.at_s, notice.why) == (NOW + 1800, "the time limit of its pod")


def test_only_the_chosen_labels_are_taken() -> None:
    own = {"topology.kubernetes.io/zone": "eu-1", "secret": "x", "a.b/c": "1", "a.b/d": "2"}
    found = {**machine(), "labels": own}
    assert read.labels_of(found, LABELS) == {"topology.kubernetes.io/zone": "eu-1"}
    assert read.labels_of(found, ("a.b/*",)) == {"a.b/c": "1", "a.b/d": "2"}


def test_the_newest_warning_of_a_pod_says_why_it_does_not_start() -> None:
    events = [
        {"reason": "FailedMount", "message": "no secret", "lastTimestamp": "2026-11-16T11:00:02Z"},
        {"reason": "Old", "message": "old", "lastTimestamp": "2026-11-16T11:00:01Z"},
    ]
    assert read.last_event(events) == "FailedMount: no secret" and read.last_event([]) == ""
