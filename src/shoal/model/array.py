"""An array: one command for many elements, each of which becomes a job shortly before it runs.

An array is a job's record with `elements`. It is in `state.arrays` while any of them is pending or
live, and among the finished jobs of the store afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from shoal.model.sweep import INDEX_MAX, Sweep

# A set of small numbers that takes one bit for each: which elements of an array are in it.


class Bits(msgspec.Struct):
    """`low`: no number below it is in the set, so that taking the first one is quick."""

    data: bytearray = msgspec.field(default_factory=bytearray)
    count: int = 0
    low: int = 0

    @classmethod
    def full(cls, count: int) -> Bits:
        """All numbers below `count`."""
        data = bytearray(b"\xff" * (count // 8))
        if count % 8:
            data.append((1 << count % 8) - 1)
        return cls(data, count)

    def __contains__(self, number: int) -> bool:
        at = number >> 3
        return at < len(self.data) and bool(self.data[at] >> (number & 7) & 1)

    def add(self, number: int) -> None:
        if number in self:
            return
        at = number >> 3
        if at >= len(self.data):
            self.data.extend(bytes(at + 1 - len(self.data)))
        self.data[at] |= 1 << (number & 7)
        self.low = min(self.low, number) if self.count else number
        self.count += 1

    def discard(self, number: int) -> None:
        if number in self:
            self.data[number >> 3] &= ~(1 << (number & 7)) & 0xFF
            self.count -= 1
            if not self.count:
                self.data, self.low = bytearray(), 0
            elif number == self.low:
                self.low = number + 1

    def take_in(self, other: Bits) -> None:
        """Add all of these, which may be many."""
        if len(other.data) > len(self.data):
            self.data.extend(bytes(len(other.data) - len(self.data)))
        mine, theirs = int.from_bytes(self.data, "little"), int.from_bytes(other.data, "little")
        self.low = min(self.low, other.low) if self.count else other.low
        both = mine | theirs
        self.data, self.count = bytearray(both.to_bytes(len(self.data), "little")), both.bit_count()

    def __iter__(self) -> Iterator[int]:
        """In rising order. The set must not change meanwhile."""
        for at in range(self.low >> 3, len(self.data)):
            byte = self.data[at]
            while byte:
                yield at * 8 + (byte & -byte).bit_length() - 1
                byte &= byte - 1


ARRAYS_MAX = 1_000  # live ones
# A job's number in the queue leaves room for the elements of an array behind its own number.
ELEMENT_NUMBERS = 1 << 20
MISSED_SHOWN = 8  # ranges of indices in a sentence


class Elements(msgspec.Struct, kw_only=True):
    """Which elements, by their positions, have not begun (`pending`), and how the others ended. An
    element in none of these sets is a live job."""

    pending: Bits
    succeeded: Bits = msgspec.field(default_factory=Bits)
    failed: Bits = msgspec.field(default_factory=Bits)
    cancelled: Bits = msgspec.field(default_factory=Bits)
    timed_out: Bits = msgspec.field(default_factory=Bits)
    ran: Bits = msgspec.field(default_factory=Bits)  # ended ones that were placed at least once
    attempts: int = 0  # the most that an element that ended has had
    base: int = 0  # the same at the last retry: elements that run again count from there
    halted: Bits = msgspec.field(default_factory=Bits)  # stopped early, as worse than others
    first_rung: int = 0  # the step at which they are first judged; 0: none was yet
    # For each rung, the value of every element that has reached it; None: not a number.
    rungs: list[dict[int, float | None]] = []

    def ended(self, outcome: str) -> Bits:
        """`outcome`: the value of an `Outcome`."""
        sets = {
            "succeeded": self.succeeded,
            "failed": self.failed,
            "cancelled": self.cancelled,
            "timed-out": self.timed_out,
        }
        return sets[outcome]

    @property
    def missed(self) -> tuple[Bits, Bits, Bits]:
        """Those that ended without success."""
        return self.failed, self.timed_out, self.cancelled

    @property
    def over(self) -> int:
        return self.succeeded.count + sum(one.count for one in self.missed)


class ArrayCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How far an array is. `pending` elements are not jobs yet; `waiting` and `running` ones are.
    `missed` are indices of elements that did not succeed, as ranges: the first of them."""

    elements: int
    pending: int = 0
    waiting: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    timed_out: int = 0
    halted: int = 0  # of those that succeeded: stopped early
    at_most: int = 0  # elements at a time; 0: as many as there is room for
    missed: str = ""

    @property
    def ended(self) -> int:
        return self.succeeded + self.failed + self.cancelled + self.timed_out


def counts_of(sweep: Sweep, elements: Elements, waiting: int, running: int) -> ArrayCounts:
    return ArrayCounts(
        elements=sweep.count,
        pending=elements.pending.count,
        waiting=waiting,
        running=running,
        succeeded=elements.succeeded.count,
        failed=elements.failed.count,
        cancelled=elements.cancelled.count,
        timed_out=elements.timed_out.count,
        halted=elements.halted.count,
        at_most=sweep.at_most,
        missed=missed_text(sweep, elements),
    )


def counts_text(counts: ArrayCounts) -> str:
    """'40 of 100 done, 8 running, 2 failed'."""
    parts = [f"{counts.ended} of {counts.elements} done"]
    for number, what in (
        (counts.running, "running"),
        (counts.waiting, "waiting"),
        (counts.pending, "to come"),
        (counts.halted, "stopped early"),
        (counts.failed, "failed"),
        (counts.timed_out, "timed out"),
        (counts.cancelled, "cancelled"),
    ):
        if number:
            parts.append(f"{number} {what}")
    return ", ".join(parts)


def missed_text(sweep: Sweep, elements: Elements, shown: int = MISSED_SHOWN) -> str:
    """'3, 7-9, 12, ...': the elements that failed or timed out; if none did, the cancelled ones."""
    failed = elements.failed if elements.failed.count else elements.timed_out
    failed = failed if failed.count else elements.cancelled
    ranges = list(islice(_ranges(sweep.index_at(position) for position in failed), shown + 1))
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:shown]]
    return ", ".join([*texts, "..."] if len(ranges) > shown else texts)


def _ranges(indices: Iterable[int]) -> Iterable[tuple[int, int]]:
    first = last = -2
    for index in indices:
        if index != last + 1:
            if last >= 0:
                yield first, last
            first = index
        last = index
        assert index <= INDEX_MAX
    if last >= 0:
        yield first, last
