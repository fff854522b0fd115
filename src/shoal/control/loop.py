"""The live tick: batch what came in, step once, commit once, then act."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import time
from collections.abc import Iterable

import msgspec

from shoal.control import plugins
from shoal.control.alarms import Alarms
from shoal.control.counters import Counters
from shoal.control.logs import LogStore
from shoal.control.packages import PackageStore
from shoal.core.phases.timekeeping import JUMP_MS
from shoal.core.state.apply import apply
from shoal.core.state.invariants import verify, verify_touched
from shoal.core.state.state import State
from shoal.core.step import Step, step
from shoal.model.budget import Spending
from shoal.model.commands import Command, Envelope
from shoal.model.events import ControllerStarted, Event, JobEvent
from shoal.model.job import Job
from shoal.model.policy import Policy
from shoal.model.report import (
    Accepted,
    Answer,
    LogChunk,
    NodeGone,
    NodeReport,
    Nothing,
    PackagePiece,
    Report,
    Request,
    SetService,
    Submit,
)
from shoal.model.samples import NodeSample
from shoal.model.service import ServiceLoad
from shoal.ports import Clock, Engine, Follower, Store, StoreDamaged, StoreError, StoreFull

log = logging.getLogger("shoal.control")

EVENTS_PER_SNAPSHOT = 10_000
REQUESTS_WAITING_MAX = 10_000
RECOVERY_PAUSE_S = 0.5
RECOVERY_PAUSE_S_MAX = 5.0


class Busy(Exception):
    """More requests wait than the controller will hold; try again later."""


class ControlLoop:
    """Sole owner of the state. Others put messages into it and read from it between steps."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        clock: Clock,
        policy: Policy | None,
        logs: LogStore,
        packages: PackageStore | None = None,
        engine_kind: str = "local",
        alarms: Alarms | None = None,
    ) -> None:
        self.clock = clock
        self.logs = logs
        self.packages = packages
        self.engine_kind = engine_kind
        self.store = store
        self.state, self.last_seq = _load(store)
        self.policy = policy or self.state.policy
        self.started_ms = clock.now_ms()
        self.restarts = 0  # controllers that have died since the cluster was started
        self.finishing: dict[str, Job] = {}  # finished, but not yet in the store
        self.counters = Counters()
        self.alarms = alarms or Alarms()
        self.samples: dict[str, NodeSample] = {}  # the newest of each node, for who keeps them
        self.followers: list[Follower] = []
        self._engine = engine
        self._snapshot_tried = 0
        self._number = 0
        self._broken_steps = 0
        self._requests: list[tuple[Request, asyncio.Future[Answer]]] = []
        self._reports: dict[str, NodeReport] = {}
        self._gone: dict[tuple[str, int], NodeGone] = {}
        self._loads: dict[str, ServiceLoad] = {}
        self._spendings: tuple[Spending, ...] = ()
        self._drift_ms: int | None = None
        self._wake = asyncio.Event()
        self._watchers: dict[str, set[asyncio.Future[None]]] = {}

    # -- what others call ------------------------------------------------------------------

    async def request(self, request: Request) -> Answer:
        """Answered when its effect is stored."""
        if len(self._requests) >= REQUESTS_WAITING_MAX:
            raise Busy("too many requests are waiting; try again in a moment")
        if self.store.tight and isinstance(request, Submit | SetService):
            raise StoreFull("the controller's disk is full: nothing new is taken; free some space")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._requests.append((request, future))
        self._wake.set()
        return await future

    async def set_policy(self, policy: Policy) -> None:
        """Obeyed from the next step on; returns when the change is stored."""
        before, self.policy = self.policy, policy
        try:
            await self.request(Nothing())
        except Exception:
            if self.policy is policy:  # and not another one that was set meanwhile
                self.policy = before
            raise
        self._look_at_policy()

    def _look_at_policy(self) -> None:
        """Functions of users may be gone or fail; then a shipped one takes their place."""
        wrong = plugins.alarm(self.policy)
        if wrong:
            self.alarms.raise_("policy", wrong)
        else:
            self.alarms.clear("policy")

    async def changed(self, job_id: str, timeout_s: float) -> None:
        """Return when an event about this job ("": any event) is stored or some of its output is
        kept, or after the timeout."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watchers = self._watchers.setdefault(job_id, set())
        watchers.add(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            pass
        finally:
            watchers.discard(future)
            if not watchers and self._watchers.get(job_id) is watchers:
                del self._watchers[job_id]

    async def stored(self, job_id: str) -> None:
        """A job that just ended is told of when its end is on disk, and all that led to it."""
        while job_id in self.finishing:
            await self.changed(job_id, 1)

    def heard(self, report: NodeReport) -> None:
        """Inventories are complete, so a newer one replaces one not yet looked at."""
        self._reports[report.spec.id] = report
        if report.sample is not None:
            self.samples[report.spec.id] = report.sample
        self._wake.set()

    def served(self, load: ServiceLoad) -> None:
        """What the gateway sees of a service; wakes the loop only if there is news in it."""
        before = self.state.heard.loads.get(load.service)
        self._loads[load.service] = load
        if before is None or before != load:
            self._wake.set()

    def spent(self, spendings: tuple[Spending, ...]) -> None:
        """What the ledger says of all tenants, where the policy sets budgets."""
        self._spendings = spendings
        self._wake.set()

    def drifted(self, drift_ms: int) -> None:
        """How far the machine's clock is off; the next step tells if that is news."""
        self._drift_ms = drift_ms
        if abs(drift_ms - self.state.drift_ms) >= JUMP_MS:
            self._wake.set()

    def gone(self, gone: NodeGone) -> None:
        self._gone[gone.node, gone.incarnation] = gone
        self._wake.set()

    def log(self, chunk: LogChunk) -> int:
        try:
            if self.store.tight:  # what room is left is for the log of events
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            kept = self.logs.append(chunk)
        except OSError as error:
            # Its node sends it again for as long as it has it. The job may end before that.
            reason = error.strerror or str(error)
            self.alarms.raise_("logs", f"output of jobs cannot be kept yet: {reason}")
            return self._kept_of(chunk)
        self.alarms.clear("logs")
        if chunk.data:
            self._notify([chunk.ref.job])
        return kept

    def _kept_of(self, chunk: LogChunk) -> int:
        try:
            return self.logs.append(LogChunk(chunk.ref, 0, b""))  # takes no descriptor
        except OSError:
            return 0

    @property
    def waiting(self) -> int:
        """Requests that no step has looked at yet."""
        return len(self._requests)

    def piece(self, package: str, offset: int) -> PackagePiece:
        if self.packages is None:
            return PackagePiece(package, offset, problem="this controller keeps no packages")
        return self.packages.piece(package, offset)

    def packages_in_use(self) -> set[str]:
        """Of jobs and services that live; others may go when room is needed."""
        used = {job.spec.package for job in self.state.jobs.values()}
        return used | {service.spec.replica.package for service in self.state.services.values()}

    # -- the tick --------------------------------------------------------------------------

    async def run(self) -> None:
        self._begin_epoch(self.state)
        await self._engine.start(self)
        wake_ms: int | None = None
        while True:
            await self._sleep_until(wake_ms)
            try:
                wake_ms = await self._tick()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                if not isinstance(error, StoreError):
                    log.exception("a step failed; the state is rebuilt from the store")
                    self._count_broken_step(error)
                else:
                    log.error("cannot store events: %s", error)
                await self._recover()
                wake_ms = None

    def _count_broken_step(self, error: Exception) -> None:
        """Once may be chance or a request. Twice, and users' functions are done without."""
        self._broken_steps += 1
        if self._broken_steps > 1 and plugins.distrust(error):
            self._broken_steps = 0

    def _begin_epoch(self, state: State) -> None:
        """Stored before it is used: else another controller could use the same one."""
        first_job, epoch = self.store.used(state.next_job, state.epoch)
        event = ControllerStarted(
            at_ms=self.clock.now_ms(),
            epoch=epoch + 1,
            first_job=first_job,
            first_port=0 if state.epoch else secrets.randbelow(self.policy.port_count),
        )
        self.last_seq = self.store.commit([event], [])
        apply(state, event)
        self.state = state
        self._number = 0
        self._look_at_policy()

    async def _sleep_until(self, wake_ms: int | None) -> None:
        if not self._wake.is_set():
            delay_s = None if wake_ms is None else max(0, wake_ms - self.clock.now_ms()) / 1000
            try:
                async with asyncio.timeout(delay_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()

    async def _tick(self) -> int | None:
        report, futures = self._drain()
        self.counters.reports += len(report.nodes)
        try:
            began = time.perf_counter()
            done = step(self.state, report, self.policy, self.clock.now_ms())
            self.counters.steps.add(time.perf_counter() - began)
            verify_touched(self.state, done.events)
            if done.events:
                await self._commit(done)
        except Exception as error:
            for future in futures:
                if not future.done():
                    future.set_exception(error)
            raise
        # It is stored, so it has happened: whatever fails from here on changes nothing about that.
        for future, answer in zip(futures, done.answers, strict=True):
            if not future.done():
                future.set_result(answer)
        self._follow(report, done.events)
        self._send(done.commands)
        self._notify_events(done.events)
        await self._keep_snapshot()
        return done.wake_ms

    def _follow(self, report: Report, events: list[Event]) -> None:
        for follower in self.followers:
            try:
                follower.stepped(report, events, self.last_seq)
            except Exception:
                log.exception("a follower failed; it finds what it missed in the log")

    def _drain(self) -> tuple[Report, list[asyncio.Future[Answer]]]:
        requests, futures = [], []
        waiting, self._requests = self._requests, []
        for request, future in waiting:
            if future.done():  # a client that went away wants nothing any more
                continue
            try:
                known = self._already_finished(request)
            except StoreError as error:
                future.set_exception(error)
                continue
            if known is not None:
                future.set_result(known)
            else:
                requests.append(request)
                futures.append(future)
        report = Report(
            requests=tuple(requests),
            nodes=tuple(self._reports.values()),
            gone=tuple(self._gone.values()),
            services=tuple(self._loads.values()),
            spendings=self._spendings,
            drift_ms=self._drift_ms,
            fences=self._engine.fences,
        )
        self._spendings = ()
        self._reports, self._gone, self._loads = {}, {}, {}
        return report, futures

    def _already_finished(self, request: Request) -> Answer | None:
        if isinstance(request, Submit) and request.key and request.key not in self.state.keys:
            job_id = self.store.keyed(request.key)
            if job_id is not None:
                return Accepted(job_id, "this submission was already accepted")
        return None

    async def _commit(self, done: Step) -> None:
        """Durable before anything is said or done; readers are served meanwhile."""
        self.finishing = {job.id: job for job in done.finished}
        began = time.perf_counter()
        self.last_seq = await asyncio.to_thread(self.store.commit, done.events, done.finished)
        self.counters.commits.add(time.perf_counter() - began)
        ended = {job.id: job.spec.tenant for job in done.finished}
        self.counters.happened(self.state, done.events, ended)
        self.finishing = {}

    async def _keep_snapshot(self) -> None:
        """Now and then, so that the next start is quick. One that fails is only tried again."""
        if self.last_seq - max(self._snapshot_tried, self.store.snapshot_seq) < EVENTS_PER_SNAPSHOT:
            return
        verify(self.state, self.policy, self.clock.now_ms(), settled=False)
        body = msgspec.json.encode(self.state.snapshot())
        self._snapshot_tried = self.last_seq
        try:
            dropped = await asyncio.to_thread(self.store.snapshot, self.last_seq, body)
        except StoreError as error:
            self.alarms.raise_("snapshot", f"no snapshot can be written: {error}")
            return
        self.alarms.clear("snapshot")
        for job_id in dropped:
            self.logs.drop(job_id)

    def _send(self, commands: list[Command]) -> None:
        by_node: dict[str, list[Command]] = {}
        for command in commands:
            by_node.setdefault(command.node, []).append(command)
        for node, orders in by_node.items():
            self._number += 1
            try:
                self._engine.send(node, Envelope(self.state.epoch, self._number, tuple(orders)))
            except Exception:  # lost, as any message may be: it is derived again
                log.exception("commands for %s could not be sent", node)

    async def _recover(self) -> None:
        """What was not stored did not happen: go back to what is, and have the nodes report.
        Until that works nothing is decided, and requests are refused with the reason."""
        self.finishing = {}
        pause_s = RECOVERY_PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(RECOVERY_PAUSE_S_MAX, pause_s * 2)
            try:
                state, self.last_seq = _load(self.store)
                self._begin_epoch(state)
                break
            except StoreDamaged:
                raise  # no patience mends it: the supervisor must not try again
            except Exception as error:
                log.error("the store cannot be read or written yet: %s", error)
                self.alarms.raise_("store", f"nothing can be stored: {error}")
                self._refuse_all(error if isinstance(error, StoreError) else StoreError(str(error)))
        self.alarms.clear("store")
        await self._engine.resend()

    def _refuse_all(self, error: StoreError) -> None:
        waiting, self._requests = self._requests, []
        for _, future in waiting:
            if not future.done():
                future.set_exception(error)

    def _notify_events(self, events: Iterable[Event]) -> None:
        if self._watchers:
            keys = {event.job for event in events if isinstance(event, JobEvent)}
            self._notify([*keys, ""] if events else [])

    def _notify(self, keys: Iterable[str]) -> None:
        for key in keys:
            for future in self._watchers.pop(key, ()):
                if not future.done():
                    future.set_result(None)


def _load(store: Store) -> tuple[State, int]:
    """The state as it is stored. It must never be out of reach because a function that a policy
    names fails on it."""
    try:
        return store.load()
    except StoreError:
        raise
    except Exception as error:
        if not plugins.distrust(error):
            raise
        log.exception("the log cannot be replayed with the functions that the policy names")
        return store.load()
