"""The live control loop: feeds the tick, commits in a thread, and wakes waiting readers."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from shoal.control.alarms import Alarms
from shoal.control.blocks import Tracker
from shoal.control.counters import Counters
from shoal.control.imaging import Imaging, NoImage
from shoal.control.leading import alone
from shoal.control.logs import LogStore
from shoal.control.pace import Pace
from shoal.control.packages import PackageStore, may_fetch
from shoal.control.placements import Place, Placements
from shoal.control.plugins import PolicyFunctions
from shoal.control.secretstore import SecretStore, hand_over
from shoal.control.storing import StoreThread
from shoal.control.tunnels import Tunnels
from shoal.core.invariants import Violation
from shoal.core.state.events.identity import IdentityEvent
from shoal.core.state.events.log import Event, jobs_of
from shoal.core.state.state import State
from shoal.database.base import Deposed
from shoal.machine.paths import asked
from shoal.model.budget import Spending
from shoal.model.commands import Envelope
from shoal.model.neighbor import NeighborReport
from shoal.model.policy import Policy
from shoal.model.report import (
    Answer,
    LogChunk,
    NodeGone,
    NodeReport,
    PackagePiece,
    Report,
    Request,
    SetPolicy,
    SetService,
    Still,
    Submit,
)
from shoal.model.secret import SealedSecrets, SecretsWanted
from shoal.model.series import NodeSample
from shoal.model.service import ServiceLoad
from shoal.model.supply import SupplyReport
from shoal.ports import (
    Clock,
    Engine,
    Files,
    Follower,
    LoopStore,
    Store,
    StoreDamaged,
    StoreError,
    StoreFull,
)
from shoal.tick import Decision, Stage, Tick

if TYPE_CHECKING:
    from shoal.control.neighboring.driver import Neighboring

log = logging.getLogger("shoal.control")

EVENTS_PER_SNAPSHOT = 10_000
REQUESTS_WAITING_MAX = 10_000
RECOVERY_PAUSE_S = 0.5
RECOVERY_PAUSE_S_MAX = 5.0
PORT_SEED_BITS = 128
READ_WAIT_S = 5.0  # a reader waits this long for a commit, or for the state to be loaded again


class Busy(Exception):
    """More requests wait than the controller will hold; try again later."""


class Unreadable(StoreError):
    """The state in memory is not what is stored, so nobody may see it now."""


class ControlLoop:
    """Drives the tick. Others put messages into it, and read what is stored.

    While a step is being stored, the state in memory is ahead of the store. Readers therefore call
    `settled` first, and again after every `await`; `state` raises for those that forget."""

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
        self.secrets: SecretStore | None = None
        self.files: Files | None = None
        self.blocks = Tracker(lambda: self.tick.state)
        self.tunnels = Tunnels(lambda: self.tick.state)
        self.engine_kind = engine_kind
        self.store = store  # for readers and threads
        self._log: LoopStore = store
        self.placements = Placements(lambda job: self.tick.state.jobs.get(job), store)
        self.tick = Tick(store, policy, self._send, fences=engine.fences)
        self.tick.draw = partial(secrets.randbits, PORT_SEED_BITS)
        self.functions = PolicyFunctions()
        self._load()
        self.policy = self.tick.policy  # in force and stored
        self.tick.functions = self.functions.load(self.policy)
        self.started_ms = clock.now_ms()
        self.restarts = 0  # controllers that have died since the cluster was started
        self.counters = Counters()
        self.alarms = alarms or Alarms()
        self.samples: dict[str, NodeSample] = {}  # the newest of each node, for the history
        self.newest: dict[str, NodeSample] = {}  # the same for views of this moment
        self.sampled: Callable[[str, NodeSample], None] | None = None  # each of them
        self.day: Callable[[str], tuple[int, ...]] = lambda _: ()  # of a service: `ServiceLoad.day`
        self.followers: list[Follower] = []
        self.cluster = ""  # its id
        self.neighboring: Neighboring | None = None  # while there are neighbors
        # Where gateways of other clusters call this one: the port, and its certificate with the
        # key, which is made now if need be. Blocks.
        self.door: Callable[[], tuple[int, str]] = lambda: (0, "")
        self.people_changed: Callable[[], None] = alone  # tenants, users, tokens, sign-ins
        self.check: Callable[[], None] = alone  # before whatever others can see
        self._engine = engine
        self._snapshot_tried = 0
        self.snapshot_task: asyncio.Task[None] | None = None  # on its way to the store
        self._broken: Violation | None = None  # what a snapshot found wrong with the state
        self._broken_steps = 0
        self._trouble = ""  # why the state cannot be read
        self._storing = StoreThread()
        self._pace = Pace(lambda: self.tick.waiting)
        self._gate = asyncio.Event()  # set when the state is what is stored again
        self._decided_ms = 0  # the time of the newest step
        self._published = self.last_seq  # the newest event that followers have seen
        self._watchers: dict[str, set[asyncio.Future[None]]] = {}
        self._starts: dict[str, None] = {}  # jobs whose start somebody waits for

    # -- readers ---------------------------------------------------------------------------

    @property
    def state(self) -> State:
        if not self.tick.settled:
            raise Unreadable(self._trouble or "a step is being stored; try again in a moment")
        return self.tick.state

    @property
    def readable(self) -> bool:
        return self.tick.settled

    @property
    def last_seq(self) -> int:
        return self.tick.last_seq

    def now_ms(self) -> int:
        """The time, but not beyond a step on its way to the store: the ledger must not run ahead
        of events that it has yet to get."""
        on_its_way = self.tick.stage is Stage.DECIDED
        return self._decided_ms if on_its_way else self.clock.now_ms()

    async def settled(self) -> None:
        """Return when the state is what is stored: at once, unless a commit is on its way or has
        just failed. The caller may read until its next `await`."""
        if self.tick.settled:
            return
        try:
            async with asyncio.timeout(READ_WAIT_S):
                while not self.tick.settled:
                    self._gate.clear()
                    await self._gate.wait()
        except TimeoutError:
            text = self._trouble or f"the store has not answered for {READ_WAIT_S:g} s"
            raise Unreadable(text) from None

    async def changed(self, job_id: str, timeout_s: float, *, starts: bool = False) -> None:
        """Return when an event about this job ("": any event) is stored or some of its output is
        kept, or after the timeout. The state is settled then. `starts`: also the start of its
        members is urgent; otherwise only its end is."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watchers = self._watchers.setdefault(job_id, set())
        watchers.add(future)
        if starts:
            self._starts[job_id] = None
        if job_id:
            self._pace.hurry()
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            pass
        finally:
            watchers.discard(future)
            if not watchers and self._watchers.get(job_id) is watchers:
                del self._watchers[job_id]
                self._starts.pop(job_id, None)
        await self.settled()

    def packages_in_use(self) -> set[str]:
        state = self.state  # what else is there may go when room is needed
        used = {job.spec.package for job in (*state.jobs.values(), *state.arrays.values())}
        used |= {job.spec.package for one in state.schedules.values() for job in one.spec.jobs}
        return used | {one.spec.replica.package for one in state.services.values()}

    # -- messages --------------------------------------------------------------------------

    async def request(self, request: Request) -> Answer:
        """Answered when its effect is stored."""
        self._refuse_more(1, adds=isinstance(request, Submit | SetService))
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if isinstance(request, SetPolicy):
            self.tick.functions = self.functions.load(request.policy)
        self.tick.ask(request, future)
        self._pace.asked()
        return await future

    async def request_all(self, requests: Sequence[Submit]) -> list[Answer]:
        """One step takes all of them, of which there is one at least. Answered when its effect is
        stored."""
        self._refuse_more(len(requests), adds=True)
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Answer]] = [loop.create_future() for _ in requests]
        (request, future), *more = zip(requests, futures, strict=True)
        self.tick.ask(request, future, *more)
        self._pace.asked()
        return await asyncio.gather(*futures)

    def _refuse_more(self, count: int, *, adds: bool) -> None:
        if self.tick.waiting + count > REQUESTS_WAITING_MAX:
            raise Busy("too many requests are waiting; try again in a moment")
        if adds and self._tight():
            raise StoreFull("the controller's disk is full: nothing new is taken; free some space")

    def _tight(self) -> bool:
        if self._log.tight and self.tick.settled:
            self._log.relax()  # otherwise a cluster where nothing happens would stay tight
        return self._log.tight

    def look_at_policy(self) -> None:
        """Functions of users may be missing or fail; then a shipped one takes their place."""
        self.alarms.show("policy", self.functions.alarm(self.policy))

    def heard(self, report: NodeReport) -> None:
        self.tick.hear(report)
        if report.sample is not None:
            self._sampled(report.spec.id, report.sample)
        if self._is_awaited(report):
            self._pace.now()
        else:
            self._pace.soon()

    def _is_awaited(self, report: NodeReport) -> bool:
        """Whether a client waits for what it may report, or a job for room that it may free or for
        another job to end."""
        if report.exits and self.tick.state.queue.size:
            return True
        return (bool(self._starts) and any(ref.job in self._starts for ref in report.alive)) or (
            bool(self._watchers) and any(one.ref.job in self._watchers for one in report.exits)
        )

    def still(self, still: Still) -> bool:
        """The loop sleeps on: a step that is due by its own time takes it in."""
        if still.sample is not None:
            self._sampled(still.node, still.sample)
        return self.tick.still(still)

    def _sampled(self, node: str, sample: NodeSample) -> None:
        self.samples[node] = sample
        if self.sampled is not None:
            self.sampled(node, sample)

    def gone(self, gone: NodeGone) -> None:
        self.tick.gone(gone)
        self._pace.now()

    def served(self, load: ServiceLoad) -> None:
        if self.tick.served(load):
            self._pace.now()

    def supplied(self, report: SupplyReport) -> None:
        self.tick.supplied(report)
        self._pace.now()

    def heard_neighbors(self, reports: Sequence[NeighborReport]) -> None:
        self.tick.neighbors(reports)
        self._pace.now()

    def spent(self, spendings: tuple[Spending, ...]) -> None:
        self.tick.spent(spendings)
        self._pace.now()

    def drifted(self, drift_ms: int) -> None:
        if self.tick.drifted(drift_ms):
            self._pace.now()

    def log_from(self, chunk: LogChunk, node: str, answer: Callable[[int], None]) -> None:
        def keep(place: Place) -> None:
            if place is Place.NOWHERE:
                answer(chunk.offset + len(chunk.data))  # it must not send it again
            elif place is Place.UNKNOWN:
                answer(self.logs.kept(chunk.ref))  # it sends it again
            else:
                answer(self.log(chunk))

        self.placements.ask(chunk.ref, node, keep)

    def log(self, chunk: LogChunk) -> int:
        self.check()
        try:
            if self._tight():  # the room that is left is for the log of events
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            kept = self.logs.append(chunk)
        except OSError as error:
            # Its node sends it again for as long as it has it. The job may end before that.
            text = f"output of jobs cannot be kept yet: {error.strerror or error}"
            self.alarms.raise_("logs", text)
            return self.logs.kept(chunk.ref)
        self.alarms.clear("logs")
        if chunk.data:
            self._notify([chunk.ref.job])
        return kept

    def piece(self, package: str, offset: int, node: str = "") -> PackagePiece:
        if node and not may_fetch(self.tick.state, node, package):
            return PackagePiece(package, offset, problem="no job on this node has this package")
        if self.packages is None:
            return PackagePiece(package, offset, problem="this controller does not store packages")
        return self.packages.piece(package, offset)

    def secrets_of(self, node: str, wanted: SecretsWanted) -> SealedSecrets | None:
        if self.tick.stage is Stage.UNLOADED:
            return None
        return hand_over(self.secrets, self.tick.state, node, wanted)

    # -- the tick --------------------------------------------------------------------------

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            self._storing.close()
            if self.snapshot_task is not None:
                self.snapshot_task.cancel()

    async def _run(self) -> None:
        await self._begin()
        self._published = self.last_seq
        await self._engine.start(self)
        wake_ms: int | None = None
        while True:
            wake_s = None if wake_ms is None else (wake_ms - self.clock.now_ms()) / 1000
            await self._pace.rest(wake_s)
            try:
                wake_ms = await self._run_tick()
            except Deposed:
                raise
            except Exception as error:
                if not isinstance(error, StoreError):
                    log.exception("a step failed; the state is rebuilt from the store")
                    self._count_broken_step(error)
                else:
                    log.error("cannot store events: %s", error)
                self.tick.fail(error)
                await self._recover()
                wake_ms = None
                self._pace.now()  # what the step had taken from the inbox may be there again

    def _count_broken_step(self, error: Exception) -> None:
        """Once may be chance. Twice, and the loop does without users' functions."""
        self._broken_steps += 1
        if self._broken_steps > 1 and self.functions.distrust(error):
            self.tick.functions = self.functions.table
            self._broken_steps = 0
            self.tick.doubts.absolve()
        self.alarms.show("nodes", self.tick.doubts.alarm())

    async def _run_tick(self) -> int | None:
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise broken
        began = time.perf_counter()
        if self.tick.receive():
            await self._storing.run(self._look_up)
        self._decided_ms = self.clock.now_ms()
        decision = self.tick.decide(self._decided_ms)
        self.counters.steps.add(time.perf_counter() - began)
        self.counters.reports += len(decision.report.nodes)
        stored_s = 0.0
        if decision.step.events:
            began = time.perf_counter()
            await self._storing.run(self._commit)
            stored_s = time.perf_counter() - began
            self.counters.commits.add(stored_s)
        else:
            self.tick.commit()
        self.check()
        self.tick.finish()
        self._pace.answered(len(decision.replies), stored_s)
        if self.policy is not self.tick.policy:
            self.policy = self.tick.policy
            self.look_at_policy()
        if self.tick.doubts.open:
            self._pace.now()
        self.alarms.show("nodes", self.tick.doubts.alarm())
        self._gate.set()
        self._publish(decision)
        self._keep_snapshot()
        return decision.step.wake_ms

    def _look_up(self) -> None:
        self.tick.look_up(self.store)

    def _commit(self) -> None:
        """And while at it, look up what has been asked since: the next step need not."""
        self.tick.commit()
        if self.tick.receive():
            self._look_up()

    def _publish(self, decision: Decision) -> None:
        """The step is stored, so it has happened: nothing that fails here changes that."""
        done = decision.step
        ended = {job.id: job.spec.tenant for job in done.finished}
        self._tell(decision.believed, done.events, ended)

    def _tell(self, report: Report, events: Sequence[Event], ended: dict[str, str]) -> None:
        self._published = self.last_seq
        self.counters.happened(self.tick.state, events, ended)
        for follower in self.followers:
            try:
                follower.stepped(report, events, self.last_seq)
            except Exception:
                log.exception("a follower failed; it finds what it missed in the log")
        if events:
            self._happened(events)

    def _happened(self, events: Sequence[Event]) -> None:
        """Wakes whoever waits for them."""
        if any(isinstance(event, IdentityEvent) for event in events):
            self.people_changed()
        if self._watchers:
            self._notify([*jobs_of(events), ""])

    async def _publish_missed(self) -> None:
        """What this controller has stored without knowing it: the new epoch, and a step whose
        commit was answered with an error and took place. Followers see every event of the log."""
        start, last = self._published, self.last_seq
        read = partial(self.store.events, start, last - start)
        try:
            found = await asyncio.to_thread(read)
        except StoreError as error:
            log.error("followers have to read what they missed themselves: %s", error)
            found = []
        self._tell(Report(), [one.event for one in found], {})

    def _notify(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._starts.pop(key, None)
            for future in self._watchers.pop(key, ()):
                if not future.done():
                    future.set_result(None)

    def _send(self, node: str, envelope: Envelope) -> None:
        try:
            self._engine.send(node, envelope)
        except Exception:  # lost, as any message may be: it is derived again
            log.exception("commands for %s could not be sent", node)

    def _keep_snapshot(self) -> None:
        """Now and then, so that the next start is quick. One that fails is only tried again."""
        tried = max(self._snapshot_tried, self._log.snapshot_seq)
        if self.snapshot_task is not None or self.last_seq - tried < EVENTS_PER_SNAPSHOT:
            return
        self._snapshot_tried = self.last_seq
        try:
            imaging = Imaging(self.state)
        except OSError as error:
            self.alarms.raise_("snapshot", f"no snapshot can be made: {error.strerror}")
            return
        self.snapshot_task = asyncio.create_task(self._store_snapshot(imaging, self.last_seq))

    async def _store_snapshot(self, imaging: Imaging, seq: int) -> None:
        try:
            body = await imaging.body()
            dropped = await asyncio.to_thread(self._log.snapshot, seq, body)
        except Violation as error:
            if imaging.state is self.tick.state:
                self._broken = error
                self._pace.now()
            return
        except (StoreError, NoImage) as error:
            self.alarms.raise_("snapshot", f"no snapshot can be written: {error}")
            return
        finally:
            self.snapshot_task = None
        self.alarms.clear("snapshot")
        for job_id in dropped:
            if job_id not in self.tick.state.jobs:  # it was not retried
                await asked(str(self.logs.root), self.logs.drop, job_id)

    # -- start and recovery ----------------------------------------------------------------

    def _load(self) -> None:
        self.tick.load()

    async def _begin(self) -> None:
        store = partial(self.tick.store_epoch, self.clock.now_ms())
        self.tick.begun(await asyncio.to_thread(store))
        self.look_at_policy()

    async def _recover(self) -> None:
        """What was not stored did not happen: go back to what is stored, and have the nodes report.
        Readers see that as soon as it is loaded. Until an epoch can be stored, too, nothing is
        decided, and requests are refused with the reason."""
        pause_s = RECOVERY_PAUSE_S
        while self.tick.stage is not Stage.READY:
            loaded = self.tick.stage is Stage.LOADED
            try:
                if loaded:
                    await self._begin()
                else:
                    await asyncio.to_thread(self._load)
            except (StoreDamaged, Deposed):
                raise  # no patience mends it: the supervisor must not try again
            except Exception as error:
                self._refuse(error)
            self._gate.set()
            if not loaded:
                await asyncio.sleep(pause_s)
                pause_s = min(RECOVERY_PAUSE_S_MAX, pause_s * 2)
        self._trouble = ""
        self.alarms.clear("store")
        self.people_changed()  # a commit of unknown outcome may have removed somebody
        await self._publish_missed()
        await self._engine.resend()

    def _refuse(self, error: Exception) -> None:
        log.error("the store cannot be read or written yet: %s", error)
        self._trouble = f"nothing can be stored: {error}"
        self.alarms.raise_("store", self._trouble)
        self.tick.refuse(error if isinstance(error, StoreError) else StoreError(str(error)))
