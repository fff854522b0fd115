"""Synthetic gangs that step together, as beats: noise, slow members, pauses and saves."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import msgspec

from shoal.core.books import scoring
from shoal.model.health import HealthRule
from shoal.model.progress import Beat

REPORT_S = 1.0

# What a member's own time in a step is multiplied by: (member, seconds since the start, step).
Drag = Callable[[int, float, int], float]


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """`noise` is the relative scatter of a step's time; `shared` is the part that all members have
    in common, such as batches of different lengths."""

    members: int = 4
    step_s: float = 0.25
    noise: float = 0.05
    shared: float = 0.0
    others_s: float = 0.02  # in collectives, at least


class Heard(msgspec.Struct, frozen=True):
    """What the controller receives: a beat, when, and how long after the end of the step."""

    member: int
    beat: Beat
    now_ms: int
    quiet_ms: int
    step: int  # the true number of steps by then


def play(gang: Gang, drag: Drag, steps: int, seed: int) -> Iterator[Heard]:
    """Each member reports its last step about once a second, at its own moment."""
    dice = random.Random(seed)
    sigma = math.sqrt(math.log(1 + gang.noise**2))
    common = math.sqrt(math.log(1 + gang.shared**2))
    compute = [0.0] * gang.members
    wait = [0.0] * gang.members
    due = [dice.random() * REPORT_S for _ in range(gang.members)]
    now_s = 0.0
    for step in range(1, steps + 1):
        work = gang.step_s * (dice.lognormvariate(-common * common / 2, common) if common else 1.0)
        own = [
            work * dice.lognormvariate(-sigma * sigma / 2, sigma) * drag(member, now_s, step)
            for member in range(gang.members)
        ]
        longest = max(own) + gang.others_s
        before_s, now_s = now_s, now_s + longest
        for member in range(gang.members):
            if due[member] < now_s:  # it reported the previous step
                told_s = max(due[member], before_s)
                yield Heard(
                    member,
                    _beat(step - 1, compute[member], wait[member]),
                    int(told_s * 1000),
                    int((told_s - before_s) * 1000),
                    step - 1,
                )
                due[member] = told_s + REPORT_S
            compute[member] += own[member]
            wait[member] += longest - own[member]


def _beat(steps: int, compute_s: float, wait_s: float) -> Beat:
    return Beat(
        ref="",
        step=steps,
        steps=steps,
        compute_us=int(compute_s * 1e6),
        wait_us=int(wait_s * 1e6),
    )


class Watched(msgspec.Struct):
    """The members found slow or well, with step and time."""

    changes: list[tuple[int, int, scoring.Change]] = []  # step, now_ms
    steps_ms: dict[int, int] = {}  # when steps were first reported


def when(seen: Watched, step: int) -> int:
    """When, in ms, `steps` steps were done, as far as reported."""
    return next((at for done, at in sorted(seen.steps_ms.items()) if done >= step), 0)


def watch(gang: Gang, drag: Drag, steps: int, seed: int, rule: HealthRule) -> Watched:
    book, seen = scoring.Gang(), Watched()
    for heard in play(gang, drag, steps, seed):
        seen.steps_ms.setdefault(heard.step, heard.now_ms - heard.quiet_ms)
        for change in scoring.hear(book, heard.member, heard.beat, heard.now_ms, rule):
            seen.changes.append((heard.step, heard.now_ms, change))
    return seen


# -- slowdowns -------------------------------------------------------------------------------


def none(member: int, now_s: float, step: int) -> float:  # noqa: ARG001
    return 1.0


def slow(factor: float, begins: int, members: tuple[int, ...] = (2,)) -> Drag:
    return lambda member, _, step: factor if member in members and step > begins else 1.0


def all_slow(factor: float, begins: int) -> Drag:
    return lambda _member, _now, step: factor if step > begins else 1.0


def on_and_off(factor: float, on_s: float, off_s: float, begins: int) -> Drag:
    def drag(member: int, now_s: float, step: int) -> float:
        on = now_s % (on_s + off_s) < on_s
        return factor if member == 2 and on and step > begins else 1.0

    return drag


def wandering(factor: float, each_s: float, members: int) -> Drag:
    """A different member is slow from time to time, so no node is to blame."""
    return lambda member, now_s, _: factor if int(now_s / each_s) % members == member else 1.0


def pauses(factor: float, every: int) -> Drag:
    """Member 0 evaluates or writes a checkpoint every `every` steps."""
    return lambda member, _, step: factor if member == 0 and step % every == 0 else 1.0


def warming(factor: float, steps: int) -> Drag:
    """One member compiles longer than the others."""
    return lambda member, _, step: factor if member == 1 and step <= steps else 1.0


def drifting(scatter: float, steps: int) -> Drag:
    """Each member's speed drifts around the usual, with a memory of `steps` steps."""
    dice, last = random.Random(7), dict[int, float]()
    keep = math.exp(-1 / steps)
    push = scatter * math.sqrt(1 - keep * keep)

    def drag(member: int, now_s: float, step: int) -> float:  # noqa: ARG001
        last[member] = keep * last.get(member, 0.0) + dice.gauss(0, push)
        return math.exp(last[member])

    return drag
