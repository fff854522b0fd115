"""What a node reports of members that sleep, or could."""

from __future__ import annotations

import msgspec

from shoal.model.job import MemberRef


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
