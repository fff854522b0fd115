"""The API's answers: the state as a person or a script wants to see it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from shoal.model.after import YEAR_10000_MS
from shoal.model.array import ArrayCounts
from shoal.model.bound import Bound
from shoal.model.health import StandingChange, Verdict
from shoal.model.job import JobSpec, Note, Startup
from shoal.model.service import EngineFigures, ServiceSpec
from shoal.model.sites import SiteView
from shoal.model.tokens import TokenLoad

SUBMISSIONS_MAX = 1_000  # at once
Moment = Annotated[int, msgspec.Meta(ge=0, lt=YEAR_10000_MS)]


class ProgressView(msgspec.Struct, kw_only=True):
    """How far a job is, as it reports. `slow`: members that hold the others up."""

    step: int
    steps_total: int  # 0: not known
    step_us: int  # usual time of a step; 0: not known
    left_ms: int | None
    saved_step: int
    loss: float | None
    metrics: dict[str, float]
    slow: list[int]
    bound: Bound | None = None  # what limits its steps; None: not known (yet)


class NapView(msgspec.Struct, kw_only=True):
    """A job's present sleep, from when it began to fall asleep until all of it is awake."""

    since_ms: int
    cause: str  # preempt, turn, idle or user
    wants: bool  # it wakes as soon as there is room; otherwise when it is touched
    host_mb: int  # memory of its nodes that is set aside for what it had on GPUs


class AwayView(msgspec.Struct, frozen=True, kw_only=True):
    """Where a neighbor runs a job, or ran it to its end. `id`: its name there; empty: the neighbor
    has not said that it has it. `price`: per GPU-hour, as offered."""

    neighbor: str
    id: str
    since_ms: int
    running_ms: int | None
    price: float | None


class JobBase(msgspec.Struct, frozen=True, kw_only=True):
    """What lists and the feed both say of a job. `state` is its phase while it is live and its
    outcome afterwards."""

    id: str
    state: str
    name: str = ""
    tenant: str = ""
    user: str = ""
    service: str = ""  # it is a replica of this one
    members: int = 1
    members_max: int = 0  # 0: not elastic
    size: int = 0  # members of the live attempt, else 0
    gpus: int = 0  # per member
    gpu_milli: int = 1000  # of each GPU, in thousandths; 0: the share that `gpu_memory_mb` is
    gpu_memory_mb: int = 0
    attempt: int = 0
    submitted_ms: int = 0
    running_ms: int | None = None
    finished_ms: int | None = None
    code: int | None = None
    why: str = ""


class JobRow(JobBase, frozen=True, kw_only=True):
    """A job in a list. model/columns.py says what is shown of it."""

    priority: int
    nodes: list[str]
    command: str
    progress: ProgressView | None  # if its members report steps
    idle_since_ms: int | None = None  # its GPUs are unused since then; it was warned
    gpu_busy_milli: int | None = (
        None  # how busy its GPUs are, where a driver tells; shared ones too
    )
    gpu_used_mb: int | None = None  # what it has on them
    array: ArrayCounts | None = None  # it is an array, and this is how far it is
    labels: dict[str, str] = {}
    nap: NapView | None = None  # it sleeps, or is on the way there or back
    away: AwayView | msgspec.UnsetType = msgspec.UNSET  # only of a job that a neighbor has
    cells: dict[str, str | int | None] | msgspec.UnsetType = msgspec.UNSET  # of further columns


class MemberView(msgspec.Struct, kw_only=True):
    member: int
    node: str
    gpus: list[int]  # that it holds: none while its job is asleep
    status: str
    code: int | None


class JobView(JobRow, frozen=True, kw_only=True):
    """One job in full."""

    spec: JobSpec
    gang: list[MemberView]
    placed_ms: int | None
    not_before_ms: int
    failures: int
    losses: int
    hangs: int
    master: str
    notes: list[Note] = []
    naps: int = 0  # how often this attempt has been put to sleep
    slept_ms: int = 0  # how long it slept before; not part of its run time
    startup: Startup | None = None  # of this attempt, if it has GPUs and it was learned
    until_ms: int | msgspec.UnsetType = msgspec.UNSET  # its lease, if it has one


