"""Jobs of a trace that wait for others, under the ids that a replay gives them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.model.job import Job, JobSpec
from shoal.model.report import Ended
from shoal.sim.replay.traces import Arrival


class Following:
    """Whatever became of the other job, the one that waits for it ran: so in a replay any end of
    the other lets it start. What is not in the trace, or was kept out of it, is not waited for."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._awaited = {job for arrival in arrivals for job in arrival.after}
        self._ids: dict[str, str] = {}  # id in the trace -> id in the replay
        self._ends: dict[str, Ended] = {}

    def enter(self, arrivals: Sequence[Arrival], first: int) -> Sequence[Arrival]:
        """They will be accepted in this order, with numbers from `first` on."""
        for number, arrival in enumerate(arrivals, first):
            if arrival.job in self._awaited:
                self._ids[arrival.job] = f"j{number}"
        return arrivals

    def spec(self, arrival: Arrival, spec: JobSpec) -> JobSpec:
        if not arrival.after and not arrival.begin_ms:
            return spec
        after = tuple(f"{self._ids[one]}:any" for one in arrival.after if one in self._ids)
        begin_ms = arrival.submit_ms + arrival.begin_ms if arrival.begin_ms else 0
        return msgspec.structs.replace(spec, after=after, begin_ms=begin_ms)

    def over(self, arrival: Arrival, job: Job) -> None:
        if arrival.job in self._awaited and job.outcome is not None:
            self._ends[job.id] = Ended(job.id, job.spec.tenant, job.outcome)

    def ended(self, job_id: str) -> Ended | None:
        return self._ends.get(job_id)
