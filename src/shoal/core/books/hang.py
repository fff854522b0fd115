"""Hangs: a live gang that makes no steps, judged by its own pace, and which rank is stuck."""

from __future__ import annotations

import msgspec

from shoal.core.books.numbers import keep, upper_median
from shoal.model.durations import duration_text
from shoal.model.health import HealthRule
from shoal.model.progress import Beat

PACES_KEPT = 25
# Each earlier hang of a job makes the next wait this many times longer: if it was a long evaluation
# and not a hang, the job gets through it.
HANGS_FACTOR = 4
HANGS_COUNTED_MAX = 4


class Mark(msgspec.Struct):
    """What a member last reported."""

    step: int
    steps: int
    wait_us: int
    save_us: int
    saves: int
    saved_step: int
    busy: bool
    wait_us_then: int = 0  # at its last step
    step_ms: int = 0  # time of its last step; 0: unknown


class Pace(msgspec.Struct):
    """The pace of one attempt. `moved_ms` is the last sign of work by any member."""

    began_ms: int  # when the last of its members was first heard
    moved_ms: int = -1
    longest_ms: int = 0  # between two signs of work
    step: int = 0  # the highest of all members
    steps: int = 0  # the most that one process has done
    steps_total: int = 0
    busy: int = 0  # members that report being busy
    paces_us: list[int] = []  # per step, newest last
    told_us: int = 0  # per step, as a member counts it: for a controller that just started
    members: dict[int, Mark] = {}


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """`stuck` are the members to look at first; all of them if they do not differ."""

    quiet_ms: int
    bound_ms: int
    step_us: int
    stuck: tuple[int, ...]
    why: str


def hear(
    pace: Pace, member: int, beat: Beat, quiet_ms: int, now_ms: int, *, timed: bool = True
) -> None:
    """Without `timed`, nobody knows when it made its last step: it has slept since."""
    mark = pace.members.get(member)
    said = Mark(
        beat.step, beat.steps, beat.wait_us, beat.save_us, beat.saves, beat.saved_step, beat.busy
    )
    stepped = beat.steps > (mark.steps if mark is not None else 0)
    said.wait_us_then = said.wait_us if stepped or mark is None else mark.wait_us_then
    said.step_ms = now_ms - quiet_ms if stepped else mark.step_ms if mark is not None else 0
    if not timed:
        said.step_ms = 0
    pace.members[member] = said
    was_busy = pace.busy > 0
    pace.busy += said.busy - (mark.busy if mark is not None else False)
    pace.steps = max(pace.steps, beat.steps)
    pace.steps_total = beat.steps_total
    if stepped and not pace.paces_us:  # the least: waiting for a stuck peer counts, too
        spent_us = (beat.compute_us + beat.wait_us + beat.data_us + beat.save_us) // beat.steps
        pace.told_us = min(pace.told_us or spent_us, spent_us)
    saved = mark is not None and _saves(said) != _saves(mark)
    if stepped or saved or (mark is not None and said.busy != mark.busy):
        _moved(pace, now_ms - quiet_ms if stepped and not saved else now_ms, was_busy)
    if mark is None:  # its work before this report may be newer than others' reports
        pace.began_ms = max(pace.began_ms, now_ms)
    elif beat.step > pace.step and mark.step_ms and said.step_ms > mark.step_ms:
        # By its own steps: compared with a peer's older report it would seem too fast.
        took_us = (said.step_ms - mark.step_ms) * 1000
        keep(pace.paces_us, took_us // (beat.step - mark.step), PACES_KEPT)
    pace.step = max(pace.step, beat.step)


def leave(pace: Pace, member: int) -> None:
    mark = pace.members.pop(member, None)
    if mark is not None:
        pace.busy -= mark.busy


def bound_ms(pace: Pace, rule: HealthRule, hangs: int = 0) -> int:
    """How long this gang may go without a sign of work; `hangs`: how many the job had before."""
    over = 0 < pace.steps_total <= pace.step
    step_us = usual_us(pace)
    if pace.busy or over or pace.steps < rule.warm_steps or not step_us:
        bound = rule.hang_patient_ms
    else:
        bound = max(rule.hang_floor_ms, rule.hang_steps * step_us // 1000, 2 * pace.longest_ms)
    return int(bound * HANGS_FACTOR ** min(hangs, HANGS_COUNTED_MAX))


def usual_us(pace: Pace) -> int:
    """What a step usually takes; 0 if unknown."""
    return upper_median(pace.paces_us) if pace.paces_us else pace.told_us


def hang(pace: Pace, now_ms: int, rule: HealthRule, hangs: int = 0) -> Hang | None:
    """Ask only while all members are alive: an end has a better reason. A gang that never sent a
    beat is not watched."""
    if not pace.members:
        return None
    quiet_ms = now_ms - max(pace.moved_ms, pace.began_ms)
    if quiet_ms <= min(rule.hang_floor_ms, rule.hang_patient_ms):
        return None
    bound = bound_ms(pace, rule, hangs)
    if quiet_ms <= bound:
        return None
    step_us = usual_us(pace)
    usual = f" (usually {step_us / 1_000_000:.3g}s a step)" if step_us else ""
    members = stuck(pace)
    first = f"member {members[0]}" if len(members) == 1 else f"one of {len(members)} members"
    return Hang(
        quiet_ms=quiet_ms,
        bound_ms=bound,
        step_us=step_us,
        stuck=members,
        why=f"no step for {duration_text(quiet_ms)} at step {pace.step}{usual}; {first} is stuck",
    )


def wake_ms(pace: Pace, rule: HealthRule, hangs: int = 0) -> int:
    """When to ask again if nothing is reported before."""
    return max(pace.moved_ms, pace.began_ms) + bound_ms(pace, rule, hangs) + 1


def stuck(pace: Pace) -> tuple[int, ...]:
    """The members furthest behind; among these, the ones not waiting for peers if others are."""
    least = min(mark.step for mark in pace.members.values())
    behind = [number for number, mark in sorted(pace.members.items()) if mark.step == least]
    idle = [n for n in behind if pace.members[n].wait_us <= pace.members[n].wait_us_then]
    return tuple(idle or behind)


def _moved(pace: Pace, at_ms: int, was_busy: bool) -> None:
    if at_ms <= pace.moved_ms:
        return
    if pace.moved_ms >= 0 and not was_busy:  # an announced pause says nothing about steps
        pace.longest_ms = max(pace.longest_ms, at_ms - pace.moved_ms)
    pace.moved_ms = at_ms


def _saves(mark: Mark) -> tuple[int, int, int]:
    return mark.save_us, mark.saves, mark.saved_step
