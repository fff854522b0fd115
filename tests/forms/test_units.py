"""Durations, memory and CPUs as people write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.forms import units
from shoal.model.resources import memory_text


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("90s", 90_000),
        ("10m", 600_000),
        ("2h", 7_200_000),
        ("1d", 86_400_000),
        ("500ms", 500),
        ("1.5s", 1500),
        ("1h30m", 5_400_000),
        ("1h 30m", 5_400_000),
        ("2H", 7_200_000),
        ("0", 0),
        ("0s", 0),
    ],
)
def test_a_duration_is_read(text: str, ms: int) -> None:
    assert units.duration_ms(text) == ms


@pytest.mark.parametrize(
    ("text", "mb"),
    [
        ("512M", 512),
        ("4G", 4096),
        ("4g", 4096),
        ("4GB", 4096),
        ("4GiB", 4096),
        ("1.5T", 1536 * 1024),
        ("0", 0),
    ],
)
def test_an_amount_of_memory_is_read(text: str, mb: int) -> None:
    assert units.memory_mb(text) == mb


@pytest.mark.parametrize(("text", "milli"), [("2", 2000), ("0.5", 500), ("0", 0), (" 1.25 ", 1250)])
def test_a_number_of_cpus_is_read(text: str, milli: int) -> None:
    assert units.cpu_milli(text) == milli


@pytest.mark.parametrize(
    "text", ["", "x", "-1s", "10", "1e3s", "s", "1s1", "9" * 100 + "s", "1 fortnight"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(units.BadAmount):
        units.duration_ms(text)


@pytest.mark.parametrize("text", ["", "G", "-4G", "4X", "512", "4G4G", "1K", "0.0001M", "4G\n; rm"])
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(units.BadAmount):
        units.memory_mb(text)


@pytest.mark.parametrize("text", ["", "-1", "1e3", "nan", "inf", "0x10", "0.0001", "1,5"])
def test_what_is_no_number_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(units.BadAmount):
        units.cpu_milli(text)


@given(st.integers(0, 10**12))
def test_a_duration_told_exactly_reads_back_equal(ms: int) -> None:
    assert units.duration_ms(units.duration_exact(ms)) == ms


def test_a_number_without_a_unit_is_answered_with_the_choices() -> None:
    with pytest.raises(units.BadAmount, match="10 of what\\? Write 10s, 10m or 10h"):
        units.duration_ms("10")
    with pytest.raises(units.BadAmount, match="512 of what\\? Write 512M or 512G"):
        units.memory_mb("512")


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (units.duration_ms, units.memory_mb, units.cpu_milli):
        with contextlib.suppress(units.BadAmount):
            assert read(text) >= 0


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (-5, "0ms"),
        (350, "350ms"),
        (4200, "4.2s"),
        (59_999, "59s"),
        (200_000, "3m 20s"),
        (7_260_000, "2h 1m"),
        (187_200_000, "2d 4h"),
    ],
)
def test_a_duration_is_told_in_two_units_at_most(ms: int, text: str) -> None:
    assert units.duration_text(ms) == text


@pytest.mark.parametrize(
    ("mb", "text"),
    [(0, "0"), (512, "512M"), (3584, "3.5G"), (4096, "4G"), (63488, "62G"), (1258291, "1.2T")],
)
def test_memory_is_told_in_three_figures_at_most(mb: int, text: str) -> None:
    assert memory_text(mb) == text
