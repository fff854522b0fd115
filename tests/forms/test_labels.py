"""Labels, taints and conditions as people write them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.cli.verbs.nodes import _sorted
from shoal.forms import readers
from shoal.forms.failure import BadField
from shoal.forms.job import to_spec
from shoal.model.job import JobSpec


@pytest.mark.parametrize(
    ("written", "where"),
    [
        ("pool=a100,zone!=b", ("pool=a100", "zone!=b")),
        (["pool=a|b", " gpu.site/x , !old"], ("pool=a|b", "gpu.site/x", "!old")),
        (("pool=", "pool="), ("pool=",)),
    ],
)
def test_conditions_are_separated_by_commas_or_in_a_list(
    written: Any, where: tuple[str, ...]
) -> None:
    spec = to_spec({"command": "work", "where": written})
    assert spec.where == where
    assert msgspec.convert(msgspec.to_builtins(spec), JobSpec) == spec


@pytest.mark.parametrize(
    "wrong", ["", ",", "pool==a", "pool=ü", "a b", "!pool=a", "*", "pool=" + "x" * 64, ["a", 3], 7]
)
def test_a_condition_that_cannot_be_read_names_the_field(wrong: Any) -> None:
    with pytest.raises(BadField) as error:
        to_spec({"command": "work", "where": wrong})
    assert error.value.field == "where"


def test_too_many_conditions_are_refused() -> None:
    with pytest.raises(BadField, match="maximum is 64"):
        to_spec({"command": "work", "where": [f"k{number}" for number in range(65)]})


def test_what_a_reader_accepts_the_spec_accepts_too() -> None:
    fields = {"tolerates": "*,a,a=b", "spread": "topology.kubernetes.io/zone", "together": "rack"}
    spec = to_spec({"command": "work", **fields})
    assert (spec.tolerates, spec.together) == (("*", "a", "a=b"), "rack")
    assert msgspec.convert(msgspec.to_builtins(spec), JobSpec) == spec


@pytest.mark.parametrize(
    ("words", "bare", "nodes", "changes"),
    [
        (("n1", "n2", "a=1", "b-"), False, ["n1", "n2"], {"a": "1", "b": None}),
        (("n1", "n2", "old"), True, ["n1", "n2"], {"old": ""}),
        (("n1", "old-", "owner=x"), True, ["n1"], {"old": None, "owner": "x"}),
    ],
)
def test_nodes_come_before_the_changes(
    words: tuple[str, ...], bare: bool, nodes: list[str], changes: dict[str, str | None]
) -> None:
    found, rest = _sorted(words, bare=bare)
    assert (found, readers.changes("CHANGE", rest, bare=bare)) == (nodes, changes)
