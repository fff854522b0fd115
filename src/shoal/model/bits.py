"""A set of small numbers that takes one bit for each: which elements of an array are in it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


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
