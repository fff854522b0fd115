"""What the router counts: tokens by service and caller, kept in its folder, and times of the last
seconds."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from pathlib import Path

import msgspec

from shoal.machine.files import read_own, write_private
from shoal.model.tokens import TokenCount

COUNTS = "counts.json"
PAIRS_MAX = 50_000  # of services and callers; beyond, a caller counts as nobody
COUNT_MAX = 1 << 53  # more than the ledger can add up would stop it for all services
LINES_MAX = 1_000  # of the log, in a life
WINDOW_S = 15
GROWTH = 1.05  # times are known to 5 %


_LINES = iter(range(LINES_MAX))


def say(text: str) -> None:
    """A line of the log: never text of a request, and not more than a file should get."""
    if next(_LINES, None) is not None:
        print(f"shoal: router: {text}", file=sys.stderr, flush=True)


class Kept(msgspec.Struct):
    folder: str
    counts: list[TokenCount]


class Books:
    """Totals since the folder was made. `save` is called about once a second, so a router that is
    killed loses what it counted in that second."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / COUNTS
        self._sums: dict[tuple[str, str], list[int]] = {}
        self._changed = False
        try:
            kept = msgspec.json.decode(read_own(self._path), type=Kept)
        except FileNotFoundError:
            kept = Kept(folder=os.urandom(8).hex(), counts=[])
            write_private(self._path, msgspec.json.encode(kept))
        self.folder = kept.folder
        for one in kept.counts:
            sums = [one.requests, one.prompt, one.cached, one.generated]
            self._sums[one.service, one.caller] = [min(COUNT_MAX, each) for each in sums]

    def add(self, service: str, caller: str, prompt: int, cached: int, generated: int) -> None:
        pair = (service, caller)
        if pair not in self._sums and len(self._sums) >= PAIRS_MAX:
            pair = (service, "")
        sums = self._sums.setdefault(pair, [0, 0, 0, 0])
        for place, count in enumerate((1, prompt, cached, generated)):
            sums[place] = min(COUNT_MAX, sums[place] + max(0, count))
        self._changed = True

    def counts(self) -> tuple[TokenCount, ...]:
        return tuple(
            TokenCount(service=service, caller=caller, requests=r, prompt=p, cached=c, generated=g)
            for (service, caller), (r, p, c, g) in self._sums.items()
        )

    def text(self) -> bytes | None:
        """The file's new content; None if nothing has changed."""
        if not self._changed:
            return None
        self._changed = False
        return msgspec.json.encode(Kept(folder=self.folder, counts=list(self.counts())))

    def write(self, text: bytes) -> None:
        write_private(self._path, text)


class Window:
    """Values of the last 15 seconds: how many of each size, in a slot for each second."""

    def __init__(self) -> None:
        self._slots: list[tuple[int, Counter[int]]] = []

    def add(self, now: float, value: float) -> None:
        self._slot(now)[round(math.log(value + 1, GROWTH))] += 1

    def _slot(self, now: float) -> Counter[int]:
        second = int(now)
        if not self._slots or self._slots[-1][0] != second:
            self._slots.append((second, Counter()))
            self._slots = [one for one in self._slots if one[0] > second - WINDOW_S]
        return self._slots[-1][1]

    def percentiles(self, now: float, *shares: float) -> list[int]:
        """In the order of `shares`; 0 where nothing was seen."""
        whole: Counter[int] = Counter()
        for second, slot in self._slots:
            if second > now - WINDOW_S:
                whole.update(slot)
        count, found = whole.total(), []
        for share in shares:
            rank, seen, at = share * count, 0, 0
            for size in sorted(whole):
                seen, at = seen + whole[size], size
                if seen >= rank:
                    break
            found.append(round(GROWTH**at - 1))
        return found


class Sums:
    """Sums over the last 15 seconds."""

    def __init__(self, names: int) -> None:
        self._names = names
        self._slots: list[tuple[int, list[int]]] = []

    def add(self, now: float, *values: int) -> None:
        second = int(now)
        if not self._slots or self._slots[-1][0] != second:
            self._slots.append((second, [0] * self._names))
            self._slots = [one for one in self._slots if one[0] > second - WINDOW_S]
        slot = self._slots[-1][1]
        for place, value in enumerate(values):
            slot[place] += value

    def of(self, now: float) -> list[int]:
        slots = [slot for second, slot in self._slots if second > now - WINDOW_S]
        return [sum(column) for column in zip(*slots, strict=True)] or [0] * self._names
