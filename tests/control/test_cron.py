"""Cron against an oracle that tries every second of local time, and the days when clocks change."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cron import BadCron, Cron, due_after, due_before, due_times, parse, zone_of

BERLIN = ZoneInfo("Europe/Berlin")
# Half an hour, at midnight, far from UTC, a whole day left out, and none.
ZONES = (
    *("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Havana"),
    *("Africa/Casablanca", "Asia/Kolkata", "Pacific/Apia", "UTC"),
)


def ms(text: str, zone: str = "UTC") -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)


def local(at_ms: int | None, zone: ZoneInfo = BERLIN) -> str:
    assert at_ms is not None
    return datetime.fromtimestamp(at_ms / 1000, zone).isoformat(sep=" ")


# -- the oracle: a walk over all minutes, with its own idea of what a match is ----------------


def matches(cron: Cron, wall: datetime) -> bool:
    in_month, in_week = wall.day in cron.days, wall.isoweekday() % 7 in cron.weekdays
    day = (in_month or in_week) if cron.either else (in_month and in_week)
    return (
        day
        and wall.month in cron.months
        and wall.hour in cron.hours
        and (wall.minute in cron.minutes)
    )


def oracle(cron: Cron, zone: ZoneInfo, from_ms: int, hours: int) -> list[int]:
    """All due times of a stretch, to the minute: every local minute is turned into its instants."""
    start = datetime.fromtimestamp(from_ms / 1000, zone).replace(tzinfo=None, second=0)
    start -= timedelta(days=2)
    found: set[int] = set()
    for minute in range((hours + 96) * 60):
        wall = start + timedelta(minutes=minute)
        if not matches(cron, wall):
            continue
        both = [wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1)]
        real = [at for at in both if at.astimezone(zone).replace(tzinfo=None) == wall]
        if not real:  # in a gap: the first minute after it
            at = min(both)
            while at.astimezone(zone).replace(tzinfo=None) < wall:
                at += timedelta(minutes=1)
            back = at - timedelta(minutes=1)
            while back.astimezone(zone).utcoffset() == at.astimezone(zone).utcoffset():
                at, back = back, back - timedelta(minutes=1)
            real = [at]
        real = sorted(set(real))
        found.update(int(at.timestamp()) * 1000 for at in (real if cron.paced else real[:1]))
    return sorted(at for at in found if from_ms < at <= from_ms + hours * 3_600_000)


MINUTES = st.sampled_from(("0", "30", "*/15", "5,50", "59", "*/30", "*"))
HOURS = st.sampled_from(("*", "0", "2", "3", "1-3", "*/2", "23", "2,14", "0-4/2"))
DAYS = st.sampled_from(("*", "1", "*/2", "25-31", "13"))
WEEK = st.sampled_from(("*", "0", "7", "mon-fri", "5", "sun,wed"))
# Around the days on which clocks change in these zones.
BASES = (
    *("2026-03-28", "2026-10-24", "2026-03-07", "2026-10-31", "2026-04-04", "2011-12-29"),
    *("2026-10-03", "2026-02-14", "2026-03-21", "2026-07-01", "2024-02-28"),
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    fields=st.tuples(MINUTES, HOURS, DAYS, st.just("*"), WEEK),
    zone=st.sampled_from(ZONES),
    base=st.sampled_from(BASES),
    shift=st.integers(0, 36 * 3600),
)
def test_every_due_time_is_found_and_no_other(
    fields: tuple[str, ...], zone: str, base: str, shift: int
) -> None:
    cron, place = parse(" ".join(fields)), ZoneInfo(zone)
    from_ms, hours = ms(base) + shift * 1000, 60
    true = oracle(cron, place, from_ms, hours)
    found, at_ms = [], from_ms
    while (due := due_after(cron, place, at_ms)) is not None and due <= from_ms + hours * 3_600_000:
        assert due > at_ms
        found.append(due)
        at_ms = due
    assert found == true
    for due in true[:3]:
        assert due_before(cron, place, due) == due
        assert due_before(cron, place, due + 999) == due


def test_a_time_that_does_not_exist_is_due_when_the_gap_ends() -> None:
    found = due_times(parse("30 2 * * *"), BERLIN, ms("2026-03-28T00:00"), 3)
    assert [local(at) for at in found] == [
        "2026-03-28 02:30:00+01:00",
        "2026-03-29 03:00:00+02:00",
        "2026-03-30 02:30:00+02:00",
    ]


def test_a_time_that_exists_twice_is_due_once() -> None:
    found = due_times(parse("30 2 * * *"), BERLIN, ms("2026-10-24T12:00"), 2)
    assert [local(at) for at in found] == ["2026-10-25 02:30:00+02:00", "2026-10-26 02:30:00+01:00"]


def test_a_pace_goes_on_through_the_hour_that_comes_twice() -> None:
    found = due_times(parse("0 * * * *"), BERLIN, ms("2026-10-24T23:30"), 4)
    assert [local(at)[11:] for at in found] == [
        *("02:00:00+02:00", "02:00:00+01:00", "03:00:00+01:00", "04:00:00+01:00"),
    ]


def test_seconds_may_come_first() -> None:
    found = due_times(parse("*/20 * * * * *"), UTC, 1_000, 3)
    assert found == [20_000, 40_000, 60_000]


def test_a_leap_day_comes_every_fourth_year() -> None:
    found = due_times(parse("0 0 29 2 *"), UTC, ms("2026-01-01"), 2)
    assert [local(at)[:10] for at in found] == ["2028-02-29", "2032-02-29"]


def test_a_rare_day_is_found_across_a_year_without_leap_day() -> None:
    (found,) = due_times(parse("0 0 29 feb */7"), UTC, ms("2081-01-01"), 1)
    day = datetime.fromtimestamp(found / 1000, UTC)
    assert (day.month, day.day, day.isoweekday()) == (2, 29, 7)


def test_two_kinds_of_days_mean_either() -> None:
    found = due_times(parse("0 0 13 * fri"), UTC, ms("2026-11-09"), 3)
    days = [datetime.fromtimestamp(at / 1000, UTC).day for at in found]
    assert days == [13, 20, 27]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0 0 30 2 *", "never due"),
        ("0 0 31 4,6,9,11 *", "never due"),
        ("", "has 0 fields"),
        ("* * * *", "has 4 fields"),
        ("60 * * * *", "the minute is from 0 to 59, not '60'"),
        ("0 24 * * *", "the hour is from 0 to 23"),
        ("*/0 * * * *", "step of 0"),
        ("5-1 * * * *", "backwards; write 1-5"),
        ("0 0 L * *", "the day of the month is from 1 to 31, not 'l'"),
        ("0 0 * * mon#1", "cannot be read"),
        ("a b c d e", "the minute is from 0 to 59, not 'a'"),
        ("* " * 5000, "fields"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, problem: str) -> None:
    with pytest.raises(BadCron, match=problem.replace("*", r"\*")):
        parse(text)


def test_macros_and_names_are_read() -> None:
    assert parse("@daily") == parse("0 0 * * *")
    assert parse("0 0 * JAN-mar SUN") == parse("0 0 * 1-3 7")


@pytest.mark.parametrize(
    "name", ["Mars/Base", "../../etc/passwd", "Europe", "/etc/localtime", "x\0"]
)
def test_an_unknown_zone_is_refused(name: str) -> None:
    with pytest.raises(BadCron, match="no time zone"):
        zone_of(name)
