"""The input of a step: inventories of nodes, known deaths, and users' requests."""

from __future__ import annotations

import enum

import msgspec

from shoal.model.blocks import Held
from shoal.model.budget import Spending
from shoal.model.fabric import CheckNetwork as CheckNetwork
from shoal.model.far import Far
from shoal.model.health import CheckResult
from shoal.model.identity import EVERY_TENANT, ApiKey, NodeKey, Token, User
from shoal.model.job import Fault, Job, JobSpec, MemberRef, Outcome
from shoal.model.kept import Copied
from shoal.model.labels import LabelKey, LabelValue
from shoal.model.neighbor import NeighborReport
from shoal.model.node import LabelChange, NodeIntent, NodeSpec
from shoal.model.notice import Rule
from shoal.model.policy import SetPolicy as SetPolicy
from shoal.model.progress import Progress, Spent
from shoal.model.schedule import Due, ScheduleSpec
from shoal.model.series import NodeSample
from shoal.model.service import ServiceLoad, ServiceSpec
from shoal.model.storage import Measurement
from shoal.model.supply import SupplyReport
from shoal.model.workflow import WorkflowJob as WorkflowJob

# Requests about workflows and schedules.


class SubmitWorkflow(msgspec.Struct, frozen=True):
    """All of these jobs, or none; the answer's id is the first job's, and the workflow's."""

    jobs: tuple[WorkflowJob, ...]
    key: str = ""
    scope: str = EVERY_TENANT


class CancelWorkflow(msgspec.Struct, frozen=True):
    """Cancel those of its jobs that have not ended."""

    workflow: str
    who: str = "a user"


class SetSchedule(msgspec.Struct, frozen=True):
    """Add or change it. `next_ms` is its first due time from now on."""

    spec: ScheduleSpec
    next_ms: int
    owner: str = ""
    who: str = "a user"
    scope: str = EVERY_TENANT


class PauseSchedule(msgspec.Struct, frozen=True):
    """`next_ms` 0 pauses it; otherwise it goes on, and is due then."""

    schedule: str
    next_ms: int = 0
    who: str = "a user"
    scope: str = EVERY_TENANT


class RunSchedule(msgspec.Struct, frozen=True):
    """One run now, once for each key; the answer's id is its job."""

    schedule: str
    key: str = ""
    who: str = "a user"
    scope: str = EVERY_TENANT


class RemoveSchedule(msgspec.Struct, frozen=True):
    schedule: str
    who: str = "a user"
    scope: str = EVERY_TENANT


ScheduleRequest = SetSchedule | PauseSchedule | RunSchedule | RemoveSchedule


class MemberExit(msgspec.Struct, frozen=True):
    """A code of 128 + n means signal n, as in a shell."""

    ref: MemberRef
    code: int
    why: str = ""
    stopped: bool = False  # it had been asked to stop, so the code says little about the job
    step: int | None = None  # from its last beat, if it counts steps
    fault: Fault = Fault.NONE
    spent: Spent | None = None  # from its last beat, too
    saved_step: int = 0  # and this
    lease_ms: int = 0  # its node stopped it because this lease was over; 0: it did not


class Leased(msgspec.Struct, frozen=True):
    """A member that may be alive until then by the cluster's clock, as far as its node knows."""

    ref: MemberRef
    until_ms: int


class Getting(msgspec.Struct, frozen=True):
    """A member that cannot start yet; `what` says what is being fetched or built."""

    ref: MemberRef
    what: str


class Idle(msgspec.Struct, frozen=True):
    """A member that holds GPUs, and how long it has not used them."""

    ref: MemberRef
    idle_ms: int


class Began(msgspec.Struct, frozen=True):
    """A member that holds GPUs and has begun to work, so long after its process started. `by`: how
    its node knows: "gpu" (its GPUs were used), "steps" (it reported one), "output" (it wrote)."""

    ref: MemberRef
    after_ms: int
    by: str


