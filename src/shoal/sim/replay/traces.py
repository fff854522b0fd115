"""A trace: the jobs that arrive in a replay, read from a file of any known format."""

from __future__ import annotations

import gzip
import io
import math
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.model.job import JobSpec
from shoal.model.service import ServiceSpec


class TraceError(Exception):
    """A trace cannot be used; the message names the row or the field, and the fix."""


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A job that comes at `submit_ms` and takes `work_ms` at full speed on all its members."""

    submit_ms: int
    work_ms: int
    spec: JobSpec
    row: int = 0  # its row in the trace, for messages
    tenant: str = ""
    exit_code: int = 0
    checkpoint_ms: int | None = None  # None: as the world has it
    start_up_ms: int | None = None  # None: as the world has it
    # What really happened, where that is known: the time until it was placed, and until it ended.
    waited_ms: int = -1
    took_ms: int = -1
    job: str = ""  # its id in the log
    after: tuple[str, ...] = ()  # jobs of the log that it waited for
    begin_ms: int = 0  # how long after its submission it was to begin
    beats: bool = False  # its members reported their steps
    cluster: str = ""  # of several, where it was submitted
    gpu_mb: int = 0  # what it has on each of its GPUs; 0: the trace does not say
    failed_ms: tuple[int, ...] = ()  # how long each attempt ran that failed before the last one
    idle_ms: tuple[tuple[int, int], ...] = ()  # from when to when of its run it used no GPU

    @property
    def lived(self) -> bool:
        """It comes from a log, and its spec says whether it may be stopped."""
        return self.waited_ms >= 0


class Gangs:
    """From what a trace says about a job to a gang; equal specs are one object, to save memory.

    A job with no more GPUs than a node has is one member. A larger one becomes members of the
    greatest common divisor of its size and the node's, so that the number of GPUs is exact and
    whole nodes are filled: 16 GPUs on nodes with 8 are 2 x 8, 12 are 3 x 4, 9 are 9 x 1.
    """

    def __init__(
        self, gpus_per_node: int, *, cpus_count: bool = False, memory_counts: bool = False
    ) -> None:
        self._gpus_per_node = gpus_per_node
        self._cpus_count = cpus_count  # otherwise CPUs never limit a job
        self._memory_counts = memory_counts
        self._specs: dict[tuple[Any, ...], JobSpec] = {}

    def split(self, gpus: int) -> tuple[int, int]:
        """Members, and the GPUs of each."""
        if gpus <= self._gpus_per_node or not self._gpus_per_node:
            return 1, gpus
        each = math.gcd(gpus, self._gpus_per_node)
        return gpus // each, each

    def spec(
        self,
        gpus: int,
        *,
        members: int = 0,
        cpu_milli: int = 0,
        memory_mb: int = 0,
        **fields: Any,
    ) -> JobSpec:
        """`gpus` are of the whole job; CPUs and memory are of each of its `members`, 0 if the
        trace does not say how many. A field that JobSpec does not have is left out."""
        if members and gpus % members == 0:
            each = gpus // members
        else:
            asked = max(members, 1)
            members, each = self.split(gpus)
            cpu_milli, memory_mb = cpu_milli * asked // members, memory_mb * asked // members
        cpu_milli = cpu_milli if self._cpus_count else 0
        memory_mb = memory_mb if self._memory_counts else 0
        key = (members, each, cpu_milli, memory_mb, *fields.items())
        spec = self._specs.get(key)
        if spec is None:
            known = {k: v for k, v in fields.items() if k in JobSpec.__struct_fields__}
            spec = self._specs[key] = JobSpec(
                command=("replayed",),
                members=members,
                gpus=each,
                cpu_milli=cpu_milli,
                memory_mb=memory_mb,
                **known,
            )
        return spec

    def uncounted(self, spec: JobSpec) -> JobSpec:
        """The same spec without resources that do not count on these nodes."""
        if (self._cpus_count or not spec.cpu_milli) and (self._memory_counts or not spec.memory_mb):
            return spec
        return msgspec.structs.replace(
            spec,
            cpu_milli=spec.cpu_milli if self._cpus_count else 0,
            memory_mb=spec.memory_mb if self._memory_counts else 0,
        )


class RecordedService(msgspec.Struct, frozen=True, kw_only=True):
    """One service of a history. A change to None stops it."""

    name: str
    changes: tuple[tuple[int, ServiceSpec | None], ...]
    work: tuple[tuple[int, int], ...] = ()  # requests in flight or waiting, from then on
    start_up_ms: int | None = None  # of a replica, until it ran; None: as the world has it
    ready_ms: int = 0  # from when a replica ran until its probe answered
    until_ms: int = 0  # the end of what is known of it

    def moved(self, by_ms: int) -> RecordedService:
        """The same, earlier by this time."""
        return msgspec.structs.replace(
            self,
            changes=tuple((at_ms - by_ms, spec) for at_ms, spec in self.changes),
            work=tuple((at_ms - by_ms, work) for at_ms, work in self.work),
            until_ms=self.until_ms - by_ms,
        )


class Trace(msgspec.Struct, frozen=True):
    """Arrivals in the order of submission, the first at time 0."""

    name: str
    arrivals: Sequence[Arrival]
    skipped: int = 0  # rows without a job to replay, e.g. one that never ran
    began_ms: int = 0  # when the first arrived, where the trace says so
    services: tuple[RecordedService, ...] = ()


def in_order(
    name: str,
    arrivals: Iterable[Arrival],
    skipped: int = 0,
    services: Sequence[RecordedService] = (),
) -> Trace:
    """Sorted and shifted so that the first arrives at 0; equal times keep the order of rows."""
    ordered = sorted(arrivals, key=lambda arrival: arrival.submit_ms)
    if not ordered:
        raise TraceError(f"{name}: has no jobs")
    firsts = [one.changes[0][0] for one in services if one.changes]
    begin_ms = min(ordered[0].submit_ms, *firsts) if firsts else ordered[0].submit_ms
    if begin_ms:
        ordered = [
            msgspec.structs.replace(arrival, submit_ms=arrival.submit_ms - begin_ms)
            for arrival in ordered
        ]
    return Trace(name, ordered, skipped, begin_ms, tuple(one.moved(begin_ms) for one in services))


def open_text(path: Path) -> Iterator[str]:
    """The lines of a file, unpacked if it is gzip; an unreadable file is an error of one line."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if packed else raw
            with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
                yield from text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: the gzip file is cut off or damaged: {error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not text: {error.reason} at byte {error.start}") from error


def stretch(
    trace: Trace, *, jobs: int = 0, load: float = 1.0, scale: float = 1.0, seed: int = 0
) -> Trace:
    """The same kind of work, but more or less of it.

    `scale` is for a cluster that much larger: every job comes that many times, the copies at
    random between its own arrival and the next one's. `load` is for the same cluster, busier: the
    arrivals come that much closer together. `jobs` takes the first of that number; a trace that has
    fewer is played again from the start.
    """
    arrivals = trace.arrivals
    if scale != 1:
        arrivals = _copies(arrivals, scale, random.Random(f"scale {seed}"))
        if not arrivals:
            raise TraceError(f"{trace.name}: no job is left at --scale {scale:g}")
    if load != 1:
        arrivals = [
            msgspec.structs.replace(arrival, submit_ms=round(arrival.submit_ms / load))
            for arrival in arrivals
        ]
    if jobs:
        arrivals = _repeated(arrivals, jobs)
    return msgspec.structs.replace(trace, arrivals=arrivals)


def _copies(arrivals: Sequence[Arrival], scale: float, rng: random.Random) -> list[Arrival]:
    result = []
    for index, arrival in enumerate(arrivals):
        end_ms = arrivals[min(index + 1, len(arrivals) - 1)].submit_ms
        count = int(scale) + (rng.random() < scale % 1)
        times = [rng.randint(arrival.submit_ms, end_ms) for _ in range(count - 1)]
        for submit_ms in [arrival.submit_ms, *sorted(times)] if count else []:
            result.append(msgspec.structs.replace(arrival, submit_ms=submit_ms))
    return result


def _repeated(arrivals: Sequence[Arrival], jobs: int) -> list[Arrival]:
    result = list(arrivals[:jobs])
    # The pause between two rounds is the mean pause between two arrivals.
    span_ms = arrivals[-1].submit_ms + arrivals[-1].submit_ms // max(len(arrivals) - 1, 1)
    while len(result) < jobs:
        source = arrivals[len(result) % len(arrivals)]
        shift_ms = span_ms * (len(result) // len(arrivals))
        result.append(msgspec.structs.replace(source, submit_ms=source.submit_ms + shift_ms))
    return result


def sums(trace: Trace) -> Mapping[str, int]:
    """What the trace asks for in all: jobs, GPU-milliseconds, and the time over which it comes."""
    gpu_ms = sum(a.work_ms * a.spec.gpus * a.spec.members for a in trace.arrivals)
    return {
        "jobs": len(trace.arrivals),
        "gpu_ms": gpu_ms,
        "span_ms": trace.arrivals[-1].submit_ms,
    }
