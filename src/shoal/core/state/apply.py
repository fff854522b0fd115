"""The only way facts and indexes change: one function per event, with the upkeep of indexes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shoal.core.state.apply_array import APPLY_ARRAY
from shoal.core.state.apply_budget import APPLY_BUDGET
from shoal.core.state.apply_identity import APPLY_IDENTITY
from shoal.core.state.apply_job import APPLY_JOB
from shoal.core.state.apply_node import APPLY_NODE
from shoal.core.state.apply_notices import APPLY_NOTICES
from shoal.core.state.apply_queue import adopt_policy, grow_older, judge_holds
from shoal.core.state.apply_room import file_again
from shoal.core.state.apply_schedule import APPLY_SCHEDULE
from shoal.core.state.apply_service import APPLY_SERVICE
from shoal.core.state.apply_sleep import APPLY_SLEEP
from shoal.core.state.apply_supply import APPLY_SUPPLY, forget_setbacks
from shoal.core.state.state import State
from shoal.model.events import ClusterRestored, ControllerStarted, Event, EventBase, PolicyChanged
from shoal.model.node import NodeHealth


def apply(state: State, event: Event) -> None:
    """Change the state by one event; live, replayed and simulated alike."""
    if state.aging and state.aging[0][0] <= event.at_ms:
        grow_older(state, event.at_ms)
    APPLY[type(event)](state, event)


def replay(state: State, events: Iterable[Event]) -> State:
    for event in events:
        apply(state, event)
    return state


def _policy_changed(state: State, event: PolicyChanged) -> None:
    forget_setbacks(state, event.policy)
    adopt_policy(state, event.policy)
    file_again(state)  # other places may count
    judge_holds(state)  # another tree: other tenants may be held


def _controller_started(state: State, event: ControllerStarted) -> None:
    state.epoch = event.epoch
    state.next_port += event.first_port
    state.next_job = max(state.next_job, event.first_job)
    state.next_order = max(state.next_order, event.first_order)
    if event.first_attempt:
        _skip_attempts(state, event.first_attempt)
    # No report could arrive while no controller ran, so silence counts from now.
    state.heard.contacts = {
        node.id: event.at_ms for node in state.order if node.health is not NodeHealth.LOST
    }
    state.heard.said = {}


def _cluster_restored(state: State, event: ClusterRestored) -> None:
    state.epoch = max(state.epoch, event.epoch)
    state.next_job = max(state.next_job, event.first_job)
    state.next_order = max(state.next_order, event.first_order)
    _skip_attempts(state, event.first_attempt)


def _skip_attempts(state: State, first: int) -> None:
    """Events were lost: nodes may know attempts of these jobs that the log does not."""
    state.restored_job = state.next_job
    state.restored_attempt = max(state.restored_attempt, first)


APPLY: dict[type[EventBase], Callable[[State, Any], None]] = {
    PolicyChanged: _policy_changed,
    ControllerStarted: _controller_started,
    ClusterRestored: _cluster_restored,
    **APPLY_ARRAY,
    **APPLY_BUDGET,
    **APPLY_IDENTITY,
    **APPLY_JOB,
    **APPLY_SLEEP,
    **APPLY_NODE,
    **APPLY_NOTICES,
    **APPLY_SCHEDULE,
    **APPLY_SERVICE,
    **APPLY_SUPPLY,
}
