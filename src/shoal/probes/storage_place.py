"""What the storage probe needs of a place where it can write: a folder, or a URL."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Problem(Exception):
    """Why this storage cannot be measured from here: one line."""


class Count(NamedTuple):
    """What was done in a phase: bytes or files, and how long it took."""

    done: int
    took_s: float


class Place(Protocol):
    """A new folder at a target."""

    notes: list[str]

    def write(self, phase_s: float) -> Count: ...

    def read(self, phase_s: float) -> Count: ...

    def small(self, phase_s: float) -> Count: ...

    def remove(self) -> None: ...
