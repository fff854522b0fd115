"""A job: one gang with a command and the rules it lives by."""

from __future__ import annotations

import enum
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

import msgspec

from shoal.model.after import AFTER_CHARACTERS_MAX, AFTER_MAX, AFTER_PATTERN, YEAR_10000_MS
from shoal.model.array import Elements
from shoal.model.away import Away
from shoal.model.labels import (
    CONDITIONS_MAX,
    WIREGUARD,
    Condition,
    Key,
    LabelKey,
    LabelValue,
    Toleration,
    asked_words,
)
from shoal.model.notice import WISHES_MAX, Wish
from shoal.model.reason import Reader, job_part
from shoal.model.resources import Demand, Slice
from shoal.model.sweep import INDEX_MAX, Sweep
from shoal.model.volume import VOLUME_NAME_PATTERN, VOLUME_PATTERN, VOLUMES_MAX

# One limit of Linux shapes two of ours: an argument or environment string of 128 KiB or more
# cannot be passed to a process at all, so it is refused at submission, not at launch.
ARGUMENT_BYTES_MAX = 128 * 1024 - 1
# execve takes a quarter of the stack limit (2 MiB by default) for all strings together.
COMMAND_BYTES_MAX = 512 * 1024
ENV_BYTES_MAX = 512 * 1024
MEMBERS_MAX = 16_384
REQUIREMENTS_BYTES_MAX = 64 * 1024
PACKAGE_BYTES_MAX = 1 << 30  # for code; keep data where the nodes can reach it
PACKAGE_FILES_MAX = 100_000
PACKAGE_PATTERN = r"^([0-9a-f]{64})?(?!\n)$"
TIME_MS_MAX = 366 * 24 * 3600 * 1000
JOB_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*(?!\n)$"
DEFAULT_TENANT = "default"
ENV_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(?!\n)$"
# NAME, NAME=/FILE to have it in a file of another name, or NAME=VARIABLE in place of a file.
SECRET_PATTERN = (
    r"^[A-Za-z][A-Za-z0-9._-]{0,62}"
    r"(=(/[A-Za-z][A-Za-z0-9._-]{0,62}|[A-Za-z_][A-Za-z0-9_]{0,127}))?(?!\n)$"
)
SECRETS_MAX = 64  # of one job
JOB_LABELS_MAX = 32
NOTES_MAX = 20  # of one job
NOTE_CHARACTERS_MAX = 1_000
# host:port/path/name:tag@sha256:digest, of which only the name is needed, or the path of a .sif
# file. Nothing that a runtime would take for a flag, or for a way to read other files ("oci:...").
IMAGE_PATTERN = (
    r"^(?:(?!(?:containers-storage|dir|docker|docker-archive|docker-daemon|oci|oci-archive|ostree"
    r"|sif|tarball):)"
    r"(?:[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]{1,5})?/)?[a-z0-9][a-z0-9._-]*(?:/[a-z0-9][a-z0-9._-]*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
    r"|/[A-Za-z0-9._/+-]+[.]sif)?(?!\n)$"
)

Text = Annotated[str, msgspec.Meta(max_length=ARGUMENT_BYTES_MAX)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=TIME_MS_MAX)]


class Restart(enum.StrEnum):
    """When a job may run again."""

    NEVER = "never"
    ON_NODE_LOSS = "on-node-loss"
    ON_FAILURE = "on-failure"  # and on node loss


class Within(enum.StrEnum):
    """How near to each other the members of a gang should be."""

    ANYWHERE = "anywhere"
    NODE = "node"
    RACK = "rack"
    BLOCK = "block"


class MemberSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a job's spec that its nodes get: the same for all members and attempts. It is
    the base of `Launch`, too: a field that a node needs is declared here, and nowhere else."""

    cpu_milli: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 1000
    memory_mb: Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)] = 0
    workdir: Annotated[str, msgspec.Meta(max_length=4096)] = ""  # with a package: a path inside it
    # SHA-256 of the archive of the working directory that was sent; "": none was.
    package: Annotated[str, msgspec.Meta(pattern=PACKAGE_PATTERN, max_length=64)] = ""
    # pip requirements to install for the job, as the text of a requirements file.
    requirements: Annotated[str, msgspec.Meta(max_length=REQUIREMENTS_BYTES_MAX)] = ""
    # The container image to run it in.
    image: Annotated[str, msgspec.Meta(pattern=IMAGE_PATTERN, max_length=512)] = ""
    # Names of the tenant's secrets; a member gets each as a file, or NAME=VARIABLE or
    # NAME=/FILE.
    secrets: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=SECRET_PATTERN, max_length=192)], ...],
        msgspec.Meta(max_length=SECRETS_MAX),
    ] = ()
    # SOURCE:NAME[:ro]: folders that its nodes must have.
    volumes: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=VOLUME_PATTERN, max_length=1024)], ...],
        msgspec.Meta(max_length=VOLUMES_MAX),
    ] = ()
    # Names of volumes from URLs of which a member gets its share of the files only.
    volume_shard: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=VOLUME_NAME_PATTERN, max_length=32)], ...],
        msgspec.Meta(max_length=VOLUMES_MAX),
    ] = ()
    # Names of volumes from URLs whose files are fetched when `shoal.data` reads them.
    volume_lazy: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=VOLUME_NAME_PATTERN, max_length=32)], ...],
        msgspec.Meta(max_length=VOLUMES_MAX),
    ] = ()
    tenant: Annotated[str, msgspec.Meta(max_length=63, pattern=JOB_NAME_PATTERN)] = DEFAULT_TENANT
    stop_grace_ms: Annotated[int, msgspec.Meta(ge=0, le=3_600_000)] = 10_000
    # Its command starts processes in the other members by itself, as mpirun does: it runs in
    # member 0, and the others wait for what it starts there.
    launcher: bool = False
    interactive: bool = False  # each member has a terminal, to which users attach
    encrypt: bool = False  # kept files leave its nodes encrypted
    encrypt_network: bool = False  # what members on different nodes send each other is encrypted


def for_members(spec: MemberSpec) -> dict[str, Any]:
    """Its fields of `MemberSpec`, for a command to a node."""
    return dict(zip(MemberSpec.__struct_fields__, _for_members(spec), strict=True))


_for_members = attrgetter(*MemberSpec.__struct_fields__)


class JobSpec(MemberSpec, frozen=True, kw_only=True, forbid_unknown_fields=True, weakref=True):
    """What a user asks for. `members` identical processes start together or not at all."""

    command: Annotated[tuple[Text, ...], msgspec.Meta(min_length=1, max_length=4096)]
    name: Annotated[str, msgspec.Meta(max_length=63, pattern=JOB_NAME_PATTERN)] | None = None
    labels: Annotated[dict[LabelKey, LabelValue], msgspec.Meta(max_length=JOB_LABELS_MAX)] = {}
    notify: Annotated[tuple[Wish, ...], msgspec.Meta(max_length=WISHES_MAX)] = ()
    members: Annotated[int, msgspec.Meta(ge=1, le=MEMBERS_MAX)] = 1
    gpus: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    env: dict[Annotated[str, msgspec.Meta(max_length=256, pattern=ENV_NAME_PATTERN)], Text] = {}
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0
    user: Annotated[str, msgspec.Meta(max_length=63)] = ""  # its submitter, for the ledger
    members_max: Annotated[int, msgspec.Meta(ge=0, le=MEMBERS_MAX)] = 0  # 0: not elastic
    gpu_milli: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1000  # 0: by `gpu_memory_mb`
    gpu_memory_mb: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 0
    gpu_models: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)] = ()
    members_per_node: Annotated[int, msgspec.Meta(ge=0, le=MEMBERS_MAX)] = 0  # 0: any number
    whole_nodes: bool = False  # no other job on its nodes
    within: Within = Within.ANYWHERE
    within_required: bool = False
    # Conditions on the labels of its nodes, and the taints that do not keep it away.
    where: Annotated[tuple[Condition, ...], msgspec.Meta(max_length=CONDITIONS_MAX)] = ()
    tolerates: Annotated[tuple[Toleration, ...], msgspec.Meta(max_length=CONDITIONS_MAX)] = ()
    spread: Key = ""  # members (or replicas) as evenly as possible over the values of this label
    together: Key = ""  # all members on nodes with the same value of this label
    preemptible: bool = False  # may be stopped for other jobs, and moved; it checkpoints
    checkpoint_ms: Milliseconds = 0  # time between its checkpoints; 0: it starts over
    estimate_ms: Milliseconds = 0  # expected run time, if the user knows it
    # Other jobs and how they must have ended before it may start: j7, j7:ok, j7:any or j7:fail.
    after: Annotated[
        tuple[
            Annotated[str, msgspec.Meta(pattern=AFTER_PATTERN, max_length=AFTER_CHARACTERS_MAX)],
            ...,
        ],
        msgspec.Meta(max_length=AFTER_MAX),
    ] = ()
    begin_ms: Annotated[int, msgspec.Meta(ge=0, lt=YEAR_10000_MS)] = 0  # not started before then
    service: Annotated[str, msgspec.Meta(max_length=63)] = ""  # it is a replica of this service
    version: Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)] = 0  # ... in this version
    # The first job of those that were submitted with it as one workflow.
    workflow: Annotated[str, msgspec.Meta(max_length=32)] = ""
    schedule: Annotated[str, msgspec.Meta(max_length=63)] = ""  # it is a run of this schedule
    scheduled_ms: Annotated[int, msgspec.Meta(ge=0, lt=YEAR_10000_MS)] = 0  # ... due at this time
    sweep: Sweep | None = None  # it is an array: each element becomes a job of its own
    array: Annotated[str, msgspec.Meta(max_length=16)] = ""  # set by Shoal: an element of this
    index: Annotated[int, msgspec.Meta(ge=0, le=INDEX_MAX)] = 0  # ... with this index
    restart: Restart = Restart.ON_NODE_LOSS
    retries: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    backoff_ms: Milliseconds = 1000
    time_limit_ms: Milliseconds = 0  # 0: none
    no_sleep: bool = False  # never put it to sleep
    # Where it may run: any cluster, here, these neighbors, or those that meet the conditions.
    cluster: Annotated[str, msgspec.Meta(max_length=256)] = ""
    # A neighbor that has not been heard of for so long has stopped it by then; 0: it runs on.
    if_cut_ms: Milliseconds = 0

    @property
    def demand(self) -> Demand:
        return Demand(
            self.gpus,
            self.cpu_milli,
            self.memory_mb,
            self.gpu_milli,
            self.gpu_memory_mb,
            self.gpu_models,
            bool(self.image),
            (*self.conditions, self.together) if self.together else self.conditions,
            self.tolerates,
        )

    @property
    def conditions(self) -> tuple[str, ...]:
        """On its nodes' labels, with what follows from its other wishes."""
        seals = self.encrypt_network and (self.members > 1 or self.elastic)
        return (*self.where, WIREGUARD) if seals else self.where

    @property
    def asked(self) -> tuple[str, ...]:
        """What of the nodes' labels and taints matters to it."""
        if not (self.conditions or self.tolerates or self.spread or self.together):
            return ()
        keys = tuple(key for key in (self.spread, self.together) if key)
        return asked_words(self.conditions, self.tolerates, keys)

    @property
    def owner(self) -> str:
        """Who answers for it: several jobs of one owner are one word against a node."""
        return f"{self.tenant}/{self.user}"

    @property
    def elastic(self) -> bool:
        return self.members_max > self.members

    @property
    def yields(self) -> bool:
        """Whether other jobs may stop or move it: its restart rule lets it run again."""
        return self.preemptible and self.restart is not Restart.NEVER

    @property
    def resizes(self) -> bool:
        """It may be restarted with more or fewer members."""
        return self.elastic and self.restart is not Restart.NEVER