class Hung(msgspec.Struct, frozen=True):
    """A mount of a node that does not answer. `path`: if links lead to it, one that a job named.
    `whole`: no member can start on the node without it."""

    mount: str
    path: str = ""
    whole: bool = False


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node's complete inventory, not a difference: alive members and unacknowledged exits.
    `stopping`: alive members that are already being stopped. `progress`: what members report of
    their work. `checks`: results of the last checks, the newest last, in every report so that none
    gets lost. `prepared`: jobs for which an interpreter is kept warm. `sample`: the node's load,
    from time to time; no decision needs it. `getting`: members that are not alive yet but hold
    their slices. `ended`: members whose processes ended without a stop command; they count as
    alive until their output is stored. `leaving`: the node leaves as soon as nothing runs on it.
    `ends_in_ms`: how much longer the node lives, as far as it knows (relative, because clocks
    differ), and what ends it then; None: no end is known. `dozing`, `asleep`, `waking`, `woke`,
    `refused`: alive members that are being put to sleep, sleep, are being woken, have woken, or
    could not be put to sleep, or woken. `uses`: what members have on GPUs, where the driver tells.
    `began`: members with GPUs that are past their start-up, for as long as they live.
    `listens`: replicas that listen on their ports by themselves; None: the agent does not look.
    `holdings`: what the node has on its disk of volumes from URLs. `hangs`: what does not answer;
    usually nothing. `leases`: of its members; None: an older agent, which does not end them."""

    spec: NodeSpec
    incarnation: int
    sequence: int
    alive: tuple[MemberRef, ...] = ()
    stopping: tuple[MemberRef, ...] = ()
    exits: tuple[MemberExit, ...] = ()
    progress: tuple[Progress, ...] = ()
    checks: tuple[CheckResult, ...] = ()
    prepared: tuple[str, ...] = ()
    sample: NodeSample | None = None
    idle: tuple[Idle, ...] = ()
    getting: tuple[Getting, ...] = ()
    leaving: bool = False
    ended: tuple[MemberRef, ...] = ()
    ends_in_ms: int | None = None
    ends_why: str = ""
    shoal: str = ""  # the agent's version; empty before 0.6.0
    dozing: tuple[MemberRef, ...] = ()
    asleep: tuple[Slept, ...] = ()
    waking: tuple[MemberRef, ...] = ()
    woke: tuple[Woke, ...] = ()
    refused: tuple[Refusal, ...] = ()
    touched: tuple[Touched, ...] = ()
    uses: tuple[Uses, ...] = ()
    listens: tuple[MemberRef, ...] | None = None
    began: tuple[Began, ...] = ()
    holdings: tuple[Held, ...] = ()
    hangs: tuple[Hung, ...] = ()
    leases: tuple[Leased, ...] | None = None


class Still(msgspec.Struct, frozen=True, tag=True):
    """In place of a report: the inventory is as in the report with this number. Costs no step."""

    node: str
    incarnation: int
    sequence: int
    sample: NodeSample | None = None


class NodeGone(msgspec.Struct, frozen=True):
    """The engine is certain that this life of the node has ended. `exits`: new ones on its disk."""

    node: str
    incarnation: int
    why: str
    exits: tuple[MemberExit, ...] = ()


class LogChunk(msgspec.Struct, frozen=True):
    """`data` belongs at `offset` of the member's output; writing it twice changes nothing. The
    `dropped` bytes before it are gone: the member wrote faster than its node could send."""

    ref: MemberRef
    offset: int
    data: bytes
    dropped: int = 0


class PackagePiece(msgspec.Struct, frozen=True):
    """`data` belongs at `offset` of the package of `size` bytes. `problem`: why there is none."""

    package: str
    offset: int
    data: bytes = b""
    size: int = 0
    problem: str = ""


class Submit(msgspec.Struct, frozen=True):
    """`key`: one key, one job, however often it is sent. `scope`: the only tenant that the sender
    may act for, which must still be there; "*": any. `instead`: it waits, and is cancelled.
    `until_ms`: the job may be alive until then, unless that is renewed; 0: for as long as it
    likes. `cancelled`: the job of this key, which may be on its way, is not to run: it is
    cancelled, or is so from its first moment."""

    spec: JobSpec
    key: str = ""
    scope: str = EVERY_TENANT
    instead: str = ""
    until_ms: int = 0
    cancelled: bool = False
    who: str = "a user"


class Cancel(msgspec.Struct, frozen=True):
    job: str
    who: str = "a user"


class RenewLease(msgspec.Struct, frozen=True):
    """The job may be alive until then by the cluster's clock."""

    job: str
    until_ms: int
    who: str = "a user"


class Requeue(msgspec.Struct, frozen=True):
    """Stop the job and run it again from its last checkpoint, without using up a retry."""

    job: str
    who: str = "a user"
    scope: str = EVERY_TENANT


