"""What the book remembers about the cluster between events: nodes, live jobs, members."""

from __future__ import annotations

import msgspec

from shoal.ledger.accounts import Account, Tokens
from shoal.model.job import StopCause
from shoal.model.resources import Slice


class Owner(msgspec.Struct, frozen=True):
    """The owner of a job's time."""

    tenant: str
    user: str
    name: str
    service: str = ""


class Hardware(msgspec.Struct, frozen=True):
    """A node's hardware when its time was booked."""

    model: str
    gpus: int


class GpuKind(msgspec.Struct):
    """GPUs of one model and size, and how long jobs waited that could use them."""

    model: str
    memory_mb: int
    wanted_ms: int = 0
    wanted: bool = False


class Node(msgspec.Struct, kw_only=True):
    """`held` and `claimed` are thousandths of each GPU. Booked up to `mark_ms`."""

    gpus: int
    kind: str
    mark_ms: int
    wanted_at: int = 0  # its kind's `wanted_ms` at the mark
    held: list[int]
    claimed: list[int]
    whole: int = 0  # members that hold the whole node
    away: Account | None = Account.LOST  # why its free GPUs cannot be used
    health: str = "joining"
    intent: str = "open"
    quarantined: bool = False
    reserved: int = 0  # number of blocked jobs that it is set aside for
    known: bool = True
    unheard: bool = False  # since the newest controller started
    power_ms: int = -1  # when its GPUs last reported their energy or power
    counters: list[int] = []  # the energy of each, in mJ, at that time
    # Since then given back: (job, share, from when, until when, GPUs).
    left: list[tuple[str, int, int, int, tuple[int, ...]]] = []
    idle: list[tuple[str, int]] = []  # its members that do not use their GPUs
    members: dict[str, list[int]] = {}  # job -> its members that hold GPUs here


class Tally(msgspec.Struct):
    """A job's useful time on a node in the newest hour, and the hour since which it is unsaved."""

    hour: int
    useful: int = 0
    since: int = 0
    firm: int = 0


class LastBeat(msgspec.Struct):
    """The newest booked beat of a member; times in microseconds since the member started."""

    steps: int = 0
    step: int = 0
    saved_step: int = 0
    compute: int = 0
    wait: int = 0
    data: int = 0
    save: int = 0
    busy: bool = False
    gap_ms: int = 0  # the longest time between two beats with news
    napped: bool = False  # it slept since then, so the next one counts time that it slept
    napped_wait: int = 0  # of `wait`: in those beats


class Member(msgspec.Struct, kw_only=True):
    """A member that holds GPUs. `account` is where its time goes at once; None: it runs, and its
    beats or its end will show where the time went."""

    node: str
    milli: int
    gpus: tuple[int, ...]
    share: int  # thousandths of each GPU
    mark_ms: int
    held_ms: int = 0  # since when it has had its GPUs
    account: Account | None = Account.STARTUP
    running_ms: int = -1
    # Since when nobody knows what it does: its node is silent, or no controller ran.
    silent_ms: int = msgspec.field(default=-1, name="suspect_ms")  # its name before 0.2
    told: LastBeat | None = None
    before: Account | None = None  # of a service's replica: its account before it slept
    lent: int = 0  # thousandths of GPUs that it does not hold because it is asleep


class Job(msgspec.Struct, kw_only=True):
    owner: Owner
    gpus: int
    models: tuple[str, ...]
    memory_mb: int
    checkpoint_ms: int = 0
    whole_nodes: bool = False
    attempt: int = 0
    waiting: bool = True
    queued: bool = False  # counted among the jobs that want room
    not_before_ms: int = 0
    awaits: int = 0  # jobs that must end before it may start
    saved: bool = False  # in this attempt
    cause: StopCause | None = None
    slices: tuple[Slice, ...] = ()
    members: dict[int, Member] = {}
    tallies: dict[str, Tally] = {}
    reserved: tuple[str, ...] = ()  # nodes that are set aside for it
    claimed: tuple[Slice, ...] = ()
    wait_us: int = 0  # wait per step of the member that waits least: not for a straggler
    wait_ms: int = 0  # when `wait_us` was computed
    wait_of: int = 0  # the number of members that it was computed from
    tellers: int = 0  # members that report steps
    dozed_ms: int = -1  # since when it has been falling asleep, asleep or waking
    asleep_ms: int = -1  # asleep, and noted up to then


class Want(msgspec.Struct):
    """How many jobs of a tenant wait for GPUs of this kind."""

    tenant: str
    models: tuple[str, ...]
    memory_mb: int
    jobs: int = 0


class Gap(msgspec.Struct, frozen=True):
    """A gap in the record: the clock jumped, or no controller ran."""

    at_ms: int
    ms: int  # negative: the clock went back
    booked: bool


class BookState(msgspec.Struct, kw_only=True):
    """The whole state, as it is stored beside the amounts."""

    now_ms: int = 0
    began_ms: int = -1
    nodes: dict[str, Node] = {}
    kinds: dict[str, GpuKind] = {}
    jobs: dict[str, Job] = {}
    wants: dict[str, Want] = {}
    delayed: list[tuple[int, str]] = []  # heap of (not before, job)
    parents: dict[str, str] = {}  # tenant -> parent
    held: list[str] = []  # tenants whose budget is used up
    gaps: list[Gap] = []
    back_ms: int = 0  # how far the clock is behind the book
    started_ms: int = -1  # when the newest controller started
    owes: bool = False  # a neighbor has run a job of ours
    # What routers had counted when they were last heard: folder -> service -> caller.
    tokens: dict[str, dict[str, dict[str, Tokens]]] = {}
