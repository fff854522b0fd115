"""What people see of jobs that sleep, and of nodes where they do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from shoal.control.loop import ControlLoop
from shoal.core.state.state import Node
from shoal.model.job import Job, Member
from shoal.model.views import NapView


class Sleepers(NamedTuple):
    """Members that sleep on a node, or are on the way there or back."""

    members: int
    host_mb: int  # that is set aside for what they had on GPUs


def nap_view(job: Job) -> NapView | None:
    if not job.napping or job.dozed_ms is None:
        return None
    return NapView(
        since_ms=job.dozed_ms,
        cause=job.sleep_cause.value if job.sleep_cause is not None else "",
        wants=job.wants,
        host_mb=sum(member.host_mb for member in job.members if not member.over),
    )


def sleepers_of(loop: ControlLoop, node: Node) -> Sleepers:
    found = list(_asleep(loop, node))
    return Sleepers(len(found), sum(member.host_mb for member in found))


def _asleep(loop: ControlLoop, node: Node) -> Iterable[Member]:
    if not loop.state.napping:  # nearly always true, and much cheaper
        return
    for ref, job in loop.state.placed[node.id].items():
        if job.napping:
            yield job.members[ref.member]


def why_no_sleep(node: Node) -> str:
    return "" if node.spec.sleep else node.spec.sleep_why or "its agent is older"


def node_naps(loop: ControlLoop, node: Node) -> dict[str, Any]:
    sleepers = sleepers_of(loop, node)
    return {
        "sleep": node.spec.sleep,
        "sleep_why": why_no_sleep(node),
        "sleepers": sleepers.members,
        "sleepers_mb": sleepers.host_mb,
    }


def naps_mark(jobs: Iterable[Job]) -> tuple[tuple[str, int], ...]:
    """Changes whenever one of these lends GPUs, or takes some again."""
    return tuple((job.phase.value, job.naps) for job in jobs if job.naps)
