"""Series of bounded size: a whole life at one width, or the recent past finer than the distant."""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Iterator, Sequence

import msgspec

Value = float | None

WIDTH_MS_FIRST = 1000
# Two points this many widths apart have a gap between them, and stay two.
GAP_WIDTHS = 4


class Merge(enum.Enum):
    """How two values become one when two points are merged."""

    MEAN = "mean"
    LAST = "last"
    MOST = "most"


class Shape:
    """What a point has: a time, and a value for each merge. `code` is how a value is kept: "d" and
    "f" are floats, "H" a whole number below 65,535."""

    def __init__(self, merges: Sequence[Merge], code: str) -> None:
        self.merges = tuple(merges)
        self._row = struct.Struct(f"<q{len(self.merges)}{code}")
        self._whole = code == "H"
        self.size = self._row.size

    def pack(self, at_ms: int, values: Sequence[Value]) -> bytes:
        if self._whole:
            whole = [0xFFFF if v is None else min(0xFFFE, max(0, round(v))) for v in values]
            return self._row.pack(at_ms, *whole)
        # A value that a float of four bytes cannot hold counts as missing.
        kept = [math.nan if v is None or not abs(v) < 3e38 else v for v in values]
        return self._row.pack(at_ms, *kept)

    def rows(self, data: bytes | bytearray) -> Iterator[tuple[int, list[Value]]]:
        for at_ms, *values in self._row.iter_unpack(data):
            yield at_ms, [None if self._missing(value) else value for value in values]

    def merged(self, first: tuple[int, list[Value]], second: tuple[int, list[Value]]) -> bytes:
        values: list[Value] = []
        for merge, a, b in zip(self.merges, first[1], second[1], strict=True):
            if a is None or b is None:
                values.append(a if b is None else b)
            elif merge is Merge.LAST:
                values.append(b)
            else:
                values.append(max(a, b) if merge is Merge.MOST else (a + b) / 2)
        return self.pack(second[0], values)

    def _missing(self, value: float) -> bool:
        return value == 0xFFFF if self._whole else value != value


def short(value: Value) -> Value:
    """Round to the digits that four bytes hold: the rest is noise."""
    return None if value is None else float(f"{value:.7g}")


class Kept(msgspec.Struct, frozen=True):
    """A series as it is stored."""

    width_ms: int
    levels: list[bytes]


class Curve:
    """A whole life in at most `most` points: when they are used up, every two become one, and from
    then on points are twice as far apart."""

    def __init__(self, shape: Shape, most: int, kept: Kept | None = None) -> None:
        self.shape = shape
        self._most = max(2, most)
        self.width_ms = kept.width_ms if kept else WIDTH_MS_FIRST
        data = kept.levels[0] if kept and kept.levels else b""
        self._data = bytearray(data[: len(data) // shape.size * shape.size])
        self.last_ms = last_of(shape, self._data)

    def __len__(self) -> int:
        return len(self._data) // self.shape.size

    def add(self, at_ms: int, values: Sequence[Value]) -> None:
        """A point that is not newer than the last is left out."""
        if at_ms <= self.last_ms:
            return
        self.last_ms = at_ms
        self._data += self.shape.pack(at_ms, values)
        if len(self) >= self._most:
            self._halve()

    def due(self, now_ms: int) -> bool:
        return now_ms - self.last_ms >= self.width_ms

    def rows(self) -> Iterator[tuple[int, list[Value]]]:
        return self.shape.rows(bytes(self._data))

    def kept(self) -> Kept:
        return Kept(self.width_ms, [bytes(self._data)])

    def cut(self, latest_ms: int) -> None:
        """Drop points that are later than this."""
        self._data = cut(self.shape, self._data, latest_ms)
        self.last_ms = last_of(self.shape, self._data)

    def _halve(self) -> None:
        rows = list(self.shape.rows(self._data))
        pairs = zip(rows[::2], rows[1::2], strict=False)
        halved = bytearray(b"".join(self.shape.merged(a, b) for a, b in pairs))
        if len(rows) % 2:
            halved += self._data[-self.shape.size :]
        self._data = halved
        self.width_ms *= 2


class Fading:
    """The newest points as they came. Older ones are merged in pairs, level by level, so that
    points twice as old are half as dense. The oldest points of the last level are dropped."""

    def __init__(
        self, shape: Shape, most: int, levels: int, width_ms: int, kept: Kept | None = None
    ) -> None:
        self.shape = shape
        self.width_ms = width_ms
        self._most = most
        self._levels = [bytearray() for _ in range(levels)]
        if kept is not None:
            for level, data in zip(self._levels, kept.levels, strict=False):
                level += data[: len(data) // shape.size * shape.size]
        self.last_ms = self._last()

    def __len__(self) -> int:
        return sum(map(len, self._levels)) // self.shape.size

    def add(self, at_ms: int, values: Sequence[Value]) -> None:
        if at_ms <= self.last_ms:
            return
        self.last_ms = at_ms
        row = self.shape.pack(at_ms, values)
        width_ms, size = self.width_ms, self.shape.size
        for level in self._levels:
            level += row
            if len(level) <= self._most * size:
                return
            first, second = self.shape.rows(level[: 2 * size])
            if second[0] - first[0] > GAP_WIDTHS * width_ms:
                row = bytes(level[:size])
                del level[:size]
            else:
                row = self.shape.merged(first, second)
                del level[: 2 * size]
            width_ms *= 2

    def due(self, now_ms: int) -> bool:
        return now_ms - self.last_ms >= self.width_ms

    def rows(self) -> Iterator[tuple[int, list[Value]]]:
        for level in reversed(self._levels):
            yield from self.shape.rows(bytes(level))

    def cut(self, latest_ms: int) -> None:
        self._levels = [cut(self.shape, level, latest_ms) for level in self._levels]
        self.last_ms = self._last()

    def _last(self) -> int:
        return last_of(self.shape, next((one for one in self._levels if one), bytearray()))

    def kept(self) -> Kept:
        return Kept(self.width_ms, [bytes(level) for level in self._levels])


def cut(shape: Shape, data: bytearray, latest_ms: int) -> bytearray:
    kept = sum(at_ms <= latest_ms for at_ms, _ in shape.rows(data))  # they are sorted by time
    return data[: kept * shape.size]


def last_of(shape: Shape, data: bytearray) -> int:
    if not data:
        return 0
    ((at_ms, _),) = shape.rows(data[-shape.size :])
    return at_ms
