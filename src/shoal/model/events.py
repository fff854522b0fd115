"""Everything that can happen. The log of these is the truth; `apply` turns it into state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from shoal.model.after_events import JobReleased as JobReleased
from shoal.model.array_events import ArrayCancelled as ArrayCancelled
from shoal.model.array_events import ArrayEvent as ArrayEvent
from shoal.model.array_events import ArrayFinished as ArrayFinished
from shoal.model.array_events import ArrayRetried as ArrayRetried
from shoal.model.array_events import ArraySubmitted as ArraySubmitted
from shoal.model.eventbase import EventBase as EventBase
from shoal.model.eventbase import JobEvent as JobEvent
from shoal.model.eventbase import NodeEvent as NodeEvent
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


class JobSubmitted(JobEvent, frozen=True, kw_only=True):
    spec: JobSpec
    key: str = ""
    awaits: tuple[str, ...] = ()  # jobs that it waits for; others of `spec.after` had ended


class JobPlaced(JobEvent, frozen=True, kw_only=True):
    """The gang has all its slices; member i gets slice i."""

    attempt: int
    slices: tuple[Slice, ...]
    master: str
    why: str
    predicted_ms: int | None = None  # when it was expected to start, if room was set aside for it
    door: str = ""  # where a gang that is a replica answers requests, "address:port"


class JobReserved(JobEvent, frozen=True, kw_only=True):
    """The job is blocked at the front of the queue; room for `members` of it is set aside on each
    of these nodes from about `start_ms` on. None: the end of the jobs running there is not known.
    Without `members` (before 0.7.0), the whole nodes are set aside."""

    start_ms: int | None
    nodes: tuple[str, ...]
    why: str
    members: tuple[int, ...] = ()


class JobClaimed(JobEvent, frozen=True, kw_only=True):
    """Room is being made for the job: it starts on these slices when the jobs that hold them,
    which are being stopped, have ended."""

    slices: tuple[Slice, ...]
    why: str


class JobUnclaimed(JobEvent, frozen=True, kw_only=True):
    why: str


class JobPromoted(JobEvent, frozen=True, kw_only=True):
    """The job has waited too long: it comes first within its priority until it has ended."""

    why: str


class MembersStarted(JobEvent, frozen=True, kw_only=True):
    """Some members are alive; others have not been seen yet."""

    attempt: int
    members: tuple[int, ...]


class JobRunning(JobEvent, frozen=True, kw_only=True):
    """Every member of the gang has been seen alive."""

    attempt: int


class MemberExited(JobEvent, frozen=True, kw_only=True):
    attempt: int
    member: int
    node: str
    code: int
    why: str = ""
    step: int | None = None  # the step it was in, if it counts steps
    stopped: bool = False  # by our command, so a code of 0 does not mean that its work is done
    spent: Spent | None = None  # where the time of its steps went, if it reports that


class MemberLost(JobEvent, frozen=True, kw_only=True):
    """A member is gone and left no exit code of its own: it vanished from its node's inventory, or
    an outdated command stopped it there. With a `fault`, its node could not run it."""

    attempt: int
    member: int
    node: str
    why: str
    fault: Fault = Fault.NONE


class JobCheckpointed(JobEvent, frozen=True, kw_only=True):
    """The job has saved all its work up to `step`: a restart continues from there."""

    attempt: int
    step: int


class JobIdled(JobEvent, frozen=True, kw_only=True):
    """The job holds GPUs but has not used them since `since_ms`; it will have to give them back."""

    attempt: int
    since_ms: int
    why: str


class JobUsed(JobEvent, frozen=True, kw_only=True):
    """The job uses its GPUs again."""

    attempt: int
    why: str


class JobStopping(JobEvent, frozen=True, kw_only=True):
    attempt: int
    cause: StopCause
    why: str


class JobRequeued(JobEvent, frozen=True, kw_only=True):
    attempt: int
    cause: StopCause
    not_before_ms: int
    why: str


class JobAdopted(JobEvent, frozen=True, kw_only=True):
    """A job that was given up with a silent node turned out to be alive there, complete."""

    attempt: int
    node: str
    why: str


class JobFinished(JobEvent, frozen=True, kw_only=True):
    attempt: int
    outcome: Outcome
    code: int
    why: str


class BudgetEvent(EventBase, frozen=True, kw_only=True):
    tenant: str
    why: str = ""


class BudgetWarned(BudgetEvent, frozen=True, kw_only=True):
    """The tenant has used 80 % of its budget."""


class BudgetHeld(BudgetEvent, frozen=True, kw_only=True):
    """The tenant has used all of its budget: its jobs, and those of its branches, keep waiting."""


class BudgetFreed(BudgetEvent, frozen=True, kw_only=True):
    """The tenant has budget left again, or no longer has a budget."""


class ClockJumped(EventBase, frozen=True, kw_only=True):
    """The machine's clock was set and is `drift_ms` ahead of the cluster's time, which runs on."""

    drift_ms: int
    why: str


class PolicyChanged(EventBase, frozen=True, kw_only=True):
    policy: Policy
    who: str = ""  # empty: the controller started with it


class ControllerStarted(EventBase, frozen=True, kw_only=True):
    """`epoch` fences the commands of controllers before this one. `first_port` was where a new
    cluster began to take ports, while they were taken in turn. Job numbers below `first_job` are
    already in use, even if this log does not show it. If the log has lost events, so are attempts
    of these jobs below `first_attempt`, and orders below `first_order`."""

    epoch: int
    first_port: int = 0
    first_job: int = 0
    first_attempt: int = 0
    first_order: int = 0


class ClusterRestored(EventBase, frozen=True, kw_only=True):
    """The log ends where a backup was made; what happened later is lost. The nodes may have seen
    epochs below `epoch`, jobs below `first_job`, attempts of these jobs below `first_attempt`, and
    orders below `first_order`: none of these numbers is given out again."""

    saved_ms: int
    epoch: int
    first_job: int
    first_attempt: int
    first_order: int


Event = (
    JobSubmitted
    | JobReleased
    | JobPlaced
    | JobReserved
    | JobClaimed
    | JobUnclaimed
    | JobPromoted
    | MembersStarted
    | JobRunning
    | MemberExited
    | MemberLost
    | JobCheckpointed
    | JobIdled
    | JobUsed
    | JobDozing
    | MembersAsleep
    | JobAsleep
    | SleepRefused
    | WakeRefused
    | JobTouched
    | JobWaking
    | MembersAwake
    | JobAwake
    | JobStopping
    | JobRequeued
    | JobAdopted
    | JobFinished
    | JobLabelled
    | JobNoted
    | JobWaited
    | RuleSet
    | RuleRemoved
    | ArraySubmitted
    | ArrayCancelled
    | ArrayRetried
    | ArrayFinished
    | NodeJoined
    | NodeReady
    | NodeSilent
    | NodeLost
    | NodeIntended
    | NodeEnding
    | NodeLabelled
    | NodeChecked
    | NodeJudged
    | FabricMeasured
    | ServiceSet
    | ServiceScaled
    | ReplicaReady
    | ReplicaDraining
    | ServiceStopping
    | ServiceStopped
    | BudgetWarned
    | BudgetHeld
    | BudgetFreed
    | NodesOrdered
    | OrderChanged
    | OrderEnded
    | OrderUnused
    | ScheduleSet
    | ScheduleRan
    | ScheduleMissed
    | ScheduleSkipped
    | SchedulePaused
    | ScheduleResumed
    | ScheduleRemoved
    | ClockJumped
    | TenantAdded
    | TenantRemoved
    | UserSet
    | UserRemoved
    | TokenSet
    | TokenRemoved
    | SignInEnded
    | KeySet
    | KeyRemoved
    | PolicyChanged
    | ControllerStarted
    | ClusterRestored
)


# Kinds so frequent that they would fill any short list of events. The store indexes all the others
# by these names: drop that index when you change this list.
QUIET = ("JobSubmitted", "JobReserved", "MembersStarted", "MemberExited", "JobCheckpointed")


def jobs_of(events: Iterable[Event]) -> dict[str, None]:
    """The jobs that these events are about, and the arrays of those that are elements."""
    jobs = dict.fromkeys(event.job for event in events if isinstance(event, JobEvent))
    return {**jobs, **dict.fromkeys(array_of(job) for job in jobs if array_of(job))}


class Recorded(msgspec.Struct, frozen=True):
    """An event with its place in the log."""

    seq: Annotated[int, msgspec.Meta(ge=1)]
    event: Event