class MemberRef(NamedTuple):
    """The permanent, cluster-wide name of one member of one attempt."""

    job: str
    attempt: int
    member: int

    def __str__(self) -> str:
        return f"{self.job}.{self.attempt}.{self.member}"


class MemberStatus(enum.StrEnum):
    PENDING = "pending"  # placed, not yet seen alive
    ALIVE = "alive"
    EXITED = "exited"
    LOST = "lost"  # its node is lost, or it vanished without an exit code


class Fault(enum.StrEnum):
    """Why an exit may be the node's fault, as the node saw it."""

    NONE = ""
    START = "start"  # the node could not start it: no disk space, inodes or processes left
    SICK = "sick"  # it ran and failed, and nothing can be written to the node's disk
    WAKE = "wake"  # it slept, and the node could not wake it
    MISSING = "missing"  # its program or folder is missing; another node may have it
    PORT = "port"  # it could not start: another process of the node has its port
    HANGS = "hangs"  # it could not start: a mount of the node that it needs does not answer
    LEASE = "lease"  # it could not start before its lease was over
    TAKEN = "taken"  # it ran, and another process of the node has taken its port


class Member(msgspec.Struct):
    """One member of the current attempt."""

    slice: Slice
    status: MemberStatus = MemberStatus.PENDING
    code: int | None = None
    started: bool = False  # it was seen running
    stopped: bool = False  # it ended after a stop command
    host_mb: int = 0  # memory of the node for what it has on its GPUs, while its job sleeps
    asleep: bool = False  # it was seen asleep
    lent: bool = False  # it holds no GPU and no CPU: its job is asleep

    @property
    def done(self) -> bool:
        """It finished its work: it exited with 0, and not because it was stopped."""
        return self.status is MemberStatus.EXITED and self.code == 0 and not self.stopped

    @property
    def over(self) -> bool:
        return self.status is MemberStatus.EXITED or self.status is MemberStatus.LOST

    @property
    def held(self) -> Slice:
        """What it takes of its node now: less than its slice while its job is asleep, and more
        memory while it falls asleep or wakes."""
        if not self.host_mb and not self.lent:
            return self.slice
        slice_, memory_mb = self.slice, self.slice.memory_mb + self.host_mb
        if self.lent:
            return Slice(slice_.node, memory_mb=memory_mb, gpu_milli=slice_.gpu_milli)
        return msgspec.structs.replace(slice_, memory_mb=memory_mb)


