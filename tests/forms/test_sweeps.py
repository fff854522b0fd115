"""Ranges and sweeps as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.forms import fields as sweeps
from shoal.forms.failure import BadField
from shoal.forms.job import to_spec
from shoal.model import sweep
from shoal.model.sweep import IndexRange


def test_the_bounds_are_those_of_the_model() -> None:
    for name in ("ELEMENTS_MAX", "INDEX_MAX", "RANGES_MAX"):
        assert getattr(sweeps, name) == getattr(sweep, name)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9)), max_size=5),
    st.integers(0, 99),
)
def test_a_range_reads_back_as_it_is_written(parts: list[tuple[int, int, int]], most: int) -> None:
    ranges, start = list[IndexRange](), 0
    for gap, length, step in parts:
        ranges.append(IndexRange(start + gap, start + gap + length, step if length else 1))
        start += gap + length + 1
    text = ",".join(map(str, ranges)) + (f"%{most}" if most else "")
    if not text:
        return
    found, at_most = sweeps.array("array", text)
    assert at_most == most
    read = [list(range(first, last + 1, step)) for first, last, step in found]
    assert read == [list(range(one.first, one.last + 1, one.step)) for one in ranges]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "is not a range of indices"),
        ("a-b", "is not a range of indices"),
        ("5-3", "5-3 is backwards; write 3-5"),
        ("0-9:0", "a step of 0 never ends"),
        ("0-9%", "does not say how many at a time"),
        ("0-9%0", "does not say how many at a time"),
        ("0-9999999999", "is too large"),
        (True, "must be a range of indices"),
    ],
)
def test_a_bad_range_is_refused_with_one_line(value: Any, said: str) -> None:
    with pytest.raises(BadField) as refused:
        sweeps.array("array", value)
    assert said in str(refused.value)


def test_a_sweep_of_a_file_and_of_flags_is_the_same() -> None:
    command = ["train", "{lr}", "{seed}"]
    in_file = to_spec({"command": command, "grid": {"lr": [0.1, 0.01], "seed": [1, 2]}})
    flags = to_spec({"command": command, "grid": ("lr=0.1,0.01", "seed=1,2")})
    assert in_file.sweep == flags.sweep
    assert in_file.sweep is not None and in_file.sweep.count == 4
    rows = to_spec({"command": command, "list": ("lr=1,seed=2",), "array": "%1"})
    assert rows.sweep is not None and (rows.sweep.at_most, rows.sweep.count) == (1, 1)
    with pytest.raises(BadField, match="is not a variable"):
        to_spec({"command": ["train", "{rl}"], "grid": {"lr": [1]}})


@pytest.mark.parametrize(
    "fields", [{"grid": ("lr=1,2", "seed=1", "lr=3")}, {"list": ("lr=1,seed=1,lr=3",)}]
)
def test_a_variable_that_flags_name_twice_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadField, match="'lr' is given twice"):
        to_spec({"command": "train {lr}", **fields})
