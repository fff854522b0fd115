"""How many replicas a service should have: fast up, slow down, none without requests.

The signal is work: requests in flight at replicas, queued in the gateway, and held because there
is no replica. A long stream is work for as long as it lasts. There should be enough replicas for
the work to expect when a replica started now is ready, if the work keeps growing as it did; never
fewer than were needed at any time in the last `down_after_ms`.

An inference engine may be full with fewer requests than `target`, because long ones fill its cache.
If replicas show their engines' figures, there should also be enough of them that no requests wait
inside the engines, and that their caches are not fuller than `CACHE_MILLI`.

A service with goals also has as many as it needs for them: `target` is then the most that a replica
gets, and less if that misses the goals (`goals.py`). It looks ahead by the usual day, too.
"""

from __future__ import annotations

import math

import msgspec

from shoal.core.books.goals import Ability, expected, learn
from shoal.model.durations import duration_text
from shoal.model.resources import plural
from shoal.model.service import Scale, ServiceLoad
from shoal.model.tokens import MILLI, Goals

# Growth is measured over this long, and at most this much of the present work is expected.
TREND_MS = 60_000
TREND_PERCENT_MAX = 150
CHANCE = 2  # standard deviations
TREND_MAX = 256  # looks that are kept; they come about twice a second
SLOTS = 32  # the time that is looked back on has this many parts
CACHE_MILLI = 800  # above this, an engine soon has to stop requests and begin them again
ENGINE_FACTOR_MAX = 2  # a moment of full engines asks for at most this many times as many
START_MS = 10_000  # assumed time until a replica is ready, before one was measured


NO_GOALS = Goals()


class RecentWork(msgspec.Struct):
    """The work of a service in the last minutes: heard, not logged."""

    peaks: list[tuple[int, int]] = []  # (when, replicas that were needed), falling
    trend: list[tuple[int, int]] = []  # (when, work)
    asked_ms: int = -1  # when there was last any work
    start_ms: int = START_MS  # how long the last replica took to be ready
    ability: Ability | None = None  # of a replica, if the service has goals


class Wish(msgspec.Struct, frozen=True):
    wanted: int
    why: str


