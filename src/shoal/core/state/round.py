"""What the phases of one step share: the state, the time, and the events so far."""

from __future__ import annotations

from typing import Any

from shoal.core.state.apply import apply
from shoal.core.state.events.arrays import ArrayFinished
from shoal.core.state.events.base import JobEvent
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeLost
from shoal.core.state.events.runs import JobCheckpointed, JobFinished
from shoal.core.state.own_members import Strays
from shoal.core.state.state import State
from shoal.model.job import Job
from shoal.model.policy import Policy
from shoal.model.report import Ended
from shoal.model.supply import SupplyCommand


class Round:
    """An event takes effect when it is emitted, so that later phases see its result."""

    __slots__ = (
        "ends",
        "entitled",
        "events",
        "finished",
        "finished_keys",
        "judged",
        "more",
        "now_ms",
        "opening",
        "policy",
        "port_seed",
        "quiet",
        "reserved",
        "state",
        "strays",
        "supplies",
        "victims",
    )

    def __init__(self, state: State, policy: Policy, now_ms: int) -> None:
        self.state = state
        self.policy = policy
        self.now_ms = now_ms
        self.events: list[Event] = []
        self.finished: list[Job] = []
        self.finished_keys: dict[str, str] = {}  # submission keys that are not in the store yet
        self.ends: dict[str, Ended] = {}  # jobs that are over, and that others may wait for
        self.entitled: dict[str, Any] = {}  # running jobs that were ranked in this step
        # What making room for the jobs in front has found so far, and after how many events.
        self.victims: tuple[int, dict[Any, Any]] = (0, {})
        self.opening: tuple[tuple[str, int], Any] | None = None
        self.judged = False  # were all running jobs ranked since a job was last stopped?
        self.supplies: list[SupplyCommand] = []  # for those who bring nodes
        self.strays: dict[str, Strays] = {}  # node -> members there that it is not to have
        self.quiet: list[str] = []  # replicas that may be put to sleep now
        self.port_seed = 0  # of the ports that jobs get in this step
        self.reserved: dict[tuple[str, ...], Any] = {}  # what is set aside for these jobs
        self.more = False  # work is left that another step should take up at once

    def look_again(self, at_ms: int) -> None:
        self.state.agenda.look_again(at_ms)

    def note_saved(self, job: Job) -> None:
        step = self.state.heard.unsaved.pop(job.id)
        if step > job.saved_step:
            saved = JobCheckpointed(at_ms=self.now_ms, job=job.id, attempt=job.attempt, step=step)
            self.emit(saved)

    def _before(self, event: Event) -> None:
        """What a job has saved is known before anything else happens to it."""
        if isinstance(event, NodeLost):
            jobs = {ref.job for ref in self.state.placed[event.node]}
        else:
            jobs = {event.job} if isinstance(event, JobEvent) else set()
        for job_id in sorted(jobs & self.state.heard.unsaved.keys()):
            self.note_saved(self.state.jobs[job_id])

    def emit(self, event: Event) -> None:
        if self.state.heard.unsaved:
            self._before(event)
        if type(event) is JobFinished or type(event) is ArrayFinished:
            known = self.state.jobs if type(event) is JobFinished else self.state.arrays
            job = known[event.job]
            self.finished.append(job)
            name = job.spec.name or ""
            self.ends[job.id] = Ended(job.id, job.spec.tenant, event.outcome, event.why, name)
            if job.key:
                self.finished_keys[job.key] = job.id
        apply(self.state, event)
        self.events.append(event)
