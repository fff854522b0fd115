"""The first stage of a controller whose cluster has several heads: it follows the log, serves the
API and a gateway, and waits until the lease is its own."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shoal import __version__
from shoal.control.clock import DatabaseClock
from shoal.control.following import Following
from shoal.control.gateway_link import GatewayLink
from shoal.control.heads import Heads
from shoal.control.history.history import History
from shoal.control.home import ClusterConfig, Home, node_url
from shoal.control.leading import Leadership
from shoal.control.logs import LogStore
from shoal.control.packages import PackageStore
from shoal.control.service_certificates import FollowedSecrets
from shoal.control.sockets import Doors
from shoal.control.store.events import Warm
from shoal.control.stores import stores_of
from shoal.database.lease import LOOK_S, Lease
from shoal.head.stages import (
    api_server,
    balancer_of,
    begin,
    door_of,
    entry_of,
    watch_supervisor,
)
from shoal.ports import Store, StoreError

if TYPE_CHECKING:
    from shoal.control.certificates import Encryption

log = logging.getLogger("shoal.control")

# A head that knows the log leads sooner than one that has just started and has yet to read it.
COLD_S = 1.0


class Won(NamedTuple):
    """What a leader takes over from the standby that it was."""

    lease: Lease
    leadership: Leadership
    clock: DatabaseClock
    heads: Heads
    gateway_link: GatewayLink
    warm: Warm | None  # the state, as far as it was followed
    tasks: list[asyncio.Task[None]]  # they go on


async def stand_by(
    home: Home,
    config: ClusterConfig,
    doors: Doors,
    encryption: Encryption | None,
    open_store: Callable[[], Store],
) -> Won | None:
    """Until this head leads; None: a signal has ended it."""
    lease = Lease(config.database)
    clock = DatabaseClock(lease.now_ms)
    loop = Following(open_store, clock, LogStore(home.logs), PackageStore(home.packages))
    heads = Heads(lease, config.head, __version__, lambda: node_url(config, home), loop)
    entry = partial(entry_of, home, config, encryption)
    link = GatewayLink(loop, balancer_of(home), entry)
    link.report, link.others = heads.report_loads, heads.other_loads
    stores = stores_of(home, config, lease)
    loop.door = door_of(entry, stores)
    link.secrets = FollowedSecrets(lambda: stores.secrets(loop.alarms))
    server = api_server(
        loop, home, stores, History(loop), None, doors.copy(), encryption, config, heads=heads
    )
    served = asyncio.create_task(server.run())
    following = asyncio.create_task(loop.run())
    kept = begin(("the gateway link", link.run), ("the list of heads", heads.run))
    tasks = begin(
        ("the watch on the supervisor", lambda: watch_supervisor(home, loop.alarms)),
    )
    taking = asyncio.create_task(_take(lease, config.head, loop, clock))
    signals = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signals.add_signal_handler(number, server.end)
    await asyncio.wait([served, taking], return_when=asyncio.FIRST_COMPLETED)
    for task in (*tasks, following):
        task.cancel()
    if not taking.done():
        taking.cancel()
        for task in kept:
            task.cancel()
        return None
    leadership = taking.result()
    server.leave()  # connections that come now wait for the leader in the sockets
    kept.append(served)
    return Won(lease, leadership, clock, heads, link, loop.hand_over(), kept)


async def _take(lease: Lease, name: str, loop: Following, clock: DatabaseClock) -> Leadership:
    """Look at the lease until it is ours, in a thread that nobody else can keep busy."""
    began, trouble = time.monotonic(), ""
    thread = ThreadPoolExecutor(1, "lease")
    while True:
        await asyncio.sleep(LOOK_S)
        may = not loop.refused and (loop.readable or time.monotonic() - began > COLD_S)
        try:
            look = partial(_look, lease, name if may else "", loop, clock)
            taken = await asyncio.get_running_loop().run_in_executor(thread, look)
            trouble = ""
        except StoreError as error:
            if str(error) != trouble:
                log.warning("the lease cannot be looked at: %s", error)
            trouble = str(error)
            continue
        if taken:
            leadership = Leadership(lease, renewed=clock.follow)
            leadership.start()
            log.info("this head leads now, in term %s", lease.term)
            return leadership


def _look(lease: Lease, name: str, loop: Following, clock: DatabaseClock) -> bool:
    """Runs in a thread. `name`: take the lease by this name, if nobody has it."""
    if not name:
        lease.watch()
    taken = bool(name) and lease.take(name)
    clock.follow()
    if not taken:
        loop.known_leader = lease.leader()
    return taken
