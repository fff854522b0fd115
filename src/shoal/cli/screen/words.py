"""What views say of a job or a service in words: its state, replicas and bounds."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.model.bound import Bound
from shoal.model.resources import plural
from shoal.model.service import Scale
from shoal.model.views import JobRow, NodeView, StatusView

STATE_WORDS = {
    "succeeded": "has succeeded",
    "failed": "has failed",
    "cancelled": "was cancelled",
    "timed-out": "ran out of time",
}


CLOSED = ("lost", "quarantined", "cordoned", "draining", "drained")  # nodes that take no jobs


def unusable_text(status: StatusView) -> str:
    """', 8 drained': the free GPUs of nodes that take no jobs."""
    states = [state for state in CLOSED if status.nodes.get(state)]
    where = " or ".join(states) if 0 < len(states) <= 2 else "unavailable"
    return f", {status.gpus_unusable} {where}" if status.gpus_unusable else ""


def replicas_text(scale: Scale) -> str:
    """As in a service file: '1 replica', or '1..8 replicas'."""
    if scale.least == scale.most:
        return plural(scale.most, "replica")
    return f"{scale.least}..{scale.most} replicas"


def state_text(state: str) -> str:
    """A job's state as the rest of a sentence about it."""
    return STATE_WORDS.get(state, f"is {state}")


def bound_lines(bound: Bound | None) -> list[str]:
    """The verdict with its first evidence, then what else is known."""
    if bound is None:
        return []
    return [bound.text, *(f"  {text}" for text in bound.evidence[1:])]


REASONS_SHOWN = 6


def node_lines(node: NodeView, closed: Sequence[str]) -> list[str]:
    """Why a node is in its state, and what is there. `closed`: who closed it."""
    lines = [text for text in closed if not text.endswith(" is open")]
    lines += [node.why] if node.why else []
    lines += [f"ends: {node.ends_why}"] if node.ends_why else []
    lines.append(f"{node.gpus_free} of {plural(node.gpus, 'GPU')} free")
    if node.jobs:
        lines.append(f"jobs there: {', '.join(node.jobs)}")
    return lines


def waiting_lines(rows: Sequence[JobRow]) -> list[str]:
    """What somebody's jobs hold, and why the others wait, most jobs first."""
    running = [row for row in rows if row.state not in ("waiting", "asleep", "away")]
    waiting = [row for row in rows if row.state == "waiting"]
    away = [row for row in rows if row.state == "away"]
    gpus = sum(row.size * row.gpus * (row.gpu_milli or 1000) for row in running) / 1000
    held = f"{plural(len(running), 'job')} on {gpus:g} GPUs"
    there = f"; {plural(len(away), 'job')} at neighbors" if away else ""
    lines = [f"{held}; {plural(len(waiting), 'job')} waiting{there}"]
    reasons: dict[str, list[str]] = {}
    for row in waiting:
        reasons.setdefault(row.why, []).append(row.id)
    for why, jobs in sorted(reasons.items(), key=lambda one: -len(one[1]))[:REASONS_SHOWN]:
        more = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
        lines.append(f"{jobs[0]}{more}: {why}")
    more_reasons = len(reasons) - REASONS_SHOWN
    return [*lines, f"and {plural(more_reasons, 'reason')} more"] if more_reasons > 0 else lines