class SleepJob(msgspec.Struct, frozen=True):
    """Put a running job to sleep until it is touched."""

    job: str
    who: str = "a user"


class WakeJob(msgspec.Struct, frozen=True):
    """Wake a job that sleeps, as soon as there is room: somebody asked for it, or touched it."""

    job: str
    who: str = "a user"
    why: str = ""  # what touched it; empty: a wish to wake it


class Retry(msgspec.Struct, frozen=True):
    """Run elements of an array again that ended without success: `job` is the array for all of
    them, or one element. The tick adds the `record` of an array that has finished."""

    job: str
    who: str = "a user"
    record: Job | None = None
    scope: str = EVERY_TENANT


class SetIntent(msgspec.Struct, frozen=True):
    node: str
    intent: NodeIntent
    who: str = "a user"
    why: str = ""  # what the operator said about it


class SetEnd(msgspec.Struct, frozen=True):
    node: str
    at_ms: int | None  # the node is to be free by then, e.g. for maintenance; None: it is not
    who: str = "a user"
    why: str = ""


class SetLabels(msgspec.Struct, frozen=True):
    node: str
    change: LabelChange
    who: str = "a user"


class CheckNode(msgspec.Struct, frozen=True):
    """Measure the node; the answer's id is the check's."""

    node: str
    who: str = "a user"


class SetService(msgspec.Struct, frozen=True):
    """Start or change the service; the answer's id is its name. `scope`: as for a job."""

    spec: ServiceSpec
    who: str = "a user"
    scope: str = EVERY_TENANT


class StopService(msgspec.Struct, frozen=True):
    """Let the replicas finish their requests, then end the service."""

    service: str
    who: str = "a user"
    scope: str = EVERY_TENANT


class SetSites(msgspec.Struct, frozen=True):
    """The other sites of a service of a neighbor, as its home names them. `scope`: as for a job."""

    service: str
    doors: tuple[Far, ...]
    who: str = "a user"
    scope: str = EVERY_TENANT


class AddTenant(msgspec.Struct, frozen=True):
    """`uid` 0: the first free one."""

    tenant: str
    uid: int = 0
    who: str = "a user"


class RemoveTenant(msgspec.Struct, frozen=True):
    tenant: str
    who: str = "a user"


class SetUser(msgspec.Struct, frozen=True):
    """Add the user, or change the user's roles; `add` refuses a user that exists."""

    user: User
    add: bool = False
    who: str = "a user"


class RemoveUser(msgspec.Struct, frozen=True):
    """`end`: what runs for the user is cancelled and stopped. `heir`: who gets the schedules, which
    are paused otherwise."""

    user: str
    who: str = "a user"
    end: bool = False
    heir: str = ""


class SetToken(msgspec.Struct, frozen=True):
    """`rotate`: the token must exist, and gets another secret; otherwise it must not. `accepts`: it
    must still be the invite with this hash, and becomes a token."""

    token: Token
    rotate: bool = False
    accepts: str = ""
    who: str = "a user"


class RemoveToken(msgspec.Struct, frozen=True):
    token: str
    who: str = "a user"


class EndSignIn(msgspec.Struct, frozen=True):
    """Sign out of a sign-in, which the API has verified."""

    token: str
    session: str
    until_ms: int
    who: str = "a user"


class SetKey(msgspec.Struct, frozen=True):
    """A join token (replaces one of that id), or the key of a node that joins and voids its earlier
    ones. A machine that was this node shows its last `incarnation`, or `before`: its key's id.
    `order`: the machine has shown the join token of this order."""

    key: NodeKey
    incarnation: int = 0
    before: str = ""
    who: str = "a user"
    order: str = ""


class RemoveKey(msgspec.Struct, frozen=True):
    key: str
    who: str = "a user"


class SetApiKey(msgspec.Struct, frozen=True):
    """Add the key. `scope`: the tenant that the sender acts for."""

    key: ApiKey
    scope: str = EVERY_TENANT
    who: str = "a user"


class RemoveApiKey(msgspec.Struct, frozen=True):
    key: str
    scope: str = EVERY_TENANT
    who: str = "a user"


class LabelJob(msgspec.Struct, frozen=True):
    """Set labels of a job; None removes one. `ended`: it is in the store, with labels `before`."""

    job: str
    labels: dict[LabelKey, LabelValue | None]
    who: str = "a user"
    ended: bool = False
    before: dict[str, str] = {}


