"""The log is the truth: whatever the way, it leads to the same state."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storm.fuzz import run_seed

from shoal.core.invariants import verify
from shoal.core.state.apply import apply, replay
from shoal.core.state.events.cluster import ControllerStarted
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeSilent
from shoal.core.state.load import restore
from shoal.core.state.room import Level
from shoal.core.state.state import Snapshot, State
from shoal.model.node import NodeHealth
from shoal.model.policy import Policy
from shoal.model.resources import Kind
from tests.core.build import Cluster, eventful, examples

_log: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def image(state: State) -> bytes:
    return msgspec.json.encode(state.snapshot())


def test_replaying_the_log_rebuilds_the_state() -> None:
    cluster = eventful()
    assert image(replay(State(), cluster.log)) == image(cluster.state)


def test_a_snapshot_through_json_restores_the_state_and_all_its_indexes() -> None:
    cluster = eventful()
    stored = msgspec.json.decode(image(cluster.state), type=Snapshot)
    restored = restore(stored)
    assert image(restored) == image(cluster.state)
    verify(restored)
    for index in ("placed", "capacity", "totals", "keys", "numbers", "masters"):
        assert getattr(restored, index) == getattr(cluster.state, index), index
    assert nodes_by_level(restored) == nodes_by_level(cluster.state)
    assert restored.open_capacity.items() <= cluster.state.open_capacity.items()


def nodes_by_level(state: State) -> dict[tuple[str, Kind, Level], list[int]]:
    """Of the cluster and of each rack and block, where there are any."""
    return {
        (place, kind, level): nodes
        for place, domain in {
            "": state.cluster,
            **state.divisions[0].domains,
            **state.divisions[1].domains,
        }.items()
        for kind, index in domain.free.items()
        for level, nodes in index.nodes.items()
    }


@settings(examples, max_examples=50)
@given(seed=st.integers(0, 40), cut=st.integers(0, 10_000))
def test_a_snapshot_anywhere_and_the_rest_of_the_log_lead_to_the_same_state(
    seed: int, cut: int
) -> None:
    events = LOGS[seed]
    cut %= len(events) + 1
    early = replay(State(), events[:cut])
    snapshot = msgspec.json.decode(image(early), type=Snapshot)
    assert image(replay(restore(snapshot), events[cut:])) == image(replay(State(), events))


class _Logs(dict[int, list[Event]]):
    """The logs of simulated histories, each made once."""

    def __missing__(self, seed: int) -> list[Event]:
        self[seed] = [_log.decode(line) for line in run_seed(seed, checked=False).log]
        return self[seed]


LOGS = _Logs()


def test_a_new_controller_hears_afresh() -> None:
    cluster = eventful()
    apply(cluster.state, ControllerStarted(at_ms=cluster.now_ms, epoch=7))
    assert cluster.state.epoch == 7
    assert cluster.state.heard.said == {}
    assert set(cluster.state.heard.contacts) == {"a", "b"}


def test_a_gpu_cannot_be_given_twice_even_by_a_log_that_says_so() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.submit(gpus=1)
    job_id = cluster.submit(gpus=1)
    placed = next(event for event in cluster.log if type(event).__name__ == "JobPlaced")
    wrong = msgspec.structs.replace(placed, job=job_id)
    with pytest.raises(AssertionError, match="is held"):
        apply(cluster.state, wrong)


def test_a_silent_node_of_an_old_snapshot_and_of_an_old_log_is_read() -> None:
    """Before 0.2 the word was suspect."""
    event = _log.decode(b'{"event":"NodeSuspected","at_ms":5,"node":"a"}')
    assert isinstance(event, NodeSilent)
    assert msgspec.json.decode(b'"suspect"', type=NodeHealth) is NodeHealth.SILENT
    policy = msgspec.json.decode(b'{"suspect_after_ms":7000}', type=Policy)
    assert policy.silent_after_ms == 7_000
