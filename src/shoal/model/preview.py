"""What an action would do, shown before it is done."""

from __future__ import annotations

import enum

import msgspec

NAMES_MAX = 1000  # that one preview is about


class Action(enum.StrEnum):
    DRAIN = "drain"
    CORDON = "cordon"
    UNCORDON = "uncordon"
    CANCEL = "cancel"
    REQUEUE = "requeue"
    STOP = "stop"  # a service
    ROLL_BACK = "rollback"
    SCALE = "scale"


class Deed(enum.StrEnum):
    """What happens to a job."""

    MOVES = "moves"  # stops, and there is room for it elsewhere now
    WAITS = "waits"  # stops, and has to wait for room
    STAYS = "stays"  # runs until it ends: it must not run twice
    REPLACED = "replaced"  # a replica: another one is ready before it goes
    ENDS = "ends"
    UNCHANGED = "unchanged"  # goes on, or has ended already


class JobEffect(msgspec.Struct, kw_only=True):
    """`unsaved_ms`: run time since its last save, or since its start if it saves nothing; that much
    may be done again or is lost. `to`: where it would run."""

    id: str
    name: str
    state: str
    deed: Deed
    unsaved_ms: int = 0
    gpu_ms: int = 0  # the same, times its GPUs
    saves: bool = False
    to: list[str] = []


class Change(msgspec.Struct, kw_only=True, frozen=True):
    """A field of a service that would be another one; empty: not set."""

    field: str
    before: str
    after: str


class VersionView(msgspec.Struct, kw_only=True, frozen=True):
    """An earlier version of a service. `why`: who set it."""

    version: int
    at_ms: int
    why: str


class PreviewView(msgspec.Struct, kw_only=True):
    """`lines` say all of it in sentences. `jobs`: those that the sender may see, the largest loss
    first; `others` counts those of other tenants, which `gpu_ms` includes."""

    action: Action
    names: list[str]
    lines: list[str]
    jobs: list[JobEffect] = []
    others: int = 0
    gpu_ms: int = 0  # GPU time that is lost or done again, at most
    dependents: list[str] = []  # jobs that wait for one of these
    changes: list[Change] = []
    versions: list[VersionView] = []  # that the service could go back to, the newest first
