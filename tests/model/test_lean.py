"""What is stored without its defaults is read as it was, by later versions, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.core.state.events.log import KINDS
from shoal.core.state.events.queue import JobReserved, JobSubmitted
from shoal.core.state.facts import Node, Snapshot
from shoal.model.health import Record
from shoal.model.job import Job, JobSpec, Phase
from shoal.model.lean import lean
from shoal.model.node import NodeSpec

STORED: tuple[type[msgspec.Struct], ...] = (*KINDS, Job, JobSpec, Node, NodeSpec, Record, Snapshot)
DEFAULTS = Path(__file__).parents[1] / "golden/defaults.json"


def defaults() -> dict[str, Any]:
    """Of every field that is left out when it has one."""
    found = {}
    for kind in STORED:
        for field in msgspec.structs.fields(kind):
            value = field.default
            if field.default_factory is not msgspec.NODEFAULT:
                value = field.default_factory()
            stands = value is not msgspec.NODEFAULT and value is not msgspec.UNSET
            if stands and not isinstance(value, msgspec.Struct):
                found[f"{kind.__name__}.{field.name}"] = msgspec.to_builtins(value)
    return dict(sorted(found.items()))


def test_no_default_of_what_is_stored_has_changed() -> None:
    """The file is made by `python -m tests.model.test_lean`; it may get longer."""
    before, now = json.loads(DEFAULTS.read_bytes()), json.loads(msgspec.json.encode(defaults()))
    changed = {name: now.get(name) for name, value in before.items() if now.get(name) != value}
    assert not changed, f"logs and snapshots leave the old defaults out: {changed}"
    assert before.keys() == now.keys(), "fields are new or gone: make the file again"


@pytest.mark.parametrize(
    "struct",
    [
        JobSpec(command=("true",)),
        JobSpec(command=("a b", ""), gpus=2, env={"A": "1"}, tenant="red", retries=3),
        JobReserved(at_ms=1, job="j1", start_ms=None, nodes=(), why=""),
        Job(id="j1", number=1, spec=JobSpec(command=("true",)), phase=Phase.RUNNING),
    ],
)
def test_a_lean_struct_is_read_as_the_whole_one(struct: msgspec.Struct) -> None:
    body, whole = msgspec.json.encode(lean(struct)), msgspec.json.encode(struct)
    assert msgspec.json.decode(body, type=type(struct)) == struct
    assert len(body) < len(whole)


def test_a_field_can_be_replaced_and_the_tag_stays_first() -> None:
    event = JobSubmitted(at_ms=5, job="j1", spec=JobSpec(command=("true",)), key="k")
    body = msgspec.json.encode(lean(event, spec=lean(event.spec)))
    assert body == (
        b'{"event":"JobSubmitted","at_ms":5,"job":"j1",'
        b'"spec":{"tenant":"default","command":["true"]},"key":"k"}'
    )


if __name__ == "__main__":
    DEFAULTS.write_text(json.dumps(json.loads(msgspec.json.encode(defaults())), indent=1) + "\n")
