"""What events do to rules for notices, and to jobs' labels, notes and waits; a part of `apply`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.core.state.state import State
from shoal.model.annotations import notes_after, spec_after
from shoal.model.events import (
    EventBase,
    JobLabelled,
    JobNoted,
    JobWaited,
    RuleRemoved,
    RuleSet,
)
from shoal.model.notice import Rule


def _labelled(state: State, event: JobLabelled) -> None:
    """The record of a job that has ended is in the store, which reads the same event."""
    job = state.live(event.job)
    if job is not None:
        job.spec = spec_after(job.spec, event)
        state.sizes.job(job)


def _noted(state: State, event: JobNoted) -> None:
    job = state.live(event.job)
    if job is not None:
        job.notes = notes_after(job.notes, event)
        state.sizes.job(job)


def _waited(state: State, event: JobWaited) -> None:
    state.jobs[event.job].waited_ms = event.waited_ms


def _rule_set(state: State, event: RuleSet) -> None:
    state.rules[event.rule.id] = event.rule
    state.next_rule += 1
    state.agenda.waits = None  # jobs that wait already are looked at again


def _rule_removed(state: State, event: RuleRemoved) -> None:
    del state.rules[event.rule]


def forget_rules(state: State, which: Callable[[Rule], bool]) -> None:
    """With their tenant or their owner."""
    for rule in [rule for rule in state.rules.values() if which(rule)]:
        del state.rules[rule.id]


APPLY_NOTICES: dict[type[EventBase], Callable[[State, Any], None]] = {
    JobLabelled: _labelled,
    JobNoted: _noted,
    JobWaited: _waited,
    RuleSet: _rule_set,
    RuleRemoved: _rule_removed,
}
