"""What pods and machines say, in our words: orders, ends and labels. Pure."""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shoal.engines.kubernetes.options import CONTAINER
from shoal.engines.kubernetes.render import LOT, NODE, ORDER
from shoal.model.node import LABEL_PATTERN, LABEL_VALUE_PATTERN, LABELS_MAX
from shoal.model.supply import REASON_CHARACTERS_MAX, OrderPhase, OrderStatus

Object = dict[str, Any]

# A pod whose machine does not answer stays "Terminating" forever. After its time and this long, it
# counts as ended, so that another machine is asked for.
STUCK_S = 30
HANDLES_MAX = 3  # pods that an order's handle names
PEOPLE_S = 600  # until a machine goes that an autoscaler or a person empties

# Taints by which a machine's owner announces its end, the seconds that are left from then on, and
# what it means. Without a documented time it is the shortest that is known.
ENDING_TAINTS = {
    "cloud.google.com/impending-node-termination": (25, "Google ends the machine"),
    "aws-node-termination-handler/spot-itn": (115, "AWS takes the spot instance back"),
    "aws-node-termination-handler/scheduled-maintenance": (115, "AWS plans maintenance"),
    "aws-node-termination-handler/asg-lifecycle-termination": (115, "AWS ends the instance"),
    "aws-node-termination-handler/rebalance-recommendation": (
        PEOPLE_S,
        "AWS is likely to take the spot instance back",
    ),
    "ToBeDeletedByClusterAutoscaler": (PEOPLE_S, "the cluster autoscaler removes the machine"),
    "karpenter.sh/disrupted": (PEOPLE_S, "Karpenter removes the machine"),
    "karpenter.sh/disruption": (PEOPLE_S, "Karpenter removes the machine"),
    "node.kubernetes.io/out-of-service": (0, "the machine is out of service"),
    "node.cloudprovider.kubernetes.io/shutdown": (0, "the machine is shut down"),
}
# Azure announces it as a condition of the machine.
ENDING_CONDITIONS = {"VMEventScheduled": (30, "Azure plans an event for the machine")}
# A cordon says nothing of when, but whoever cordons a machine is about to empty it.
CORDONED_S = 3600


class Notice(NamedTuple):
    """A node ends. `at_s`: in seconds of the API server's clock; None: from now on `in_s` are left,
    because the notice itself has no time."""

    node: str
    cause: str  # names the notice: the same one is noticed once
    at_s: float | None
    in_s: float
    why: str


def slim(pod: Object) -> Object:
    """Without the record of who wrote which field, which is half of it."""
    meta = {key: value for key, value in pod["metadata"].items() if key != "managedFields"}
    return {**pod, "metadata": meta}


def order_of(pod: Object) -> str:
    return str(pod["metadata"]["labels"].get(ORDER, ""))


def node_of(pod: Object) -> str:
    return str(pod["metadata"]["labels"].get(NODE, ""))


def machine_of(pod: Object) -> str:
    return str(pod.get("spec", {}).get("nodeName", ""))


