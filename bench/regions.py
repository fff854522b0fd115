"""How many replicas three regions need alone and together, when their days are shifted.

    python -m bench.regions --servegen total_rates.csv.gz

Each region has the request rates of the same ServeGen model, 0, 8 and 16 hours later. They are
scaled to a mean of --work requests in flight in each region; what is in flight around that is
drawn. The real `core/books/scale.py` is asked every 30 s how many replicas there should be: for
each region alone, and for one service that has the work of all. "peak of work" is the most work at
a time, in replicas; "fixed" is a fleet for the most replicas that the book asks for, with its
headroom; "scaled" is their mean over time.

This counts replicas for work that may run anywhere at once. It has no round trips between regions,
no caches of prompts that requests would leave behind, and no waits, so it is a bound on what such
regions can save, and not a measurement of a router. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.figures import table
from shoal.core.books.scale import RecentWork, wish
from shoal.model.service import Scale, ServiceLoad

WINDOW_S = 600  # of the rates
LOOK_MS = 30_000
START_MS = 45_000  # until a replica is ready
TARGET = 8  # requests in flight at a replica
MODELS = ("m-large", "m-mid", "m-small")
SHIFTS_H = (0, 8, 16)
HEADER = ("model", "how", "sum of regions", "together", "saved")


class Need(msgspec.Struct, frozen=True):
    """Replicas: for the most work at a time, the most that were asked for, and their mean."""

    peak: float
    most: int
    mean: float


class Found(msgspec.Struct, frozen=True):
    regions: list[Need]
    together: Need

    def rows(self, model: str) -> list[tuple[str, ...]]:
        ways = (("peak of work", "peak"), ("fixed", "most"), ("scaled", "mean"))
        pairs = [
            (how, sum(getattr(one, name) for one in self.regions), getattr(self.together, name))
            for how, name in ways
        ]
        return [
            (model, how, f"{alone:.1f}", f"{both:.1f}", f"{100 * (1 - both / alone):.1f} %")
            for how, alone, both in pairs
        ]


def read_rates(path: Path, model: str) -> list[float]:
    """For each window from the first one on; windows without requests are left out of the file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model]
    if not rows:
        raise SystemExit(f"error: {path}: no rates of model {model!r}")
    rates = {int(row["t_s"]) // WINDOW_S: float(row["rate_rps"]) for row in rows}
    return [rates.get(window, 0.0) for window in range(max(rates) + 1)]


def shifted(rates: Sequence[float], hours: int) -> list[float]:
    """The same, later; what is moved out at the end comes in at the beginning."""
    by = hours * 3600 // WINDOW_S
    return [rates[(window - by) % len(rates)] for window in range(len(rates))]


def in_flight(rates: Sequence[float], mean: float, rng: random.Random) -> list[int]:
    """At each look; the number varies by about its square root, as independent requests do."""
    factor = mean * len(rates) / sum(rates)
    found = []
    for rate in rates:
        level = rate * factor
        for _ in range(WINDOW_S * 1000 // LOOK_MS):
            found.append(max(0, round(rng.gauss(level, level**0.5))))
    return found


def needed(work: Sequence[int]) -> Need:
    """As the scale book decides, look by look."""
    scale, recent = Scale(least=1, most=10_000, target=TARGET), RecentWork()
    wanted = -(-work[0] // TARGET)
    held = most = 0
    for look, now in enumerate(work):
        load = ServiceLoad(service="llm", in_flight=now)
        wanted = wish(recent, scale, load, wanted, START_MS, look * LOOK_MS).wanted
        held += wanted
        most = max(most, wanted)
    return Need(max(work) / TARGET, most, round(held / len(work), 2))


def compare(rates: Sequence[float], mean: float, seed: int) -> Found:
    works = [
        in_flight(shifted(rates, hours), mean, random.Random(f"{seed}/{hours}"))
        for hours in SHIFTS_H
    ]
    together = [sum(at) for at in zip(*works, strict=True)]
    return Found([needed(work) for work in works], needed(together))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servegen", type=Path, required=True, help="total_rates.csv.gz")
    parser.add_argument("--work", type=float, default=160, help="mean in flight in a region [160]")
    parser.add_argument("--days", type=int, default=14, help="the first so many days [14]")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    found, rows = {}, []
    for model in MODELS:
        rates = read_rates(arguments.servegen, model)[: arguments.days * 86_400 // WINDOW_S]
        found[model] = compare(rates, arguments.work, arguments.seed)
        rows += found[model].rows(model)
        print(f"{model} is done", file=sys.stderr)
    print(table(HEADER, rows))
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
