"""What no view shows: keys of maps, with which one could pose as a worker, and URLs of receivers
of notices, which are often secrets."""

from __future__ import annotations

import msgspec

from shoal.model.job import JobSpec
from shoal.model.notice import masked
from shoal.model.service import ServiceSpec

HIDDEN = "(hidden)"
NO_HASH = "0" * 64
TASKS = frozenset(("SHOAL_TASKS_SECRET", "SHOAL_TASKS_INVITATION", "SHOAL_TASKS_CALL"))


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