class NodeView(msgspec.Struct, kw_only=True):
    """`state` is one word: the most important of its health and the operator's intent."""

    id: str
    state: str
    health: str
    intent: str
    why: str
    since_ms: int
    standing: str  # ok, suspect or quarantined
    history: list[StandingChange]  # changes of the standing, newest last
    place: str
    measured_place: str = ""  # its group as tours of the network found it
    weak_links: list[str] = []  # in words
    address: str
    origin: str = ""  # empty: the head's own; joined; or the supply that brought it
    order: str = ""  # that brought it
    checkpoints: str = ""  # names its checkpoint storage: nodes with the same name share it
    containers: str = ""  # what runs images there; empty: nothing does
    unenforced: list[str] = []  # what members are not held to there, and why
    labels: dict[str, str] = {}
    taints: list[str] = []
    version: str = ""  # of Shoal there; empty: older than 0.6.0, or not heard of yet
    incarnation: int
    gpu_model: str
    gpu_memory_mb: int  # of each GPU; 0: not known
    gpus: int
    gpus_free: int  # whole GPUs
    gpu_milli_free: int  # including the free shares of shared ones
    cpu_milli: int
    cpu_milli_free: int
    memory_mb: int
    memory_mb_free: int
    jobs: list[str]
    closed: str = ""  # who closed it, when and why: drained 3h ago by ada: new memory
    ends_ms: int | None = None  # until when it lives, if that is known
    ends_in_ms: int | None = None  # the same, from now, because clocks differ
    ends_why: str = ""
    hangs: str = ""  # mounts that do not answer, in words
    sleep: str = ""  # how members sleep there: cuda or freeze; empty: they cannot
    sleep_why: str = ""  # why they cannot
    sleepers: int = 0  # members that sleep there, or are on the way there or back
    sleepers_mb: int = 0  # memory that is set aside for what they had on GPUs


class PackageView(msgspec.Struct, kw_only=True):
    """A package that the controller has."""

    package: str
    size: int


class StatusView(msgspec.Struct, kw_only=True):
    version: str
    engine: str = "local"  # what brings nodes; unless "local", code has to be sent
    epoch: int  # number of controller starts
    restarts: int = 0  # controllers that died and were replaced since `shoal up`
    now_ms: int
    up_since_ms: int
    nodes: dict[str, int]  # state -> number of nodes
    gpus: int  # of the nodes that are not lost
    gpus_held: int
    gpus_free: int  # on nodes that take jobs
    gpus_unusable: int  # free on a closed or quarantined node, or on a lost node
    cpu_milli: int
    cpu_milli_held: int
    jobs: dict[str, int]  # phase -> number of live jobs
    submitted: int | None  # of all tenants; for those who see only their own: unknown
    finished: int | None
    last_seq: int  # newest event
    waits: list[str] = []  # what waiting jobs wait for, with counts, most frequent first
    supply: list[str] = []  # what brings nodes and has some, has been asked, or cannot be
    caps: list[str] = []  # tenants that may have only so many jobs, the fullest first
    unenforced: list[str] = []  # what members are not held to, and on which nodes
    alarms: tuple[str, ...] = ()  # what is wrong with the controller itself
    # Clusters that take jobs of ours or may send theirs, if there are any.
    neighbors: int | msgspec.UnsetType = msgspec.UNSET


class HeadView(msgspec.Struct, kw_only=True):
    """A machine that runs a controller. `role`: leads, standby or away."""

    name: str
    url: str
    version: str
    role: str
    behind: int  # events that it does not know yet
    seen_ms_ago: int


class Remedy(msgspec.Struct, kw_only=True, frozen=True):
    """What would let a waiting job start sooner: in words, and as what can be done at once."""

    text: str
    fields: dict[str, Any] = {}  # of the job's form, with other values: submit it so
    node: str = ""  # let jobs start there again; empty if somebody closed it for a reason
    tenant: str = ""  # raise its limits in the policy
    # "change": submit the form in its place; "resubmit": as a new job that starts over, and cancel
    # this one; "uncordon": open `nodes`; "policy": an admin has to change it.
    how: str = "change"
    nodes: list[str] = []  # all that have to be opened
    cost: str = ""  # what it costs others


