"""Keys of maps: whoever has them could pose as a worker, so no view shows them."""

from __future__ import annotations

import msgspec

from shoal.core.phases.reserved import TASKS
from shoal.model.events import JobSubmitted, Recorded
from shoal.model.job import JobSpec

HIDDEN = "(hidden)"


def without_keys(spec: JobSpec) -> JobSpec:
    if not TASKS.intersection(spec.env):
        return spec
    env = {name: HIDDEN if name in TASKS else value for name, value in spec.env.items()}
    return msgspec.structs.replace(spec, env=env)


def event_without_keys(recorded: Recorded) -> Recorded:
    event = recorded.event
    if not isinstance(event, JobSubmitted) or not TASKS.intersection(event.spec.env):
        return recorded
    shown = msgspec.structs.replace(event, spec=without_keys(event.spec))
    return msgspec.structs.replace(recorded, event=shown)
