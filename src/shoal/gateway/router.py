"""The token router's process: starts it so that it outlives us, tells it what is wanted, and asks
what it sees.

Like the proxy it is nobody's child, and the next controller takes it over. Whatever is wrong with
it, nothing waits here: the proxy then asks the replicas directly.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from shoal.gateway.binary import ROUTER_LOCK, end_router, holders
from shoal.machine.files import held, write_private
from shoal.machine.paths import ask
from shoal.model.access import is_open
from shoal.model.service import ReplicaLoad, Routing, Served, ServiceLoad, Wanted
from shoal.model.tokens import (
    RoutedLoad,
    RoutedReplica,
    RoutedService,
    RouterSeen,
    RouterWanted,
    TokenCount,
    TokenLoad,
)

log = logging.getLogger("shoal.gateway")

ANSWER_TIMEOUT_S = 1.0
ANSWER_BYTES_MAX = 64 << 20
SOON_MS = 10_000  # a router that ends within this time waits twice as long for the next start
PAUSE_MS, PAUSE_MAX_MS = 3_000, 15_000  # a start takes up to that
SILENT_MS = 5_000  # a router that has not answered for this long is stuck
END_MS = 10_000  # from SIGTERM to SIGKILL
SAID_BYTES_MAX = 1 << 20  # of its own messages, when it starts
ADAPTERS_MAX = 10_000  # of a service
LAUNCH = '"$@" &'


def router_wanted(wanted: Wanted) -> RouterWanted | None:
    """None: no service needs it."""
    services = [one for one in wanted.services if one.route.routing is Routing.CACHE]
    if not services:
        return None
    return RouterWanted(
        services=tuple(_routed(one, wanted) for one in services),
        refused=wanted.refused,
        limited=tuple(one.id for one in wanted.callers if one.limited),
    )


def _routed(served: Served, wanted: Wanted) -> RoutedService:
    route = served.route
    callers = None
    if not is_open(route.access):
        callers = tuple(
            one.id
            for one in wanted.callers
            if one.may_call(route.service, route.access, served.tenant)
        )
    return RoutedService(
        name=route.service,
        replicas=tuple(
            RoutedReplica(id=one.id, address=one.address, port=one.port, state=one.state)
            for one in served.replicas
        ),
        owner=served.owner,
        goals=served.goals,
        concurrency=route.concurrency,
        queue_max=route.queue_max,
        queue_timeout_ms=route.queue_timeout_ms,
        connect_timeout_ms=route.connect_timeout_ms,
        response_timeout_ms=route.response_timeout_ms,
        body_bytes_max=route.body_bytes_max,
        callers=callers,
        adapters=adapters_in(served.adapters),
        adapters_max=served.adapters_max,
    )


def adapters_in(place: str) -> dict[str, str]:
    """By the names of the folders there, of which hidden ones are none. Of a URL nothing can be
    listed: an engine that has read it knows its adapters by their names."""
    if place.startswith("/"):
        with contextlib.suppress(OSError):  # also of a mount that does not answer
            return ask((place,), _folders, place)
    return {}


def _folders(place: str) -> dict[str, str]:
    found: dict[str, str] = {}
    with os.scandir(place) as entries:
        for entry in entries:
            if not entry.name.startswith(".") and entry.is_dir():
                found[entry.name] = entry.path
                if len(found) >= ADAPTERS_MAX:
                    break
    return dict(sorted(found.items()))


class Router:
    """The router of one gateway's folder. `keep` and `ask` are called about twice a second."""

    def __init__(self, directory: Path, now_ms: Callable[[], int]) -> None:
        self._directory = directory
        self._lock = directory / ROUTER_LOCK
        self._now_ms = now_ms
        self._written = b""
        self._began_ms: int | None = None  # when we last started one
        self._pause_ms = PAUSE_MS
        self._ending_ms: int | None = None
        self._silent_ms: int | None = None  # since when it has not answered
        self.seen: RouterSeen | None = None  # its last answer; None when it is dead
        self._asked_ms = 0
        self._rates: dict[tuple[str, str], int] = {}  # answers per thousand seconds

    @property
    def alive(self) -> bool:
        return held(self._lock)

    def keep(self, wanted: RouterWanted | None) -> None:
        """Start it if it is wanted and does not run, or end it."""
        if wanted is None:
            self._written = b""
            self._forget()
            self._end()
            return
        self._ending_ms = None
        said = msgspec.json.encode(wanted)
        if said != self._written:
            write_private(self._directory / "router.json", said)
            self._written = said
        if not self.alive:
            self._forget()
            self._start()

    def ask(self) -> None:
        """Tell it what is wanted, and hear what it sees."""
        if not self._written or not self.alive:
            return
        try:
            seen = self._ask(self._written)
        except (OSError, ValueError) as error:  # what it saw last still says who is busy
            self._bear(error)
        else:
            self._silent_ms = None
            self._follow(seen)

    def _bear(self, error: Exception) -> None:
        """One that is stuck would hold all requests; without it, they go on."""
        now_ms = self._now_ms()
        self._silent_ms = now_ms if self._silent_ms is None else self._silent_ms
        if now_ms - self._silent_ms > SILENT_MS:
            log.error("the token router does not answer, and is started again: %s", error)
            self.stop()

    def stop(self) -> None:
        """At once."""
        end_router(self._directory)
        self._forget()

    def _forget(self) -> None:
        self.seen, self._rates, self._silent_ms = None, {}, None

    def _start(self) -> None:
        """At once, unless the one before ended soon after its start."""
        now_ms = self._now_ms()
        lived_ms = SOON_MS if self._began_ms is None else now_ms - self._began_ms
        if lived_ms < self._pause_ms:
            return
        soon = lived_ms < SOON_MS
        self._pause_ms = min(PAUSE_MAX_MS, self._pause_ms * 2) if soon else PAUSE_MS
        self._began_ms = now_ms
        self._launch()

    def _launch(self) -> None:
        """It takes the lock of its folder itself; of two, the second ends."""
        path = self._directory / "router.log"
        if path.exists() and path.stat().st_size > SAID_BYTES_MAX:
            path.unlink()
        kept = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        words = [sys.executable, "-P", "-m", "shoal.router", str(self._directory)]
        with path.open("ab") as said:
            subprocess.run(
                ["/bin/sh", "-c", LAUNCH, "sh", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
                cwd=self._directory,
                env=kept,  # not the head's, which may hold its passwords
                check=True,
            )

    def _end(self) -> None:
        """It may finish what it has; it is not waited for here."""
        if not self.alive:
            self._ending_ms = None
            return
        now_ms = self._now_ms()
        first = self._ending_ms is None
        since_ms = self._ending_ms = now_ms if self._ending_ms is None else self._ending_ms
        if first or now_ms - since_ms > END_MS:
            for pid in holders(self._lock):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if first else signal.SIGKILL)

    def _ask(self, said: bytes) -> RouterSeen:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            connection.connect(str(self._directory / "router-control.sock"))
            connection.sendall(said + b"\n")
            parts, size = list[bytes](), 0
            deadline = time.monotonic() + ANSWER_TIMEOUT_S
            while not parts or not parts[-1].endswith(b"\n"):
                part = connection.recv(1 << 16)
                size += len(part)
                if not part or size > ANSWER_BYTES_MAX or time.monotonic() > deadline:
                    raise OSError("its answer is not whole")
                parts.append(part)
        return msgspec.json.decode(b"".join(parts), type=RouterSeen)

    def _follow(self, seen: RouterSeen) -> None:
        now_ms = self._now_ms()
        before, past_ms = self.seen, max(1, now_ms - self._asked_ms)
        self._rates = {}
        for name, load in seen.services.items() if before is not None else ():
            old = before.services.get(name, TokenLoad()).replicas if before is not None else {}
            for replica, one in load.replicas.items():
                answers = one.answers - old.get(replica, RoutedLoad()).answers
                self._rates[name, replica] = max(0, answers) * 1_000_000 // past_ms
        self.seen, self._asked_ms = seen, now_ms

    # -- what it sees, beside what the proxy sees

    def with_tokens(self, load: ServiceLoad, draining: Iterable[str]) -> ServiceLoad:
        """The load with requests that are in the router. To the proxy these are at one server,
        which is no replica."""
        tokens, counts = None, tuple[TokenCount, ...]()
        if self.seen is not None:
            tokens = seen = self.seen.services.get(load.service, TokenLoad())
            counts = _counts(self.seen, load.service)
        elif self.alive:  # it has not answered yet: nobody knows whether a replica is done
            seen = TokenLoad(replicas={one: RoutedLoad(in_flight=1) for one in draining})
        else:
            return load
        at = sum(one.in_flight for one in seen.replicas.values())
        replicas = dict(load.replicas)
        for job, one in seen.replicas.items():
            own = replicas.get(job, ReplicaLoad(up=True, in_flight=0))
            rate = self._rates.get((load.service, job), 0)
            replicas[job] = ReplicaLoad(
                own.up, own.in_flight + one.in_flight, own.answers_per_ks + rate, own.response_ms
            )
        return msgspec.structs.replace(
            load,
            in_flight=load.in_flight + at,
            queued=load.queued + seen.queued,
            held=max(0, load.held - at - seen.queued),
            replicas=replicas,
            tokens=tokens,
            token_counts=counts,
        )


def _counts(seen: RouterSeen, service: str) -> tuple[TokenCount, ...]:
    return tuple(
        msgspec.structs.replace(one, folder=seen.folder)
        for one in seen.counts
        if one.service == service
    )
