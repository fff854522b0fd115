"""What both stages of a controller build, the standby and the leader: the API at the head's doors,
its certificate, and the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from shoal.control.alarms import Alarms
from shoal.control.following import Following
from shoal.control.heads import Heads
from shoal.control.history.history import History
from shoal.control.home import ClusterConfig, Home, node_url
from shoal.control.loop import ControlLoop
from shoal.control.notices.posting import Posting
from shoal.control.past.following import Bars
from shoal.control.sockets import Doors, address, choose_gate, holds_gate
from shoal.control.stores import Stores
from shoal.engines.everywhere import Everywhere
from shoal.ledger.live import LiveLedger
from shoal.machine.enduring import enduring
from shoal.machine.files import held, write_private
from shoal.model.service import GatewayEntry, ServiceLoad, Wanted
from shoal.ports import Balancer

if TYPE_CHECKING:
    from shoal.api.server import ApiServer
    from shoal.control.certificates import Encryption

SUPERVISOR_LOOK_S = 3.0
CHOOSING = threading.Lock()  # the gateway's port, by whichever thread asks first


def begin(*works: tuple[str, Callable[[], Awaitable[None]]]) -> list[asyncio.Task[None]]:
    """Tasks that a cluster cannot do without, each with its name for the log."""
    return [asyncio.create_task(enduring(name, work)) for name, work in works]


async def watch_supervisor(home: Home, alarms: Alarms) -> None:
    """Without a supervisor, nothing starts the next controller or holds its port."""
    while True:
        if held(home.supervisor_lock):
            alarms.clear("supervisor")
        else:
            text = "the supervisor has died: if the controller dies too, nothing will restart it"
            alarms.raise_("supervisor", f"{text}; repair it with: shoal up")
        await asyncio.sleep(SUPERVISOR_LOOK_S)


class _LazyBalancer:
    """Loads the gateway's code only with the first service."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._real: Balancer | None = None

    def look(self, wanted: Wanted) -> dict[str, ServiceLoad]:
        if self._real is None:
            if not wanted.services:
                return {}
            from shoal.gateway.gateway import HaproxyBalancer

            self._real = HaproxyBalancer(self._home.gateway, holds_gate)
        return self._real.look(wanted)


def balancer_of(home: Home) -> Balancer:
    return _LazyBalancer(home)


def entry_of(home: Home, config: ClusterConfig, encryption: Encryption | None) -> GatewayEntry:
    """The services' shared port: the first free one from 8080 on; it stays the same afterwards."""
    names = [socket.gethostname(), config.host, urlsplit(config.reach).hostname or ""]
    names += encryption.served.names if encryption else ()
    known = tuple(dict.fromkeys(name.lower() for name in names if name))
    entry = GatewayEntry(address=config.host, domain=config.domain, names=known)
    with CHOOSING:
        if home.gateway_port.exists():
            with contextlib.suppress(ValueError):
                return msgspec.structs.replace(entry, port=int(home.gateway_port.read_text()))
        return msgspec.structs.replace(entry, port=choose_gate(home, config.host))


def door_of(entry: Callable[[], GatewayEntry], stores: Stores) -> Callable[[], tuple[int, str]]:
    def door() -> tuple[int, str]:
        from shoal.control.neighboring.door import APART, door_pem

        return entry().port + APART, door_pem(stores.settings, leads=stores.leads)

    return door


def encryption_of(home: Home, config: ClusterConfig) -> Encryption | None:
    if not config.encrypted:
        return None
    from shoal.control.certificates import Encryption

    return Encryption(home, config)


def api_server(
    loop: ControlLoop,
    home: Home,
    stores: Stores,
    history: History,
    ledger: LiveLedger | None,
    doors: Doors,
    encryption: Encryption | None,
    config: ClusterConfig,
    engine: Everywhere | None = None,
    posting: Posting | None = None,
    heads: Heads | None = None,
    bars: Bars | None = None,
) -> ApiServer:
    """It leaves its address in the home. A standby has no ledger, engine, posting or
    bars."""
    from shoal.api.app import build
    from shoal.api.forwarded import HEAD_URLS
    from shoal.api.forwarding import at_standby
    from shoal.api.joining import FINGERPRINT, HEADS, NODE_URL
    from shoal.api.meeting import INVITE
    from shoal.api.notices import POSTING
    from shoal.api.server import ApiServer
    from shoal.api.timeline import BARS

    def show_address() -> None:
        shown = (encryption.host, encryption.fingerprint) if encryption else ()
        write_private(home.address, msgspec.json.encode(address(home, doors, *shown)))

    names = encryption.served.names if encryption else ()
    reach = config.reach if "://" in config.reach else ""
    token, entry = home.read_token(), lambda: entry_of(home, config, encryption)
    linked = engine.linked if engine is not None else None
    app = build(loop, token, entry, history, ledger, home.path, names, reach, linked, stores)
    if engine is not None:
        app.state[INVITE] = engine.invite
    app.state[POSTING] = posting
    app.state[BARS] = bars
    app.state[HEADS] = heads
    app.state[NODE_URL] = lambda: node_url(config, home)
    app.state[FINGERPRINT] = lambda: encryption.fingerprint if encryption else ""
    if heads is not None:
        app.state[HEAD_URLS] = heads.urls
    if isinstance(loop, Following):
        at_standby(app, loop, token, partial(_trust, encryption), loop.ended, entry)
    server = ApiServer(app, doors, encryption, loop.alarms, show_address)
    show_address()
    return server


def _trust(encryption: Encryption | None) -> ssl.SSLContext:
    """Whom a standby accepts as the leader: the certificates of all heads have one CA."""
    from shoal.client.transport import trust_in

    own = encryption is not None and encryption.fingerprint
    return trust_in(encryption.served.anchor if encryption is not None and own else "")