def wish(
    recent: RecentWork,
    scale: Scale,
    load: ServiceLoad,
    wanted: int,
    start_ms: int,
    now_ms: int,
    goals: Goals = NO_GOALS,
) -> Wish:
    """`start_ms`: how long a replica usually takes to be ready."""
    work = load.work
    if recent.asked_ms < 0:  # the present replicas count as needed: the time before is unknown
        recent.peaks = [(now_ms, wanted)]
    if recent.asked_ms < 0 or work or load.answers_per_ks:
        recent.asked_ms = now_ms
    ahead = _ahead(recent, work, start_ms, now_ms)
    each_milli, because = scale.target * MILLI, ""
    if goals:
        ahead = max(ahead, expected(load.day, work, now_ms + start_ms, now_ms))
        each_milli, because = _by_goals(recent, scale, load, goals, wanted, start_ms, now_ms)
    need = -(-ahead * MILLI // each_milli)
    need = max(need, 1 if work else 0)
    by_engines, full = _by_engines(load)
    because = full if by_engines > need else because
    need = min(max(need, by_engines, scale.least), scale.most)
    if need == 0 and now_ms - recent.asked_ms < scale.idle_ms:
        need = min(1, scale.most) if wanted else 0
    _note(recent, need, scale.down_after_ms, now_ms)
    if need > wanted and because:
        return Wish(need, because)
    if need > wanted:
        more = f", {ahead} expected by the time a new one is ready" if ahead > work else ""
        each = f"{each_milli / MILLI:.3g} per replica"
        return Wish(need, f"{work} requests in flight or waiting{more}, {each}")
    done = max(need, recent.peaks[0][1])
    if goals and done < wanted:  # it would have to start again what it stops now
        until_ms = now_ms + start_ms + scale.down_after_ms
        soon = -(-expected(load.day, work, until_ms, now_ms) * MILLI // each_milli)
        done = max(done, min(soon, wanted))
    if done < wanted:
        if done == 0:
            return Wish(0, f"no request for {duration_text(now_ms - recent.asked_ms)}")
        since = duration_text(scale.down_after_ms)
        return Wish(done, f"{plural(done, 'replica')} would have been enough for the last {since}")
    return Wish(wanted, "")


def _by_goals(
    recent: RecentWork,
    scale: Scale,
    load: ServiceLoad,
    goals: Goals,
    wanted: int,
    start_ms: int,
    now_ms: int,
) -> tuple[int, str]:
    """How much a replica may have; and why, if that is news."""
    ability = recent.ability
    if ability is None:
        ability = recent.ability = Ability()
    if wanted >= scale.most:  # more replicas cannot help, whatever a miss might teach
        load = msgspec.structs.replace(load, tokens=None)
    lesson = learn(ability, goals, scale.target, load, start_ms, now_ms)
    if lesson is None:
        return ability.each_milli, ""
    each = f"{ability.each_milli / MILLI:.3g} requests per replica"
    text = f"{lesson[1]} of {lesson[0]} requests missed the goal; {each} from now on"
    return ability.each_milli, text


def _ahead(recent: RecentWork, work: int, start_ms: int, now_ms: int) -> int:
    """Work to expect when a replica started now is ready. Growth is that of the window's later half
    over its earlier half. It counts only if it is more than chance, and chance varies by about the
    square root. Without that rule, noise alone cost two thirds more replicas."""
    trend = recent.trend
    trend.append((now_ms, work))
    while trend[0][0] < now_ms - TREND_MS:
        del trend[0]
    del trend[:-TREND_MAX]
    half_ms = TREND_MS // 2
    early = [seen for at_ms, seen in trend if at_ms <= now_ms - half_ms]
    late = [seen for at_ms, seen in trend if at_ms > now_ms - half_ms]
    if not early:
        return work
    mean = sum(late) // len(late)
    grown = mean - sum(early) // len(early)
    if grown <= CHANCE * math.isqrt(mean):
        return work
    # The later half's mean is as old as a quarter of the window.
    ahead_ms = TREND_MS // 4 + min(start_ms, TREND_MS)
    return max(work, min(mean + grown * ahead_ms // half_ms, work * TREND_PERCENT_MAX // 100))


def _by_engines(load: ServiceLoad) -> tuple[int, str]:
    """How many replicas the engines' own figures ask for, and why; 0 if they show none. A request
    waits for a moment in every engine, so waiting counts from one in each on average."""
    shown = len(load.engines)
    if not shown:
        return 0, ""
    waiting = sum(one.waiting for one in load.engines.values())
    running = sum(one.running for one in load.engines.values())
    used = sum(one.cache_milli for one in load.engines.values())
    on = f"on {plural(shown, 'replica')}"
    need = -(-used // CACHE_MILLI)
    why = (
        f"the engines' caches are {used // shown // 10} % full {on}, {CACHE_MILLI // 10} % is best"
    )
    if waiting >= shown:
        each = max(1, running // shown)
        by_waiting = -(-(running + waiting) // each)
        if by_waiting > need:
            need = by_waiting
            why = f"{waiting} requests wait inside the engines, which run {running} {on}"
    return min(need, ENGINE_FACTOR_MAX * shown), why


def _note(recent: RecentWork, need: int, down_after_ms: int, now_ms: int) -> None:
    """The first of `peaks` is the most that was needed since then."""
    peaks = recent.peaks
    while peaks and peaks[-1][1] <= need:
        peaks.pop()
    slot_ms = max(1, down_after_ms // SLOTS)
    if peaks and peaks[-1][0] // slot_ms == now_ms // slot_ms:
        peaks[-1] = (now_ms, peaks[-1][1])  # keeps them few and forgets none too early
    else:
        peaks.append((now_ms, need))
    while peaks[0][0] < now_ms - down_after_ms:
        del peaks[0]
