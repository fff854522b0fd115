"""Samples jobs, nodes and services about once a second, and keeps the samples."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec

from shoal.control.history.curve import Fading, Kept, Shape
from shoal.control.history.day import Day
from shoal.control.history.jobs import JobHistory, JobSample
from shoal.control.history.points import (
    SERVICE_MERGES,
    NodePoint,
    ServicePoint,
    node_point,
    node_series,
    node_shape,
    service_point,
    service_series,
    service_shape,
)
from shoal.control.history.store import HistoryFile, Whole
from shoal.control.loop import ControlLoop, Unreadable
from shoal.core.state.heard import Touring, Watch
from shoal.core.state.state import State
from shoal.database.sqlite import Place
from shoal.model.fabric import Fabric
from shoal.model.series import JobSeries, NodeSample, NodeSeries, ServiceSeries
from shoal.model.trials import Extent
from shoal.ports import StoreError

log = logging.getLogger("shoal.history")

LOOK_S = 1.0
LOOKS_AT_ONCE = 20  # then the loop gets its turn
FLUSH_EVERY = 3  # looks
WHOLE_EVERY_S = 300  # between two writes of whole series; the tail has what came since
WHOLE_AT_ONCE = 100  # then the loop gets its turn
LOAD_WIDTH_MS = 2000
# With 64 points to a level and 14 levels: two minutes at full rate, four weeks in all.
LOAD_POINTS = 64
LOAD_LEVELS = 14

# More ended jobs than this that cannot be written are dropped.
ENDED_HELD_MAX = 2_000
EXTENTS_HELD_MAX = 20_000  # of ended trials; beyond, they are read again

Sample = JobSample | NodePoint | ServicePoint
Result = TypeVar("Result")


class History:
    """Reads the loop's state between steps, on the loop's thread; writes in a thread of its own."""

    def __init__(self, loop: ControlLoop, place: Place | None = None) -> None:
        self._loop = loop
        self.file = HistoryFile(place)
        self.measured = Measured(self.file)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="history")
        self._jobs: dict[str, JobHistory] = {}
        self._watches: dict[str, Watch] = {}  # the last seen of each, to be read once more
        self._nodes: dict[str, Fading] = {}
        self._services: dict[str, Fading] = {}
        self._days: dict[str, Day] = {}  # of services with goals
        self._changed: dict[str, None] = {}  # keys of nodes and services
        self._fresh: list[Sample] = []
        self._extents: dict[str, dict[str, Extent]] = {}  # of trials that have ended
        self._trouble = ""

    # -- what others ask -------------------------------------------------------------------

    @property
    def newest(self) -> dict[str, NodeSample]:
        """The newest sample of each node."""
        return self._loop.newest

    async def job(self, job: str, since_ms: int = 0, *, members: bool = True) -> JobSeries:
        """Of a job that lives or has ended; without points if it never reported a step."""
        known = self._jobs.get(job)
        if known is not None:
            return known.series(since_ms, members=members)
        body = await asyncio.to_thread(self._read, f"j/{job}")
        return _restored_job(job, body).series(since_ms, members=members)

    async def extents(self, jobs: Sequence[str]) -> dict[str, dict[str, Extent]]:
        """What the metrics of these jobs have been. Those of jobs that have ended are read once."""
        found = {job: known.extents() for job in jobs if (known := self._jobs.get(job)) is not None}
        missing = [job for job in jobs if job not in found and job not in self._extents]
        if missing:
            if len(self._extents) + len(missing) > EXTENTS_HELD_MAX:
                self._extents.clear()
            bodies = await asyncio.to_thread(self._read_all, [f"j/{job}" for job in missing])
            for start in range(0, len(missing), WHOLE_AT_ONCE):
                for job in missing[start : start + WHOLE_AT_ONCE]:
                    body = bodies.get(f"j/{job}")
                    self._extents[job] = _restored_job(job, body).extents() if body else {}
                await asyncio.sleep(0)
        return {job: found[job] if job in found else self._extents.get(job, {}) for job in jobs}

    def node(self, node: str, since_ms: int = 0) -> NodeSeries:
        return node_series(node, self._nodes.get(node), since_ms)

    def day(self, name: str) -> tuple[int, ...]:
        """The usual work of a service with goals, in each part of a day."""
        known = self._days.get(name)
        return known.slots if known is not None else ()

    def service(self, name: str, since_ms: int = 0) -> ServiceSeries:
        return service_series(name, self._services.get(name), since_ms)

    async def tour(self, tour: str) -> KeptTour | None:
        """One of the last tours that have ended."""
        try:
            return await self._in_thread(lambda: self.measured.find(tour))
        except StoreError as error:
            self._say(error)
            return None

    # -- its life --------------------------------------------------------------------------

    async def run(self) -> None:
        await self.restore()
        looks = 0
        whole_at = asyncio.get_running_loop().time() + WHOLE_EVERY_S
        while True:
            await asyncio.sleep(LOOK_S)
            looks += 1
            try:
                await self._loop.settled()
                for _ in self.looks():
                    await asyncio.sleep(0)
                    await self._loop.settled()
                if looks % FLUSH_EVERY == 0:
                    await self.flush()
                if asyncio.get_running_loop().time() >= whole_at:
                    await self.write_whole()
                    whole_at = asyncio.get_running_loop().time() + WHOLE_EVERY_S
            except Unreadable:
                continue  # the store has an alarm already
            except Exception:  # a look that fails must not be the last one
                log.exception("a look at the samples failed")

    async def close(self) -> None:
        await self.flush()
        self._thread.shutdown(wait=True)
        self.file.close()

    async def restore(self) -> None:
        """Take up what the last controller left."""
        try:
            living, tail = await self._in_thread(self._load)
        except StoreError as error:
            self._say(error)
            return
        for key, body in living.items():
            kind, _, name = key.partition("/")
            if kind == "j":
                self._jobs[name] = _restored_job(name, body)
            else:
                self._restore_load(kind, name, body)
        for piece in tail:
            try:
                samples = msgspec.msgpack.decode(piece, type=list[Sample])
            except msgspec.DecodeError:
                continue
            for sample in samples:
                self._take(sample)
        self._forget_the_future()
        self._fresh = []

    def _forget_the_future(self) -> None:
        """A clock that was wrong and is set back must not keep new points from being newer."""
        latest_ms = self._loop.clock.now_ms()
        for history in self._jobs.values():
            history.cut(latest_ms)
        for known in (*self._nodes.values(), *self._services.values()):
            known.cut(latest_ms)

    def look(self) -> None:
        """One look at everything that may have changed."""
        for _ in self.looks():
            pass

    def looks(self) -> Iterator[None]:
        """The same in pieces; the state may change between two of them."""
        now_ms = self._loop.clock.now_ms()
        samples, self._loop.samples = self._loop.samples, {}
        self._loop.newest.update(samples)
        self.measured.look(self._loop.state)
        work: list[tuple[Callable[[str, int], None], Iterable[str]]] = [
            (self._look_at_watch, list(self._loop.state.heard.watches)),
            (self._look_at_ended, list(self._watches)),
            (self._look_at_node, samples),
            (self._look_at_service, list(self._loop.state.heard.loads)),
        ]
        for number, (look, key) in enumerate((one, key) for one, keys in work for key in keys):
            look(key, now_ms)
            if number % LOOKS_AT_ONCE == LOOKS_AT_ONCE - 1:
                yield

    def _look_at_watch(self, job_id: str, now_ms: int) -> None:
        watch = self._loop.state.heard.watches.get(job_id)
        if watch is None:
            return
        history = self._jobs.get(job_id)
        if history is None:
            history = self._jobs[job_id] = JobHistory(job_id)
        last = self._watches.get(job_id)
        if last is not watch:
            if last is not None:
                self._look_at_job(history, last, now_ms)
            self._watches[job_id] = watch
        if history.due(now_ms) or last is not watch:
            self._look_at_job(history, watch, now_ms)

    def _look_at_ended(self, job_id: str, now_ms: int) -> None:
        """An attempt that is over may have reported after the last look at it."""
        if job_id not in self._loop.state.heard.watches:
            self._look_at_job(self._jobs[job_id], self._watches.pop(job_id), now_ms)

    def _look_at_node(self, node_id: str, now_ms: int) -> None:
        known = self._nodes.get(node_id)
        if known is None or known.due(now_ms):
            self._keep(node_point(node_id, now_ms, self.newest[node_id]))

    def _look_at_service(self, name: str, now_ms: int) -> None:
        state, known = self._loop.state, self._services.get(name)
        service, load = state.services.get(name), state.heard.loads.get(name)
        if service is None or load is None or not load.tells:
            return
        if known is None or known.due(now_ms):
            self._keep(service_point(service, load, now_ms))
            if service.spec.goals and self._days.setdefault(name, Day()).add(now_ms, load.work):
                self._changed[f"d/{name}"] = None

    def _look_at_job(self, history: JobHistory, watch: Watch, now_ms: int) -> None:
        job = self._loop.state.jobs.get(history.job)
        same = job is not None and job.attempt == watch.attempt
        nodes = [member.slice.node for member in job.members] if job is not None and same else []
        if not nodes and watch.beats:
            nodes = list(history.nodes(watch.attempt))
        if nodes:
            naps = job.naps if job is not None and same else 0
            sample = history.sample(watch.attempt, nodes, watch.beats, now_ms, naps)
            if sample is not None:
                self._keep(sample)

    def _keep(self, sample: Sample) -> None:
        self._fresh.append(sample)
        self._take(sample)

    def _take(self, sample: Sample) -> None:
        match sample:
            case JobSample():
                history = self._jobs.get(sample.job)
                if history is None:
                    history = self._jobs[sample.job] = JobHistory(sample.job)
                history.take(sample)
            case NodePoint():
                shape = node_shape(sample.gpus)
                known = self._nodes.get(sample.node)
                if known is None or known.shape.size != shape.size:  # it has other GPUs now
                    known = self._nodes[sample.node] = _fading(shape)
                known.add(sample.at_ms, sample.values)
                self._changed[f"n/{sample.node}"] = None
            case ServicePoint():
                shape = service_shape(len(sample.values) > len(SERVICE_MERGES))
                known = self._services.get(sample.service)
                if known is None or known.shape.size < shape.size:  # it has a token router now
                    known = self._services[sample.service] = _fading(shape)
                missing = [None] * (len(known.shape.merges) - len(sample.values))
                sample.values.extend(missing)
                known.add(sample.at_ms, sample.values)
                self._changed[f"s/{sample.service}"] = None

    # -- the file --------------------------------------------------------------------------

    async def flush(self) -> None:
        """What is new goes to the tail; jobs that have ended are written whole, and leave."""
        now_ms = self._loop.clock.now_ms()
        # Not readable: the controller ends while a step is being stored.
        living = self._loop.state.jobs if self._loop.readable else self._jobs
        # A job whose last reports were not looked at yet has not ended here.
        ended = [
            job_id for job_id in self._jobs if job_id not in living and job_id not in self._watches
        ]
        wholes: list[Whole] = [(f"j/{one}", now_ms, self._jobs[one].body()) for one in ended]
        fresh, self._fresh = self._fresh, []
        await self._keep_measured()
        if not fresh and not wholes:
            return
        written = await self._write(msgspec.msgpack.encode(fresh) if fresh else b"", wholes)
        if written or len(ended) > ENDED_HELD_MAX:
            for job_id in ended:
                self._extents.pop(job_id, None)
                del self._jobs[job_id]

    async def write_whole(self) -> None:
        """Write all series that changed, so that the tail can begin again."""
        await self.flush()
        forget_to = self.file.newest
        jobs = [history for history in self._jobs.values() if history.changed]
        for start in range(0, len(jobs), WHOLE_AT_ONCE):
            some = jobs[start : start + WHOLE_AT_ONCE]
            if not await self._write(b"", [(f"j/{one.job}", None, one.body()) for one in some]):
                return
            for one in some:
                one.changed = False
        keys, self._changed = list(self._changed), {}
        for start in range(0, len(keys), WHOLE_AT_ONCE):
            some_keys = keys[start : start + WHOLE_AT_ONCE]
            if not await self._write(b"", [(key, None, self._load_body(key)) for key in some_keys]):
                self._changed.update(dict.fromkeys(keys))
                return
        await self._write(b"", [], forget_to)
        await self._tidy()

    async def _tidy(self) -> None:
        """Drop nodes and services that are gone, and the oldest series beyond the bounds."""
        await self._loop.settled()
        state = self._loop.state
        gone = [f"n/{one}" for one in self._nodes if one not in state.nodes]
        gone += [f"s/{one}" for one in self._services if one not in state.services]
        gone += [f"d/{one}" for one in self._days if one not in state.services]
        newest = self._loop.newest
        self._loop.newest = {one: kept for one, kept in newest.items() if one in state.nodes}
        self._nodes = {one: kept for one, kept in self._nodes.items() if one in state.nodes}
        self._services = {
            one: kept for one, kept in self._services.items() if one in state.services
        }
        self._days = {one: kept for one, kept in self._days.items() if one in state.services}
        try:
            await self._in_thread(partial(self.file.drop, gone))
            await self._in_thread(lambda: self.file.trim(lambda: self._loop.store.tenants()))
        except StoreError as error:
            self._say(error)

    def _load_body(self, key: str) -> bytes:
        kind, _, name = key.partition("/")
        if kind == "d":
            return msgspec.msgpack.encode(self._days[name])
        known = self._nodes[name] if kind == "n" else self._services[name]
        return msgspec.msgpack.encode((known.shape.size, known.kept()))

    def _restore_load(self, kind: str, name: str, body: bytes) -> None:
        try:
            if kind == "d":
                self._days[name] = msgspec.msgpack.decode(body, type=Day)
                return
            size, kept = msgspec.msgpack.decode(body, type=tuple[int, Kept])
        except msgspec.DecodeError:
            return
        if kind == "s":
            for one in (service_shape(), service_shape(True)):
                if one.size == size:
                    self._services[name] = _fading(one, kept)
            return
        shape = node_shape((size - node_shape(0).size) // (node_shape(1).size - node_shape(0).size))
        if shape.size == size:
            self._nodes[name] = _fading(shape, kept)

    async def _write(self, tail: bytes, wholes: Iterable[Whole], forget_to: int = 0) -> bool:
        """A full disk costs samples and nothing else."""
        try:
            await self._in_thread(lambda: self.file.write(tail, wholes, forget_to))
        except StoreError as error:
            self._say(error)
            return False
        self._trouble = ""
        return True

    async def _keep_measured(self) -> None:
        try:
            await self._in_thread(self.measured.save)
        except StoreError as error:
            self._say(error)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _load(self) -> tuple[dict[str, bytes], list[bytes]]:
        self.measured.restore()
        return self.file.living(), self.file.tail()

    def _read(self, key: str) -> bytes | None:
        try:
            return self.file.read(key)
        except StoreError as error:
            self._say(error)
            return None

    def _read_all(self, keys: list[str]) -> dict[str, bytes]:
        try:
            return self.file.read_all(keys)
        except StoreError as error:
            self._say(error)
            return {}

    def _say(self, error: Exception) -> None:
        """Log it once, not every few seconds."""
        if str(error) != self._trouble:
            self._trouble = str(error)
            log.error("samples cannot be kept: %s", error)


def _fading(shape: Shape, kept: Kept | None = None) -> Fading:
    return Fading(shape, LOAD_POINTS, LOAD_LEVELS, LOAD_WIDTH_MS, kept)


def _restored_job(job: str, body: bytes | None) -> JobHistory:
    try:
        return JobHistory(job, body)
    except msgspec.DecodeError:
        return JobHistory(job)  # written by another version: its curve begins again


# The last tours and storage checks, which outlive the controller that heard them.


TOURS_KEPT = 8
PREFIX = "t/"


class KeptTour(msgspec.Struct, frozen=True):
    """`fabric` is what followed from it."""

    tour: Touring
    fabric: Fabric


class Measured:
    """The newest is in memory; the others are read when somebody asks."""

    def __init__(self, file: HistoryFile) -> None:
        self._file = file
        self._unsaved: KeptTour | None = None
        self.last: KeptTour | None = None

    def look(self, state: State) -> None:
        for tour in state.heard.tours.values():
            if (
                tour.ended_ms is None
                or tour.about
                or tour.cuts
                or (self.last and self.last.tour.id == tour.id)
            ):
                continue
            fabric = state.fabric if state.fabric.id == tour.id else Fabric()
            self.last = self._unsaved = KeptTour(tour, fabric)

    def restore(self) -> None:
        """In the history's thread, as all below."""
        for key in reversed(self._file.keys(PREFIX)):
            if (found := self._read(key)) is not None:
                self.last = found
                return

    def find(self, tour: str) -> KeptTour | None:
        if self.last is not None and self.last.tour.id == tour:
            return self.last
        return self._read(PREFIX + tour)

    def save(self) -> None:
        kept, self._unsaved = self._unsaved, None
        if kept is None:
            return
        whole: Whole = (PREFIX + kept.tour.id, kept.tour.ended_ms, msgspec.msgpack.encode(kept))
        self._file.write(b"", [whole])
        if old := self._file.keys(PREFIX)[:-TOURS_KEPT]:
            self._file.drop(old)

    def _read(self, key: str) -> KeptTour | None:
        body = self._file.read(key)
        try:
            return None if body is None else msgspec.msgpack.decode(body, type=KeptTour)
        except msgspec.DecodeError:
            return None  # written by another version
