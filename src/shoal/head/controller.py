"""Wires the live controller together: store, engine, loop and API, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from shoal.control import log_room, output_room
from shoal.control.clock import DatabaseClock, SystemClock, watch, watch_database
from shoal.control.filedesk import FileDesk
from shoal.control.gateway_link import GatewayLink
from shoal.control.history.history import History
from shoal.control.home import ClusterConfig, Home, node_url
from shoal.control.jointoken import for_order, keep_standing, standing
from shoal.control.leading import end_process
from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop
from shoal.control.notices.posting import Posting
from shoal.control.outputs import OutputStore
from shoal.control.packages import PackageStore
from shoal.control.past.following import Bars
from shoal.control.reach import machine_address
from shoal.control.sockets import Doors
from shoal.control.store.events import EventStore
from shoal.control.store.marks import Numbers
from shoal.control.store.sqlite import SqliteStore, begin_check
from shoal.control.stores import NEIGHBORS, Stores, stores_of
from shoal.control.supervise import DAMAGED_CODE, HOPELESS_CODE, RESTARTS_ENV, STAND_BY_CODE
from shoal.control.supplying import Supplying, build_supplier
from shoal.core.state.events.log import Event
from shoal.core.state.events.runs import JobFinished
from shoal.database.base import Deposed, StoreAway
from shoal.engines.agentlink import StartAgent, start_agent
from shoal.engines.everywhere import Everywhere
from shoal.engines.linked.engine import LinkedEngine
from shoal.engines.local import LocalEngine
from shoal.head.stages import (
    api_server,
    balancer_of,
    begin,
    door_of,
    encryption_of,
    entry_of,
    watch_supervisor,
)
from shoal.ledger.live import LiveLedger, parties, quotas_of
from shoal.machine.files import lock
from shoal.machine.kernel import prepare_for_service
from shoal.machine.paths import MOUNTS, ask
from shoal.machine.template import Asking
from shoal.model.node import NodeIntent
from shoal.model.report import Report, SetIntent
from shoal.model.supply import Supply, for_engine
from shoal.ports import (
    EngineError,
    StoreDamaged,
    StoreError,
    Supplier,
    SupplyContext,
    SupplyError,
)

if TYPE_CHECKING:
    from shoal.control.certificates import Encryption
    from shoal.head.standby import Won


FILES_MAX = 16_384


def run_controller(home_path: str, network: int, local: int, gate: int | None = None) -> int:
    """Run until a signal ends it. It listens on two descriptors that the supervisor holds; the
    third keeps the gateway's port, and may be missing. Its output is its log. A last line beginning
    with "shoal: " means that a restart would not help."""
    start = partial(start_agent, usual=prepare_for_service(FILES_MAX), template=Asking.inherited())
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("shoal").setLevel(logging.INFO)  # of libraries, warnings
    home = Home(Path(home_path))
    if lock(home.controller_lock) is None:
        print(f"shoal: another controller runs in {home.path}", flush=True)
        return HOPELESS_CODE
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(home, Doors.inherited(network, local, gate), start))
    except (Deposed, StoreAway) as error:
        print(f"this head no longer leads: {error}", flush=True)
        return STAND_BY_CODE
    except (StoreError, EngineError) as error:
        print(f"shoal: {error}", flush=True)
        return DAMAGED_CODE if isinstance(error, StoreDamaged) else HOPELESS_CODE
    return 0


async def _serve(home: Home, doors: Doors, start: StartAgent) -> None:
    """A cluster without a database has one head, which always leads."""
    config = home.read_config()
    if config is None:
        raise EngineError(f"{home.config} is missing; start with: shoal up")
    MOUNTS.follow(str(home.path))
    try:
        home.share(config.shared)
    except OSError as error:
        text = f"the shared folder {config.shared}: {error.strerror}"
        raise EngineError(f"{text}; is it mounted on this machine?") from None
    encryption = encryption_of(home, config)
    if not config.database:
        await _lead(home, config, doors, start, encryption, None)
        return
    from shoal.head.standby import stand_by

    won = await stand_by(home, config, doors, encryption, lambda: _store(home, config))
    if won is None:
        return
    signal.signal(signal.SIGCONT, lambda *_: won.leadership.check())
    try:
        await _lead(home, config, doors, start, encryption, won)
    finally:
        for task in won.tasks:
            task.cancel()
        won.leadership.give_up()


async def _lead(
    home: Home,
    config: ClusterConfig,
    doors: Doors,
    start: StartAgent,
    encryption: Encryption | None,
    won: Won | None,
) -> None:
    """Everything that a leader remembers is read now, and not before: until now another head may
    have changed it. Only the state was followed; what is new in the log is added to it. It is read
    in a thread of its own: a gateway is being served meanwhile."""
    reading = ThreadPoolExecutor(1, "take-over")
    read = partial(asyncio.get_running_loop().run_in_executor, reading)
    store = await read(_store, home, config, won)
    stores = await read(stores_of, home, config, won.lease if won is not None else None)
    linked = LinkedEngine()
    engine = _engine(home, config, start, linked)
    clock = await read(_clock, home, store, won)
    loop = await read(_loop, home, config, store, engine, clock)
    if won is not None:
        loop.check = won.leadership.check
        won.heads.loop, linked.heads = loop, won.heads.urls
    alarm = partial(loop.alarms.raise_, "ledger")
    ledger = await read(LiveLedger, stores.ledger, stores.settings, store, loop, alarm)
    loop.secrets, loop.cluster = await read(stores.secrets, loop.alarms), home.cluster_id()
    outputs = OutputStore(home.outputs)
    loop.files = desk = FileDesk(loop, outputs, engine.invite)
    desk.recall()
    posting = await read(Posting, loop, stores, loop.cluster, clock.now_ms)
    bars = Bars(stores.bars, store, loop, partial(loop.alarms.show, "time line"))
    loop.sampled = ledger.sampled
    ledger.quotas = lambda: quotas_of(loop.tick.state)
    ledger.who = lambda service, caller: parties(loop.tick.state, service, caller)
    loop.followers += [posting, ledger, bars, Tidy(home.checkpoints), loop.secrets]
    tasks = begin(
        ("the ledger", lambda: ledger.run(lambda: loop.policy, loop.spent)),
        ("the time line", bars.run),
        ("the copies of checkpoints", desk.holders.watch),
    )
    tasks += _watches(home, loop, clock, outputs)
    _spare_the_collector()
    loop_task = asyncio.create_task(loop.run())
    loop_task.add_done_callback(_end_if_deposed)
    fingerprint = encryption.fingerprint if encryption else ""
    tasks += begin(("the join token", lambda: keep_standing(loop, stores.settings, fingerprint)))
    await asyncio.sleep(0)  # the agents start while the API is still being imported
    history = await read(History, loop, stores.history)
    loop.day = history.day
    await _begin_neighbors(loop, stores, read)
    reading.shutdown(wait=False)
    heads = won.heads if won is not None else None
    more = history, ledger, doors, encryption, config, engine, posting, heads, bars
    server = api_server(loop, home, stores, *more)
    api_task = asyncio.create_task(server.run())
    tasks += _serve_gateway(home, config, loop, won, encryption, stores)
    tasks += begin(
        ("the supply of nodes", _supplying(home, config, loop, stores).run),
        ("the history", history.run),
        ("the notices", posting.run),
        ("the removal of nodes that are no longer configured", lambda: _retire(loop, config)),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.end)
    await asyncio.wait([loop_task, api_task], return_when=asyncio.FIRST_COMPLETED)
    server.end()
    await asyncio.wait([api_task])
    if loop.neighboring is not None:
        loop.neighboring.close()
    await engine.close()
    for task in (*tasks, loop_task):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await loop_task
    await history.close()
    await bars.close()
    outputs.close()
    ledger.close()
    store.close()


async def _begin_neighbors(
    loop: ControlLoop, stores: Stores, read: Callable[..., Awaitable[Any]]
) -> None:
    """What drives them is loaded only if there are some. A cluster does without them if it must."""
    try:
        if await read(stores.settings.get, NEIGHBORS):
            from shoal.control.neighboring.driver import start
            from shoal.control.neighboring.known import read_known

            start(loop, stores.settings, await read(read_known, stores.settings))
    except StoreError as error:
        loop.alarms.raise_("neighbors", f"jobs of neighbors are not followed: {error}")


def _loop(
    home: Home,
    config: ClusterConfig,
    store: EventStore,
    engine: Everywhere,
    clock: SystemClock | DatabaseClock,
) -> ControlLoop:
    logs, packages = LogStore(home.logs, clock.now_ms), PackageStore(home.packages)
    loop = ControlLoop(store, engine, clock, None, logs, packages, config.engine, store.alarms)
    loop.restarts = int(os.environ.get(RESTARTS_ENV, "0"))
    return loop


def _watches(
    home: Home, loop: ControlLoop, clock: SystemClock | DatabaseClock, outputs: OutputStore
) -> list[asyncio.Task[None]]:
    return begin(
        ("the watch on the clock", lambda: _watch_clock(clock, loop)),
        ("the watch on the supervisor", lambda: watch_supervisor(home, loop.alarms)),
        ("the watch on the log store", lambda: log_room.watch(loop)),
        ("the watch on the output store", lambda: output_room.watch(loop, outputs)),
        ("the watch on its log", lambda: watch_log(home.controller_log)),
    )


def _end_if_deposed(task: asyncio.Task[None]) -> None:
    """At once: requests that wait for an answer must not get one."""
    if not task.cancelled() and isinstance(error := task.exception(), Deposed):
        end_process(str(error))


def _serve_gateway(
    home: Home,
    config: ClusterConfig,
    loop: ControlLoop,
    won: Won | None,
    encryption: Encryption | None,
    stores: Stores,
) -> list[asyncio.Task[None]]:
    entry = partial(entry_of, home, config, encryption)
    loop.door = door_of(entry, stores)
    if won is not None:
        won.gateway_link.serve(loop)
        return []
    link = GatewayLink(loop, balancer_of(home), entry)
    return begin(("the gateway link", link.run))


def _clock(home: Home, store: EventStore, won: Won | None) -> SystemClock | DatabaseClock:
    if won is None:
        return SystemClock(store.newest_ms(), home.clock)
    won.clock.set(store.newest_ms())
    return won.clock


async def _watch_clock(clock: SystemClock | DatabaseClock, loop: ControlLoop) -> None:
    if isinstance(clock, DatabaseClock):
        await watch_database(clock, loop.alarms)
    else:
        await watch(clock, loop.alarms, loop.drifted)


def _store(home: Home, config: ClusterConfig, won: Won | None = None) -> EventStore:
    if config.database:
        from shoal.database.postgres import PostgresDatabase

        # Job numbers name folders in the shared one: an old copy of the database that is put back
        # must not give them out again.
        numbers = Numbers(home.marks) if won else None
        store = EventStore(PostgresDatabase(config.database, won.lease if won else None), numbers)
        store.warm = won.warm if won else None
        return store
    return _file_store(home)


def _file_store(home: Home) -> SqliteStore:
    if not home.database.exists() and home.salvaged.exists():
        home.salvaged.replace(home.database)  # a salvage that was interrupted at the very end
    numbers = Numbers(home.marks, (home.logs, home.checkpoints, home.outputs))
    lost = not home.database.exists() and (numbers.left > 1 or numbers.written.epoch)
    store = SqliteStore(home.database, numbers, home.spare)
    begin_check(home.database, store.alarms)
    if lost:
        text = f"{home.database} was missing, so earlier jobs are unknown; job ids continue"
        store.alarms.raise_("store missing", text)
    if home.salvage_report.exists():
        text = f"the store was damaged: what was lost is in {home.salvage_report}"
        store.alarms.raise_("salvage", f"{text}; remove that file after reading it")
    return store


def _engine(
    home: Home, config: ClusterConfig, start: StartAgent, linked: LinkedEngine
) -> Everywhere:
    address = machine_address(config.host)
    local = () if config.database else config.nodes  # with a database they dial in
    nodes = [msgspec.structs.replace(spec, address=address) for spec in local]
    return Everywhere(LocalEngine(nodes, home.nodes, home.checkpoints, start), linked)


def _supplying(home: Home, config: ClusterConfig, loop: ControlLoop, stores: Stores) -> Supplying:
    def supplies() -> tuple[Supply, ...]:
        known = [order.supply for order in loop.tick.state.orders.values()]
        return tuple(for_engine(one) for one in (*loop.policy.supply, *known))

    def places() -> tuple[str, str]:
        return node_url(config, home), standing(stores.settings)

    def build(engine: str) -> Supplier:
        url, token = places()
        if not url or not token:
            raise SupplyError("the controller is still starting")
        context = SupplyContext(
            cluster=home.cluster_id(),
            home=Path(config.shared) if config.shared else home.path,
            join_url=url,
            join_token=token,
            python=sys.executable,
            supplies=supplies,
            changed=lambda: supplying.look_soon(engine),
            order_token=lambda order: for_order(loop, stores.settings, order),
        )
        return build_supplier(engine, context)

    supplying = Supplying(loop, build, places)
    return supplying


def _spare_the_collector() -> None:
    """The state is large, long-lived and has no cycles. Scanning it repeatedly would be the longest
    pause of a large cluster's controller (90 ms and more with 12,500 nodes)."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


