"""What happens to a job from its placement to its end: its attempts and its members."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.books.failures import Failure, failed, forget, ran_well
from shoal.core.state.accounts import share_of
from shoal.core.state.apply_array import element_ended, element_runs
from shoal.core.state.apply_job import account, end_nap, member_over, not_served, replica_over
from shoal.core.state.apply_queue import (
    drop_job,
    join_queue,
    learn_run,
    leave_queue,
    leave_waiting,
    let_go,
    runs_no_more,
    runs_on,
    unclaim,
)
from shoal.core.state.apply_room import hold
from shoal.core.state.estimates import key_of
from shoal.core.state.events.base import JobEvent
from shoal.core.state.saving import kept_ms
from shoal.core.state.state import State
from shoal.model.job import Fault, Job, Member, MemberStatus, Outcome, Phase, Startup, StopCause
from shoal.model.phrases import (
    attempt_text,
    because,
    began_text,
    exit_text,
    nodes_text,
    numbers_text,
)
from shoal.model.progress import Spent
from shoal.model.resources import Slice

MISSING_CODE = 127  # as a shell reports a command that is not there
OUTCOME_WORDS = {
    Outcome.SUCCEEDED: "succeeded",
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "was cancelled",
    Outcome.TIMED_OUT: "ran out of time",
}
CAUSE_WORDS = {
    StopCause.CANCEL: "cancelled",
    StopCause.TIME_LIMIT: "time limit reached",
    StopCause.FAILURE: "failed",
    StopCause.NODE_LOSS: "node lost",
    StopCause.DRAIN: "its node is being drained",
    StopCause.PREEMPT: "another job needs the room",
    StopCause.RESIZE: "its size changes",
    StopCause.MOVE: "it moves to other nodes",
    StopCause.HANG: "it hangs",
    StopCause.BUDGET: "its budget is used up",
    StopCause.IDLE: "its GPUs are not used",
    StopCause.HALVING: "other trials are better",
    StopCause.LEASE: "its lease is over",
}


class JobPlaced(JobEvent, frozen=True, kw_only=True):
    """The gang has all its slices; member i gets slice i."""

    attempt: int
    slices: tuple[Slice, ...]
    master: str
    why: str
    predicted_ms: int | None = None  # when it was expected to start, if room was set aside for it
    door: str = ""  # where a gang that is a replica answers requests, "address:port"

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        leave_waiting(state, job)
        job.phase = Phase.STARTING
        job.share = share_of(job.spec, self.slices[0].gpu_milli, state.totals)
        job.attempt = self.attempt
        job.said = ""
        job.members = [Member(slice_) for slice_ in self.slices]
        job.master, job.door = self.master, self.door
        job.placed_ms = self.at_ms
        job.running_ms = None
        job.stop_cause = None
        job.first_bad_code = None
        job.fault = ""
        job.saved_ms = job.idle_since_ms = None
        job.awake_ms = None
        job.naps = job.slept_ms = 0
        job.refused = ""
        job.startup = None
        job.not_before_ms = 0
        job.why = self.why
        state.next_port += 1
        hold(state, job)
        members = len(job.members)
        penalty = job.share * members * state.policy.entry_penalty_ms
        account(state, job, members, self.at_ms, penalty)
        job.borrowed = not state.accounts.within_quota(job.spec.tenant, 0)

    def phrase(self) -> str:
        where = self.why or nodes_text(self.slices)
        return f"was placed{attempt_text(self.attempt)}: {where}"


class MembersStarted(JobEvent, frozen=True, kw_only=True):
    """Some members are alive; others have not been seen yet."""

    quiet: ClassVar[bool] = True

    attempt: int
    members: tuple[int, ...]

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        for number in self.members:
            job.members[number].status = MemberStatus.ALIVE
            job.members[number].started = True

    def phrase(self) -> str:
        begun = f"started {numbers_text(self.members)} and waits for the rest"
        return f"{begun}{attempt_text(self.attempt)}"


class JobRunning(JobEvent, frozen=True, kw_only=True):
    """Every member of the gang has been seen alive."""

    attempt: int

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        for member in job.members:
            if not member.over:
                member.status = MemberStatus.ALIVE
                member.started = True
        job.phase = Phase.RUNNING
        job.running_ms = job.awake_ms = self.at_ms
        if job.spec.array:
            element_runs(state, job, self.at_ms)
        learn_run(state, job, job.attained_ms)
        runs_on(state, job)

    def phrase(self) -> str:
        return f"is running{attempt_text(self.attempt)}"


class MemberExited(JobEvent, frozen=True, kw_only=True):
    quiet: ClassVar[bool] = True

    attempt: int
    member: int
    node: str
    code: int
    why: str = ""
    step: int | None = None  # the step it was in, if it counts steps
    stopped: bool = False  # by our command, so a code of 0 does not mean that its work is done
    spent: Spent | None = None  # where the time of its steps went, if it reports that

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        member = job.members[self.member]
        member.status = MemberStatus.EXITED
        member.code, member.stopped = self.code, self.stopped
        if self.code and job.first_bad_code is None:
            job.first_bad_code = self.code
            job.first_bad_member, job.first_bad_step = self.member, self.step
            if job.phase is not Phase.STOPPING:  # otherwise the reason for stopping it says more
                job.why = self.why
        elif not self.code and self.why:
            job.said = self.why
        member_over(state, job, self.member, self.at_ms)

    def phrase(self) -> str:
        end = "finished" if self.code == 0 else f"ended with {exit_text(self.code)}"
        return f"member {self.member} {end} on {self.node}{because(self.why)}"


class MemberLost(JobEvent, frozen=True, kw_only=True):
    """A member is gone and left no exit code of its own: it vanished from its node's inventory, or
    an outdated command stopped it there. With a `fault`, its node could not run it."""

    attempt: int
    member: int
    node: str
    why: str
    fault: Fault = Fault.NONE

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        job.members[self.member].status = MemberStatus.LOST
        if self.fault:
            self._note_fault(state, job)
        member_over(state, job, self.member, self.at_ms)

    def _note_fault(self, state: State, job: Job) -> None:
        """A missing program counts as a failure on this node: if the job runs well elsewhere, the
        node is blamed."""
        job.fault, job.faults = self.why, job.faults + 1
        if self.fault is Fault.MISSING:
            job.missing_on = (*job.missing_on, self.node)
            failure = Failure(
                at_ms=self.at_ms,
                node=self.node,
                member=self.member,
                code=MISSING_CODE,
                owner=job.spec.owner,
            )
            failed(state.failures, job.id, failure)

    def phrase(self) -> str:
        return f"lost member {self.member} on {self.node}{because(self.why)}"


class JobCheckpointed(JobEvent, frozen=True, kw_only=True):
    """The job has saved all its work up to `step`: a restart continues from there."""

    quiet: ClassVar[bool] = True

    attempt: int
    step: int

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        job.saved_step, job.saved_ms = self.step, self.at_ms

    def phrase(self) -> str:
        return f"saved its work up to step {self.step}"


class JobUnsaved(JobEvent, frozen=True, kw_only=True):
    """So many saves in a row have failed by now, the first of them or the newest. It runs on."""

    attempt: int
    failed: int

    def apply(self, state: State) -> None:
        pass

    def phrase(self) -> str:
        times = "once" if self.failed == 1 else f"{self.failed} times in a row"
        return f"could not save its work {times}, and runs on; its output says why"


class JobBegan(JobEvent, frozen=True, kw_only=True):
    """Members with GPUs have begun to work; the time before was start-up. `startup_ms`: since the
    job runs. `by`: how that was learned, as in `Startup`."""

    attempt: int
    members: tuple[int, ...]
    startup_ms: int
    by: str

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        before = job.startup or Startup((), 0, self.by)
        latest = self.startup_ms >= before.ms
        job.startup = Startup(
            (*before.members, *self.members),
            max(before.ms, self.startup_ms),
            self.by if latest else before.by,
        )

    def phrase(self) -> str:
        whom = "" if self.members == (0,) else f" ({numbers_text(self.members)})"
        return f"{began_text(self.startup_ms, self.by)}{whom}"


class JobIdled(JobEvent, frozen=True, kw_only=True):
    """The job holds GPUs but has not used them since `since_ms`; it will have to give them back."""

    attempt: int
    since_ms: int
    why: str

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        job.idle_since_ms, job.why = self.since_ms, self.why

    def phrase(self) -> str:
        return f"is idle{because(self.why)}"


class JobUsed(JobEvent, frozen=True, kw_only=True):
    """The job uses its GPUs again."""

    attempt: int
    why: str

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        job.idle_since_ms, job.why = None, self.why

    def phrase(self) -> str:
        return f"is no longer idle{because(self.why)}"


class JobStopping(JobEvent, frozen=True, kw_only=True):
    attempt: int
    cause: StopCause
    why: str

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        not_served(state, job)
        if job.id in state.claims and job.phase is Phase.ASLEEP:
            unclaim(state, job)
        end_nap(state, job, self.at_ms)
        state.awake.pop(job.id, None)
        job.phase = Phase.STOPPING
        job.stop_cause = self.cause
        job.why = self.why
        runs_no_more(state)
        state.agenda.attention[job.id] = None

    def phrase(self) -> str:
        return f"is being stopped ({CAUSE_WORDS[self.cause]}){because(self.why)}"


class JobRequeued(JobEvent, frozen=True, kw_only=True):
    attempt: int
    cause: StopCause
    not_before_ms: int
    why: str

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        let_go(state, job)
        not_served(state, job)
        if job.id in state.claims and job.phase is Phase.ASLEEP:
            unclaim(state, job)  # it was for waking up
        end_nap(state, job, self.at_ms)
        if job.running_ms is not None:
            learn_run(state, job, job.attained_ms + self.at_ms - job.running_ms)
        _wear(state, job, self.at_ms, self.cause in (StopCause.NODE_LOSS, StopCause.HANG))
        job.kept_ms = kept_ms(job, self.cause, self.at_ms)
        job.attained_ms += job.kept_ms
        job.phase = Phase.WAITING
        state.tally.wait(state.accounts, job, 1)
        job.not_before_ms = self.not_before_ms
        job.requeued_ms, job.waited_ms = self.at_ms, 0
        job.stop_cause = None
        if self.cause is StopCause.FAILURE:
            job.failures += 1
            _book_failure(state, job, self.at_ms)
        elif self.cause is StopCause.NODE_LOSS:
            job.losses += 1
        elif self.cause is StopCause.HANG:
            job.hangs += 1
        elif self.cause is StopCause.IDLE:
            job.idle_stops += 1
        elif self.cause in (StopCause.PREEMPT, StopCause.RESIZE, StopCause.MOVE):
            job.preemptions += 1
        job.why = self.why
        runs_no_more(state)
        if job.id not in state.claims:
            join_queue(state, job)

    def phrase(self) -> str:
        wait_ms = self.not_before_ms - self.at_ms
        later = f" in {wait_ms / 1000:.1f} s" if wait_ms > 0 else ""
        return f"will run again{later} ({CAUSE_WORDS[self.cause]}){because(self.why)}"


class JobAdopted(JobEvent, frozen=True, kw_only=True):
    """A job that was given up with a silent node turned out to be alive there, complete."""

    attempt: int
    node: str
    why: str

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        leave_waiting(state, job)
        for member in job.members:
            member.status = MemberStatus.ALIVE
            member.host_mb, member.asleep, member.lent = 0, False, False
        hold(state, job)
        account(state, job, len(job.members), self.at_ms)
        job.borrowed = not state.accounts.within_quota(job.spec.tenant, 0)
        job.attained_ms -= job.kept_ms  # the attempt was not over after all
        job.kept_ms = 0
        job.phase = Phase.RUNNING
        job.not_before_ms = 0
        if job.running_ms is None:
            job.running_ms = self.at_ms
        job.awake_ms = self.at_ms
        job.why = self.why
        runs_on(state, job)
        state.agenda.attention[job.id] = None  # its node may be draining by now

    def phrase(self) -> str:
        return f"continues on {self.node}{because(self.why)}"


class JobFinished(JobEvent, frozen=True, kw_only=True):
    attempt: int
    outcome: Outcome
    code: int
    why: str

    def apply(self, state: State) -> None:
        job = state.jobs[self.job]
        if job.id in state.claims:
            unclaim(state, job)
        end_nap(state, job, self.at_ms)
        if job.phase is Phase.WAITING:
            leave_queue(state, job)
        elif job.phase is not Phase.AWAY:
            let_go(state, job)
            _wear(state, job, self.at_ms, lost=job.stop_cause is StopCause.NODE_LOSS)
        if job.running_ms is not None:
            ran_ms = job.attained_ms + self.at_ms - job.running_ms
            learn_run(state, job, ran_ms)
            if self.outcome is Outcome.SUCCEEDED and job.stop_cause is not StopCause.HALVING:
                state.estimates.ended(key_of(job), ran_ms)
                state.agenda.stuck.clear()
                nodes = tuple(dict.fromkeys(member.slice.node for member in job.members))
                ran_well(state.failures, job.id, nodes)
        forget(state.failures, job.id)
        state.ages.add(self.at_ms - job.submitted_ms)
        if job.spec.service:
            not_served(state, job)
            replica_over(state, job, self.outcome, self.why, self.at_ms)
        if job.spec.array:
            element_ended(state, job, self.outcome)
        state.tally.job(state.accounts, job, -1)
        state.sizes.gone(job)
        job.phase = Phase.FINISHED
        job.outcome = self.outcome
        job.code = self.code
        job.why = self.why
        job.finished_ms = self.at_ms
        state.finished += 1
        drop_job(state, job)
        runs_no_more(state)

    def phrase(self) -> str:
        code = "" if self.outcome is Outcome.SUCCEEDED else f" with {exit_text(self.code)}"
        return f"{OUTCOME_WORDS[self.outcome]}{code}{because(self.why)}"


def _wear(state: State, job: Job, at_ms: int, lost: bool) -> None:
    if job.running_ms is not None:
        nodes = len({member.slice.node for member in job.members})
        state.wear.add(nodes * (at_ms - job.running_ms), lost)


def _book_failure(state: State, job: Job, at_ms: int) -> None:
    number = job.first_bad_member
    failed(
        state.failures,
        job.id,
        Failure(
            at_ms=at_ms,
            node=job.members[number].slice.node,
            member=number,
            code=job.first_bad_code or 0,
            step=job.first_bad_step,
            owner=job.spec.owner,
        ),
    )
