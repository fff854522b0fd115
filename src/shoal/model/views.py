"""What the API answers with: the state as a person or a script wants to see it."""

from __future__ import annotations

import msgspec

from shoal.model.events import Recorded
from shoal.model.explanation import AttemptRecord
from shoal.model.health import StandingChange, Verdict
from shoal.model.job import JobSpec
from shoal.model.service import ServiceSpec


class ProgressView(msgspec.Struct, kw_only=True):
    """How far a job is, by its own word. `slow`: members that hold the others up."""

    step: int
    steps_total: int  # 0: not known
    step_us: int  # what a step usually takes; 0: not known
    left_ms: int | None
    saved_step: int
    loss: float | None
    metrics: dict[str, float]
    slow: list[int]


class JobRow(msgspec.Struct, kw_only=True):
    """A job in a list. `state` is its phase while it lives and its outcome afterwards."""

    id: str
    name: str
    state: str
    tenant: str
    members: int
    members_max: int  # 0: not elastic
    size: int  # members of the attempt that lives now, else 0
    gpus: int  # per member
    gpu_milli: int  # of each, in thousandths; 0: as much as `gpu_memory_mb` of its memory is
    gpu_memory_mb: int
    priority: int
    attempt: int
    nodes: list[str]
    submitted_ms: int
    running_ms: int | None
    finished_ms: int | None
    code: int | None
    command: str
    why: str
    progress: ProgressView | None  # of one whose members tell of their steps
    idle_since_ms: int | None = None  # it was warned that it uses nothing of its GPUs


class MemberView(msgspec.Struct, kw_only=True):
    member: int
    node: str
    gpus: list[int]
    status: str
    code: int | None


class JobView(JobRow, kw_only=True):
    """One job, whole."""

    spec: JobSpec
    gang: list[MemberView]
    placed_ms: int | None
    not_before_ms: int
    failures: int
    losses: int
    hangs: int
    master: str


class NodeView(msgspec.Struct, kw_only=True):
    """`state` is one word: what matters most of its health and the operator's intent."""

    id: str
    state: str
    health: str
    intent: str
    why: str
    since_ms: int
    standing: str  # what is thought of its work: ok, suspect, quarantined
    history: list[StandingChange]  # how that changed, the newest last
    place: str
    address: str
    checkpoints: str = ""  # names its root for checkpoints: the same name is the same place
    incarnation: int
    gpu_model: str
    gpu_memory_mb: int  # of each GPU; 0: not known
    gpus: int
    gpus_free: int  # wholly
    gpu_milli_free: int  # with what is left of shared ones
    cpu_milli: int
    cpu_milli_free: int
    memory_mb: int
    memory_mb_free: int
    jobs: list[str]


class PackageView(msgspec.Struct, kw_only=True):
    """A package that the controller has."""

    package: str
    size: int


class StatusView(msgspec.Struct, kw_only=True):
    version: str
    engine: str = "local"  # who runs processes; other than "local": code has to travel
    epoch: int  # how often a controller has started
    restarts: int = 0  # how often since `shoal up` one had to take the place of one that died
    now_ms: int
    up_since_ms: int
    nodes: dict[str, int]  # state -> how many
    gpus: int  # of the nodes that are not lost
    gpus_held: int
    gpus_free: int  # on nodes that take jobs
    gpus_unusable: int  # free, but their node is closed or in quarantine; and those of lost nodes
    cpu_milli: int
    cpu_milli_held: int
    jobs: dict[str, int]  # phase -> how many live jobs
    submitted: int
    finished: int
    last_seq: int  # newest event
    waits: list[str] = []  # what those who wait wait for, in counts, most first
    alarms: tuple[str, ...] = ()  # what is wrong with the controller itself


class WhyView(msgspec.Struct, kw_only=True):
    """`why` is the truth of this moment; `events` is how it came to it, oldest first: the newest of
    them, and of checkpoints in a row the last. `attempts` are all of the job's."""

    id: str
    state: str
    why: str
    early_ms: int | None  # a waiting job will probably start between these two moments
    late_ms: int | None
    start: str = ""  # the same in words; empty: `why` says all there is to say
    progress: ProgressView | None
    events: list[Recorded]
    attempts: list[AttemptRecord] = []


class EventsView(msgspec.Struct, kw_only=True):
    """`next_after` is what to pass as `after` to go on from here."""

    events: list[Recorded]
    next_after: int


class LogView(msgspec.Struct, kw_only=True):
    """A piece of one member's output. `ended`: this attempt writes no more, and this was all."""

    attempt: int
    member: int
    offset: int
    next_offset: int
    ended: bool
    data: bytes


class Done(msgspec.Struct, kw_only=True):
    """`note` says if there was nothing to do."""

    id: str
    note: str = ""


class CheckView(msgspec.Struct, kw_only=True):
    """A check of a node. While it has no `verdict` it is under way: ask again."""

    node: str
    id: str
    busy: bool = False  # members ran there meanwhile
    took_ms: int = 0
    verdict: Verdict | None = None
    notes: tuple[str, ...] = ()


class Problem(msgspec.Struct, kw_only=True):
    """Every refusal of the API: one sentence, and the field at fault if there is one."""

    message: str
    field: str = ""


class Submission(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`key` is chosen by the client: sending it again is safe and gives the same job."""

    spec: JobSpec
    key: str = ""


class ReplicaView(msgspec.Struct, kw_only=True):
    job: str
    node: str
    address: str  # HOST:PORT, "" before it is placed
    version: int
    state: str  # waiting, starting, ready, draining, down
    in_flight: int
    requests_per_s: float
    response_ms: int
    why: str


class ServiceView(msgspec.Struct, kw_only=True):
    """`state` is one word: ready, rolling, starting, idle (no replica, one comes with the first
    request), stopping or failing."""

    name: str
    state: str
    url: str
    version: int
    least: int
    most: int
    wanted: int
    ready: int
    in_flight: int
    queued: int  # in the gateway, with those held for want of a replica
    requests_per_s: float
    failed_per_s: float
    response_ms: int
    why: str
    replicas: list[ReplicaView]
    spec: ServiceSpec
