"""What limits a job that reports its steps: where the time of a step goes, in words and figures."""

from __future__ import annotations

import enum

import msgspec


class BoundKind(enum.StrEnum):
    """What a faster step would need most."""

    COMPUTE = "compute"
    NETWORK = "network"
    STORAGE = "storage"
    INPUT = "input"
    IMBALANCE = "imbalance"


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Of a step, in thousandths, over all members; together they are 1000."""

    compute_milli: int  # their own work
    network_milli: int  # collectives that would take as long if no member were late
    imbalance_milli: int  # waiting in collectives for members that are late
    input_milli: int  # waiting for the next batch
    storage_milli: int  # blocked by saves, or waiting for a batch while storage was the cause


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict over the last `steps` steps. `text` begins with it and gives the figures;
    `evidence` adds what speaks for or against it."""

    kind: BoundKind
    shares: Shares
    step_us: int
    steps: int
    text: str
    evidence: list[str] = []


def parts_of(shares: Shares) -> list[tuple[str, int]]:
    """The kind that each share belongs to, and the share in thousandths."""
    return [(kind.value, getattr(shares, f"{kind.value}_milli")) for kind in BoundKind]
