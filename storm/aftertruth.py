"""The truth about jobs that wait for others or for a time: none starts too early, none is cancelled
without a reason, a workflow comes as a whole, and a job takes another's place in one piece."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.state.events.log import Event
from shoal.core.state.events.queue import JobReleased, JobSubmitted
from shoal.core.state.events.runs import JobFinished, JobPlaced
from shoal.model.job import JobSpec, Outcome
from shoal.model.report import CancelWorkflow, Request, Submit, SubmitWorkflow
from storm.lives import Untruth
from storm.scheduletruth import ScheduleTruth


class AfterTruth:
    def __init__(self) -> None:
        self._specs: dict[str, JobSpec] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._flows: dict[str, int] = {}  # workflow -> how many jobs came with it
        self._sizes: dict[str, int] = {}  # key -> how many jobs were asked for
        self._cancelled: dict[str, None] = {}
        self._places: dict[str, str] = {}  # key -> the job whose place is wanted
        self._schedules = ScheduleTruth()

    def asked(self, request: Request) -> None:
        if isinstance(request, SubmitWorkflow):
            self._sizes[request.key] = len(request.jobs)
        elif isinstance(request, CancelWorkflow):
            self._cancelled[request.workflow] = None
        elif isinstance(request, Submit) and request.instead:
            self._places[request.key] = request.instead

    def may_be_cancelled(self, job: str) -> bool:
        """Without a request for this job: with its workflow, for another in its place, or because
        it would wait in vain."""
        spec = self._specs[job]
        return (
            job in self._places.values()
            or spec.workflow in self._cancelled
            or "in vain" in self._fates(spec)
        )

    def _fates(self, spec: JobSpec) -> list[str]:
        """Of each of its conditions: holds, open, or in vain."""
        fates = []
        for text in spec.after:
            job, _, when = text.partition(":")
            outcome = self._outcomes.get(job)
            if outcome is None:
                fates.append("open")
            elif when == "any":
                fates.append("holds")
            else:
                good = outcome is Outcome.SUCCEEDED
                fates.append("holds" if good == (when != "fail") else "in vain")
        return fates

    def see(self, event: Event) -> None:
        self._schedules.see(event)
        match event:
            case JobSubmitted():
                self._specs[event.job] = event.spec
            case JobReleased() if event.by not in self._outcomes:
                raise Untruth(f"{event.job} is said to be after {event.by}, which has not ended")
            case JobPlaced():
                spec = self._specs[event.job]
                if any(fate != "holds" for fate in self._fates(spec)):
                    raise Untruth(f"{event.job} was placed, but it is after {spec.after}")
                if event.at_ms < spec.begin_ms:
                    raise Untruth(f"{event.job} was placed before it was to begin")
            case JobFinished():
                self._outcomes[event.job] = event.outcome

    def done(self, events: Sequence[Event]) -> None:
        """One transaction: a workflow is in it with all of its jobs, or not at all."""
        self._schedules.done(events)
        came: dict[str, list[JobSubmitted]] = {}
        for event in events:
            if isinstance(event, JobSubmitted) and event.spec.workflow:
                came.setdefault(event.spec.workflow, []).append(event)
        for workflow, jobs in came.items():
            if workflow in self._flows or workflow != jobs[0].job:
                raise Untruth(f"the workflow {workflow} came in parts")
            self._flows[workflow] = len(jobs)
            wanted = self._sizes.get(jobs[0].key)
            if wanted is not None and wanted != len(jobs):
                raise Untruth(f"{workflow} came with {len(jobs)} jobs, not {wanted}")
        for event in events:
            if isinstance(event, JobFinished):
                self._must_follow(event)
        self._one_for_another(events)

    def _one_for_another(self, events: Sequence[Event]) -> None:
        """Neither comes without the other, and what has run is not replaced."""
        over = {event.job: event for event in events if isinstance(event, JobFinished)}
        for event in events:
            old = self._places.get(event.key, "") if isinstance(event, JobSubmitted) else ""
            if not old:
                continue
            ended = over.pop(old, None)
            if ended is None or ended.attempt or ended.outcome is not Outcome.CANCELLED:
                raise Untruth(f"{event} came in the place of {old}, which is {ended or 'there'}")
        for left in over.values():
            if left.why.startswith("replaced by"):
                raise Untruth(f"{left.job} was replaced, but nothing came in its place")

    def _must_follow(self, event: JobFinished) -> None:
        """Whoever can no longer start has ended in the same transaction."""
        for job, spec in self._specs.items():
            if job not in self._outcomes and "in vain" in self._fates(spec):
                raise Untruth(f"{job} still waits, though {event.job} {event.outcome.value}")