class NoteJob(msgspec.Struct, frozen=True):
    """Write a note about a job; an empty one removes all of them."""

    job: str
    text: str
    who: str = "a user"
    ended: bool = False


class SetRule(msgspec.Struct, frozen=True):
    """Add the rule, whose id the step chooses. One that says the same is there only once."""

    rule: Rule
    who: str = "a user"


class RemoveRule(msgspec.Struct, frozen=True):
    """`owner`: whose rule it must be; empty: anybody's."""

    rule: str
    owner: str = ""
    who: str = "a user"


class DeclareGone(msgspec.Struct, frozen=True):
    """A person says that the neighbor will never speak again: its jobs of ours run elsewhere."""

    neighbor: str
    who: str = "a user"


class Nothing(msgspec.Struct, frozen=True):
    """Answered when the next step is stored."""


PeopleRequest = AddTenant | RemoveTenant | SetUser | RemoveUser | SetToken | RemoveToken | EndSignIn
IdentityRequest = PeopleRequest | SetKey | RemoveKey | SetApiKey | RemoveApiKey
NoticeRequest = LabelJob | NoteJob | SetRule | RemoveRule
Request = (
    Submit
    | ScheduleRequest
    | SubmitWorkflow
    | CancelWorkflow
    | Cancel
    | RenewLease
    | Requeue
    | SleepJob
    | WakeJob
    | Retry
    | SetIntent
    | SetEnd
    | SetLabels
    | CheckNode
    | Measurement
    | SetService
    | StopService
    | SetSites
    | IdentityRequest
    | NoticeRequest
    | SetPolicy
    | DeclareGone
    | Nothing
)


class Accepted(msgspec.Struct, frozen=True):
    """`id` is the job or node concerned; `note` says if there was nothing to do."""

    id: str
    note: str = ""


class Full(enum.StrEnum):
    """Whose limit on jobs is reached: the same request may be accepted later."""

    TENANT = "tenant"
    CLUSTER = "cluster"


class Refused(msgspec.Struct, frozen=True):
    """`field` names what is wrong; `message` says what would work."""

    field: str
    message: str
    missing: bool = False  # the job or node does not exist
    full: Full | None = None
    late: bool = False  # something else has changed meanwhile: look again


Answer = Accepted | Refused


class Ended(msgspec.Struct, frozen=True):
    """How a job ended, for jobs that were to wait for it."""

    id: str
    tenant: str
    outcome: Outcome
    why: str = ""
    name: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    requests: tuple[Request, ...] = ()
    nodes: tuple[NodeReport, ...] = ()
    gone: tuple[NodeGone, ...] = ()
    still: tuple[Still, ...] = ()
    services: tuple[ServiceLoad, ...] = ()
    supplies: tuple[SupplyReport, ...] = ()  # the newest of each engine that brings nodes
    neighbors: tuple[NeighborReport, ...] = ()  # the newest word of each
    spendings: tuple[Spending, ...] = ()  # of all tenants; empty: nothing new
    dues: tuple[Due, ...] = ()  # schedules whose time has come
    ended: tuple[Ended, ...] = ()  # jobs that requests name and that the store knows
    copied: tuple[Copied, ...] = ()  # checkpoints that have arrived at the head
    port_seed: int = 0  # up to 128 random bits, from which ports are drawn
    drift_ms: int | None = None  # how far the machine's clock is ahead of `now`, if it was read
    fences: bool = False  # the engine can end a node that does not answer


# What a node reports of members that sleep, or could.


class Uses(msgspec.Struct, frozen=True):
    """What a member has on GPUs now, in whole GB upwards, so that it seldom changes."""

    ref: MemberRef
    gpu_mb: int


class Slept(msgspec.Struct, frozen=True):
    """A member that is asleep: what it has moved to memory of the node, and how long that took."""

    ref: MemberRef
    memory_mb: int = 0
    took_ms: int = 0


class Woke(msgspec.Struct, frozen=True):
    """A member that was woken and is awake; how long that took."""

    ref: MemberRef
    took_ms: int = 0


class Touched(msgspec.Struct, frozen=True):
    """A member that somebody has used through an open session since it fell asleep, and how
    often."""

    ref: MemberRef
    times: int


class Refusal(msgspec.Struct, frozen=True):
    """A member that could not be put to sleep, and why; it is awake."""

    ref: MemberRef
    why: str
