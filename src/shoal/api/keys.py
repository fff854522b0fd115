"""What no view shows: keys of maps, with which one could pose as a worker, and URLs of receivers
of notices, which are often secrets."""

from __future__ import annotations

import msgspec

from shoal.core.phases.reserved import TASKS
from shoal.model.events import (
    ArrayRetried,
    ArraySubmitted,
    Event,
    JobSubmitted,
    Recorded,
    RuleSet,
    ScheduleSet,
    ServiceSet,
)
from shoal.model.job import JobSpec
from shoal.model.notice import masked
from shoal.model.service import ServiceSpec

HIDDEN = "(hidden)"


def without_keys(spec: JobSpec) -> JobSpec:
    if spec.notify:
        shown = tuple(masked(wish) for wish in spec.notify)
        spec = msgspec.structs.replace(spec, notify=shown)
    if not TASKS.intersection(spec.env):
        return spec
    env = {name: HIDDEN if name in TASKS else value for name, value in spec.env.items()}
    return msgspec.structs.replace(spec, env=env)


def service_without_keys(spec: ServiceSpec) -> ServiceSpec:
    return msgspec.structs.replace(spec, replica=without_keys(spec.replica))


def event_without_keys(recorded: Recorded) -> Recorded:
    shown = _shown(recorded.event)
    if shown is recorded.event:
        return recorded
    return msgspec.structs.replace(recorded, event=shown)


def _shown(event: Event) -> Event:
    """Wherever an event holds what somebody asked for."""
    change = msgspec.structs.replace
    match event:
        case JobSubmitted() | ArraySubmitted():
            spec = without_keys(event.spec)
            return event if spec is event.spec else change(event, spec=spec)
        case ArrayRetried() if event.record is not None:
            record = event.record
            return change(event, record=change(record, spec=without_keys(record.spec)))
        case ServiceSet():
            return change(event, spec=service_without_keys(event.spec))
        case ScheduleSet():
            jobs = tuple(change(one, spec=without_keys(one.spec)) for one in event.spec.jobs)
            return change(event, spec=change(event.spec, jobs=jobs))
        case RuleSet():
            return change(event, rule=change(event.rule, wish=masked(event.rule.wish)))
        case _:
            return event
