"""The truth about nodes that end: nothing starts there that would be lost, and nothing that may
move is there when the end comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.core.state.events.cluster import ControllerStarted, PolicyChanged
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeEnding, NodeIntended, NodeLost
from shoal.core.state.events.runs import JobCheckpointed, JobPlaced, JobStopping
from shoal.model.job import Restart, StopCause
from shoal.model.node import NodeIntent
from shoal.model.policy import Policy
from storm.jobtruth import JobTruth
from storm.lives import Untruth

LATE_MS = 1_000  # a report that took longer made the end look later than it was


class EndTruth:
    def __init__(self, jobs: Mapping[str, JobTruth], policy: Policy) -> None:
        self._jobs = jobs
        self._policy = policy
        self._ends: dict[str, dict[bool, int]] = {}  # node -> of its own, or planned -> when
        self._noted_ms: dict[str, int] = {}  # node -> when that last changed
        self._stopping: dict[str, int] = {}  # job -> attempt
        self._saved: set[str] = set()
        self._listening_ms = 0

    def see(self, event: Event) -> None:
        match event:
            case PolicyChanged():
                self._policy = event.policy
            case ControllerStarted():
                self._listening_ms = event.at_ms
            case NodeEnding():
                self._note(event)
            case NodeLost():
                self._ends.get(event.node, {}).pop(True, None)
            case NodeIntended() if event.intent is NodeIntent.REMOVED:
                self._ends.pop(event.node, None)
            case JobPlaced():
                self._placed(event)
            case JobCheckpointed():
                self._saved.add(event.job)
            case JobStopping():
                self._stops(event)

    def done(self, events: Sequence[Event]) -> None:
        """After a step, each job that has to leave by now is being stopped."""
        if not any(self._ends.values()):
            return
        if not events or any(isinstance(event, ControllerStarted) for event in events):
            return
        for job in self._jobs.values():
            node = self._should_have_left(job, events[0].at_ms)
            if node:
                raise Untruth(f"{job.id} goes on on {node}, which ends")

    def came_true(self, node: str, end_ms: int) -> None:
        """The node ends now. Whoever could know it in time has stopped the jobs there."""
        known_ms = self._end_of(node)
        if known_ms is None or known_ms > end_ms + LATE_MS:
            return
        for job in self._jobs.values():
            begun_ms = max(self._noted_ms[node], self._listening_ms)
            in_time = begun_ms <= end_ms - self._stop_ms(job)
            if in_time and self._should_have_left(job, end_ms) == node:
                raise Untruth(f"{job.id} was lost with {node}, which had said that it ends")

    def _note(self, event: NodeEnding) -> None:
        ends = self._ends.setdefault(event.node, {})
        ends.pop(event.own, None)
        if event.end is not None:
            ends[event.own] = event.end.at_ms
        self._noted_ms[event.node] = event.at_ms

    def _end_of(self, node: str) -> int | None:
        return min(self._ends.get(node, {}).values(), default=None)

    def _stop_ms(self, job: JobTruth) -> int:
        return 2 * self._policy.silent_after_ms + job.spec.stop_grace_ms

    def _should_have_left(self, job: JobTruth, now_ms: int) -> str:
        """A node that a job of today should not be on; replicas wait for others there."""
        if job.spec.restart is Restart.NEVER or job.spec.service:
            return ""
        if self._stopping.get(job.id) == job.attempt or job.waking:  # awake, it can save its work
            return ""
        for slice_ in job.held:
            end_ms = self._end_of(slice_.node)
            if end_ms is not None and end_ms - self._stop_ms(job) <= now_ms:
                return slice_.node
        return ""

    def _placed(self, event: JobPlaced) -> None:
        job = self._jobs[event.job]
        spec = job.spec
        saves = spec.preemptible or spec.checkpoint_ms or spec.service or job.id in self._saved
        needs_ms = spec.stop_grace_ms + 1
        if (not saves or spec.restart is Restart.NEVER) and spec.estimate_ms:
            limit_ms = spec.time_limit_ms or spec.estimate_ms
            needs_ms = spec.stop_grace_ms + min(spec.estimate_ms, limit_ms)
        for slice_ in event.slices:
            end_ms = self._end_of(slice_.node)
            if end_ms is not None and event.at_ms + needs_ms > end_ms:
                left_ms = end_ms - event.at_ms
                raise Untruth(f"{job.id} needs {needs_ms} ms; {slice_.node} lives {left_ms} ms")

    def _stops(self, event: JobStopping) -> None:
        job = self._jobs[event.job]
        self._stopping[event.job] = event.attempt
        if event.cause is not StopCause.DRAIN:
            return
        for slice_ in job.held:
            end_ms = self._end_of(slice_.node)
            # A replica leaves earlier, because another has to be ready first.
            near = end_ms is not None and end_ms - self._stop_ms(job) <= event.at_ms
            if near or (end_ms is not None and job.spec.service):
                job.node_drained(slice_.node)
