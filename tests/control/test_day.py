"""The usual day of a service: learned in quarters of an hour, bounded, and kept over a restart."""

from __future__ import annotations

import msgspec

from shoal.control.history.day import SEEN_MIN, UNKNOWN, Day
from shoal.core.books.goals import DAY_MS, SLOT_MS
from shoal.model.service import DAY_SLOTS


def filled(day: Day, slot: int, work: int, *, times: int = SEEN_MIN) -> bool:
    """Looks within this part of the day, then one in the next."""
    for number in range(times):
        day.add(slot * SLOT_MS + number, work)
    return day.add((slot + 1) * SLOT_MS, 0)


def test_each_part_of_a_day_is_its_mean_and_newer_days_count_as_much_as_all_before() -> None:
    day = Day()
    assert filled(day, 5, 8)
    assert day.slots[5] == 8_000
    assert filled(day, 5 + DAY_SLOTS, 4)
    assert day.slots[5] == 6_000
    assert [slot for slot, work in enumerate(day.slots) if work != UNKNOWN] == [5]


def test_a_part_of_which_little_was_seen_teaches_nothing() -> None:
    day = Day()
    assert not filled(day, 5, 8, times=SEEN_MIN - 1)
    assert set(day.slots) == {UNKNOWN}


def test_it_stays_as_small_as_it_is_and_a_copy_goes_on() -> None:
    day = Day()
    for at_ms in range(0, 3 * DAY_MS, SLOT_MS // SEEN_MIN):
        day.add(at_ms, at_ms // SLOT_MS % DAY_SLOTS)
    assert day.slots[:-1] == tuple(1_000 * slot for slot in range(DAY_SLOTS - 1))
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(day), type=Day)
    assert copy == day
    assert len(msgspec.msgpack.encode(day)) < 1_000
