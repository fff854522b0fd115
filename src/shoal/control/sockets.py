"""Where a cluster listens: a TCP port for pages and other machines, a socket file for its user.

The supervisor opens both and holds them for as long as the cluster is up. No other process on this
machine can take them between the end of one controller and the start of the next.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from shoal.client.address import Address
from shoal.control.home import ClusterConfig, Home
from shoal.machine.files import short_path, write_private
from shoal.machine.listening import hold, holders, listeners
from shoal.ports import EngineError

BACKLOG = 1024
# Below the ports that the kernel gives to outgoing connections. One of those could take the port
# while the cluster is down, even a client that tries to reach it.
FREE_PORTS = range(10_000, 20_000)


# Where services are reached: chosen with the first of them, and the same from then on.
GATEWAY_PORTS = range(8080, 9080)
SUPERVISOR_ENV = "SHOAL_SUPERVISOR"  # its process, if it holds the gateway's port when asked
# What this process holds of the gateway: the supervisor's own socket, or one of ours.
GATE: list[socket.socket] = []


class Doors(NamedTuple):
    network: socket.socket
    local: socket.socket

    @classmethod
    def inherited(cls, network: int, local: int, gate: int | None = None) -> Doors:
        """The sockets that the parent process holds, by their descriptors."""
        doors = cls(socket.socket(fileno=network), socket.socket(fileno=local))
        if gate is not None:
            GATE.append(socket.socket(fileno=gate))
        for door in (*doors, *GATE):
            door.set_inheritable(False)
        return doors

    def copy(self) -> Doors:
        """The same sockets, for a server that closes its own when it ends."""
        return Doors(self.network.dup(), self.local.dup())

    @property
    def descriptors(self) -> tuple[int, int]:
        return self.network.fileno(), self.local.fileno()


def open_doors(home: Home) -> Doors:
    """The caller holds the supervisor's lock, because an old socket file is replaced."""
    try:
        config = home.read_config()
    except msgspec.DecodeError as error:
        raise EngineError(f"{home.config} is damaged ({error}); fix or remove it") from None
    if config is None:
        raise EngineError(f"{home.config} is missing; start with: shoal up")
    network = _listen(home, config)
    try:
        return Doors(network, _listen_locally(home))
    except OSError as error:
        network.close()
        raise EngineError(f"cannot listen on {home.socket}: {error.strerror or error}") from None


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def holds_gate(where: tuple[str, int]) -> bool:
    """Does this process hold the place for the gateway?"""
    host, port = where
    wanted = "0.0.0.0" if host in ("", "*") else host
    return any(one.getsockname()[:2] == (wanted, port) for one in GATE)


def choose_gate(home: Home, host: str) -> int:
    """The first free port. It is held from now on, by this process and the supervisor, so that
    nobody else gets it while the proxy is down."""
    for port in GATEWAY_PORTS:
        with contextlib.suppress(OSError):
            GATE.append(hold(host, port))
            write_private(home.gateway_port, str(port).encode())
            if os.environ.get(SUPERVISOR_ENV) == str(os.getppid()):
                os.kill(os.getppid(), signal.SIGUSR1)
            return port
    return GATEWAY_PORTS[0]


def hold_gate(home: Home, *, shared: bool = False) -> socket.socket | None:
    """For the supervisor: the gateway's port, if one was chosen and no other program has it.
    `shared`: our controller holds it."""
    try:
        config, port = home.read_config(), int(home.gateway_port.read_text())
    except (OSError, ValueError, msgspec.DecodeError):
        return None
    if config is None:
        return None
    for together in (True,) if shared else (False, True):
        with contextlib.suppress(OSError):
            if shared or not together or _of_our_proxy(home, port):
                return hold(config.host, port, shared=together)
    return None


def _of_our_proxy(home: Home, port: int) -> bool:
    """A proxy outlives its cluster's supervisor. It runs in a folder of the home."""
    there = {one.inode for one in listeners() if one.port == port}
    pids = holders(there)
    with contextlib.suppress(OSError):
        return bool(pids) and all(os.path.samefile(f"/proc/{p}/cwd", home.gateway) for p in pids)
    return False


def address(home: Home, doors: Doors, shown: str = "", fingerprint: str = "") -> Address:
    """Where this process, the controller, answers; with TLS if others are shown another host."""
    host, port = doors.network.getsockname()[:2]
    host, scheme = (shown, "https") if shown else (host, "http")
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    return Address(url=url, pid=os.getpid(), socket=str(home.socket), fingerprint=fingerprint)


def _listen(home: Home, config: ClusterConfig) -> socket.socket:
    """A cluster that comes back listens on the same port, so bookmarks and scrapers find it."""
    port = config.port
    if port == 0 and home.address.exists():
        with contextlib.suppress(msgspec.DecodeError, ValueError):
            before = msgspec.json.decode(home.address.read_bytes(), type=Address)
            port = urlsplit(before.url).port or 0
    for candidate in [port] if port else random.sample(FREE_PORTS, 100):
        try:
            return bind(config.host, candidate)
        except OSError as error:
            reason = error.strerror or str(error)
    advice = "choose another with: shoal up --port 0 (0 is any free one)"
    raise EngineError(f"cannot listen on {config.host} port {port} ({reason}); {advice}")


def _listen_locally(home: Home) -> socket.socket:
    home.socket.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        with short_path(home.socket) as path:
            listener.bind(path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener
