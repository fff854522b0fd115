"""Which nodes see a job's checkpoints: those whose checkpoint root is the same place."""

from __future__ import annotations

from shoal.core.state.state import State
from shoal.model.job import Job
from shoal.model.resources import Slice

CHECKPOINT_DIR = "SHOAL_CHECKPOINT_DIR"  # set by a job with its own checkpoint folder
NAMED_MAX = 3


def blind_nodes(state: State, job: Job) -> set[int]:
    """Nodes on which a job that ran before would not find its checkpoints, as far as is known."""
    roots = _roots(state, job)
    return {
        node.index
        for node in (state.order if roots else ())
        if node.spec.checkpoints and node.spec.checkpoints not in roots
    }


def starts_over(state: State, job: Job, given: tuple[Slice, ...]) -> str:
    """A warning if these nodes do not see the job's checkpoints; empty if they do."""
    blind = blind_nodes(state, job)
    here = dict.fromkeys(s.node for s in given if state.nodes[s.node].index in blind)
    if not here:
        return ""
    there = list(dict.fromkeys(member.slice.node for member in job.members))
    return (
        f"; its checkpoints are on {_named(there)}, and {_named(list(here))} cannot see them: it "
        "starts over; set SHOAL_CHECKPOINT_ROOT to a folder that all nodes share"
    )


def _roots(state: State, job: Job) -> set[str]:
    saves = job.saved_step or job.spec.checkpoint_ms
    if not job.attempt or not saves or job.spec.env.get(CHECKPOINT_DIR):
        return set()
    nodes = [state.nodes.get(member.slice.node) for member in job.members]
    return {node.spec.checkpoints for node in nodes if node is not None} - {""}


def _named(nodes: list[str]) -> str:
    more = f" and {len(nodes) - NAMED_MAX} more" if len(nodes) > NAMED_MAX else ""
    return ", ".join(nodes[:NAMED_MAX]) + more
