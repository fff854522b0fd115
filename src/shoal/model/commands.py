"""Commands from the controller to nodes. Each of them can safely be sent again."""

from __future__ import annotations

import msgspec

from shoal.model.fabric import Tour
from shoal.model.job import MemberRef, MemberSpec
from shoal.model.policy import GpuOver
from shoal.model.storage import Storage


class CommandBase(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag=True):
    """`incarnation` is the life of the node it is for; a later life ignores it."""

    node: str
    incarnation: int
    ref: MemberRef


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the policy says about every member."""

    processes: int = 0  # processes and threads; 0: no limit
    cpu_hard: bool = False  # it never gets more CPU than it asked for, even if some is idle
    gpu_over: GpuOver = GpuOver.END
    # Ports of gangs and replicas: the first, and the first behind them. Empty: an older head, which
    # cannot read that a port was taken.
    ports: tuple[int, ...] = ()
    rdma: bool = True  # it may open the node's InfiniBand and RoCE cards


class Lease(msgspec.Struct, frozen=True):
    """A member may be alive until `until_ms` by the cluster's clock. The node counts `for_ms` from
    when it sent the report with this number: that was before the controller had it, so the node
    never counts too long, however late the command comes."""

    until_ms: int
    sequence: int
    for_ms: int


class Launch(MemberSpec, frozen=True, kw_only=True, tag_field="command", tag=True):
    """Start this member, unless it was already started. Beside the spec's fields stands what
    differs between members or attempts, or follows from the policy."""

    node: str
    incarnation: int
    ref: MemberRef
    argv: tuple[str, ...]
    env: dict[str, str]
    gpus: tuple[int, ...] = ()
    gpu_milli: int = 1000
    gpu_memory_mb: int = 0  # of a GPU that it shares; 0: in proportion to `gpu_milli`
    # The Unix user to run it as; 0: the agent's own, because the tenant is not kept apart.
    uid: int = 0
    limits: Limits = Limits()
    keeps: bool = False  # the head keeps what it writes to its output folder
    travels: bool = False  # its checkpoints may be at the head: fetch them before it starts again
    continues: bool = False  # ... and the first time, too: it was handed over with them
    copies: bool = False  # and copy to the head what it saves
    peers: bool = False  # ... or rather to another node, if one can hold it
    data_mbit_s: int = 0  # how fast its node may fetch volumes, and give them to others; 0: any
    lease: Lease | msgspec.UnsetType = msgspec.UNSET

    @property
    def ports(self) -> tuple[int, ...]:
        """Ports of the node that are the member's own: where its gang meets, where it answers."""
        if self.ref.member != 0:
            return ()
        door = self.env.get("PORT", "") if self.answers else ""
        texts = (self.env.get("MASTER_PORT", ""), door)
        return tuple(int(text) for text in texts if text.isdecimal())

    @property
    def answers(self) -> bool:
        """It is the member of a replica that answers requests, at $PORT."""
        return self.ref.member == 0 and "SHOAL_SERVICE" in self.env


class Stop(CommandBase, frozen=True, kw_only=True):
    """SIGTERM, then SIGKILL after the grace time. A member that never started counts as ended.
    With `dump`, the stacks of its processes are saved first, because it hangs."""

    grace_ms: int
    why: str = ""
    dump: bool = False


class Sleep(CommandBase, frozen=True, kw_only=True):
    """Put this member to sleep: what it has on GPUs goes to memory of the node, and none of its
    processes runs. A member that cannot sleep goes on as if nothing had been asked."""


class Wake(CommandBase, frozen=True, kw_only=True):
    """Let this member go on where it stopped, on these GPUs. Refusals are forgotten with it."""

    gpus: tuple[int, ...] = ()


class Renew(CommandBase, frozen=True, kw_only=True):
    """This member may be alive for longer."""

    lease: Lease


class Acknowledge(CommandBase, frozen=True, kw_only=True):
    """The exit of this member is in the log; the node may forget it."""


class Check(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag=True):
    """Measure the node, unless it already ran the check with this `id`. Sent again until a report
    has the result. One check runs at a time: a later id replaces one that has not begun."""

    node: str
    incarnation: int
    id: str
    tour: Tour | None = None  # measure the network to these nodes instead of the node itself
    storage: Storage | None = None  # measure this storage instead


class Prepare(MemberSpec, frozen=True, kw_only=True, tag_field="command", tag=True):
    """Keep an interpreter warm for members of this job, in case one moves to this node. If the job
    has an image, only fetch that. The node's reports name the job for some minutes; after that the
    command has to be sent again."""

    node: str
    incarnation: int
    job: str
    argv: tuple[str, ...]
    env: dict[str, str]
    uid: int = 0


class Dismiss(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag=True):
    """The node asked to leave, or outlives its order, and is not needed: its agent ends."""

    node: str
    incarnation: int


class Fence(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag=True):
    """For the engine, not the agent: the node was silent longer than the grace period, so end this
    life of it and everything it runs, and report it dead. Sent again until that is done."""

    node: str
    incarnation: int


Command = Launch | Stop | Sleep | Wake | Renew | Acknowledge | Check | Prepare | Dismiss | Fence


class Envelope(msgspec.Struct, frozen=True):
    """Commands of one round for one node. A node refuses all but newer envelopes."""

    epoch: int
    number: int
    commands: tuple[Command, ...]
