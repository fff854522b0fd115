"""The seams between the pure core and the world: Engine, Store, Clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from shoal.core.state.events.log import Event, Recorded
from shoal.core.state.state import State
from shoal.model.blocks import Door, Seek, Sought
from shoal.model.commands import Envelope
from shoal.model.finding import EVERY_JOB, Found, JobFilter, Mark, Order
from shoal.model.job import Job
from shoal.model.kept import CopyHeld, FileAnswer, FilePiece, FileSent, FileWanted, Snapshot
from shoal.model.node import NodeSpec
from shoal.model.report import Ended, LogChunk, NodeGone, NodeReport, PackagePiece, Report, Still
from shoal.model.secret import SealedSecrets, SecretsWanted
from shoal.model.service import ServiceLoad, Wanted
from shoal.model.supply import Provision, Release, Supply, SupplyReport
from shoal.model.tunnel import Tunnel, TunnelEnd


class StoreError(Exception):
    """The store cannot take or give data now; the message says why and what to do."""


class StoreDamaged(StoreError):
    """What was stored cannot be read back; trying again does not help."""


class StoreFull(StoreError):
    """The disk has no room left."""


class EngineError(Exception):
    """An engine cannot work here; the message says why and what to do."""


class ServingError(Exception):
    """Services cannot be served as asked; the message says why and what to do."""


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since the epoch; never less than announced."""


class Files(Protocol):
    """The kept folders of jobs, as the controller keeps them."""

    def take(
        self, what: FilePiece | Snapshot | CopyHeld, node: str, answer: Callable[[FileAnswer], None]
    ) -> None:
        """Kept only if the member was placed on this node; answered when it is on disk."""

    def give(self, wanted: FileWanted, node: str) -> FileSent | None:
        """For a member that the node is to start. None: it cannot be said now."""


class Blocks(Protocol):
    """Which nodes hold which blocks."""

    def opens(self, node: str, door: Door) -> None: ...

    def seek(self, seek: Seek, node: str, answer: Callable[[Sought], None]) -> None:
        """Believed, and answered, only for a job that the node has a member of. `answer` is called
        again when there is news."""


class Tunnels(Protocol):
    """Where nodes of a gang learn each other's keys."""

    def joins(self, end: TunnelEnd, node: str, answer: Callable[[Tunnel], None]) -> None:
        """`answer` is called when all ends are known, and again when one changes."""


class Inbox(Protocol):
    """Where an engine delivers its messages; may be called at any time on the loop's thread."""

    files: Files | None

    @property
    def blocks(self) -> Blocks | None: ...

    @property
    def tunnels(self) -> Tunnels | None: ...

    def heard(self, report: NodeReport) -> None: ...

    def still(self, still: Still) -> bool:
        """False: the node should send a complete report."""

    def gone(self, gone: NodeGone) -> None: ...

    def log(self, chunk: LogChunk) -> int:
        """Keep a piece of a member's output; returns how many bytes are kept so far."""

    def log_from(self, chunk: LogChunk, node: str, answer: Callable[[int], None]) -> None:
        """The same for another machine: kept only if the member was placed on this node."""

    def piece(self, package: str, offset: int, node: str = "") -> PackagePiece:
        """The part of a package that an agent asked for: the answer to `wire.Need`. `node`: it is
        on another machine, and gets the packages of its own jobs alone."""

    def secrets_of(self, node: str, wanted: SecretsWanted) -> SealedSecrets | None:
        """The secrets of a member that this life of the node is to start. None: it cannot be said
        now, and the node asks again."""


class Engine(Protocol):
    """Where processes run. `send` may lose commands; they are derived again from reports.
    `fences`: it can end a node that does not answer, when it gets a `Fence`."""

    fences: bool

    async def start(self, inbox: Inbox) -> None:
        """Reach or start the nodes, and report to the inbox what each of them holds."""

    def send(self, node: str, envelope: Envelope) -> None: ...

    async def resend(self) -> None:
        """Have every node report its whole inventory again; report known deaths again, too."""

    async def close(self) -> None:
        """Disconnect from the nodes without disturbing what runs on them."""


class SupplyError(Exception):
    """A supplier cannot be asked, or refuses; one line that says why and, if anything helps, what
    to do. `quota`, `permission` and the like are the supplier's own words."""


class Supplier(Protocol):
    """An engine that brings nodes. Each call may take long and may raise `SupplyError`; one runs at
    a time. It holds no facts: whatever it has to know, it finds at Slurm, Kubernetes or Ray, by the
    ids of orders in names and labels there. It sees and touches nothing that is not ours."""

    engine: str

    async def look(self) -> SupplyReport:
        """Every order of this cluster that the engine knows, ended ones for some minutes, too."""

    async def provision(self, command: Provision) -> None: ...

    async def release(self, command: Release) -> None: ...

    async def drain(self, node: NodeSpec, why: str) -> None:
        """Tell the engine that the machine under this node is sick, where we are allowed to."""

    async def close(self) -> None: ...


class SupplyContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a supplier is given when it is built. `cluster`: 8 hex digits that name this home, to be
    put into the names or labels of whatever the supplier makes, so that it finds its own again and
    nothing else. `join_token` lets a machine join, so it must not be where other users can read it.
    `supplies`: those of the policy and of all orders, which name the places where the engine has to
    look. `changed`: a supplier that notices changes by itself calls it, and is looked at soon.
    `order_token`: for an order's id, a join token for its machines alone, each of them once. It is
    void when they have joined, so it may be where their jobs can read it."""

    cluster: str
    home: Path
    join_url: str  # where nodes reach the controller
    join_token: str
    python: str  # the interpreter that runs Shoal here
    supplies: Callable[[], tuple[Supply, ...]] = tuple
    changed: Callable[[], None] = lambda: None
    order_token: Callable[[str], Awaitable[str]] | None = None


class SupplierKind(NamedTuple):
    """A supplier as its package declares it, in the entry points' group `shoal.supplier`. To load
    this must be cheap: what a supplier needs beside Shoal is imported by `build`."""

    title: str  # in sentences, such as "asked Slurm for 2 nodes"
    words: Collection[str]  # of a supply, for this supplier alone: it finds them in `options`
    build: Callable[[SupplyContext], Supplier]
    install: str = ""  # a command that installs what `build` imports
    needs: str = ""  # what `shoal up --engine` must name beside the engine


class Balancer(Protocol):
    """Spreads requests over replicas. `look` is called about once a second. It applies what is
    wanted and reports what it sees. It may block; one thread at a time calls it."""

    def look(self, wanted: Wanted) -> dict[str, ServiceLoad]: ...


class Follower(Protocol):
    """Follows the log. After each step is stored, it gets the step's report and its events; the
    last of them has the number `seq`. Events that no step made are found in the log."""

    def stepped(self, report: Report, events: Sequence[Event], seq: int) -> None: ...


class Used(NamedTuple):
    """The next job number, and the newest epoch. If the log has lost events: from which numbers on
    attempts of its jobs, and orders, were never given out."""

    first_job: int
    epoch: int
    first_attempt: int = 0
    first_order: int = 0


class LoopLog(Protocol):
    """Keeps events so that the state can be rebuilt: what an event loop may hold of a store. It
    loads before the loop begins, or in a thread; nothing else here reads."""

    def used(self, next_job: int, epoch: int) -> Used:
        """Where to go on: with these, or with higher ones if the home has used numbers that the log
        does not show."""

    def load(self) -> tuple[State, int]:
        """The state, and the sequence number of the last event in it."""

    def commit(self, events: Sequence[Event], finished: Sequence[Job]) -> int:
        """Append durably, all or nothing; returns the last sequence number."""

    def snapshot(self, seq: int, body: bytes) -> list[str]:
        """Let the next load start at this event, and drop history beyond its bounds; returns the
        finished jobs that were dropped."""


class EventLog(LoopLog, Protocol):
    """Also tells of finished jobs, for requests that name one. Each call may wait for a server, so
    that an event loop leaves it to a thread."""

    def keyed(self, key: str) -> str | None:
        """The finished job that was submitted with this key."""

    def ended(self, job_id: str) -> Ended | None:
        """How a finished job ended."""

    def job(self, job_id: str) -> Job | None:
        """A finished job."""


class LoopStore(LoopLog, Protocol):
    """What the live loop holds of its store."""

    snapshot_seq: int  # of the snapshot that the next load starts at; 0: from the beginning

    @property
    def tight(self) -> bool:
        """The disk is full. The remaining room is for jobs that end: no new ones are accepted."""

    def relax(self) -> None:
        """No longer tight, if the disk has room again. Not while a commit is on its way."""


class Store(LoopStore, EventLog, Protocol):
    """An event log that can also be read: by event, by job, and by what has finished."""

    unbroken_from: int  # the log before this event may have holes

    def events(
        self, after: int, limit: int, job: str = "", node: str = "", notable: bool = False
    ) -> list[Recorded]:
        """A negative `after` counts from the end; `notable` leaves out the kinds in `QUIET`."""

    def policies(self, limit: int) -> list[Recorded]:
        """The events that changed the policy, the newest first."""

    def history(self, job: str, limit: int) -> list[Recorded]:
        """A job's newest events, oldest first. Of several checkpoints in a row only the last is
        there, and checkpoints do not count toward `limit`."""

    def finished(
        self, limit: int, after: int = -1, wanted: JobFilter = EVERY_JOB, before: str = ""
    ) -> list[Job]:
        """Finished jobs, the last to end first; `after`: only those that ended after this event;
        `before`: only those that ended before this job. Elements are left out, unless
        `wanted.array` is named."""

    def listed(self, limit: int, wanted: JobFilter, order: Order, mark: Mark | None) -> Found:
        """Finished jobs in this order that come after this mark, with a bound on what is read."""

    def count(self, wanted: JobFilter) -> int:
        """How many finished jobs match. A filter may count some that only look as if they did."""

    def tenants(self) -> dict[str, str]:
        """Of finished jobs."""

    def mark(self, seq: int) -> int | None:
        """Tells this event from another one of the same number, in a log that has lost events;
        None: it is not there."""

    def seq_at(self, at_ms: int) -> int:
        """The number of the last event before this time."""
