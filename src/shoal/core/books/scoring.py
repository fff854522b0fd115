"""Scores of a gang's members from their own step times: which member holds up the others.

A *window* closes when every member that beats has done enough steps since it opened. In it, a
member's ratio is the gang's lower median of own time per step over its own; its score is the median
ratio of its last windows. Own time is computing and waiting for data, never waiting for peers: in a
gang that steps together all have the same step time, and only own time shows the cause.

The scatter of windows is learned from how the ratios change from one to the next; a steadily slow
member does not affect it. A job that scatters much gets longer windows.

This is heard, not decided, so it is changed in place and never logged. A `Gang` belongs to one
attempt, its size is bounded by the gang's, and a beat costs O(1) except at a window's end.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shoal.core.books.numbers import keep, lower_median, upper_median
from shoal.model.health import HealthRule
from shoal.model.progress import Beat

RATIOS_KEPT = 5  # a single odd window (an evaluation on one rank) does not move their median
NOISES_KEPT = 9
JUDGED_FROM = 3  # windows before the first score
RATIO_MILLI_MAX = 4000
# Windows that scatter more than this are made longer, up to `FACTOR_MAX` times.
NOISE_MILLI_GOAL = 50
FACTOR_MAX = 64


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A member became slow or recovered, with the numbers that show it."""

    member: int
    slow: bool
    score_milli: int
    own_us: int  # its own time per step in the last window
    gang_us: int  # the gang's
    noise_milli: int
    windows: int  # since the gang was first measured


class Member(msgspec.Struct):
    """Newest counts, the counts when the window opened, and the last windows' ratios."""

    steps: int = 0
    own_us: int = 0
    from_steps: int = 0
    from_us: int = 0
    there: bool = False  # has done its steps of this window, or of the warm-up before the first
    ratios: list[int] = []
    streak: int = 0  # windows in a row that contradict its standing
    slow: bool = False


class Gang(msgspec.Struct):
    """The members of one attempt that send beats, by number."""

    members: dict[int, Member] = {}
    there: int = 0
    opened_ms: int = -1  # -1: not all are warm yet
    factor: int = 1
    noises: list[int] = []
    windows: int = 0


def hear(gang: Gang, member: int, beat: Beat, now_ms: int, rule: HealthRule) -> list[Change]:
    """Take in a beat; return the members that became slow or recovered."""
    own_us = beat.compute_us + beat.data_us
    known = gang.members.get(member)
    if known is None or beat.steps < known.steps or own_us < known.own_us:
        # A new member or a restarted process: earlier measurements no longer compare.
        gang.members[member] = Member(steps=beat.steps, own_us=own_us)
        _begin_again(gang, rule)
        known = gang.members[member]
    known.steps, known.own_us = beat.steps, own_us
    if not known.there and _has_done(gang, known, rule):
        known.there = True
        gang.there += 1
    if len(gang.members) < 2 or gang.there < len(gang.members):
        return []
    if gang.opened_ms >= 0 and now_ms - gang.opened_ms < rule.window_ms * gang.factor:
        return []
    changes = list(_close(gang, rule)) if gang.opened_ms >= 0 else []
    _open(gang, now_ms)
    return changes


def leave(gang: Gang, member: int, rule: HealthRule) -> None:
    """It has ended while others go on; windows must not wait for it."""
    if gang.members.pop(member, None) is not None:
        _begin_again(gang, rule)


def scores(gang: Gang) -> dict[int, int]:
    """In thousandths, by member; members without a score are left out."""
    return {
        number: lower_median(member.ratios)
        for number, member in gang.members.items()
        if len(member.ratios) >= JUDGED_FROM
    }


def _has_done(gang: Gang, member: Member, rule: HealthRule) -> bool:
    if gang.opened_ms < 0:
        return member.steps >= rule.warm_steps
    return member.steps - member.from_steps >= rule.window_steps * gang.factor


def _begin_again(gang: Gang, rule: HealthRule) -> None:
    gang.opened_ms, gang.there = -1, 0
    gang.noises = []
    for member in gang.members.values():
        member.ratios, member.streak = [], 0
        member.there = member.steps >= rule.warm_steps
        gang.there += member.there


def _open(gang: Gang, now_ms: int) -> None:
    gang.opened_ms, gang.there = now_ms, 0
    for member in gang.members.values():
        member.from_steps, member.from_us = member.steps, member.own_us
        member.there = False


def _close(gang: Gang, rule: HealthRule) -> Iterator[Change]:
    rates = {
        number: (member.own_us - member.from_us) * 1000 // (member.steps - member.from_steps)
        for number, member in gang.members.items()
    }
    usual = lower_median(rates.values())
    if usual <= 0:
        return  # they count steps but no times
    gang.windows += 1
    moves = []
    for number, member in gang.members.items():
        ratio = min(usual * 1000 // max(rates[number], 1), RATIO_MILLI_MAX)
        if member.ratios:
            moves.append(abs(ratio - member.ratios[-1]))
        keep(member.ratios, ratio, RATIOS_KEPT)
    if moves:
        keep(gang.noises, upper_median(moves), NOISES_KEPT)
    if len(gang.noises) < JUDGED_FROM - 1:
        return
    noise = upper_median(gang.noises)
    for number, member in gang.members.items():
        score = lower_median(member.ratios)
        if _turns(member, score, noise, rule):
            yield Change(
                member=number,
                slow=member.slow,
                score_milli=score,
                own_us=rates[number] // 1000,
                gang_us=usual // 1000,
                noise_milli=noise,
                windows=gang.windows,
            )
    _lengthen(gang, noise)


def _turns(member: Member, score: int, noise: int, rule: HealthRule) -> bool:
    """Does its standing change now? Only after enough windows in a row."""
    if member.slow:
        against = score >= rule.well_milli
    else:
        against = score < rule.slow_milli and 1000 - score > rule.noise_factor * noise
    member.streak = member.streak + 1 if against else 0
    if member.streak < rule.windows_in_a_row:
        return False
    member.slow, member.streak = not member.slow, 0
    return True


def _lengthen(gang: Gang, noise: int) -> None:
    if len(gang.noises) < NOISES_KEPT or noise <= NOISE_MILLI_GOAL or gang.factor >= FACTOR_MAX:
        return
    gang.factor *= 2
    gang.noises = []
    for member in gang.members.values():
        member.ratios, member.streak = [], 0
