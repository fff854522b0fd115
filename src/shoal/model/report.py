"""What reaches a step from outside: inventories of nodes, known deaths, and users' requests."""

from __future__ import annotations

import msgspec

from shoal.model.budget import Spending
from shoal.model.health import CheckResult
from shoal.model.job import Fault, JobSpec, MemberRef
from shoal.model.node import NodeIntent, NodeSpec
from shoal.model.progress import Progress
from shoal.model.samples import NodeSample
from shoal.model.service import ServiceLoad, ServiceSpec


class MemberExit(msgspec.Struct, frozen=True):
    """A code of 128 + n means signal n, as a shell would say it."""

    ref: MemberRef
    code: int
    why: str = ""
    stopped: bool = False  # it had been told to stop, so the code says little about the job
    step: int | None = None  # by its last beat, if it counts steps
    fault: Fault = Fault.NONE


class Getting(msgspec.Struct, frozen=True):
    """A member that was ordered but cannot start yet: `what` says what is brought or built."""

    ref: MemberRef
    what: str


class Idle(msgspec.Struct, frozen=True):
    """A member that holds GPUs and has used nothing for so long."""

    ref: MemberRef
    idle_ms: int


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node's complete inventory, not a difference: alive members and unacknowledged exits.
    `stopping` are those alive that have been told to stop and need not be told again. `progress`
    is what living members say of their work, where they do. `checks` are the results of the last
    checks, the newest last; they are told in every report, so that none gets lost. `prepared`
    are the jobs that the node was told to be ready for, with an interpreter that is warm.
    `sample` is the node's load, now and then: no decision needs it. Those `getting` are not alive
    yet, but hold what they were given. Those `ended` count as alive until their output is stored,
    but their processes are over, and not because they were told to stop. A node that is `leaving`
    wants to go as soon as nothing runs on it any more."""

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


class NodeGone(msgspec.Struct, frozen=True):
    """The engine knows, and does not merely suspect, that this life of the node has ended. `exits`
    are those it left on its disk, stored nowhere else yet."""

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
    """`data` belongs at `offset` of the package, which is `size` bytes long. With a `problem` it
    cannot be had."""

    package: str
    offset: int
    data: bytes = b""
    size: int = 0
    problem: str = ""


class Submit(msgspec.Struct, frozen=True):
    """`key` makes it safe to send again: one key, one job."""

    spec: JobSpec
    key: str = ""


class Cancel(msgspec.Struct, frozen=True):
    job: str
    who: str = "a user"


class Requeue(msgspec.Struct, frozen=True):
    """Stop it and let it run again from its last checkpoint, at no cost to its retries."""

    job: str
    who: str = "a user"


class SetIntent(msgspec.Struct, frozen=True):
    node: str
    intent: NodeIntent
    who: str = "a user"


class CheckNode(msgspec.Struct, frozen=True):
    """Have the node measured; the answer's id is the check's."""

    node: str
    who: str = "a user"


class SetService(msgspec.Struct, frozen=True):
    """Serve it so; the answer's id is its name."""

    spec: ServiceSpec
    who: str = "a user"


class StopService(msgspec.Struct, frozen=True):
    """Let its replicas finish what they have, and end it."""

    service: str
    who: str = "a user"


class Nothing(msgspec.Struct, frozen=True):
    """Wants to be answered when the next step is stored."""


Request = Submit | Cancel | Requeue | SetIntent | CheckNode | SetService | StopService | Nothing


class Accepted(msgspec.Struct, frozen=True):
    """`id` is the job or node concerned; `note` says if there was nothing to do."""

    id: str
    note: str = ""


class Refused(msgspec.Struct, frozen=True):
    """`field` names what is wrong; `message` says what would work."""

    field: str
    message: str
    missing: bool = False  # the job or node does not exist


Answer = Accepted | Refused


class Report(msgspec.Struct, frozen=True, kw_only=True):
    requests: tuple[Request, ...] = ()
    nodes: tuple[NodeReport, ...] = ()
    gone: tuple[NodeGone, ...] = ()
    services: tuple[ServiceLoad, ...] = ()
    spendings: tuple[Spending, ...] = ()  # of all tenants, or nothing was told
    drift_ms: int | None = None  # how far the machine's clock is ahead of `now`, if somebody looked
    fences: bool = False  # the engine can end a node that does not answer
