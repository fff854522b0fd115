"""What no view shows: keys of maps, with which one could pose as a worker, and URLs of receivers
of notices, which are often secrets."""

from __future__ import annotations

import msgspec

from shoal.core.phases.reserved import TASKS
from shoal.model.events import ArraySubmitted, JobSubmitted, Recorded, RuleSet
from shoal.model.job import JobSpec
from shoal.model.notice import masked

HIDDEN = "(hidden)"


def without_keys(spec: JobSpec) -> JobSpec:
    if spec.notify:
        shown = tuple(masked(wish) for wish in spec.notify)
        spec = msgspec.structs.replace(spec, notify=shown)
    if not TASKS.intersection(spec.env):
        return spec
    env = {name: HIDDEN if name in TASKS else value for name, value in spec.env.items()}
    return msgspec.structs.replace(spec, env=env)


def event_without_keys(recorded: Recorded) -> Recorded:
    event = recorded.event
    shown: JobSubmitted | ArraySubmitted | RuleSet
    if isinstance(event, JobSubmitted | ArraySubmitted):
        if (spec := without_keys(event.spec)) is event.spec:
            return recorded
        shown = msgspec.structs.replace(event, spec=spec)
    elif isinstance(event, RuleSet):
        rule = msgspec.structs.replace(event.rule, wish=masked(event.rule.wish))
        shown = msgspec.structs.replace(event, rule=rule)
    else:
        return recorded
    return msgspec.structs.replace(recorded, event=shown)