class LogView(msgspec.Struct, kw_only=True):
    """A piece of one member's output. `ended`: this was the last of this attempt's output."""

    attempt: int
    member: int
    offset: int
    next_offset: int
    ended: bool
    data: bytes


class LogPiece(msgspec.Struct, kw_only=True):
    """Output of one member that came at about one time (0: not known). Where nothing is kept,
    `data` is a line that says so, and not as long as the gap."""

    member: int
    offset: int
    next_offset: int
    at_ms: int
    data: bytes


class LogPart(msgspec.Struct, kw_only=True):
    """Output of the named members in the order in which it came. For each of them: how much there
    is now, and from where to where it was read. `ended`: no more can come after this."""

    attempt: int
    members: list[int]
    sizes: list[int]
    starts: list[int]
    ends: list[int]
    ended: bool
    first_ms: int
    last_ms: int
    pieces: list[LogPiece]


class LogPlace(msgspec.Struct, kw_only=True):
    member: int
    offset: int
    at_ms: int = 0


class LogHits(msgspec.Struct, kw_only=True):
    """Lines that were found. `rest`: where to go on, unless all was searched."""

    attempt: int
    hits: list[LogPlace]
    rest: LogPlace | None


class Done(msgspec.Struct, kw_only=True):
    """`note` says if there was nothing to do."""

    id: str
    note: str = ""


class CheckView(msgspec.Struct, kw_only=True):
    """A check of a node. While it has no `verdict` it is under way: ask again."""

    node: str
    id: str
    busy: bool = False  # members ran there during the check
    took_ms: int = 0
    verdict: Verdict | None = None
    notes: tuple[str, ...] = ()


class Problem(msgspec.Struct, kw_only=True):
    """A refusal by the API: one sentence, and the field at fault if there is one."""

    message: str
    field: str = ""


class Submission(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`key` is chosen by the client: sending it again is safe and returns the same job.
    `cancelled`: that job is not to run, whether it has come before or comes now."""

    spec: JobSpec
    key: str = ""
    until_ms: Moment = 0
    cancelled: bool = False


class LeaseUntil(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    until_ms: Moment


class LeaseView(msgspec.Struct, kw_only=True):
    """`now_ms`: the cluster's clock when this was answered. `note` says if there was nothing to
    do."""

    id: str
    until_ms: int
    now_ms: int
    note: str = ""


class Submissions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`key` is chosen by the client: sending it again is safe and returns the same jobs."""

    specs: Annotated[tuple[JobSpec, ...], msgspec.Meta(max_length=SUBMISSIONS_MAX)]
    key: str = ""


class Submitted(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What became of one of several submissions: the job's `id`, or the `problem` with the `status`
    that it would have been refused with by itself."""

    id: str = ""
    problem: Problem | None = None
    status: int = 201


class ReplicaView(msgspec.Struct, kw_only=True):
    job: str
    node: str
    nodes: list[str]  # of its members, in their order; the first one answers
    members: int
    address: str  # HOST:PORT, "" before it is placed
    version: int
    state: str  # waiting, starting, ready, draining, down
    in_flight: int
    requests_per_s: float
    response_ms: int
    why: str
    engine: EngineFigures | None = None  # if its /metrics shows vLLM's or SGLang's figures


class ServiceView(msgspec.Struct, kw_only=True):
    """`state` is one word: ready, rolling, starting, idle (no replica until the first request),
    asleep, waking, stopping or failing. Before the gateway has reported that it serves it, it is
    starting."""

    name: str
    state: str
    url: str
    version: int
    least: int
    most: int
    wanted: int
    ready: int
    in_flight: int
    queued: int  # in the gateway, including those held until there is a replica
    requests_per_s: float
    failed_per_s: float
    response_ms: int
    why: str
    replicas: list[ReplicaView]
    spec: ServiceSpec
    before: int = 0  # the version that a roll-back goes to
    browser_url: str = ""  # where pages with absolute links work, too; empty: nowhere that is known
    tokens: TokenLoad | None = None  # of a service of route cache
    help: list[str] = []  # while its goals are missed: what would help
    sites: list[SiteView] = []  # other clusters that serve it, too
