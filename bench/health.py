"""How soon slow members are found, and how often wrongly: synthetic gangs, the real scoring.

python bench/health.py            everything (about three minutes)
python bench/health.py --quick    a tenth of it
"""

from __future__ import annotations

import argparse
import statistics
import time

import harness.gangs as gangs
import msgspec
from harness.gangs import Drag, Gang

from bench.figures import machine, table
from shoal.core.books import scoring
from shoal.model.health import HealthRule
from shoal.model.progress import Beat

RULE = HealthRule()
BEGINS = 400  # the step after which the slow member is slow
STEPS_AFTER = 4000
SEEDS = 20
CALM_STEPS = 1_000_000


class Found(msgspec.Struct, frozen=True):
    """For a gang with slow members: how many runs found them all, and when; medians."""

    case: str
    runs: int
    found: int
    steps: float | None
    seconds: float | None
    steps_max: int | None
    wrong: int  # healthy members that were called slow


class Calm(msgspec.Struct, frozen=True):
    """For a gang without slow members: members wrongly called slow."""

    case: str
    steps: int
    wrong: int
    per_million: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a tenth of the runs")
    share = 10 if parser.parse_args().quick else 1
    print(machine())
    found = [detection(*case, SEEDS // share) for case in slow_cases()]
    print(
        table(
            ("a slow member", "runs", "found", "steps", "seconds", "steps max", "wrong"),
            [(f.case, f.runs, f.found, f.steps, f.seconds, f.steps_max, f.wrong) for f in found],
        )
    )
    calm = [wrongly(*case, CALM_STEPS // share) for case in calm_cases()]
    print(
        table(
            ("nobody to suspect", "steps", "wrong", "per million steps"),
            [(c.case, c.steps, c.wrong, c.per_million) for c in calm],
        )
    )
    cost = beat_cost_ns()
    print(f"a beat costs {cost['mean_ns']} ns in a gang of {cost['members']}")
    print(msgspec.json.encode({"found": found, "calm": calm, "beat": cost}).decode())


def slow_cases() -> list[tuple[str, Gang, Drag, tuple[int, ...]]]:
    usual = Gang()
    one = (2,)
    return [
        ("1.1x, noise 5 %", usual, gangs.slow(1.1, BEGINS), one),
        ("1.25x, noise 5 %", usual, gangs.slow(1.25, BEGINS), one),
        ("1.5x, noise 5 %", usual, gangs.slow(1.5, BEGINS), one),
        ("3x, noise 5 %", usual, gangs.slow(3.0, BEGINS), one),
        ("1.25x, noise 20 %", Gang(noise=0.2), gangs.slow(1.25, BEGINS), one),
        ("1.5x, noise 20 %", Gang(noise=0.2), gangs.slow(1.5, BEGINS), one),
        ("1.5x, noise 50 %", Gang(noise=0.5), gangs.slow(1.5, BEGINS), one),
        ("1.5x, batches vary 30 %", Gang(shared=0.3), gangs.slow(1.5, BEGINS), one),
        ("1.5x, steps of 10 s", Gang(step_s=10.0), gangs.slow(1.5, BEGINS), one),
        ("1.5x, steps of 20 ms", Gang(step_s=0.02), gangs.slow(1.5, BEGINS), one),
        ("1.5x, of 2", Gang(members=2), gangs.slow(1.5, BEGINS, (1,)), (1,)),
        ("1.5x, of 64", Gang(members=64), gangs.slow(1.5, BEGINS), one),
        ("1.5x, 2 of 4", usual, gangs.slow(1.5, BEGINS, (1, 2)), (1, 2)),
        ("1.5x from the first step", usual, gangs.slow(1.5, 0), one),
        ("3x, 1 s on, 1 s off", usual, gangs.on_and_off(3.0, 1, 1, BEGINS), one),
        ("3x, 20 s on, 20 s off", usual, gangs.on_and_off(3.0, 20, 20, BEGINS), one),
    ]


def calm_cases() -> list[tuple[str, Gang, Drag]]:
    return [
        ("noise 5 %", Gang(), gangs.none),
        ("noise 20 %", Gang(noise=0.2), gangs.none),
        ("noise 50 %", Gang(noise=0.5), gangs.none),
        ("noise 50 %, of 2", Gang(members=2, noise=0.5), gangs.none),
        ("noise 20 %, steps of 10 s", Gang(noise=0.2, step_s=10.0), gangs.none),
        ("noise 50 %, steps of 10 s", Gang(noise=0.5, step_s=10.0), gangs.none),
        ("batches vary 50 %", Gang(shared=0.5), gangs.none),
        ("all become 2x slower", Gang(), gangs.all_slow(2.0, BEGINS)),
        ("another 2x slower each 10 s", Gang(), gangs.wandering(2.0, 10, 4)),
        ("one pauses 20 steps, each 200", Gang(), gangs.pauses(20.0, 200)),
        ("speeds drift by 3 % in a minute", Gang(), gangs.drifting(0.03, 240)),
        ("speeds drift by 10 % in a minute", Gang(), gangs.drifting(0.1, 240)),
        ("one compiles 5 steps 50x longer", Gang(), gangs.warming(50.0, 5)),
    ]


def detection(case: str, gang: Gang, drag: Drag, slow: tuple[int, ...], seeds: int) -> Found:
    steps: list[int] = []
    seconds: list[float] = []
    wrong = 0
    begins = 0 if "first step" in case else BEGINS
    for seed in range(max(seeds, 2)):
        seen = gangs.watch(gang, drag, BEGINS + STEPS_AFTER, seed, RULE)
        began_s = gangs.when(seen, begins) / 1000
        calls = [(step, now_ms, c) for step, now_ms, c in seen.changes if c.slow]
        wrong += len({c.member for _, _, c in calls if c.member not in slow})
        firsts = [
            next(((step, now) for step, now, c in calls if c.member == member), None)
            for member in slow
        ]
        known = [first for first in firsts if first is not None]
        if len(known) == len(slow):
            steps.append(max(step for step, _ in known) - begins)
            seconds.append(max(now for _, now in known) / 1000 - began_s)
    return Found(
        case,
        max(seeds, 2),
        len(steps),
        statistics.median(steps) if steps else None,
        round(statistics.median(seconds), 1) if seconds else None,
        max(steps, default=None),
        wrong,
    )


def wrongly(case: str, gang: Gang, drag: Drag, steps: int) -> Calm:
    seen = gangs.watch(gang, drag, steps, 1, RULE)
    wrong = sum(change.slow for _, _, change in seen.changes)
    return Calm(case, steps, wrong, round(wrong * 1e6 / steps, 2))


def beat_cost_ns(members: int = 256, rounds: int = 200) -> dict[str, int]:
    """All windows close as soon as they can, so this is the most expensive case."""
    rule = HealthRule(window_ms=0, window_steps=1)
    book = scoring.Gang()
    beats = [Beat(ref="", step=n, steps=n, compute_us=n * 250_000) for n in range(1, rounds + 1)]
    started = time.perf_counter_ns()
    for number, beat in enumerate(beats):
        for member in range(members):
            scoring.hear(book, member, beat, number * 1000, rule)
    return {
        "members": members,
        "mean_ns": (time.perf_counter_ns() - started) // (members * rounds),
    }


if __name__ == "__main__":
    main()