def seconds(text: str | None) -> float | None:
    """RFC 3339 in UTC, which is all that Kubernetes writes."""
    try:
        return float(calendar.timegm(time.strptime((text or "")[:19], "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None


# -- orders --------------------------------------------------------------------------------


def orders(
    pods: Sequence[Object], machines: Mapping[str, Object], now_s: float, hints: Mapping[str, str]
) -> list[OrderStatus]:
    """All orders among these pods. `hints`: what events say of a pod that does not start."""
    by_order: dict[str, list[Object]] = {}
    for pod in pods:
        if order_of(pod):
            by_order.setdefault(order_of(pod), []).append(pod)
    return [
        _order(order, sorted(found, key=_name), machines, now_s, hints)
        for order, found in sorted(by_order.items())
    ]


def _order(
    order: str,
    pods: Sequence[Object],
    machines: Mapping[str, Object],
    now_s: float,
    hints: Mapping[str, str],
) -> OrderStatus:
    living = [pod for pod in pods if not _over(pod, now_s)]
    handle = ", ".join(_name(pod) for pod in pods[:HANDLES_MAX])
    if len(pods) > HANDLES_MAX:
        handle += f" and {len(pods) - HANDLES_MAX} more"
    if not living:
        ends = [_end(pod) for pod in pods]
        reason, failed = next((end for end in ends if end[1]), ends[0])
        phase = OrderPhase.ENDED
    elif any(_phase(pod) == "Running" for pod in living):
        phase, failed = OrderPhase.RUNNING, False
        reason = _first(_trouble(pod, machines) for pod in living)
    elif len(pods) < _lot(pods[0]) and not any(_leaving(pod) for pod in pods):
        # We died between two pods of one lot: asked again, the supplier makes the others.
        return OrderStatus(order=order, phase=OrderPhase.UNKNOWN, handle=handle)
    else:
        phase, failed = OrderPhase.PENDING, False
        reason = _first(hints.get(_name(pod), "") or pending_reason(pod) for pod in living)
    return OrderStatus(
        order=order,
        phase=phase,
        reason=_line(reason),
        failed=failed,
        handle=handle,
    )


def _first(texts: Any) -> str:
    return next((text for text in texts if text), "")


def _line(text: str) -> str:
    """One line, as long as a reason may be."""
    return " ".join(text.split())[:REASON_CHARACTERS_MAX]


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def _lot(pod: Object) -> int:
    text = str(pod["metadata"]["labels"].get(LOT, "1"))
    return int(text) if text.isdigit() else 1


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", ""))


def _leaving(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _over(pod: Object, now_s: float) -> bool:
    if _phase(pod) in ("Succeeded", "Failed"):
        return True
    due = seconds(pod["metadata"].get("deletionTimestamp"))
    return due is not None and now_s > due + STUCK_S


def over_since_s(pod: Object) -> float | None:
    """When its container ended, by the API server's clock; None: it has not."""
    if _phase(pod) not in ("Succeeded", "Failed"):
        return None
    ended = seconds((_state(pod).get("terminated") or {}).get("finishedAt"))
    return ended if ended is not None else seconds(pod["metadata"].get("creationTimestamp"))


def pending_reason(pod: Object) -> str:
    """Kubernetes' own words for why it does not run yet."""
    waiting = _state(pod).get("waiting") or {}
    reason, message = str(waiting.get("reason", "")), str(waiting.get("message", ""))
    if reason and reason not in ("ContainerCreating", "PodInitializing"):
        return f"{reason}: {message}" if message else reason
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return str(scheduled.get("message") or scheduled.get("reason") or "")
    return f"starts on {machine_of(pod)}" if machine_of(pod) else "not scheduled yet"


def starts_long(pod: Object, now_s: float, after_s: float) -> bool:
    """It has a machine, and yet no container after this time: events may say why."""
    since = seconds(_condition(pod, "PodScheduled").get("lastTransitionTime"))
    waits = _phase(pod) == "Pending" and machine_of(pod) and not _leaving(pod)
    plain = (_state(pod).get("waiting") or {}).get("reason", "ContainerCreating")
    return (
        bool(waits)
        and plain == "ContainerCreating"
        and since is not None
        and now_s > since + after_s
    )


def _trouble(pod: Object, machines: Mapping[str, Object]) -> str:
    """What is wrong with a pod that runs."""
    machine = machines.get(machine_of(pod))
    if machine is not None:
        ready = next((one for one in machine["conditions"] if one["type"] == "Ready"), None)
        if ready is not None and ready.get("status") != "True":
            return f"machine {machine_of(pod)} is not ready: {ready.get('message', '')}"
    disrupted = _condition(pod, "DisruptionTarget")
    if disrupted.get("status") == "True":
        return str(disrupted.get("message") or disrupted.get("reason") or "")
    return f"pod {_name(pod)} is being deleted" if _leaving(pod) else ""


def _end(pod: Object) -> tuple[str, bool]:
    """Why it ended, and whether that was against our will."""
    status = pod.get("status", {})
    disrupted = _condition(pod, "DisruptionTarget")
    if disrupted.get("status") == "True":
        text = str(disrupted.get("message") or disrupted.get("reason") or "")
        return f"{_name(pod)} was evicted: {text}", True
    if status.get("reason") == "DeadlineExceeded":
        return f"{_name(pod)} reached its time limit", False
    if _leaving(pod) and _phase(pod) not in ("Succeeded", "Failed"):
        return f"machine {machine_of(pod)} does not end {_name(pod)}", True
    if status.get("reason"):
        return f"{status['reason']}: {status.get('message', '')}", True
    ended = _state(pod).get("terminated") or {}
    if _phase(pod) == "Succeeded" or (_leaving(pod) and ended):
        return f"{_name(pod)} ended", False
    text = str(ended.get("message") or ended.get("reason") or "no reason is given")
    return f"{_name(pod)} ended with code {ended.get('exitCode', '?')}: {_last_line(text)}", True


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _state(pod: Object) -> Object:
    for one in pod.get("status", {}).get("containerStatuses") or ():
        if one.get("name") == CONTAINER:
            found: Object = one.get("state") or {}
            return found
    return {}


def _condition(pod: Object, kind: str) -> Object:
    for one in pod.get("status", {}).get("conditions") or ():
        if one.get("type") == kind:
            found: Object = one
            return found
    return {}


# -- machines ------------------------------------------------------------------------------


def machine(found: Object) -> Object:
    """The little that we need of a Kubernetes node: those objects are large, and may be many."""
    spec, status = found.get("spec", {}), found.get("status", {})
    return {
        "labels": found["metadata"].get("labels") or {},
        "taints": spec.get("taints") or [],
        "cordoned": bool(spec.get("unschedulable")),
        "conditions": [
            {key: one.get(key, "") for key in ("type", "status", "message")}
            for one in status.get("conditions") or ()
            if one.get("type") == "Ready" or one.get("type") in ENDING_CONDITIONS
        ],
    }


def labels_of(found: Object, wanted: Sequence[str]) -> dict[str, str]:
    """The labels of a machine that its node takes over."""
    taken: dict[str, str] = {}
    for name, value in sorted(found["labels"].items()):
        asked = any(
            name.startswith(one[:-1]) if one.endswith("/*") else name == one for one in wanted
        )
        fits = re.search(LABEL_PATTERN, name) and re.search(LABEL_VALUE_PATTERN, value)
        if asked and fits and len(taken) < LABELS_MAX:
            taken[name] = value
    return taken


# -- ends ----------------------------------------------------------------------------------


def notices(pods: Sequence[Object], machines: Mapping[str, Object]) -> list[Notice]:
    """What says that a node will end: of its pod, or of the machine under it."""
    found: list[Notice] = []
    for pod in pods:
        node = node_of(pod)
        if not node or _phase(pod) != "Running":
            continue
        due = seconds(pod["metadata"].get("deletionTimestamp"))
        if due is not None:
            text = _condition(pod, "DisruptionTarget").get("message") or "its pod is being deleted"
            found.append(Notice(node, "deleted", due, 0, _line(str(text))))
        limit_s = pod["spec"].get("activeDeadlineSeconds")
        began = seconds(pod["status"].get("startTime"))
        if limit_s and began is not None:
            found.append(Notice(node, "limit", began + limit_s, 0, "the time limit of its pod"))
        under = machines.get(machine_of(pod))
        if under is not None:
            found += _of_machine(node, machine_of(pod), under)
    return found


def _of_machine(node: str, name: str, under: Object) -> list[Notice]:
    found: list[Notice] = []
    for taint in under["taints"]:
        known = ENDING_TAINTS.get(str(taint.get("key", "")))
        if known is not None:
            left_s, why = known
            began = seconds(taint.get("timeAdded")) or _epoch(taint.get("value"))
            at_s = began + left_s if began is not None else None
            found.append(Notice(node, f"{name} {taint['key']}", at_s, left_s, f"{why} ({name})"))
    for condition in under["conditions"]:
        known = ENDING_CONDITIONS.get(str(condition["type"]))
        if known is not None and condition["status"] == "True":
            text = f"{known[1]} ({name}): {condition['message']}"
            found.append(Notice(node, f"{name} {condition['type']}", None, known[0], _line(text)))
    if under["cordoned"] and not found:
        why = f"the machine is cordoned ({name})"
        found.append(Notice(node, f"{name} cordoned", None, CORDONED_S, why))
    return found


def _epoch(value: Any) -> float | None:
    """The cluster autoscaler writes the time into its taint's value."""
    text = str(value or "")
    return float(text) if text.isdigit() and len(text) == 10 else None


def last_event(events: Sequence[Object]) -> str:
    """The newest of a pod's warnings."""
    newest = max(
        events,
        key=lambda one: str(one.get("lastTimestamp") or one.get("eventTime") or ""),
        default=None,
    )
    return (
        "" if newest is None else _line(f"{newest.get('reason', '')}: {newest.get('message', '')}")
    )
