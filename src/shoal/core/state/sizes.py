"""How much memory the specs of live work take, by tenant: kept by `apply`, one look per request.

Live work is what the controller keeps in memory and writes into every snapshot: jobs, arrays,
services and schedules. Only the part of a spec that its user chooses counts; what every job has is
bounded by the number of jobs.
"""

from __future__ import annotations

from weakref import WeakValueDictionary
from zlib import crc32

import msgspec

from shoal.core.state.queue import Gang, gang_of_spec
from shoal.core.state.tally import EVERYONE
from shoal.model.job import Job, JobSpec
from shoal.model.schedule import ScheduleSpec
from shoal.model.service import VERSIONS_KEPT, ServiceSpec

# A short string takes this much more memory than its characters.
STRING_BYTES = 64

_encode = msgspec.json.Encoder().encode
_EMPTY_BYTES = len(_encode(JobSpec(command=("",))))


def bytes_of(spec: JobSpec) -> int:
    """The encoder knows every field, so none can be forgotten here."""
    return _bytes_of(spec, _encode(spec))


def _bytes_of(spec: JobSpec, body: bytes) -> int:
    size = len(body) + STRING_BYTES * (len(spec.command) + 2 * len(spec.env))
    if spec.sweep is not None:
        size += STRING_BYTES * (_encode(spec.sweep).count(b'"') // 2)
    return max(0, size - _EMPTY_BYTES)


def service_bytes(spec: ServiceSpec) -> int:
    """Each replica is a job with a spec of its own, and the record keeps earlier versions."""
    return (spec.scale.most + 2 + VERSIONS_KEPT) * bytes_of(spec.replica)


def schedule_bytes(spec: ScheduleSpec) -> int:
    return sum(bytes_of(job.spec) for job in spec.jobs)


class Specs:
    """Equal specs of live jobs are one object in memory: by a checksum of what they say."""

    def __init__(self) -> None:
        self._live: WeakValueDictionary[int, JobSpec] = WeakValueDictionary()
        # The spec that was looked at last, its bytes and its checksum: it enters next.
        self._last: tuple[JobSpec, int, int] | None = None
        self._gang: tuple[JobSpec, Gang] | None = None

    def gang(self, spec: JobSpec) -> Gang:
        """As `gang_of_spec`: jobs with equal specs often come in a row."""
        if self._gang is None or self._gang[0] is not spec:
            self._gang = spec, gang_of_spec(spec)
        return self._gang[1]

    def measure(self, spec: JobSpec) -> int:
        return self._look_at(spec)[1]

    def share(self, spec: JobSpec) -> tuple[JobSpec, int]:
        """A live job's spec that is equal to this one, or this one; and its bytes."""
        _, size, digest = self._look_at(spec)
        known = self._live.get(digest)
        if known is None or known != spec:
            self._live[digest] = known = spec
        self._last = known, size, digest
        return known, size

    def _look_at(self, spec: JobSpec) -> tuple[JobSpec, int, int]:
        if self._last is None or self._last[0] is not spec:
            body = _encode(spec)
            self._last = spec, _bytes_of(spec, body), crc32(body)
        return self._last


class Sizes(msgspec.Struct):
    """`held`: bytes by tenant, and of everyone; `of`: bytes of each thing that counts."""

    held: dict[str, int] = {}
    of: dict[str, int] = {}

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

    def job(self, job: Job, size: int) -> None:
        """A job or array has come, or its labels or notes have changed; `size`: of its spec.
        Replicas count with their service."""
        if not job.spec.service:
            if job.notes:
                size += sum(len(note.text) for note in job.notes)
            self.set(job.id, job.spec.tenant, size)

    def gone(self, job: Job) -> None:
        self.set(job.id, job.spec.tenant, 0)

    def service(self, spec: ServiceSpec, *, gone: bool = False) -> None:
        size = 0 if gone else service_bytes(spec)
        self.set(f"service {spec.name}", spec.replica.tenant, size)

    def schedule(self, spec: ScheduleSpec, *, gone: bool = False) -> None:
        self.set(f"schedule {spec.key}", spec.tenant, 0 if gone else schedule_bytes(spec))
