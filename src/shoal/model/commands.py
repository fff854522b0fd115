"""What the controller tells nodes to do. Every command may be sent again without harm."""

from __future__ import annotations

import msgspec

from shoal.model.job import MemberRef


class CommandBase(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag=True):
    """`incarnation` is the life of the node it is meant for; a later life ignores it."""

    node: str
    incarnation: int
    ref: MemberRef


class Launch(CommandBase, frozen=True, kw_only=True):
    """Start this member, unless it was already started."""

    argv: tuple[str, ...]
    env: dict[str, str]
    workdir: str
    stop_grace_ms: int
    gpus: tuple[int, ...] = ()
    gpu_milli: int = 1000
    package: str = ""  # the node asks for it if it has it not; `workdir` is inside it
    requirements: str = ""


class Stop(CommandBase, frozen=True, kw_only=True):
    """SIGTERM, then SIGKILL after the grace time. One never started counts as ended by it. With
    `dump` the stacks of its processes are saved first, for it is stopped because it hangs."""

    grace_ms: int
    why: str = ""
    dump: bool = False


class Acknowledge(CommandBase, frozen=True, kw_only=True):
    """The exit of this member is in the log; the node may forget it."""


class Check(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag=True):
    """Measure the node, unless this `id` was measured already; the result is in its reports. Told
    again until it is there. One at a time: a later id takes the place of one not yet begun."""

    node: str
    incarnation: int
    id: str


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag=True):
    """Keep an interpreter warm for members of this job: the node may have to take one over. The
    node's reports name the job for some minutes; who still wants it then tells it again."""

    node: str
    incarnation: int
    job: str
    argv: tuple[str, ...]
    env: dict[str, str]
    workdir: str
    package: str = ""
    requirements: str = ""


class Dismiss(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag=True):
    """The node wanted to leave, and nothing is expected of it any more: its agent may end."""

    node: str
    incarnation: int


class Fence(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag=True):
    """For the engine, not the agent: the node is silent beyond the grace time, so end this life of
    it, with all that it runs, and say that it is gone. Told again until it is."""

    node: str
    incarnation: int


Command = Launch | Stop | Acknowledge | Check | Prepare | Dismiss | Fence


class Envelope(msgspec.Struct, frozen=True):
    """Commands of one round for one node. A node refuses an envelope not newer than its last."""

    epoch: int
    number: int
    commands: tuple[Command, ...]
