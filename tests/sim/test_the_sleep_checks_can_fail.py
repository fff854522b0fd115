"""A scheduler that is wrong about sleep, on purpose, is caught by what really happened."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from storm.fuzz import SeedFailed, Size, run_seed
from storm.naps import Sleepy

from shoal.core.features import reclaim, sleep
from shoal.core.phases import reconcile
from shoal.core.scheduling import preempt, turns
from shoal.core.scheduling import sleeping as costs
from shoal.core.scheduling.sleeping import bed, rouse
from shoal.core.scheduling.wake import Sleepers
from shoal.core.state.apply_job import end_nap
from shoal.core.state.events import runs
from shoal.core.state.events import sleep as sleep_events
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.job import Job, Phase

SEEDS_MAX = 120
SIZE = Size(calm_ms=300_000, sleep_part=1)

Mutate = Callable[[pytest.MonkeyPatch], None]


def sleep_in_part(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sleep, "all", any, raising=False)


def wake_who_wants_to_sleep(patch: pytest.MonkeyPatch) -> None:
    def wake_all(self: Sleepers, _: Job | None = None) -> None:
        for job in self._round.state.jobs.values():
            if job.phase is Phase.ASLEEP and (given := bed(self._round.state, job)):
                rouse(self._round, job, given)

    patch.setattr(Sleepers, "wake", wake_all)


def let_everybody_sleep_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sleepers, "wake", lambda *_: None)


def count_sleep_as_run_time(patch: pytest.MonkeyPatch) -> None:
    def end(state: State, job: Job, at_ms: int) -> None:
        running_ms = job.running_ms
        end_nap(state, job, at_ms)
        job.running_ms = running_ms

    patch.setattr(sleep_events, "end_nap", end)
    patch.setattr(runs, "end_nap", end)


def put_anybody_to_sleep(patch: pytest.MonkeyPatch) -> None:
    def why_not(_: State, job: Job, *, asked: bool = False) -> str:
        return "" if job.phase is Phase.RUNNING or asked is None else "it does not run"

    for module in (sleep, preempt, reclaim):
        patch.setattr(module, "why_not", why_not)


def set_no_memory_aside(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(costs, "host_mb", lambda *_: 0)


def never_repeat_that_somebody_should_wake(patch: pytest.MonkeyPatch) -> None:
    wanted = sleep.naps_wanted
    patch.setattr(reconcile, "naps_wanted", lambda *args: wanted(*args) or None)


def call_everybody_idle(patch: pytest.MonkeyPatch) -> None:
    def hear(round_: Round, job: Job, *_: object) -> None:
        reclaim._judge(round_, job, round_.now_ms - 60_000)

    patch.setattr(reclaim, "_hear", hear)


def end_turns_too_soon(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(turns, "turn_ms", lambda *_: 0)


def lose_work_in_a_nap(patch: pytest.MonkeyPatch) -> None:
    thaw = Sleepy.thaw

    def forget(self: Sleepy, now_ms: int) -> None:
        thaw(self, now_ms)
        self._gone_ms += 10

    patch.setattr(Sleepy, "thaw", forget)


CAUGHT: list[tuple[Mutate, str]] = [
    (sleep_in_part, "is said to sleep, but it is awake"),
    (wake_who_wants_to_sleep, "is woken, and nobody wants that"),
    (let_everybody_sleep_on, "stuck"),
    (count_sleep_as_run_time, "timed-out .* but"),
    (put_anybody_to_sleep, "cannot do that|must not be|without sleep|members sleep|are promised"),
    (set_no_memory_aside, "more than it has|are promised"),
    (never_repeat_that_somebody_should_wake, "stuck"),
    (call_everybody_idle, "is put to sleep as idle|is said to be idle"),
    (end_turns_too_soon, "the turn of .* is over after"),
    (lose_work_in_a_nap, "and goes on elsewhere"),
]
# The first seeds that show it; the others are tried if these no longer do.
EARLY: dict[Mutate, int] = {
    count_sleep_as_run_time: 38,
    set_no_memory_aside: 65,
    never_repeat_that_somebody_should_wake: 33,
    call_everybody_idle: 9,
    end_turns_too_soon: 4,
    put_anybody_to_sleep: 3,
}


def _name(value: object) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("mutate", "words"), CAUGHT, ids=_name)
def test_what_really_happened_catches(
    mutate: Mutate, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a look at the controller's state."""
    mutate(monkeypatch)
    assert re.search(words, _first_failure(mutate))


def _first_failure(mutate: Mutate) -> str:
    early = [EARLY[mutate]] if mutate in EARLY else []
    for seed in (*early, *range(SEEDS_MAX)):
        try:
            run_seed(seed, SIZE, checked=False)
        except SeedFailed as failure:
            return str(failure)
    raise AssertionError(f"{SEEDS_MAX} seeds passed: nothing noticed")
