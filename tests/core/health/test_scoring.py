"""Scores: who is slow is found, who is not is left alone, whatever the job is like."""

from __future__ import annotations

import harness.gangs as gangs
import msgspec
import pytest
from harness.gangs import Drag, Gang, Heard
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.books import scoring
from shoal.model.health import HealthRule
from shoal.model.progress import Beat

RULE = HealthRule()
SOON = 120  # steps of a quarter of a second
STEPS = 1200


def found(gang: Gang, drag: Drag, steps: int = STEPS, seed: int = 1) -> list[tuple[int, bool]]:
    seen = gangs.watch(gang, drag, steps, seed, RULE)
    return [(change.member, change.slow) for _, _, change in seen.changes]


def first_step(gang: Gang, drag: Drag, begins: int) -> int:
    seen = gangs.watch(gang, drag, STEPS, 1, RULE)
    return next(step for step, _, change in seen.changes if change.slow) - begins


@pytest.mark.parametrize("factor", [1.25, 1.5, 3.0])
def test_a_slow_member_is_found_soon_and_nobody_else(factor: float) -> None:
    assert found(Gang(), gangs.slow(factor, 200)) == [(2, True)]
    assert first_step(Gang(), gangs.slow(factor, 200), 200) < SOON


@pytest.mark.parametrize("noise", [0.2, 0.5])
def test_in_a_noisy_job_it_takes_longer_and_is_found_all_the_same(noise: float) -> None:
    assert found(Gang(noise=noise), gangs.slow(1.5, 200), 6000) == [(2, True)]


def test_in_a_gang_of_two_the_slower_one_is_found() -> None:
    assert found(Gang(members=2), gangs.slow(1.5, 200, (1,))) == [(1, True)]


def test_when_half_of_a_gang_is_slow_the_fast_half_is_the_measure() -> None:
    assert sorted(found(Gang(), gangs.slow(1.5, 200, (0, 3)))) == [(0, True), (3, True)]


def test_when_most_are_slow_that_is_how_the_job_is() -> None:
    assert found(Gang(), gangs.slow(1.5, 200, (0, 1, 3))) == []


def test_a_process_stopped_half_of_the_time_is_found() -> None:
    assert found(Gang(), gangs.on_and_off(3.0, 1, 1, 200)) == [(2, True)]


def test_steps_of_ten_seconds_are_enough_to_go_by() -> None:
    assert first_step(Gang(step_s=10.0), gangs.slow(1.5, 100), 100) < 40


@pytest.mark.parametrize(
    ("gang", "drag"),
    [
        (Gang(noise=0.05), gangs.none),
        (Gang(noise=0.5), gangs.none),
        (Gang(noise=0.5, members=2), gangs.none),
        (Gang(noise=0.5, step_s=10.0), gangs.none),
        (Gang(shared=0.5), gangs.none),
        (Gang(), gangs.all_slow(3.0, 200)),
        (Gang(), gangs.wandering(2.0, 10, 4)),
        (Gang(), gangs.pauses(20.0, 100)),
        (Gang(), gangs.warming(50.0, 5)),
        (Gang(), gangs.slow(1.1, 200)),
        (Gang(members=1), gangs.slow(3.0, 200, (0,))),
    ],
)
def test_nobody_is_suspected_of_noise_pauses_or_the_first_steps(gang: Gang, drag: Drag) -> None:
    assert found(gang, drag, 10_000) == []


def test_a_member_that_recovers_is_well_again_and_may_become_slow_again() -> None:
    def drag(member: int, now_s: float, step: int) -> float:
        return 1.5 if member == 2 and (300 < step < 600 or step > 900) else 1.0

    assert found(Gang(), drag) == [(2, True), (2, False), (2, True)]


def test_a_score_between_the_two_thresholds_changes_nothing() -> None:
    def drag(member: int, now_s: float, step: int) -> float:
        return 1.0 if member != 2 or step < 200 else 1.5 if step < 500 else 1.15

    assert found(Gang(noise=0.01), drag) == [(2, True)]


def test_slow_data_counts_and_waiting_for_peers_does_not() -> None:
    book = scoring.Gang()
    changes: list[scoring.Change] = []
    for step in range(1, 60):
        for member in range(3):
            data = 100_000 * step if member == 1 else 0
            wait = 0 if member == 1 else 100_000 * step
            beat = Beat(ref="", steps=step, compute_us=100_000 * step, data_us=data, wait_us=wait)
            changes += scoring.hear(book, member, beat, step * 1000, RULE)
    assert [(change.member, change.score_milli) for change in changes] == [(1, 500)]
    assert (changes[0].own_us, changes[0].gang_us) == (200_000, 100_000)


