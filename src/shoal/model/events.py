"""Everything that can happen. The log of these is the truth; `apply` turns it into state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, Union

import msgspec

from shoal.model.after_events import JobReleased as JobReleased
from shoal.model.array_events import ArrayCancelled as ArrayCancelled
from shoal.model.array_events import ArrayEvent as ArrayEvent
from shoal.model.array_events import ArrayFinished as ArrayFinished
from shoal.model.array_events import ArrayRetried as ArrayRetried
from shoal.model.array_events import ArraySubmitted as ArraySubmitted
from shoal.model.durations import moment_text
from shoal.model.eventbase import ClusterEvent, Reader
from shoal.model.eventbase import EventBase as EventBase
from shoal.model.eventbase import JobEvent as JobEvent
from shoal.model.eventbase import NodeEvent as NodeEvent
from shoal.model.hidden import without_keys
from shoal.model.identity_events import IdentityEvent as IdentityEvent
from shoal.model.identity_events import KeyRemoved as KeyRemoved
from shoal.model.identity_events import KeySet as KeySet
from shoal.model.identity_events import SignInEnded as SignInEnded
from shoal.model.identity_events import TenantAdded as TenantAdded
from shoal.model.identity_events import TenantRemoved as TenantRemoved
from shoal.model.identity_events import TokenRemoved as TokenRemoved
from shoal.model.identity_events import TokenSet as TokenSet
from shoal.model.identity_events import UserRemoved as UserRemoved
from shoal.model.identity_events import UserSet as UserSet
from shoal.model.ids import array_of
from shoal.model.job import Fault, JobSpec, Outcome, StopCause
from shoal.model.node_events import FabricMeasured as FabricMeasured
from shoal.model.node_events import NodeChecked as NodeChecked
from shoal.model.node_events import NodeEnding as NodeEnding
from shoal.model.node_events import NodeIntended as NodeIntended
from shoal.model.node_events import NodeJoined as NodeJoined
from shoal.model.node_events import NodeJudged as NodeJudged
from shoal.model.node_events import NodeLabelled as NodeLabelled
from shoal.model.node_events import NodeLost as NodeLost
from shoal.model.node_events import NodeReady as NodeReady
from shoal.model.node_events import NodeSilent as NodeSilent
from shoal.model.notice_events import JobLabelled as JobLabelled
from shoal.model.notice_events import JobNoted as JobNoted
from shoal.model.notice_events import JobWaited as JobWaited
from shoal.model.notice_events import RuleEvent as RuleEvent
from shoal.model.notice_events import RuleRemoved as RuleRemoved
from shoal.model.notice_events import RuleSet as RuleSet
from shoal.model.phrases import (
    attempt_text,
    because,
    command_text,
    exit_text,
    names_text,
    nodes_text,
    numbers_text,
    printable,
    shape_text,
)
from shoal.model.policy import Policy
from shoal.model.progress import Spent
from shoal.model.resources import Slice
from shoal.model.schedule_events import ScheduleEvent as ScheduleEvent
from shoal.model.schedule_events import ScheduleMissed as ScheduleMissed
from shoal.model.schedule_events import SchedulePaused as SchedulePaused
from shoal.model.schedule_events import ScheduleRan as ScheduleRan
from shoal.model.schedule_events import ScheduleRemoved as ScheduleRemoved
from shoal.model.schedule_events import ScheduleResumed as ScheduleResumed
from shoal.model.schedule_events import ScheduleSet as ScheduleSet
from shoal.model.schedule_events import ScheduleSkipped as ScheduleSkipped
from shoal.model.service_events import ReplicaDraining as ReplicaDraining
from shoal.model.service_events import ReplicaReady as ReplicaReady
from shoal.model.service_events import ServiceEvent as ServiceEvent
from shoal.model.service_events import ServiceScaled as ServiceScaled
from shoal.model.service_events import ServiceSet as ServiceSet
from shoal.model.service_events import ServiceStopped as ServiceStopped
from shoal.model.service_events import ServiceStopping as ServiceStopping
from shoal.model.sleep_events import JobAsleep as JobAsleep
from shoal.model.sleep_events import JobAwake as JobAwake
from shoal.model.sleep_events import JobDozing as JobDozing
from shoal.model.sleep_events import JobTouched as JobTouched
from shoal.model.sleep_events import JobWaking as JobWaking
from shoal.model.sleep_events import MembersAsleep as MembersAsleep
from shoal.model.sleep_events import MembersAwake as MembersAwake
from shoal.model.sleep_events import SleepRefused as SleepRefused
from shoal.model.sleep_events import WakeRefused as WakeRefused
from shoal.model.supply_events import NodesOrdered as NodesOrdered
from shoal.model.supply_events import OrderChanged as OrderChanged
from shoal.model.supply_events import OrderEnded as OrderEnded
from shoal.model.supply_events import OrderEvent as OrderEvent
from shoal.model.supply_events import OrderUnused as OrderUnused

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
}


class JobSubmitted(JobEvent, frozen=True, kw_only=True):
    quiet: ClassVar[bool] = True

    spec: JobSpec
    key: str = ""
    awaits: tuple[str, ...] = ()  # jobs that it waits for; others of `spec.after` had ended

    def phrase(self) -> str:
        spec = self.spec
        name = f" as '{spec.name}'" if spec.name else ""
        return f"was submitted{name}: {shape_text(spec)}: {command_text(spec.command)}"

    def without_secrets(self) -> Self:
        return msgspec.structs.replace(self, spec=without_keys(self.spec))


class JobPlaced(JobEvent, frozen=True, kw_only=True):
    """The gang has all its slices; member i gets slice i."""

    attempt: int
    slices: tuple[Slice, ...]
    master: str
    why: str
    predicted_ms: int | None = None  # when it was expected to start, if room was set aside for it
    door: str = ""  # where a gang that is a replica answers requests, "address:port"

    def phrase(self) -> str:
        where = self.why or nodes_text(self.slices)
        return f"was placed{attempt_text(self.attempt)}: {where}"


class JobReserved(JobEvent, frozen=True, kw_only=True):
    """The job is blocked at the front of the queue; room for `members` of it is set aside on each
    of these nodes from about `start_ms` on. None: the end of the jobs running there is not known.
    Without `members` (before 0.7.0), the whole nodes are set aside."""

    quiet: ClassVar[bool] = True

    start_ms: int | None
    nodes: tuple[str, ...]
    why: str
    members: tuple[int, ...] = ()

    def phrase(self) -> str:
        """Without the expected start: that changes, and `shoal why` shows it."""
        if not self.nodes:
            return "is first in the queue"
        return f"has room reserved on {names_text(self.nodes)} for when the jobs there end"


class JobClaimed(JobEvent, frozen=True, kw_only=True):
    """Room is being made for the job: it starts on these slices when the jobs that hold them,
    which are being stopped, have ended."""

    slices: tuple[Slice, ...]
    why: str

    def phrase(self) -> str:
        return f"gets room made for it on {nodes_text(self.slices)}{because(self.why)}"


class JobUnclaimed(JobEvent, frozen=True, kw_only=True):
    why: str

    def phrase(self) -> str:
        return f"no longer gets room made for it{because(self.why)}"


class JobPromoted(JobEvent, frozen=True, kw_only=True):
    """The job has waited too long: it comes first within its priority until it has ended."""

    why: str

    def phrase(self) -> str:
        return f"now comes first among jobs of its priority{because(self.why)}"


class MembersStarted(JobEvent, frozen=True, kw_only=True):
    """Some members are alive; others have not been seen yet."""

    quiet: ClassVar[bool] = True

    attempt: int
    members: tuple[int, ...]

    def phrase(self) -> str:
        begun = f"started {numbers_text(self.members)} and waits for the rest"
        return f"{begun}{attempt_text(self.attempt)}"


class JobRunning(JobEvent, frozen=True, kw_only=True):
    """Every member of the gang has been seen alive."""

    attempt: int

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

    def phrase(self) -> str:
        return f"lost member {self.member} on {self.node}{because(self.why)}"


class JobCheckpointed(JobEvent, frozen=True, kw_only=True):
    """The job has saved all its work up to `step`: a restart continues from there."""

    quiet: ClassVar[bool] = True

    attempt: int
    step: int

    def phrase(self) -> str:
        return f"saved its work up to step {self.step}"


class JobIdled(JobEvent, frozen=True, kw_only=True):
    """The job holds GPUs but has not used them since `since_ms`; it will have to give them back."""

    attempt: int
    since_ms: int
    why: str

    def phrase(self) -> str:
        return f"is idle{because(self.why)}"


class JobUsed(JobEvent, frozen=True, kw_only=True):
    """The job uses its GPUs again."""

    attempt: int
    why: str

    def phrase(self) -> str:
        return f"is no longer idle{because(self.why)}"


class JobStopping(JobEvent, frozen=True, kw_only=True):
    attempt: int
    cause: StopCause
    why: str

    def phrase(self) -> str:
        return f"is being stopped ({CAUSE_WORDS[self.cause]}){because(self.why)}"


class JobRequeued(JobEvent, frozen=True, kw_only=True):
    attempt: int
    cause: StopCause
    not_before_ms: int
    why: str

    def phrase(self) -> str:
        wait_ms = self.not_before_ms - self.at_ms
        later = f" in {wait_ms / 1000:.1f} s" if wait_ms > 0 else ""
        return f"will run again{later} ({CAUSE_WORDS[self.cause]}){because(self.why)}"


class JobAdopted(JobEvent, frozen=True, kw_only=True):
    """A job that was given up with a silent node turned out to be alive there, complete."""

    attempt: int
    node: str
    why: str

    def phrase(self) -> str:
        return f"continues on {self.node}{because(self.why)}"


class JobFinished(JobEvent, frozen=True, kw_only=True):
    attempt: int
    outcome: Outcome
    code: int
    why: str

    def phrase(self) -> str:
        code = "" if self.outcome is Outcome.SUCCEEDED else f" with {exit_text(self.code)}"
        return f"{OUTCOME_WORDS[self.outcome]}{code}{because(self.why)}"


class BudgetEvent(EventBase, frozen=True, kw_only=True):
    tenant: str
    why: str = ""

    @property
    def subject(self) -> str:
        return f"tenant {self.tenant}"

    def visible_to(self, reader: Reader) -> bool:
        return reader.sees_tenant(self.tenant, self.at_ms)


class BudgetWarned(BudgetEvent, frozen=True, kw_only=True):
    """The tenant has used 80 % of its budget."""

    def phrase(self) -> str:
        return f"was warned about its budget{because(self.why)}"


class BudgetHeld(BudgetEvent, frozen=True, kw_only=True):
    """The tenant has used all of its budget: its jobs, and those of its branches, keep waiting."""

    def phrase(self) -> str:
        return f"has used up its budget{because(self.why)}"


class BudgetFreed(BudgetEvent, frozen=True, kw_only=True):
    """The tenant has budget left again, or no longer has a budget."""

    def phrase(self) -> str:
        return f"has budget again{because(self.why)}"


class ClockJumped(ClusterEvent, frozen=True, kw_only=True):
    """The machine's clock was set and is `drift_ms` ahead of the cluster's time, which runs on."""

    drift_ms: int
    why: str

    @property
    def subject(self) -> str:
        return "the clock"

    def sentence(self) -> str:
        return printable(self.why)


class PolicyChanged(ClusterEvent, frozen=True, kw_only=True):
    policy: Policy
    who: str = ""  # empty: the controller started with it

    @property
    def subject(self) -> str:
        return "the policy"

    def phrase(self) -> str:
        policy = self.policy
        return (
            f"is now '{policy.name}': order {policy.order}, "
            f"placement {policy.placement}, preempt {policy.preempt}"
        )

    def concealed(self, reader: Reader) -> Self:
        return msgspec.structs.replace(self, policy=reader.policy(self.policy), who="")


class ControllerStarted(ClusterEvent, frozen=True, kw_only=True):
    """`epoch` fences the commands of controllers before this one. `first_port` was where a new
    cluster began to take ports, while they were taken in turn. Job numbers below `first_job` are
    already in use, even if this log does not show it. If the log has lost events, so are attempts
    of these jobs below `first_attempt`, and orders below `first_order`."""

    epoch: int
    first_port: int = 0
    first_job: int = 0
    first_attempt: int = 0
    first_order: int = 0

    @property
    def subject(self) -> str:
        return "the controller"

    def phrase(self) -> str:
        return f"restarted (start {self.epoch})" if self.epoch > 1 else "started"


class ClusterRestored(ClusterEvent, frozen=True, kw_only=True):
    """The log ends where a backup was made; what happened later is lost. The nodes may have seen
    epochs below `epoch`, jobs below `first_job`, attempts of these jobs below `first_attempt`, and
    orders below `first_order`: none of these numbers is given out again."""

    saved_ms: int
    epoch: int
    first_job: int
    first_attempt: int
    first_order: int

    @property
    def subject(self) -> str:
        return "the cluster"

    def phrase(self) -> str:
        return (
            f"was restored from its backup of {moment_text(self.saved_ms)}: "
            f"what happened later is lost, and new jobs begin at j{self.first_job}"
        )


def _kinds(base: type[EventBase]) -> list[type[EventBase]]:
    """Those that can happen: families of events have kinds below them."""
    below = base.__subclasses__()
    return [kind for family in below for kind in _kinds(family)] if below else [base]


KINDS = tuple(_kinds(EventBase))
if TYPE_CHECKING:
    Event = EventBase
else:
    Event = Union[KINDS]  # noqa: UP007 - so that a decoder finds the kind by its tag

QUIET = tuple(kind.__name__ for kind in KINDS if kind.quiet)


def jobs_of(events: Iterable[Event]) -> dict[str, None]:
    """The jobs that these events are about, and the arrays of those that are elements."""
    jobs = dict.fromkeys(event.job for event in events if isinstance(event, JobEvent))
    return {**jobs, **dict.fromkeys(array_of(job) for job in jobs if array_of(job))}


class Recorded(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event with its place in the log. `text`: its sentence, where it is shown to people."""

    seq: Annotated[int, msgspec.Meta(ge=1)]
    event: Event
    text: str = ""


def published(records: Iterable[Recorded]) -> list[Recorded]:
    """As views show them: with their sentences, and without secrets."""
    return [
        Recorded(record.seq, record.event.without_secrets(), record.event.sentence())
        for record in records
    ]
