"""How much memory the specs of live work take, by tenant: kept by `apply`, one look per request.

Live work is what the controller keeps in memory and writes into every snapshot: jobs, arrays,
services and schedules. Only the part of a spec that its user chooses counts; what every job has is
bounded by the number of jobs.
"""

from __future__ import annotations

import msgspec

from shoal.core.state.tally import EVERYONE
from shoal.model.job import Job, JobSpec
from shoal.model.schedule import ScheduleSpec
from shoal.model.service import ServiceSpec

# A short string takes this much more memory than its characters.
STRING_BYTES = 64

_encode = msgspec.json.Encoder().encode
_EMPTY_BYTES = len(_encode(JobSpec(command=("",))))


def bytes_of(spec: JobSpec) -> int:
    """The encoder knows every field, so none can be forgotten here."""
    size = len(_encode(spec)) + STRING_BYTES * (len(spec.command) + 2 * len(spec.env))
    if spec.sweep is not None:
        size += STRING_BYTES * (_encode(spec.sweep).count(b'"') // 2)
    return max(0, size - _EMPTY_BYTES)


def service_bytes(spec: ServiceSpec) -> int:
    """Each replica is a job with a spec of its own, and the record keeps the version before."""
    return (spec.scale.most + 2) * bytes_of(spec.replica)


def schedule_bytes(spec: ScheduleSpec) -> int:
    return sum(bytes_of(job.spec) for job in spec.jobs)


class Sizes(msgspec.Struct):
    """`held`: bytes by tenant, and of everyone; `of`: bytes of each thing that counts."""

    held: dict[str, int] = {}
    of: dict[str, int] = {}
    measured: tuple[JobSpec, int] | None = None  # the spec that was looked at last: it enters next

    def measure(self, spec: JobSpec) -> int:
        if self.measured is None or self.measured[0] is not spec:
            self.measured = spec, bytes_of(spec)
        return self.measured[1]

    def set(self, name: str, tenant: str, size: int) -> None:
        """It takes so much from now on; 0: it is gone."""
        change = size - self.of.pop(name, 0)
        if size:
            self.of[name] = size
        self._hold(EVERYONE, change)
        if tenant != EVERYONE:
            self._hold(tenant, change)

    def _hold(self, holder: str, change: int) -> None:
        held = self.held.get(holder, 0) + change
        if held:
            self.held[holder] = held
        else:
            self.held.pop(holder, None)

    def job(self, job: Job) -> None:
        """A job or array has come, or its labels or notes have changed. Replicas count with their
        service."""
        if not job.spec.service:
            notes = sum(len(note.text) for note in job.notes) if job.notes else 0
            self.set(job.id, job.spec.tenant, self.measure(job.spec) + notes)

    def gone(self, job: Job) -> None:
        self.set(job.id, job.spec.tenant, 0)

    def service(self, spec: ServiceSpec, *, gone: bool = False) -> None:
        size = 0 if gone else service_bytes(spec)
        self.set(f"service {spec.name}", spec.replica.tenant, size)

    def schedule(self, spec: ScheduleSpec, *, gone: bool = False) -> None:
        self.set(f"schedule {spec.key}", spec.tenant, 0 if gone else schedule_bytes(spec))