def test_beats_without_times_say_nothing() -> None:
    book = scoring.Gang()
    for step in range(1, 60):
        for member in range(3):
            assert not scoring.hear(book, member, Beat(ref="", steps=step), step * 1000, RULE)
    assert scoring.scores(book) == {}


def test_the_others_do_not_wait_for_a_member_that_left() -> None:
    book = scoring.Gang()
    heard = list(gangs.play(Gang(), gangs.slow(1.5, 100), 600, 1))
    found_slow = []
    for one in heard:
        if one.member == 0 and one.step > 50:
            if 0 in book.members:
                scoring.leave(book, 0, RULE)
            continue
        found_slow += scoring.hear(book, one.member, one.beat, one.now_ms, RULE)
    assert [(change.member, change.slow) for change in found_slow] == [(2, True)]


def test_a_process_that_began_anew_is_warmed_up_again() -> None:
    book = scoring.Gang()
    for round_ in range(2):
        for one in gangs.play(Gang(), gangs.warming(50.0, 5), 300, round_):
            now_ms = one.now_ms + round_ * 1_000_000
            assert not scoring.hear(book, one.member, one.beat, now_ms, RULE)
    assert sorted(scoring.scores(book)) == [0, 1, 2, 3]


Said = tuple[list[tuple[int, bool, int, int]], dict[int, int]]


def run(heard: list[Heard], scale: int = 1, order: tuple[int, ...] = (0, 1, 2, 3)) -> Said:
    """What was said of each member, under its old number."""
    book = scoring.Gang()
    said = []
    for one in heard:
        beat = msgspec.structs.replace(one.beat, compute_us=one.beat.compute_us * scale)
        for change in scoring.hear(book, order[one.member], beat, one.now_ms, RULE):
            said.append((order.index(change.member), change.slow, change.score_milli, one.now_ms))
    scores = {order.index(number): score for number, score in scoring.scores(book).items()}
    return sorted(said), scores


WORLDS = st.builds(
    lambda noise, factor, seed, members: list(
        gangs.play(Gang(noise=noise), gangs.slow(factor, 60, members), 400, seed)
    ),
    noise=st.sampled_from([0.01, 0.1, 0.4]),
    factor=st.sampled_from([1.0, 1.3, 2.0]),
    seed=st.integers(0, 1000),
    members=st.sampled_from([(0,), (2,), (1, 3)]),
)


@given(WORLDS, st.permutations(range(4)))
@settings(max_examples=25, deadline=None)
def test_the_numbers_of_the_members_do_not_matter(heard: list[Heard], order: list[int]) -> None:
    assert run(heard, order=tuple(order)) == run(heard)


@given(WORLDS, st.integers(2, 50))
@settings(max_examples=25, deadline=None)
def test_it_does_not_matter_how_fast_all_of_them_are(heard: list[Heard], scale: int) -> None:
    """But for rounding: a ratio is cut to a thousandth."""
    said, scores = run(heard)
    said_scaled, scores_scaled = run(heard, scale)
    assert [one[:2] for one in said] == [one[:2] for one in said_scaled]
    assert scores.keys() == scores_scaled.keys()
    assert all(abs(scores[member] - scores_scaled[member]) <= 1 for member in scores)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 50), st.integers(0, 10**9)), max_size=80)
)
@settings(max_examples=100, deadline=None)
def test_whatever_is_said_the_book_stays_small_and_can_be_stored(
    said: list[tuple[int, int, int]],
) -> None:
    book = scoring.Gang()
    for now, (member, steps, compute) in enumerate(said):
        beat = Beat(ref="", steps=steps, compute_us=compute)
        for change in scoring.hear(book, member, beat, now * 5000, RULE):
            assert change.score_milli <= scoring.RATIO_MILLI_MAX
    assert len(book.noises) <= scoring.NOISES_KEPT
    assert all(len(m.ratios) <= scoring.RATIOS_KEPT for m in book.members.values())
    assert book.there == sum(member.there for member in book.members.values())
    assert msgspec.json.decode(msgspec.json.encode(book), type=scoring.Gang) == book


def test_a_long_run_takes_no_more_room_than_a_short_one() -> None:
    def size(steps: int) -> int:
        book = scoring.Gang()
        for one in gangs.play(Gang(), gangs.none, steps, 1):
            scoring.hear(book, one.member, one.beat, one.now_ms, RULE)
        return len(book.noises) + sum(len(member.ratios) for member in book.members.values())

    assert size(4000) == size(1000)
