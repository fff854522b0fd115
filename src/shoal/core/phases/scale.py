"""How many replicas a service should have: fast up, slow down, none when nobody asks.

The signal is work: requests in flight at replicas, queued in the gateway, and held because there
is no replica. A long stream is work for as long as it lasts. What is wanted is enough replicas for
the work that there will be when one that is started now is ready, if it goes on growing as it did;
never fewer than would have done at any time of the last `down_after_ms`.
"""

from __future__ import annotations

import math

import msgspec

from shoal.model.durations import duration_text
from shoal.model.service import Scale, ServiceLoad

# Growth is looked at over this long, and believed for at most this much of what there is.
TREND_MS = 60_000
TREND_PERCENT_MAX = 150
CHANCE = 2  # standard deviations
TREND_MAX = 256  # looks that are kept; they come about twice a second
SLOTS = 32  # the time that is looked back on is told apart in so many parts
START_MS = 10_000  # what a replica is taken to need until it is ready, before that is known


class RecentWork(msgspec.Struct):
    """What was seen of a service's work lately: heard, not logged."""

    peaks: list[tuple[int, int]] = []  # (when, replicas that would have done), falling
    trend: list[tuple[int, int]] = []  # (when, work)
    asked_ms: int = -1  # when there was last any work
    start_ms: int = START_MS  # what the last replica needed to be ready


class Wish(msgspec.Struct, frozen=True):
    wanted: int
    why: str


def wish(
    recent: RecentWork, scale: Scale, load: ServiceLoad, wanted: int, start_ms: int, now_ms: int
) -> Wish:
    """`start_ms`: how long a replica usually takes to be ready."""
    work = load.work
    if recent.asked_ms < 0:  # what there is counts as needed: nothing is known of the time before
        recent.peaks = [(now_ms, wanted)]
    if recent.asked_ms < 0 or work or load.answers_per_ks:
        recent.asked_ms = now_ms
    ahead = _ahead(recent, work, start_ms, now_ms)
    need = -(-ahead // scale.target)
    need = max(need, 1 if work else 0)
    need = min(max(need, scale.least), scale.most)
    if need == 0 and now_ms - recent.asked_ms < scale.idle_ms:
        need = min(1, scale.most) if wanted else 0
    _note(recent, need, scale.down_after_ms, now_ms)
    if need > wanted:
        more = f", {ahead} expected by the time a new one is ready" if ahead > work else ""
        return Wish(need, f"{work} requests in flight or waiting{more}, {scale.target} a replica")
    done = max(need, recent.peaks[0][1])
    if done < wanted:
        if done == 0:
            return Wish(0, f"no request for {duration_text(now_ms - recent.asked_ms)}")
        since = duration_text(scale.down_after_ms)
        return Wish(done, f"{done} would have done for the last {since}")
    return Wish(wanted, "")


def _ahead(recent: RecentWork, work: int, start_ms: int, now_ms: int) -> int:
    """Work by the time that a replica started now is ready. Growth is that of the window's later
    half over its earlier one, and believed only if it is more than chance: what comes by chance is
    spread by about its square root. Without that, noise alone cost two thirds more replicas."""
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


def _note(recent: RecentWork, need: int, down_after_ms: int, now_ms: int) -> None:
    """The first of `peaks` is the most that was needed since then."""
    peaks = recent.peaks
    while peaks and peaks[-1][1] <= need:
        peaks.pop()
    slot_ms = max(1, down_after_ms // SLOTS)
    if peaks and peaks[-1][0] // slot_ms == now_ms // slot_ms:
        peaks[-1] = (now_ms, peaks[-1][1])  # so they are few, and none is forgotten too early
    else:
        peaks.append((now_ms, need))
    while peaks[0][0] < now_ms - down_after_ms:
        del peaks[0]
