"""The only way facts and indexes change: each event says what it does to them."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.state.apply_queue import grow_older
from shoal.core.state.events.base import EventBase
from shoal.core.state.state import State


def apply(state: State, event: EventBase) -> None:
    """Change the state by one event; live, replayed and simulated alike."""
    if state.aging and state.aging[0][0] <= event.at_ms:
        grow_older(state, event.at_ms)
    unserved = state.agenda.unserved
    if unserved is not None:
        for name in event.services(state):
            unserved[name] = None
    event.apply(state)


def replay(state: State, events: Iterable[EventBase]) -> State:
    for event in events:
        apply(state, event)
    return state
