"""What a probe is asked for, what it returns, and the time it may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MB = 1_000_000


class Reading(NamedTuple):
    """Figures with the unit last in their names; faults, which fail a check; and notes on what
    could not be measured."""

    figures: dict[str, int]
    faults: list[str]
    notes: list[str]


class Asked(NamedTuple):
    """The node's folder, how many cores it has, and whether it has GPUs."""

    directory: Path
    cores: int
    gpus: bool


Probe = Callable[[Asked], Reading]


def joined(*readings: Reading) -> Reading:
    return Reading(
        {name: value for one in readings for name, value in one.figures.items()},
        [fault for one in readings for fault in one.faults],
        [note for one in readings for note in one.notes],
    )


def nothing() -> Reading:
    return Reading({}, [], [])


def mbs(size: int, took_s: float) -> int:
    return round(size / MB / took_s) if took_s > 0 else 0


def repeated(act: Callable[[], int], budget_s: float) -> list[int]:
    """What `act` measures, again and again until the time is used; at least once."""
    until = time.monotonic() + budget_s
    found = [act()]
    while time.monotonic() < until:
        found.append(act())
    return found
