"""What really became of one job: which of its ends are justified by what its processes did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.core.state.events.neighbors import JobHanded
from shoal.core.state.events.runs import (
    JobAdopted,
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobStopping,
)
from shoal.model.commands import Launch
from shoal.model.job import JobSpec, MemberRef, Outcome, Restart, StopCause
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.resources import Slice
from storm.lives import Life, Untruth
from storm.witness import End


class JobTruth:
    def __init__(self, job_id: str, spec: JobSpec) -> None:
        self.id = job_id
        self.spec = spec
        self.outcome: Outcome | None = None
        self.asleep = False  # by the log: it holds no GPU
        self.waking = False
        # Their node fell silent or lost all trace of them: they may run, or start late, unseen.
        self.given_up: set[MemberRef] = set()
        self._placements: list[tuple[Slice, ...]] = []  # by attempt, from 1
        self._held: dict[MemberRef, str] = {}  # members of the attempt that are not over -> node
        self._not_before_ms = 0
        self._failed: set[int] = set()  # attempts with a member that failed on its own
        self._lost: set[int] = set()  # attempts that lost a member with a node or without a trace
        self._drained: set[int] = set()
        self.faulted: set[int] = set()  # attempts with a member that its node could not start
        self._ran: set[int] = set()  # attempts of which something ran
        self.left: set[int] = set()  # attempts that were stopped to leave a node in quarantine
        self.stopped_for_hang: set[int] = set()
        self.stopped_for_idleness: set[int] = set()
        self.stopped_early: set[int] = set()  # as a trial that is worse than others
        self._bad: dict[int, tuple[int, int | None]] = {}  # attempt -> its first bad code, its step
        self._retries = 0
        self._losses = 0
        self._hangs = 0

    def again(self, attempts: int) -> None:
        """An element of an array is retried: it goes on counting from this number."""
        self.outcome, self._not_before_ms = None, 0
        self._placements += [()] * (attempts - self.attempt) if self.attempt else []
        self._retries = self._losses = self._hangs = 0
        self._bad = {}

    @property
    def attempt(self) -> int:
        return len(self._placements)

    @property
    def held(self) -> list[Slice]:
        """Slices of its members that are not over."""
        return [self._placements[ref.attempt - 1][ref.member] for ref in self._held]

    @property
    def living(self) -> list[MemberRef]:
        """Members of the attempt that are not over."""
        return list(self._held)

    @property
    def drained(self) -> bool:
        """A node of the attempt was to be left."""
        return self.attempt in self._drained

    def node_of(self, ref: MemberRef) -> str:
        return self._held[ref]

    def held_on(self, node: str) -> list[MemberRef]:
        return [ref for ref, place in self._held.items() if place == node]

    def refs(self, attempt: int) -> list[MemberRef]:
        return [MemberRef(self.id, attempt, number) for number in range(self._size(attempt))]

    def _size(self, attempt: int) -> int:
        """Elastic gangs differ in size from attempt to attempt."""
        known = 0 < attempt <= self.attempt
        return len(self._placements[attempt - 1]) if known else self.spec.members

    # -- what happens on the nodes ---------------------------------------------------------

    def member_may_start(self, node: str, launch: Launch) -> None:
        ref = launch.ref
        if ref.attempt > self.attempt:
            raise Untruth(f"{ref} was started, but the log knows no such attempt")
        slice_ = self._placements[ref.attempt - 1][ref.member]
        if (slice_.node, slice_.gpus) != (node, launch.gpus):
            raise Untruth(f"{ref} was started on {node}, but its slice is {slice_}")
        self._ran.add(ref.attempt)
        if self.outcome is not None and ref not in self.given_up:
            raise Untruth(f"{ref} was started after its job had {self.outcome.value}")

    def member_ended(self, ref: MemberRef, code: int | None, how: End) -> None:
        if how in (End.NODE_DIED, End.VANISHED, End.LOST):
            self._lost.add(ref.attempt)
            if how is End.VANISHED:
                self.given_up.add(ref)
            if how is End.LOST:  # a job that no node can wake has itself to blame
                self._failed.add(ref.attempt)
        elif how is End.OWN and code:
            self._failed.add(ref.attempt)

    def found_broken(self, attempt: int) -> None:
        """A server that does not answer has failed, though it lives."""
        self._failed.add(attempt)

    def node_lost(self, node: str, *, dead: bool) -> None:
        for ref, held_on in list(self._held.items()):
            if held_on == node:
                del self._held[ref]
                self._lost.add(ref.attempt)
                if not dead:
                    self.given_up.add(ref)

    def node_drained(self, node: str) -> None:
        if node in self._held.values():
            self._drained.add(self.attempt)

    # -- what the log says -----------------------------------------------------------------

    def placed(self, event: JobPlaced) -> None:
        self._must_be_unfinished()
        if event.attempt != self.attempt + 1 or self._held:
            raise Untruth(f"{self.id} was placed as attempt {event.attempt} after {self.attempt}")
        most = max(self.spec.members, self.spec.members_max)
        if not self.spec.members <= len(event.slices) <= most:
            raise Untruth(f"{self.id} was placed with {len(event.slices)} members")
        if event.at_ms < self._not_before_ms:
            raise Untruth(f"{self.id} was placed before its backoff was over")
        self._placements.append(event.slices)
        self._hold()

    def handed(self, event: JobHanded) -> None:
        """Another cluster has it. What it does there is seen there."""
        self._must_be_unfinished()
        if event.attempt <= self.attempt or self._held:
            raise Untruth(f"{self.id} was handed over as attempt {event.attempt}, but {self._held}")
        if event.at_ms < self._not_before_ms:
            raise Untruth(f"{self.id} was handed over before its backoff was over")
        self._placements += [()] * (event.attempt - self.attempt)

    def adopted(self, event: JobAdopted) -> list[MemberRef]:
        self._must_be_unfinished()
        if event.attempt != self.attempt or self._held:
            raise Untruth(f"{self.id} was adopted as attempt {event.attempt}, not {self.attempt}")
        self.given_up -= set(self.refs(event.attempt))
        self._lost.discard(event.attempt)
        self.stopped_for_hang.discard(event.attempt)  # perhaps it ended before the stop arrived
        self._hold()
        return self.refs(event.attempt)

    def _hold(self) -> None:
        for ref, slice_ in zip(self.refs(self.attempt), self._placements[-1], strict=True):
            self._held[ref] = slice_.node

    def member_failed(self, attempt: int, code: int, step: int | None) -> None:
        if attempt in self._failed:
            self._bad.setdefault(attempt, (code, step))

    def member_over(self, ref: MemberRef, *, lost: bool = False) -> None:
        if self._held.pop(ref, None) is None:
            raise Untruth(f"{ref} is said to be over a second time")
        if lost:
            self._lost.add(ref.attempt)

    def must_not_be_done(self, lives: Sequence[Life | None]) -> None:
        """If all its members ended well by themselves, and that was reported, its work is done. An
        element that is retried waits with the number of an attempt that it never had."""
        lost = not lives or any(life is None or life.ref.attempt in self._lost for life in lives)
        if not self.spec.service and not lost and all(life and life.done for life in lives):
            raise Untruth(f"{self.id} has done its work in attempt {self.attempt}")

    def must_be_idle(
        self, event: JobStopping, lives: Sequence[Life | None], reclaim_ms: int
    ) -> None:
        """The whole gang has held unused GPUs for as long as the policy allows."""
        latest_ms = event.at_ms - reclaim_ms
        late = any(life is None or life.started_ms > latest_ms for life in lives)
        if self.spec.command[0] != "idles" or not reclaim_ms or late:
            raise Untruth(f"{self.id} is said to be idle: {event.why}")
        self.stopped_for_idleness.add(event.attempt)

    def requeued(self, event: JobRequeued, policy: Policy) -> None:
        self._must_be_unfinished()
        self._not_before_ms = event.not_before_ms
        never = self.spec.restart is Restart.NEVER
        match event.cause:
            case StopCause.FAILURE:
                self._retries += 1
                allowed = self.spec.restart is Restart.ON_FAILURE
                justified = event.attempt in self._failed and self._retries <= self.spec.retries
            case StopCause.NODE_LOSS:
                self._losses += 1
                unstarted = event.attempt in self.faulted and event.attempt not in self._ran
                allowed = (not never or unstarted) and self._losses <= policy.losses_max
                justified = event.attempt in self._lost
            case StopCause.HANG:
                self._hangs += 1
                allowed = not never and self._hangs < policy.hangs_max
                justified = event.attempt in self.stopped_for_hang
            case StopCause.MOVE if event.attempt in self.left:
                allowed = justified = not never
            case StopCause.PREEMPT | StopCause.RESIZE | StopCause.MOVE:
                allowed = justified = not never and (self.spec.preemptible or self.spec.elastic)
            case StopCause.DRAIN:
                allowed, justified = not never, event.attempt in self._drained
            case StopCause.IDLE:
                allowed = justified = not never and event.attempt in self.stopped_for_idleness
            case StopCause.BUDGET:  # the reason was verified when it was stopped
                allowed = justified = not never
            case _:
                allowed = justified = False
        if not (allowed and justified):
            raise Untruth(f"{self.id} runs again after attempt {event.attempt}: {event.why}")

    def finished(
        self,
        event: JobFinished,
        lives: Sequence[Life | None],
        policy: Policy,
        *,
        cancel_asked: bool,
    ) -> None:
        self._must_be_unfinished()
        self.outcome = event.outcome
        match event.outcome:
            case Outcome.SUCCEEDED:
                just = all(life and life.how is End.OWN and life.code == 0 for life in lives)
                just = (just and bool(lives)) or event.attempt in self.stopped_early
            case Outcome.FAILED:
                just = self._may_fail(event.attempt, policy)
            case Outcome.CANCELLED:
                just = cancel_asked or event.attempt in self.stopped_for_idleness
            case Outcome.TIMED_OUT:
                limit_ms = self.spec.time_limit_ms
                just = all(life and life.awake_ms(event.at_ms) >= limit_ms for life in lives)
        if not just:
            seen = "; ".join(str(life or "never started") for life in lives)
            raise Untruth(f"{self.id} {event.outcome.value} ({event.why}), but {seen}")

    def _may_fail(self, attempt: int, policy: Policy) -> bool:
        if attempt in self._lost:
            never = self.spec.restart is Restart.NEVER
            if never or self._losses >= policy.losses_max:
                return True
        if attempt in self.stopped_for_hang:
            never = self.spec.restart is Restart.NEVER
            return never or self._hangs + 1 >= policy.hangs_max
        if self._fails_the_same_way():
            return True
        if self.spec.restart is Restart.ON_FAILURE and self._retries < self.spec.retries:
            return False
        return attempt in self._failed

    def _fails_the_same_way(self) -> bool:
        """Three times by the same code at the same step."""
        last = list(self._bad.values())[-3:]
        return len(last) == 3 and len(set(last)) == 1 and last[0][1] is not None

    def _must_be_unfinished(self) -> None:
        if self.outcome is not None:
            raise Untruth(f"{self.id} had {self.outcome.value} already")


def must_fit(spec: NodeSpec, lives: Iterable[Life], jobs: Mapping[str, JobTruth]) -> None:
    """Members that still run on a node that was given up do not count. A sleeper has no CPU, and
    keeps in memory what it had on GPUs."""
    cpu_milli = memory_mb = 0
    for life in lives:
        job = jobs[life.ref.job]
        if life.ref not in job.given_up:
            cpu_milli += 0 if life.asleep else job.spec.cpu_milli
            memory_mb += job.spec.memory_mb + life.moved_mb
    if cpu_milli > spec.cpu_milli or memory_mb > spec.memory_mb:
        raise Untruth(f"{spec.id} runs {cpu_milli} mCPU and {memory_mb} MB, more than it has")