class Startup(msgspec.Struct, frozen=True):
    """The members of an attempt that have begun to work, how long the last of them took from when
    the job ran, and how that was learned: by "gpu", "steps" or "output"."""

    members: tuple[int, ...]
    ms: int
    by: str


class Phase(enum.StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    DOZING = "dozing"  # it is being put to sleep, and holds its GPUs until all of it sleeps
    ASLEEP = "asleep"  # its members live, in memory of their nodes, and hold no GPU
    WAKING = "waking"  # it holds GPUs again, and goes on when all of it is awake
    STOPPING = "stopping"
    FINISHED = "finished"
    AWAY = "away"  # a neighbor has it


class Outcome(enum.StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed-out"


class StopCause(enum.StrEnum):
    """Why an attempt is being stopped; this decides what happens next."""

    CANCEL = "cancel"
    TIME_LIMIT = "time-limit"
    FAILURE = "failure"
    NODE_LOSS = "node-loss"
    DRAIN = "drain"
    PREEMPT = "preempt"
    RESIZE = "resize"
    MOVE = "move"
    HANG = "hang"
    BUDGET = "budget"
    IDLE = "idle"
    HALVING = "halving"  # a trial that is worse than others: it has ended well
    LEASE = "lease"

    @property
    def final(self) -> bool:
        """The job ends with this attempt, whatever its restart rule is."""
        return self in FINAL_STOPS


FINAL_STOPS = (StopCause.CANCEL, StopCause.TIME_LIMIT, StopCause.HALVING, StopCause.LEASE)


class SleepCause(enum.StrEnum):
    """Why a job was put to sleep; this decides when it wakes."""

    PREEMPT = "preempt"  # for another job: it wakes as soon as there is room
    TURN = "turn"  # its time slice is over: it wakes when it is its turn again
    IDLE = "idle"  # it did not use its GPUs: it wakes when it is touched
    USER = "user"  # somebody asked for it: it wakes when it is touched

    @property
    def wants(self) -> bool:
        """It wakes by itself."""
        return self in (SleepCause.PREEMPT, SleepCause.TURN)


class Note(msgspec.Struct, frozen=True):
    """What somebody wrote about a job."""

    at_ms: int
    who: str
    text: str


class Job(msgspec.Struct, kw_only=True):
    """A job's whole record. Only `apply` changes it. `attempt` counts placements, from 1."""

    id: str
    number: int
    spec: JobSpec
    key: str = ""
    phase: Phase = Phase.WAITING
    attempt: int = 0
    members: list[Member] = []
    master: str = ""  # rendezvous point of the attempt, "address:port"
    door: str = ""  # where a replica that is a gang answers; its members meet at `master`
    submitted_ms: int = 0
    not_before_ms: int = 0
    awaits: tuple[str, ...] = ()  # jobs that must end before it may join the queue
    released_ms: int = 0  # when the last of them had ended
    attained_ms: int = 0  # run time of earlier attempts whose work was kept
    kept_ms: int = 0  # the last attempt's part of it
    borrowed: bool = False  # its newest placement put its tenant above the quota
    share: int = 0  # of the cluster, per member, in billionths, when it was placed
    placed_ms: int | None = None
    running_ms: int | None = None
    finished_ms: int | None = None
    stop_cause: StopCause | None = None
    failures: int = 0  # ends by its own error; these use up `retries`
    preemptions: int = 0
    elder: bool = False  # it waited too long, so it comes first until it ends
    told: int = -1  # the last span of its run time used for estimates
    losses: int = 0  # ends by the loss of a node; these do not use up `retries`
    hangs: int = 0
    first_bad_code: int | None = None
    first_bad_member: int = 0
    first_bad_step: int | None = None
    saved_step: int = 0  # its newest reported checkpoint continues from this step
    saved_ms: int | None = None  # when this attempt last saved
    faults: int = 0  # ends because a node could not run it
    fault: str = ""  # the fault that ended this attempt
    missing_on: tuple[str, ...] = ()  # nodes that lack what it needs
    idle_stops: int = 0  # ends because its GPUs were not used
    idle_since_ms: int | None = None  # its GPUs are unused since then; it was warned
    outcome: Outcome | None = None
    code: int | None = None
    why: str = ""  # the newest decision about it
    notes: tuple[Note, ...] = ()
    requeued_ms: int = 0  # since then it waits, again or for the first time
    waited_ms: int = 0  # the longest part of its present wait that was reported
    elements: Elements | None = None  # it is an array
    said: str = ""  # why this attempt ended well, in its own words
    sleep_cause: SleepCause | None = None  # of its present sleep
    wants: bool = False  # it is to be woken as soon as there is room
    wanted_ms: int | None = None  # since when
    dozed_ms: int | None = None  # when its present sleep began
    naps: int = 0  # how often this attempt has slept
    slept_ms: int = 0  # how long this attempt has slept in all; not a part of its run time
    sleep_mb: int = 0  # what its largest member had on GPUs when it last slept
    sleep_cost_ms: int = 0  # how long it last held GPUs to fall asleep
    wake_cost_ms: int = 0  # ... and to wake
    awake_ms: int | None = None  # since when it has been awake, or is being woken
    full_ms: int = 0  # its GPU had no room for it: it is not woken before this
    refused: str = ""  # why a node could not put this attempt to sleep; it is not asked again
    startup: Startup | None = None  # of this attempt, as far as it was learned
    away: Away | None = None  # this attempt is at a neighbor
    returns: int = 0  # how often it came back without having ended
    away_after_ms: int = 0  # not handed over before this
    until_ms: int = 0  # its lease: it may be alive until then, unless that is renewed; 0: none

    @property
    def state(self) -> str:
        """Its phase while it is live and its outcome afterwards."""
        return self.outcome.value if self.outcome is not None else self.phase.value

    @property
    def began_ms(self) -> int | None:
        """Since when it runs, or ran, here or at a neighbor."""
        return self.running_ms if self.away is None else self.away.running_ms

    @property
    def active(self) -> bool:
        return self.phase not in (Phase.WAITING, Phase.AWAY, Phase.FINISHED)

    @property
    def napping(self) -> bool:
        """It sleeps, or is on the way there or back."""
        return self.phase in (Phase.DOZING, Phase.ASLEEP, Phase.WAKING)

    @property
    def serves_at(self) -> str:
        """Where a replica answers, "address:port". One that is not a gang meets nobody else."""
        return self.door or self.master

    @property
    def since_ms(self) -> int:
        """Since when only the cluster keeps it waiting: not other jobs, nor its own wish."""
        return max(self.submitted_ms, self.released_ms, self.spec.begin_ms)

    @property
    def title(self) -> str:
        return f"{self.id} ({self.spec.name})" if self.spec.name else self.id

    @property
    def label(self) -> str:
        """Its title as a part of a reason."""
        return job_part(self.spec.tenant, self.id, self.title)

    @property
    def reader(self) -> Reader:
        """Its tenant, as one who reads a reason."""
        return Reader(self.spec.tenant, knows=self.id.partition(".")[0].__eq__)

    @property
    def mention(self) -> str:
        """Its id as a part of a reason."""
        return job_part(self.spec.tenant, self.id)
