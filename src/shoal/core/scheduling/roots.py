"""Which nodes see a job's checkpoints: those whose checkpoint root is the same place.

Where nodes have several such places, checkpoints travel: they are copied to the head as they are
saved, and fetched by the nodes on which the job starts again. So do those of jobs that neighbors
may run, or have run.
"""

from __future__ import annotations

from shoal.core.state.state import State
from shoal.model.job import Job
from shoal.model.neighbor import asks, handed_here
from shoal.model.resources import Slice

CHECKPOINT_DIR = "SHOAL_CHECKPOINT_DIR"  # set by a job with its own checkpoint folder
NAMED_MAX = 3


def travels(state: State, job: Job) -> bool:
    """May the job start where it cannot see its checkpoints, and are they copied to the head?"""
    if not state.policy.checkpoint_copy_mb or job.spec.env.get(CHECKPOINT_DIR):
        return False
    if job.returns or asks(job.spec.cluster) or handed_here(job.spec):
        return True
    roots = state.caches.roots
    if roots is None:
        roots = frozenset(node.spec.checkpoints for node in state.order) - {""}
        state.caches.roots = roots
    return len(roots) > 1


def carries(state: State, job: Job) -> bool:
    """Is all that it has saved at the head, so that it can go to another cluster?"""
    copied = state.heard.copied.get(job.id)
    return copied is not None and copied.step >= job.saved_step and travels(state, job)


def copying(state: State, job: Job) -> frozenset[int]:
    """The members whose nodes copy what the job saves: one for each place."""
    first: dict[str, int] = {}
    for number, member in enumerate(job.members):
        first.setdefault(state.nodes[member.slice.node].spec.checkpoints, number)
    return frozenset(first.values())


def blind_nodes(state: State, job: Job) -> set[int]:
    """Nodes on which a job that ran before would not find its checkpoints, as far as is known."""
    roots = _roots(state, job)
    return {
        node.index
        for node in (state.order if roots else ())
        if node.spec.checkpoints and node.spec.checkpoints not in roots
    }


def where_from(state: State, job: Job, given: tuple[Slice, ...]) -> str:
    """What these nodes find of the job's work, if they do not see all that it saved."""
    before = _roots(state, job)
    if not before:
        return ""
    now = {state.nodes[s.node].spec.checkpoints for s in given}
    if not before - now or "" in now:
        return ""
    there = list(dict.fromkeys(member.slice.node for member in job.members))
    here = list(dict.fromkeys(s.node for s in given if s.node not in there)) or [given[0].node]
    copied = state.heard.copied.get(job.id)
    if copied is not None and travels(state, job):
        of = f" of step {copied.step}" if copied.step else ""
        lost = ""
        if copied.step and job.saved_step > copied.step:
            lost = f"; step {job.saved_step} was saved on {_named(there)} and not copied in time"
        origin = _named(list(copied.held_by)) or "the head"
        return f"; {_named(here)} gets its checkpoint{of} from {origin}{lost}"
    return (
        f"; its checkpoints are on {_named(there)}, and {_named(here)} cannot see them: it "
        f"starts over; {_advice(state, job)}"
    )


def _advice(state: State, job: Job) -> str:
    if travels(state, job):
        return "none of them was copied to the head yet"
    return "set SHOAL_CHECKPOINT_ROOT to a folder that all nodes share"


def _roots(state: State, job: Job) -> set[str]:
    if not job.attempt:
        return set()
    saves = job.saved_step or job.spec.checkpoint_ms or job.id in state.heard.copied
    if not saves or job.spec.env.get(CHECKPOINT_DIR):
        return set()
    nodes = [state.nodes.get(member.slice.node) for member in job.members]
    return {node.spec.checkpoints for node in nodes if node is not None} - {""}


def _named(nodes: list[str]) -> str:
    more = f" and {len(nodes) - NAMED_MAX} more" if len(nodes) > NAMED_MAX else ""
    return ", ".join(nodes[:NAMED_MAX]) + more
