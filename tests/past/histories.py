"""Histories of storms: their events, and what the state held after each of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import groupby

import msgspec
from storm.fuzz import Size, run_seed

from shoal.core.state.apply import apply
from shoal.core.state.events.log import Event
from shoal.core.state.state import State

Held = set[tuple[str, tuple[int, ...], str, int, int]]  # node, GPUs, job, attempt, member
_decode = msgspec.json.Decoder(Event).decode


@cache
def events_of(seed: int, sleeps: bool = False) -> tuple[Event, ...]:
    size = Size(sleep_part=1.0) if sleeps else Size()
    return tuple(_decode(line) for line in run_seed(seed, size, checked=False).log)


def moments(events: tuple[Event, ...]) -> Iterator[tuple[int, list[Event], State]]:
    """Each time at which something happened, with its events and the state after them."""
    state = State()
    for at_ms, group in groupby(events, key=lambda event: event.at_ms):
        together = list(group)
        for event in together:
            apply(state, event)
        yield at_ms, together, state


def held(state: State) -> Held:
    """As the state has it: members that sleep hold nothing."""
    return {
        (node, ref_slice.gpus, ref.job, ref.attempt, ref.member)
        for node, members in state.placed.items()
        for ref, job in members.items()
        if (ref_slice := job.members[ref.member].held).gpus
    }
