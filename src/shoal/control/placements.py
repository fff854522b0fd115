"""Where members were placed: a node is believed about its own, also after their attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.model.events import JobPlaced, Recorded
from shoal.model.job import Job, MemberRef

EVENTS_MAX = 2_000  # of a job that are looked at: hundreds of attempts
REMEMBERED_MAX = 256  # attempts
History = Callable[[str, int], Sequence[Recorded]]


class Placements:
    """The record of a job has its last attempt; the log has those before. They are asked for when a
    node was away, and ships what is left."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._earlier: dict[tuple[str, int], tuple[str, ...]] = {}

    def had(self, job: Job | None, node: str, ref: MemberRef) -> bool:
        """Was this member placed on this node?"""
        if job is None:
            return False
        if ref.attempt == job.attempt:
            nodes = tuple(member.slice.node for member in job.members)
        elif 0 < ref.attempt < job.attempt:
            nodes = self._nodes(job.id, ref.attempt)
        else:
            return False
        return 0 <= ref.member < len(nodes) and nodes[ref.member] == node

    def _nodes(self, job: str, attempt: int) -> tuple[str, ...]:
        key = job, attempt
        if key not in self._earlier:
            found: tuple[str, ...] = ()
            for recorded in self._history(job, EVENTS_MAX):
                event = recorded.event
                if isinstance(event, JobPlaced) and event.attempt == attempt:
                    found = tuple(slice_.node for slice_ in event.slices)
            self._earlier[key] = found
            while len(self._earlier) > REMEMBERED_MAX:
                del self._earlier[next(iter(self._earlier))]
        return self._earlier[key]
