"""A node's way into quarantine and back, and what must hold on any way."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.books.quarantine import (
    HISTORY_MAX,
    SUSPICIONS_MAX,
    checked,
    faulted,
    passed_by,
    released,
    room_for,
    suspected,
    wake_ms,
    wants_check,
)
from shoal.model.health import HealthRule, Record, Standing, Suspicion

RULE = HealthRule()
MINUTE = 60_000
DAY = 24 * 60 * MINUTE


def slow(at_ms: int, job: str = "j1", attempt: int = 1, member: int = 0, **more: Any) -> Suspicion:
    return Suspicion(at_ms=at_ms, why="slow", job=job, attempt=attempt, member=member, **more)


def suspect(record: Record, news: Suspicion) -> Record:
    return suspected(record, news, RULE, room=True)


def check(record: Record, passed: bool, now_ms: int) -> Record:
    return checked(record, passed, "numbers", now_ms, RULE, room=True)


def test_a_first_suspicion_asks_for_a_check_and_a_passed_one_ends_it() -> None:
    record = suspect(Record(), slow(1000))
    assert record.standing is Standing.SUSPECT
    assert wants_check(record)
    record = check(record, True, 2000)
    assert record.standing is Standing.OK
    assert not wants_check(record)
    assert [entry.standing for entry in record.history] == [Standing.SUSPECT, Standing.OK]


def test_a_failed_check_quarantines() -> None:
    record = check(suspect(Record(), slow(1000)), False, 2000)
    assert record.standing is Standing.QUARANTINED
    assert record.why == "check failed: numbers"
    assert record.retest_ms == 2000 + RULE.retest_ms


def test_a_check_by_hand_that_fails_quarantines_too_and_one_that_passes_changes_nothing() -> None:
    assert check(Record(), False, 5).standing is Standing.QUARANTINED
    assert check(Record(), True, 5) == Record()


def test_a_second_suspicion_by_another_job_quarantines_though_the_check_passed() -> None:
    record = check(suspect(Record(), slow(1000)), True, 2000)
    record = suspect(record, slow(3000, job="j2"))
    assert record.standing is Standing.QUARANTINED
    assert record.why == "suspected a second time: slow"


def test_a_rank_with_more_to_do_cannot_bring_its_node_into_quarantine() -> None:
    record = check(suspect(Record(), slow(1000, member=3)), True, 2000)
    for attempt in range(1, 20):
        record = suspect(record, slow(3000 + attempt, attempt=attempt, member=3))
        assert record.standing is Standing.OK
        record = suspect(record, slow(3000 + attempt, attempt=1, member=2))  # it waits for rank 3
        assert record.standing is Standing.OK
    record = suspect(record, slow(5000, attempt=20, member=0))
    assert record.standing is Standing.QUARANTINED


def test_a_suspicion_of_long_ago_does_not_count() -> None:
    record = check(suspect(Record(), slow(1000)), True, 2000)
    record = suspect(record, slow(1001 + DAY, job="j2"))
    assert record.standing is Standing.SUSPECT


def test_what_one_owners_jobs_say_is_one_word() -> None:
    record = check(suspect(Record(), slow(1000, owner="red/ann")), True, 2000)
    record = suspect(record, slow(3000, job="j2", owner="red/ann"))
    assert record.standing is Standing.OK
    assert suspect(record, slow(4000, job="j3", owner="red/bob")).standing is Standing.QUARANTINED


def test_a_check_that_passes_refutes_failures_but_not_what_checks_cannot_see() -> None:
    record = suspect(Record(), slow(1000, owner="red/ann", refutable=True))
    assert check(record, True, 2000).suspicions == ()
    assert len(check(suspect(Record(), slow(1000)), True, 2000).suspicions) == 1


def test_the_quick_retests_of_a_full_disk_are_one_strike() -> None:
    record = faulted(Record(), "its disk is full", 0, RULE)
    for now in range(30_000, 20 * 30_000, 30_000):
        record = check(passed_by(record, now, RULE), False, now)
    record = check(record, True, 20 * 30_000)
    later = check(record, False, 21 * 30_000)
    assert later.strikes == 2
    assert later.retest_ms - later.since_ms == 20 * MINUTE


def test_what_is_proven_needs_no_second_time() -> None:
    news = Suspicion(at_ms=5, why="2 jobs failed on it", proven=True)
    assert suspect(Record(), news).standing is Standing.QUARANTINED


def test_a_node_comes_back_after_a_passed_retest_with_its_history() -> None:
    record = check(suspect(Record(), slow(0)), False, 0)
    assert wake_ms(record, RULE) == RULE.retest_ms
    assert passed_by(record, RULE.retest_ms - 1, RULE) == record
    record = passed_by(record, RULE.retest_ms, RULE)
    assert wants_check(record)
    assert record.standing is Standing.QUARANTINED
    record = check(record, True, RULE.retest_ms + 5)
    assert record.standing is Standing.OK
    assert record.why == "retest passed: numbers"
    assert len(record.history) == 3
    assert wake_ms(record, RULE) is None


def test_the_wait_doubles_with_each_failed_retest_up_to_a_day() -> None:
    record, now, waits = check(Record(), False, 0), 0, []
    for _ in range(12):
        waits.append(record.retest_ms - now)
        now = record.retest_ms
        record = check(passed_by(record, now, RULE), False, now)
    assert waits[:4] == [10 * MINUTE, 20 * MINUTE, 40 * MINUTE, 80 * MINUTE]
    assert waits[-1] == DAY


def test_a_node_that_comes_back_bad_again_waits_longer_and_is_forgiven_after_a_week() -> None:
    record = check(check(Record(), False, 0), True, 10 * MINUTE)
    again = check(record, False, 20 * MINUTE)
    assert again.retest_ms == 40 * MINUTE
    later = check(record, False, 10 * MINUTE + RULE.forgive_ms + 1)
    assert later.retest_ms - later.since_ms == 10 * MINUTE


def test_a_check_that_nobody_answers_is_given_up_but_not_forgotten() -> None:
    record = suspect(Record(), slow(0))
    at_ms = wake_ms(record, RULE)
    assert at_ms is not None
    assert passed_by(record, at_ms - 1, RULE) == record
    record = passed_by(record, at_ms, RULE)
    assert (record.standing, record.why) == (Standing.OK, "check not answered")
    assert suspect(record, slow(at_ms, job="j2")).standing is Standing.QUARANTINED


def test_a_retest_that_nobody_answers_counts_as_failed() -> None:
    record = passed_by(check(Record(), False, 0), RULE.retest_ms, RULE)
    at_ms = wake_ms(record, RULE)
    assert at_ms is not None
    record = passed_by(record, at_ms, RULE)
    assert record.retest_ms == at_ms + 2 * RULE.retest_ms
    assert not wants_check(record)


def test_a_few_bad_nodes_may_be_kept_away_but_never_most_of_the_cluster() -> None:
    assert [room_for(n, 1, RULE) for n in (0, 1)] == [True, False]
    assert [room_for(n, 8, RULE) for n in (1, 2)] == [True, False]
    assert [room_for(n, 500, RULE) for n in (124, 125)] == [True, False]
    full = checked(suspect(Record(), slow(0)), False, "numbers", 5, RULE, room=False)
    assert full.standing is Standing.OK
    assert "too many nodes" in full.why
    second = suspected(full, slow(9, job="j2"), RULE, room=False)
    assert second.standing is Standing.SUSPECT


def test_an_operator_may_release_a_node_and_begin_anew() -> None:
    record = released(check(suspect(Record(), slow(0)), False, 0), "ana", 5)
    assert (record.standing, record.why) == (Standing.OK, "released by ana")
    assert suspect(record, slow(6, job="j2")).standing is Standing.SUSPECT
    assert released(Record(), "ana", 5) == Record()


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["slow", "pass", "fail", "wait", "release"]),
        st.integers(0, 3),
        st.integers(0, DAY),
        st.booleans(),
    ),
    max_size=60,
)


@given(MOVES)
@settings(max_examples=200, deadline=None)
def test_whatever_happens_a_node_can_come_back_and_the_record_stays_small(
    moves: list[tuple[str, int, int, bool]],
) -> None:
    record, now = Record(), 0
    for what, number, pause_ms, room in moves:
        now += pause_ms
        before = record
        if what == "slow":
            record = suspected(record, slow(now, f"j{number}", number, number), RULE, room=room)
        elif what in ("pass", "fail"):
            record = checked(record, what == "pass", "numbers", now, RULE, room=room)
        elif what == "wait":
            record = passed_by(record, now, RULE)
        else:
            record = released(record, "ana", now)
        if before.standing is not Standing.QUARANTINED is record.standing:
            assert room
        assert len(record.history) <= HISTORY_MAX
        assert len(record.suspicions) <= SUSPICIONS_MAX
        assert record.standing is not Standing.SUSPECT or wants_check(record)
        assert (wake_ms(record, RULE) is None) == (record.standing is Standing.OK)
        assert record.retest_ms - now <= RULE.retest_ms_max
        assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record
    for _ in range(3):
        at_ms = wake_ms(record, RULE)
        if at_ms is None:
            break
        now = max(at_ms, now)
        record = passed_by(record, now, RULE)
        if wants_check(record):
            record = checked(record, True, "numbers", now, RULE, room=True)
    assert record.standing is Standing.OK
