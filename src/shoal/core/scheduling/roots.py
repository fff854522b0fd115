"""Who sees a job's checkpoints: nodes whose root for them is the same place."""

from __future__ import annotations

from shoal.core.state.state import State
from shoal.model.job import Job
from shoal.model.resources import Slice

CHECKPOINT_DIR = "SHOAL_CHECKPOINT_DIR"  # of a job that keeps its own place
NAMED_MAX = 3


def blind_nodes(state: State, job: Job) -> set[int]:
    """Nodes on which a job that ran before would not find what it saved, as far as is known."""
    roots = _roots(state, job)
    return {
        node.index
        for node in (state.order if roots else ())
        if node.spec.checkpoints and node.spec.checkpoints not in roots
    }


def starts_over(state: State, job: Job, given: tuple[Slice, ...]) -> str:
    """What to say of a place that does not see the job's checkpoints; empty if it does."""
    blind = blind_nodes(state, job)
    here = dict.fromkeys(s.node for s in given if state.nodes[s.node].index in blind)
    if not here:
        return ""
    there = list(dict.fromkeys(member.slice.node for member in job.members))
    return (
        f"; what it saved is on {_named(there)}, and {_named(list(here))} cannot see it: it starts "
        "over there; set SHOAL_CHECKPOINT_ROOT to a place that all nodes see"
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
