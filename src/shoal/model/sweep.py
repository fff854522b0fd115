"""What makes a job an array: the indices of its elements, and the variables that they differ in."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

ELEMENTS_MAX = 1_000_000
INDEX_MAX = 999_999_999
RANGES_MAX = 256
VARIABLES_MAX = 32
VALUES_MAX = 10_000  # of one variable
ROWS_MAX = 100_000
VALUE_CHARACTERS_MAX = 4096
HALVED_MAX = 10_000  # trials of a sweep that stops some of them early
INDEX = "index"  # the placeholder that every array has
# The variables that Shoal sets for each element.
ARRAY_JOB, ARRAY_INDEX, ARRAY_COUNT = "SHOAL_ARRAY_JOB", "SHOAL_ARRAY_INDEX", "SHOAL_ARRAY_COUNT"

Number = Annotated[int, msgspec.Meta(ge=0, le=INDEX_MAX)]
Name = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*(?!\n)$")]
Value = Annotated[str, msgspec.Meta(max_length=VALUE_CHARACTERS_MAX)]


class IndexRange(NamedTuple):
    """From the first to the last, both included."""

    first: Number
    last: Number
    step: Annotated[int, msgspec.Meta(ge=1, le=INDEX_MAX)] = 1

    @property
    def size(self) -> int:
        return (self.last - self.first) // self.step + 1 if self.last >= self.first else 0

    def __str__(self) -> str:
        if self.size <= 1:
            return str(self.first)
        return f"{self.first}-{self.last}" + (f":{self.step}" if self.step > 1 else "")


class Sweep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`ranges` of indices, or the values of variables: all combinations (`grid`) or one row for
    each element (`rows`), whose indices count from 0."""

    ranges: Annotated[tuple[IndexRange, ...], msgspec.Meta(max_length=RANGES_MAX)] = ()
    at_most: Annotated[int, msgspec.Meta(ge=0, le=ELEMENTS_MAX)] = 0  # at a time; 0: no limit
    grid: Annotated[
        dict[Name, Annotated[tuple[Value, ...], msgspec.Meta(max_length=VALUES_MAX)]],
        msgspec.Meta(max_length=VARIABLES_MAX),
    ] = {}
    rows: Annotated[
        tuple[Annotated[dict[Name, Value], msgspec.Meta(max_length=VARIABLES_MAX)], ...],
        msgspec.Meta(max_length=ROWS_MAX),
    ] = ()
    halve: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0  # one of so many goes on; 0: all do
    by: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = "loss"  # the metric it is by
    highest: bool = False  # its highest value is the best
    rung: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0  # step of the first rung; 0: a default

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(self.grid) or (tuple(self.rows[0]) if self.rows else ())

    @property
    def count(self) -> int:
        """How many elements."""
        if self.ranges:
            return sum(one.size for one in self.ranges)
        if self.rows:
            return len(self.rows)
        count = 1 if self.grid else 0
        for values in self.grid.values():
            count *= len(values)
        return count

    def index_at(self, position: int) -> int:
        """The index of an element by its place among all: 0, 1, 2, ..."""
        if not self.ranges:
            return position
        for one in self.ranges:
            if position < one.size:
                return one.first + position * one.step
            position -= one.size
        raise IndexError(position)

    def position_of(self, index: int) -> int | None:
        """None: no element has this index."""
        if not self.ranges:
            return index if 0 <= index < self.count else None
        before = 0
        for one in self.ranges:
            if one.first <= index <= one.last:
                steps, rest = divmod(index - one.first, one.step)
                return None if rest else before + steps
            before += one.size
        return None

    def values_at(self, position: int) -> dict[str, str]:
        """The variables of an element. The last variable of a grid changes fastest."""
        if self.rows:
            return dict(self.rows[position])
        found: dict[str, str] = {}
        for name in reversed(self.grid):
            values = self.grid[name]
            position, at = divmod(position, len(values))
            found[name] = values[at]
        return {name: found[name] for name in self.grid}


def filled(word: str, values: dict[str, str]) -> str:
    """The word with its placeholders filled in: {lr}. {{lr}} stands for the text {lr}; ${lr} is
    left to the shell."""
    return "".join(values[part] if named else part for named, part in _parts(word, values))


def placeholders(word: str) -> list[str]:
    """The names in it that look like placeholders."""
    return [part for named, part in _parts(word, None) if named]


def _parts(word: str, known: dict[str, str] | None) -> list[tuple[bool, str]]:
    """Text and placeholders in turn; `known` None: every name counts."""
    parts: list[tuple[bool, str]] = []
    start = 0
    while (open_ := word.find("{", start)) >= 0:
        twice = word[open_ : open_ + 2] == "{{"
        close = word.find("}", open_)
        name = word[open_ + 1 + twice : close] if close >= 0 else ""
        ours = name.isascii() and name.isidentifier() and (known is None or name in known)
        if ours and twice and word[close : close + 2] == "}}":
            parts += [(False, word[start:open_]), (False, word[open_ + 1 : close + 1])]
            start = close + 2
        elif ours and not twice and word[open_ - 1 : open_] != "$":
            parts += [(False, word[start:open_]), (True, name)]
            start = close + 1
        else:
            parts.append((False, word[start : open_ + 1]))
            start = open_ + 1
    return [*parts, (False, word[start:])]
