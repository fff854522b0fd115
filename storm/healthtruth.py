"""Which nodes and jobs are really slow, stuck or broken, against what the log says."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shoal.core.answers.bound import divided, shares_of
from shoal.core.state.events.nodes import NodeIntended, NodeJudged
from shoal.core.state.events.queue import JobClaimed
from shoal.core.state.events.runs import JobCheckpointed, JobPlaced, JobStopping, MemberExited
from shoal.model.health import HealthRule, Standing
from shoal.model.job import StopCause
from shoal.model.node import NodeIntent
from shoal.model.policy import Policy
from shoal.model.progress import Spent
from shoal.model.report import NodeReport
from storm.jobtruth import JobTruth
from storm.lives import Untruth

SHARE_MILLI = HealthRule().quarantined_milli_max


class HealthTruth:
    """Knows which jobs really hang, which steps were reported, and how the log judges each node."""

    def __init__(self, jobs: Mapping[str, JobTruth], policy: Policy) -> None:
        self.policy = policy
        self.calm_ms: int | None = None  # since then messages are neither lost nor late
        self.hung: set[tuple[str, int]] = set()  # jobs and attempts
        self.saved: Mapping[str, int] = {}  # what is on the disk, by job
        self._jobs = jobs
        self._steps: dict[tuple[str, int, int], tuple[int, int]] = {}  # steps, saved step by member
        self._moved_ms: dict[tuple[str, int], int] = {}  # when the newest reported step was made
        self._checkpoints: dict[str, int] = {}
        self._known: dict[str, None] = {}  # neither lost nor taken away
        self._ready: dict[str, bool] = {}
        self._intents: dict[str, NodeIntent] = {}
        self._standings: dict[str, Standing] = {}
        self._claimed: set[str] = set()

    # -- what is heard -----------------------------------------------------------------------

    def heard(self, report: NodeReport, now_ms: int) -> None:
        for progress in report.progress:
            ref, beat = progress.ref, progress.beat
            steps, saved = self._steps.get(ref, (0, 0))
            at_ms = -1
            if beat.steps > steps:
                at_ms = now_ms - progress.quiet_ms
            if beat.saved_step > saved:
                at_ms = now_ms
            key = ref.job, ref.attempt
            self._moved_ms[key] = max(self._moved_ms.get(key, -1), at_ms)
            self._steps[ref] = beat.steps, beat.saved_step

    # -- jobs --------------------------------------------------------------------------------

    def stopping(self, event: JobStopping) -> None:
        job = self._jobs[event.job]
        leaves = any(self._in_quarantine(slice_.node) for slice_ in job.held)
        if event.cause is StopCause.MOVE and leaves:
            job.left.add(event.attempt)
        if event.cause is not StopCause.HANG:
            return
        key = event.job, event.attempt
        job.stopped_for_hang.add(event.attempt)
        quiet_ms = event.at_ms - self._moved_ms.get(key, event.at_ms)
        if quiet_ms < self.policy.hang_after_ms:
            raise Untruth(f"{event.job} made a step {quiet_ms} ms ago, and is said to hang")
        if key not in self.hung and self._calm_for(2 * self.policy.grace_ms, event.at_ms):
            raise Untruth(f"{event.job} makes steps, and is said to hang")

    def exited(self, event: MemberExited) -> None:
        """Its last counts are at least those that were heard, and their shares are a whole."""
        ref = event.job, event.attempt, event.member
        heard = self._steps.get(ref, (0, 0))[0]
        spent = event.spent or Spent()
        if spent.steps < heard:
            raise Untruth(f"{ref} reported {heard} steps, and ended with {spent.steps}")
        gang = divided({event.member: spent})
        if gang is None:
            return
        shares = msgspec.structs.astuple(shares_of(gang))
        if sum(shares) != 1000 or min(shares) < 0:
            raise Untruth(f"the time of {ref} is divided into {shares}")

    def _calm_for(self, long_ms: int, now_ms: int) -> bool:
        return self.calm_ms is not None and now_ms - self.calm_ms > long_ms

    def starts_over(self, job: str) -> None:
        """An element that is retried reports again what it has saved."""
        self._checkpoints.pop(job, None)

    def checkpointed(self, event: JobCheckpointed) -> None:
        before = self._checkpoints.get(event.job, 0)
        if event.step <= before:
            raise Untruth(f"{event.job} goes back from step {before} to {event.step}")
        if event.step > self.saved.get(event.job, 0):
            raise Untruth(f"{event.job} has not saved step {event.step}")
        self._checkpoints[event.job] = event.step

    def placed(self, event: JobPlaced) -> None:
        for slice_ in event.slices:
            if self._in_quarantine(slice_.node):
                raise Untruth(f"{event.job} was placed on {slice_.node}, which is in quarantine")
        if event.job not in self._claimed:
            self._beside_spares(event)
        self._claimed.discard(event.job)

    def claimed(self, event: JobClaimed) -> None:
        self._claimed.add(event.job)
        self._beside_spares(event)

    def _beside_spares(self, event: JobPlaced | JobClaimed) -> None:
        """A job that never ran, and may not be stopped, must leave the spare nodes free."""
        job = self._jobs[event.job]
        if job.spec.yields or job.attempt > isinstance(event, JobPlaced):
            return
        fixed = {
            slice_.node
            for other in self._jobs.values()
            if other.id != job.id and not other.spec.yields
            for slice_ in other.held
        }
        free = {
            node
            for node in self._known
            if self._ready[node]
            and self._intents.get(node, NodeIntent.OPEN) is NodeIntent.OPEN
            and not self._in_quarantine(node)
            and node not in fixed
        }
        used = free & {slice_.node for slice_ in event.slices}
        if used and len(free) - len(used) < self.policy.spares:
            raise Untruth(f"{job.id} was given {sorted(used)}, which are kept as spares")

    # -- nodes -------------------------------------------------------------------------------

    def node_is(self, node: str, *, known: bool, ready: bool) -> None:
        if known:
            self._known[node] = None
        else:
            self._known.pop(node, None)
        self._ready[node] = ready

    def intended(self, event: NodeIntended) -> None:
        self._intents[event.node] = event.intent

    def joined(self, node: str) -> None:
        if self._intents.get(node) is NodeIntent.REMOVED:
            self._intents[node] = NodeIntent.OPEN
        self.node_is(node, known=True, ready=False)

    def judged(self, event: NodeJudged) -> None:
        new = event.record.standing
        guessed = not event.record.faulty  # what a node reports about itself is not a guess
        if new is Standing.QUARANTINED and guessed and not self._in_quarantine(event.node):
            others = sum(map(self._in_quarantine, self._known))
            if others >= max(1, len(self._known) * SHARE_MILLI // 1000):
                raise Untruth(f"{event.node} was quarantined beside {others} others: too many")
        self._standings[event.node] = new

    def _in_quarantine(self, node: str) -> bool:
        return self._standings.get(node) is Standing.QUARANTINED
