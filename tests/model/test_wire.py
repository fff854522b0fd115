"""What crosses a wire or lies on a disk: it comes back as it was, and nonsense does not come in."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from shoal.core.state.events.log import Event, Recorded
from shoal.core.state.events.nodes import NodeLost
from shoal.core.state.events.queue import JobSubmitted
from shoal.model.commands import Acknowledge, Command, Envelope, Launch, Stop
from shoal.model.job import JobSpec, MemberRef, for_members
from shoal.model.node import NodeSpec
from shoal.model.report import MemberExit, NodeReport

REF = MemberRef("j1", 2, 3)


def there_and_back(value: Any, kind: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value), type=kind)


def test_every_kind_of_command_survives_the_wire() -> None:
    commands: tuple[Command, ...] = (
        Launch(
            node="a",
            incarnation=1,
            ref=REF,
            argv=("python", "-c", "print('é\\n')"),
            env={"A": "b"},
            workdir="/tmp",
            stop_grace_ms=5,
            gpus=(0, 3),
        ),
        Stop(node="a", incarnation=1, ref=REF, grace_ms=5, why="drained"),
        Acknowledge(node="a", incarnation=1, ref=REF),
    )
    envelope = Envelope(epoch=3, number=7, commands=commands)
    assert there_and_back(envelope, Envelope) == envelope


class LaunchBefore(msgspec.Struct, tag_field="command", tag="Launch"):
    """As agents of earlier versions read it: some fields are required there, and some have other
    defaults than a job's spec."""

    argv: tuple[str, ...]
    workdir: str
    stop_grace_ms: int
    tenant: str = ""
    cpu_milli: int = 0
    image: str = ""


def test_agents_of_earlier_versions_find_every_field_of_a_launch_where_it_was() -> None:
    spec = JobSpec(command=("train",), image="torch", members=2, env={"A": "b"})
    launch = Launch(
        **for_members(spec), node="a", incarnation=1, ref=REF, argv=spec.command, env={}, uid=7
    )
    body = msgspec.msgpack.encode(launch)
    before = msgspec.msgpack.decode(body, type=LaunchBefore)
    assert before == LaunchBefore(("train",), "", 10_000, "default", 1000, "torch")
    assert not {"members", "labels", "spec"} & msgspec.msgpack.decode(body).keys()
    old = msgspec.msgpack.encode({**msgspec.msgpack.decode(body), "unknown": 1})
    assert msgspec.msgpack.decode(old, type=Command) == launch


def test_an_inventory_survives_the_wire() -> None:
    report = NodeReport(
        spec=NodeSpec(id="a", cpu_milli=1, memory_mb=1),
        incarnation=4,
        sequence=9,
        alive=(REF,),
        stopping=(REF,),
        exits=(MemberExit(REF, 143, "terminated", stopped=True),),
    )
    assert there_and_back(report, NodeReport) == report


def test_an_event_says_which_kind_it_is() -> None:
    lost = NodeLost(at_ms=5, node="a", incarnation=1, dead=True, why="gone")
    assert msgspec.json.decode(msgspec.json.encode(lost))["event"] == "NodeLost"
    assert there_and_back(Recorded(1, lost), Recorded) == Recorded(1, lost)


def test_every_kind_of_event_has_a_name_of_its_own() -> None:
    kinds = get_args(Event)
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)


def test_an_event_written_before_a_field_existed_can_still_be_read() -> None:
    line = b'{"event":"JobSubmitted","at_ms":1,"job":"j1","spec":{"command":["x"]}}'
    event = msgspec.json.decode(line, type=Event)
    assert event == JobSubmitted(at_ms=1, job="j1", spec=JobSpec(command=("x",)))


@pytest.mark.parametrize(
    "fields",
    [
        {"command": []},
        {"members": 0},
        {"gpus": -1},
        {"gpus": True},
        {"cpu_milli": 1.5},
        {"memory_mb": "8"},
        {"name": "has space"},
        {"name": "-dash"},
        {"name": "x" * 64},
        {"env": {"1BAD": "x"}},
        {"priority": 1001},
        {"restart": "sometimes"},
        {"retries": -1},
        {"time_limit_ms": -1},
        {"gpu": 1},
    ],
)
def test_a_spec_with_nonsense_in_it_is_refused_at_the_edge(fields: dict[str, Any]) -> None:
    text = msgspec.json.encode({"command": ["x"], **fields})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=JobSpec)


@pytest.mark.parametrize("node_id", ["", "A", "-a", "a_b", "a" * 64, "a b"])
def test_a_node_needs_a_name_that_can_be_a_host_name(node_id: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"id": node_id, "cpu_milli": 1, "memory_mb": 1}, NodeSpec)


def test_a_spec_that_says_only_what_to_run_gets_sensible_defaults() -> None:
    spec = msgspec.json.decode(b'{"command":["sleep","1"]}', type=JobSpec)
    assert (spec.members, spec.gpus, spec.cpu_milli, spec.retries) == (1, 0, 1000, 0)
    assert spec.restart == "on-node-loss"
