"""How much work a replica may have if its service's goals are to hold, and what the hour brings.

What a replica may have is learned from what the router judges: less after a miss, then slowly more
while the goals are met by replicas that are nearly full. So the room to spare is as large as the
noise and the growth of the load need. It is at most the service's `target`. The usual day is
learned by the control layer, and comes with the load.
"""

from __future__ import annotations

import math

import msgspec

from shoal.model.service import DAY_SLOTS, ServiceLoad
from shoal.model.tokens import MILLI, Goals, TokenLoad

JUDGED_MS = 15_000  # the requests that a router judges began within this long
LESSONS_MAX = 20  # five minutes of them
CHANCE = 2  # standard deviations
LESS, OF = 19, 20  # what a replica may have after a miss, of what it had
# After this many lessons without one, what is tried beyond that with each: by replicas that have at
# least so many tenths of it. Chosen on the traces of bench/autoscale.py.
WELL, MORE_PART, NEAR_TENTHS = 8, 300, 7
LEAST_PART = 4  # fewer requests than this part of `target` do not make a replica faster
DAY_MS = 86_400_000
SLOT_MS = DAY_MS // DAY_SLOTS
DAY_PERCENT_MAX = 200  # of the present work, however much a day is used to bring


class Ability(msgspec.Struct):
    """Heard, not logged: a controller that restarts learns it again."""

    each_milli: int = 0  # requests at a replica; 0: nothing was learned, so it is `target`
    due_ms: int = 0  # of the next lesson
    patient_ms: int = 0  # until then, what was asked for last is not there yet
    lessons: list[tuple[int, int]] = []  # requests, and those that missed, since that time


def learn(
    ability: Ability, goals: Goals, target: int, load: ServiceLoad, start_ms: int, now_ms: int
) -> tuple[int, int] | None:
    """After a miss from which something was learned: how many requests were judged, and how many
    of them missed."""
    most, tokens = target * MILLI, load.tokens
    ability.each_milli = each = min(ability.each_milli or most, most)
    if tokens is None or now_ms < ability.due_ms:
        return None
    first, ability.due_ms = not ability.due_ms, now_ms + JUDGED_MS
    if first or now_ms < ability.patient_ms:
        return None
    lesson = tokens.judged, tokens.judged - tokens.good
    ability.lessons = [*ability.lessons, lesson][-LESSONS_MAX:]
    here = load.work * MILLI // max(1, len(load.ready))
    judged, bad = map(sum, zip(*ability.lessons, strict=True))
    if is_missed(goals, *lesson) or is_missed(goals, judged, bad):
        least = max(MILLI, most // LEAST_PART)
        ability.each_milli = max(least, max(min(each, here), each * 3 // 4) * LESS // OF)
        ability.lessons, ability.patient_ms = [], now_ms + start_ms + JUDGED_MS
        return judged, bad
    well = 2 * bad * MILLI <= judged * (MILLI - goals.share_milli)
    if well and len(ability.lessons) >= WELL and here * 10 > each * NEAR_TENTHS:
        ability.each_milli = min(most, each + each // MORE_PART)
    return None


def is_missed(goals: Goals, judged: int, bad: int) -> bool:
    """More than the share allows, and more than chance."""
    allowed = judged * (MILLI - goals.share_milli)
    return bad * MILLI > allowed + CHANCE * math.isqrt(allowed * MILLI) + MILLI


def missed(goals: Goals, tokens: TokenLoad | None) -> bool:
    """At this moment."""
    return tokens is not None and is_missed(goals, tokens.judged, tokens.judged - tokens.good)


def expected(day: tuple[int, ...], work: int, until_ms: int, now_ms: int) -> int:
    """The most work from now until then, if it changes as it does at this time of the day."""
    here = _usual(day, now_ms)
    if here < MILLI or len(day) != DAY_SLOTS:
        return work
    times = range(now_ms, until_ms, SLOT_MS // 2)
    there = max(_usual(day, at_ms) for at_ms in (*times, until_ms))
    return max(work, min(work * there // here, work * DAY_PERCENT_MAX // 100))


def _usual(day: tuple[int, ...], at_ms: int) -> int:
    """Between the middles of two parts of the day, in proportion; 0 if one is not known."""
    if len(day) != DAY_SLOTS:
        return 0
    place, past_ms = divmod(at_ms - SLOT_MS // 2, SLOT_MS)
    before, after = day[place % DAY_SLOTS], day[(place + 1) % DAY_SLOTS]
    if before < 0 or after < 0:
        return 0
    return before + (after - before) * past_ms // SLOT_MS
