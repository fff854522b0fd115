"""Alarms of the controller itself: one line per cause, bounded, gone when the cause is."""

from __future__ import annotations

from shoal.control.alarms import ALARMS_MAX, Alarms


def test_an_alarm_is_there_until_its_cause_is_gone() -> None:
    alarms = Alarms()
    alarms.raise_("disk", "the disk is full")
    alarms.raise_("disk", "the disk is still full")
    alarms.raise_("clock", "the clock jumped")
    assert alarms.texts == ("the disk is still full", "the clock jumped")
    alarms.clear("disk")
    alarms.clear("never raised")
    assert list(alarms.texts) == ["the clock jumped"]


def test_alarms_have_a_bound() -> None:
    alarms = Alarms()
    for number in range(ALARMS_MAX + 5):
        alarms.raise_(str(number), f"problem {number}")
    assert len(alarms.texts) == ALARMS_MAX
