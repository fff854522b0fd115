"""What happened to a job, from its submission to its end, in parts that a page can show."""

from __future__ import annotations

import enum

import msgspec

from shoal.model.bound import Bound
from shoal.model.job import Note


class Cause(enum.StrEnum):
    """Why an attempt ended."""

    NONE = "still going"
    SUCCEEDED = "succeeded"
    OWN_ERROR = "exited with an error"
    OUT_OF_MEMORY = "out of memory"
    HARDWARE = "hardware"
    NODE_LOST = "node lost"
    HANG = "hang"
    TIME_LIMIT = "time limit"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    DRAINED = "drained"
    RESIZED = "resized"
    MOVED = "moved"
    BUDGET = "budget"
    STOPPED_EARLY = "stopped early"
    LEASE = "lease over"
    RETURNED = "came back"
    UNKNOWN = "unknown"


# These are failures; the others are decisions.
FAILURES = frozenset(
    (Cause.OWN_ERROR, Cause.OUT_OF_MEMORY, Cause.HARDWARE, Cause.NODE_LOST, Cause.HANG)
)


class FirstFailure(msgspec.Struct, kw_only=True):
    """The member that ended first and took the others with it."""

    member: int
    node: str
    at_ms: int
    code: int | None  # None: it left no exit code
    step: int | None
    said: str  # what its node reported about the end
    lines: list[str]  # the last lines of its output


class ColdStart(msgspec.Struct, kw_only=True):
    """Where the time of a replica's start went. None: not measured, or not yet."""

    waited_ms: int | None = None  # for room
    got_ms: dict[str, int] | None = None  # what its nodes had to get, and how long that took
    listened_ms: int | None = None  # the moment when it listened on its port
    ready_ms: int | None = None  # when its probe was answered
    served_ms: int | None = None  # when the gateway had it
    first_token_ms: int | None = None  # of its first answer, from its request on


class AttemptRecord(msgspec.Struct, kw_only=True):
    """`sure`: the cause is known; otherwise it is the most likely one."""

    attempt: int
    nodes: list[str]
    members: int
    gpu_milli: int  # of all members together, in thousandths of a GPU
    placed_ms: int
    running_ms: int | None = None
    stopping_ms: int | None = None  # when it was asked to stop
    ended_ms: int | None = None
    cause: Cause = Cause.NONE
    sure: bool = True
    evidence: str = ""  # for a likely cause: what points to it
    why: str = ""
    first: FirstFailure | None = None
    from_step: int = 0
    to_step: int | None = None  # as far as is known
    saved_step: int | None = None  # step of its newest checkpoint
    bound: Bound | None = None  # what limited its steps; None: not known
    startup_ms: int = 0  # from when it ran until it worked, if that was learned:
    startup_by: str = ""  # "gpu", "steps" or "output"; empty: it was not
    naps: int = 0  # how often it slept
    slept_ms: int = 0  # in all, with the time to fall asleep and to wake
    dozed_ms: int | None = None  # since when it sleeps now
    slept_at: list[tuple[int, int]] = []  # from and until when, of its newest naps that are over
    cold: ColdStart | None = None  # of a replica of a service
    cluster: str = ""  # the neighbor where it was, and what is owed for that
    owed_gpu_ms: int = 0
    owed_money: int = 0  # in millionths of its currency


class Learned(msgspec.Struct, kw_only=True):
    """How the cluster has judged one of the job's nodes since."""

    at_ms: int
    node: str
    standing: str
    why: str
    about_this_job: bool


class Explanation(msgspec.Struct, kw_only=True):
    id: str
    name: str
    tenant: str
    state: str
    why: str
    command: str
    members: int
    submitted_ms: int
    finished_ms: int | None
    now_ms: int
    code: int | None
    complete: bool  # False: its first events have been dropped
    attempts: list[AttemptRecord]
    learned: list[Learned]
    labels: dict[str, str] = {}
    notes: list[Note] = []