async def _retire(loop: ControlLoop, config: ClusterConfig) -> None:
    """Remove the nodes that an earlier configuration had and this one does not. Machines that join
    also leave by themselves."""
    wanted = {spec.id for spec in config.nodes}
    await loop.settled()
    own = [node for node in loop.state.order if not node.spec.origin]
    known = [node.id for node in own if node.intent is not NodeIntent.REMOVED]
    for node in known:
        if node not in wanted:
            await loop.request(SetIntent(node, NodeIntent.REMOVED, "the new configuration"))


# Keeps the controller's own log within its size: a full one becomes the file before it.


log = logging.getLogger("shoal.control")

LOG_BYTES_MAX = 64 << 20  # and as much in the file before it
LOOK_S = 60.0


def bound(path: Path, most: int = LOG_BYTES_MAX) -> bool:
    """Processes that hold it open append to it, so it keeps its inode: only its content moves."""
    try:
        if path.stat().st_size <= most:
            return False
        before = path.with_name(f"{path.name}.1")
        shutil.copyfile(path, before)
        before.chmod(0o600)
        os.truncate(path, 0)
    except OSError as error:  # the disk is full, or somebody else has taken it away
        log.debug("%s stays as it is: %s", path, error)
        return False
    return True


async def watch_log(path: Path) -> None:
    while True:
        await asyncio.to_thread(bound, path)
        await asyncio.sleep(LOOK_S)


# Removes the checkpoint directory of a finished job that saved nothing.


class Tidy:
    """A follower of the loop: only the controller knows that no member can still write there."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = f"{checkpoints}/"

    def stepped(self, report: Report, events: Sequence[Event], seq: int) -> None:  # noqa: ARG002
        for event in events:
            if isinstance(event, JobFinished):
                with contextlib.suppress(OSError):  # not empty: what was saved stays
                    ask((self._checkpoints,), os.rmdir, self._checkpoints + event.job)
