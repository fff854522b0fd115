"""Where the seconds of a replica's start go, as its nodes and the gateway report it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.core.state.state import State
from shoal.model.explanation import ColdStart
from shoal.model.job import Job, MemberRef

# What a node says of a member that cannot start yet begins with these words (agent/supplies.py).
KINDS = {
    "is pulling ": "image",
    "is looking at volume": "volumes",
    "is fetching volume": "volumes",
    "is waiting for its volumes": "volumes",
    "is building its environment": "environment",
    "is requesting its working directory": "working directory",
    "is fetching its working directory": "working directory",
    "is unpacking its working directory": "working directory",
}


def hear_starts(
    state: State,
    before: Mapping[MemberRef, str],
    getting: Mapping[MemberRef, str],
    listens: Iterable[MemberRef],
    now_ms: int,
) -> None:
    """`before`: what the node's members had to get as of its last report."""
    starts = state.heard.starts
    kinds: dict[str, str] = {}  # members of a gang wait for each other
    for ref in (*before, *getting):
        start = starts.get(ref.job)
        if start is not None and start.attempt == ref.attempt:
            kinds[ref.job] = _kind(getting.get(ref, "")) or kinds.get(ref.job, "")
    for job_id, kind in kinds.items():
        starts[job_id].gets(kind, now_ms)
    for ref in listens:
        start = starts.get(ref.job)
        if start is not None and start.attempt == ref.attempt and start.listened_ms is None:
            start.listened_ms = now_ms


def _kind(what: str) -> str:
    return next((kind for words, kind in KINDS.items() if what.startswith(words)), "")


def complete(state: State, job: Job, cold: ColdStart) -> None:
    """What no event says: it is known for as long as the replica runs and the controller, too."""
    start, load = state.heard.starts.get(job.id), state.heard.loads.get(job.spec.service)
    if start is not None and start.attempt == job.attempt:
        cold.got_ms = dict(start.got_ms) if cold.got_ms is None else cold.got_ms
        cold.listened_ms = cold.listened_ms or start.listened_ms
        cold.served_ms = start.served_ms
    if load is not None and load.tokens is not None and job.id in load.tokens.replicas:
        cold.first_token_ms = load.tokens.replicas[job.id].first_ms or None
