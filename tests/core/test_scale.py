"""How many replicas: enough, within bounds, up at once, down slowly, and steady on steady load."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.books.scale import SLOTS, TREND_MAX, RecentWork, wish
from shoal.model.service import EngineFigures, Scale, ServiceLoad
from tests.core.build import examples

LOOK_MS = 500


def needed(work: int, scale: Scale) -> int:
    return min(max(-(-work // scale.target), scale.least), scale.most)


class Counters:
    """One service: looks twice a second, and has what it wishes for at once."""

    def __init__(self, scale: Scale, start_ms: int = 10_000) -> None:
        self.scale = scale
        self.start_ms = start_ms
        self.recent = RecentWork()
        self.wanted = scale.least
        self.now_ms = 1_000
        self.why = ""

    def look(self, work: int, times: int = 1) -> int:
        for _ in range(times):
            self.now_ms += LOOK_MS
            load = ServiceLoad(service="chat", in_flight=work)
            wished = wish(self.recent, self.scale, load, self.wanted, self.start_ms, self.now_ms)
            assert (wished.wanted != self.wanted) == bool(wished.why)
            self.wanted, self.why = wished.wanted, wished.why or self.why
        return self.wanted


@st.composite
def scales(draw: st.DrawFn) -> Scale:
    least = draw(st.integers(0, 20))
    return Scale(
        least=least,
        most=draw(st.integers(max(1, least), 200)),
        target=draw(st.integers(1, 10)),
        down_after_ms=draw(st.sampled_from([1, 500, 5_000, 60_000])),
        idle_ms=draw(st.sampled_from([1, 5_000, 60_000])),
    )


WORKS = st.lists(st.integers(0, 2_000), max_size=80)


@examples
@given(scales(), WORKS, st.integers(0, 600_000))
def test_it_is_within_bounds_and_never_fewer_than_are_in_use(
    scale: Scale, works: list[int], start_ms: int
) -> None:
    counters = Counters(scale, start_ms)
    for work in works:
        wanted = counters.look(work)
        assert scale.least <= wanted <= scale.most
        assert wanted >= needed(work, scale)
        assert wanted >= 1 or not work


@examples
@given(scales(), WORKS)
def test_it_is_never_fewer_than_would_have_done_lately(scale: Scale, works: list[int]) -> None:
    counters = Counters(scale)
    for number, work in enumerate(works, start=1):
        wanted = counters.look(work)
        looks = scale.down_after_ms // LOOK_MS
        lately = works[max(0, number - 1 - looks) : number]
        assert wanted >= max(needed(each, scale) for each in lately)


@examples
@given(scales(), st.lists(st.integers(0, 2_000), min_size=1, max_size=600))
def test_what_it_remembers_is_bounded(scale: Scale, works: list[int]) -> None:
    counters = Counters(scale)
    for work in sorted(works, reverse=True):  # falling work has the most peaks
        counters.look(work)
        assert len(counters.recent.trend) <= TREND_MAX
        assert len(counters.recent.peaks) <= SLOTS + 2


@examples
@given(scales(), WORKS, st.integers(0, 2_000))
def test_on_constant_work_it_settles_and_then_stays(
    scale: Scale, works: list[int], work: int
) -> None:
    counters = Counters(scale)
    for each in works:
        counters.look(each)
    settled = counters.look(work, 2 * 60_000 // LOOK_MS + 2 * SLOTS)
    assert settled == needed(work, scale)
    for _ in range(50):
        assert counters.look(work) == settled


def test_more_work_is_met_at_the_first_look() -> None:
    counters = Counters(Scale(least=1, most=100, target=8))
    counters.look(8, 60)
    assert counters.look(80) >= 10
    assert "80 requests in flight or waiting" in counters.why


def test_less_work_is_believed_only_after_a_while() -> None:
    counters = Counters(Scale(least=1, most=100, target=8, down_after_ms=60_000), start_ms=0)
    counters.look(80, 60)
    assert counters.look(8, 119) == 10
    assert counters.look(80) == 10
    assert counters.look(8, 119) == 10
    assert counters.look(8, 8) == 1
    assert counters.why == "1 replica would have been enough for the last 1m"


def test_growth_is_met_before_it_comes_and_believed_within_reason() -> None:
    slow = Counters(Scale(least=1, most=1_000, target=1), start_ms=0)
    fast = Counters(Scale(least=1, most=1_000, target=1), start_ms=15_000)
    for work in range(100, 300):  # two more a second
        slow.look(work)
        fast.look(work)
    assert slow.wanted in (299, 300)
    assert abs(fast.wanted - (299 + 2 * 15)) <= 2
    assert "expected by the time a new one is ready" in fast.why
    leap = Counters(Scale(least=1, most=1_000, target=1), start_ms=600_000)
    leap.look(100, 100)
    assert leap.look(300, 50) == 450


def test_chance_is_not_taken_for_growth() -> None:
    """Work that comes by chance is wanted as it comes, and no more."""
    rng = random.Random(1)
    counters = Counters(Scale(least=1, most=1_000, target=1, down_after_ms=1), start_ms=60_000)
    more = 0
    for _ in range(1_000):
        work = rng.randrange(90, 111)
        more += counters.look(work) > work
    assert more == 0


def test_a_fleet_that_shrinks_by_many_small_steps_keeps_its_peak_for_as_long() -> None:
    counters = Counters(Scale(least=0, most=1_000, target=1, down_after_ms=60_000))
    counters.look(500, 60)
    for work in range(499, 399, -1):
        assert counters.look(work) == 500


def test_it_sleeps_when_nobody_has_asked_for_long_and_wakes_at_once() -> None:
    counters = Counters(Scale(least=0, most=4, target=2, down_after_ms=5_000, idle_ms=60_000))
    assert counters.look(1) == 1
    assert counters.look(0, 119) == 1
    assert counters.look(0, 12) == 0
    assert "no request for" in counters.why
    assert counters.look(1) == 1


def test_who_is_met_anew_keeps_what_it_has_for_a_while() -> None:
    counters = Counters(Scale(least=1, most=100, target=8, down_after_ms=60_000))
    counters.wanted = 20  # the controller has just been started
    assert counters.look(8, 119) == 20
    assert counters.look(8, 10) == 1


# -- what engines say of themselves ------------------------------------------------------------


def engines(count: int, *, waiting: int = 0, running: int = 0, cache_milli: int = 0) -> ServiceLoad:
    """Each of so many replicas shows these figures; the gateway alone would ask for no more."""
    figures = EngineFigures(waiting=waiting, running=running, cache_milli=cache_milli)
    shown = {f"j{number}": figures for number in range(count)}
    return ServiceLoad(service="chat", in_flight=count * (waiting + running), engines=shown)


@pytest.mark.parametrize(
    ("load", "wanted", "why"),
    [
        (engines(2, running=4), 2, ""),
        (engines(2, running=4, waiting=4), 4, "8 requests wait inside the engines"),
        (engines(2, running=4, waiting=40), 4, "wait inside"),  # at most twice as many at once
        (engines(4, running=4, waiting=1), 5, "4 requests wait inside the engines, which run 16"),
        (engines(2, running=4, cache_milli=700), 2, ""),
        (engines(4, running=4, cache_milli=950), 5, "caches are 95 % full on 4 replicas"),
        (engines(2), 2, ""),
    ],
)
def test_full_engines_ask_for_more_replicas_than_their_requests_do(
    load: ServiceLoad, wanted: int, why: str
) -> None:
    scale = Scale(least=1, most=16, target=64)
    have = len(load.engines)
    wished = wish(RecentWork(), scale, load, have, 10_000, 1_000)
    assert wished.wanted == wanted
    assert why in wished.why


def test_what_engines_ask_for_is_within_the_bounds_and_kept_for_a_while() -> None:
    scale, recent = Scale(least=1, most=3, target=64, down_after_ms=60_000), RecentWork()
    assert wish(recent, scale, engines(2, running=4, waiting=9), 2, 10_000, 1_000).wanted == 3
    assert wish(recent, scale, engines(3, running=4), 3, 10_000, 30_000).wanted == 3
    assert wish(recent, scale, engines(3, running=4), 3, 10_000, 70_000).wanted == 1
