"""The gateway as a balancer: say what is wanted, call `tick` every second, read figures."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

import msgspec

from shoal.gateway import guard, quote, sites
from shoal.gateway import render as pem
from shoal.gateway.binary import Binary, GatewayError, find_binary
from shoal.gateway.nearest import Nearest
from shoal.gateway.process import Proxy
from shoal.gateway.quote import Refused
from shoal.gateway.refuse import (
    Holds,
    Take,
    Where,
    check_machine,
    check_wishes,
    listening,
    sound_part,
)
from shoal.gateway.render import Place, Weights, digest, render, server_options
from shoal.gateway.router import Router, router_wanted
from shoal.gateway.stats import (
    BATCH,
    ActualServer,
    Runtime,
    RuntimeFailure,
    ServiceCount,
    ServiceStats,
    WorkerOver,
    busy,
    read_counts,
    stats,
    with_old_workers,
)
from shoal.gateway.weights import Balance, rebalance
from shoal.model.far import SiteLoad
from shoal.model.service import (
    Replica,
    ReplicaLoad,
    Route,
    Routing,
    Served,
    ServiceLoad,
    Wanted,
)
from shoal.model.tokens import ReplicaState

Key = tuple[str, str]
REFUSALS_MAX = 1_000
JUDGED_MAX = 4


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Gateway:
    """Drives one HAProxy. It may be dropped at any moment: the proxy keeps running with its last
    settings, and another Gateway in the same directory takes over. Not thread-safe."""

    def __init__(
        self,
        directory: Path,
        binary: Binary | None = None,
        now_ms: Callable[[], int] = monotonic_ms,
        given: Callable[[Where], bool] = lambda _: False,
    ) -> None:
        """`given`: places that another process holds for this proxy."""
        self._holds = Holds(given)
        self._binary = binary or find_binary()
        self._proxy = Proxy(directory.absolute(), self._binary)
        self._place = Place(lua=self._binary.lua)
        self._log = AccessLog(self._proxy.access_log)
        self._now_ms = now_ms
        self._wanted: Wanted | None = None
        self._balances: dict[str, Balance] = {}
        self._weights: dict[Key, int] = {}
        self._counts: dict[str, ServiceCount] = {}
        self._counted_ms = 0
        self._recent = Recent()
        self._refusals: dict[str, str] = {}  # by the digest of what HAProxy was asked about
        self._judged: dict[tuple[object, ...], dict[str, str]] = {}
        self.router = Router(self._proxy.directory, now_ms)
        self.nearest = Nearest(self._proxy.directory)
        self._rows: dict[str, str] | None = None  # of callers, as every worker has them

    def apply(self, wanted: Wanted) -> None:
        """Start the proxy if it is not running, reload it if the routes changed, else update its
        replicas. An impossible request raises a one-line error and changes nothing."""
        check_wishes(wanted)
        running = self._proxy.running()
        target = digest(wanted, self._place)
        rows = guard.rows(wanted.callers)
        if running != target or rows != self._rows:
            self._keep_callers(wanted, rows)
        if running != target:
            self._change(wanted, running, target)
            pem.forget_others(self._proxy.directory, _pems(wanted))
        self._wanted = wanted
        self._holds.keep(listening(wanted))
        self._proxy.keep_log()
        self._tell_replicas(wanted)
        self._tell_callers(wanted, rows)
        self.router.keep(router_wanted(wanted))

    def sound_part(self, wanted: Wanted) -> tuple[Wanted, dict[str, str]]:
        """The services that `apply` would accept, and the problem of each of the others."""
        running = self._proxy.running() is not None
        sound, problems = sound_part(wanted, self._proxy.directory, self._take(running))
        refused = self._left_out(sound)
        kept = tuple(one for one in sound.services if one.route.service not in refused)
        return msgspec.structs.replace(sound, services=kept), {**problems, **refused}

    def _left_out(self, wanted: Wanted) -> dict[str, str]:
        """Services that HAProxy refuses. The answer is kept: it is wanted again at each look."""
        services = ((one.route, one.certificate, one.far) for one in wanted.services)
        routes = (wanted.entry, *services)
        if routes not in self._judged:
            if len(self._judged) >= JUDGED_MAX:
                self._judged.clear()
            self._judged[routes] = left_out(wanted, self._refusal)
        return self._judged[routes]

    def _refusal(self, wanted: Wanted) -> str:
        """Why the proxy would not take this configuration; empty if it would. It is asked once."""
        try:
            target = digest(wanted, self._place)
        except quote.Refused as error:
            return str(error)
        if target not in self._refusals:
            if len(self._refusals) >= REFUSALS_MAX:
                self._refusals.clear()
            try:
                self._keep_files(wanted)
                self._keep_callers(wanted, guard.rows(wanted.callers))
                self._proxy.check(render(wanted, self._place))
                self._refusals[target] = ""
            except quote.Refused as error:
                self._refusals[target] = str(error)
        return self._refusals[target]

    def tick(self) -> tuple[ServiceStats, ...]:
        """Call about once a second: restarts a dead proxy, removes drained replicas, adjusts
        weights. Returns the figures since the last call, or nothing if the proxy has just died.
        Raises GatewayError if it cannot be restarted."""
        if self._wanted is None:
            return ()
        try:
            if self._proxy.running() is None:
                self.apply(self._wanted)
            else:
                self._proxy.keep_log()
                self._tell_replicas(self._wanted)
                self.router.keep(router_wanted(self._wanted))
            self.router.ask()
            before, before_ms = self._counts, self._counted_ms
            self._counts, self._counted_ms = self.counts(), self._now_ms()
            self._follow(self._counts)
            self.nearest.look(self._wanted, self._proxy.runtime, self._counted_ms)
        except RuntimeFailure:
            return ()  # it has just died: the next call restarts it
        seen = stats(before, self._counts, (self._counted_ms - before_ms) / 1000)
        return tuple(
            msgspec.structs.replace(one, **self._recent.percentiles(one.service)) for one in seen
        )

    def counts(self) -> dict[str, ServiceCount]:
        """Current counters, including what workers of an earlier configuration have in flight."""
        older = [self._counts_of(pid) for pid in self._proxy.master.old_workers()]
        return with_old_workers(read_counts(self._proxy.runtime.table()), older)

    def _counts_of(self, worker: int) -> dict[str, ServiceCount]:
        try:
            return read_counts(self._proxy.master.worker(worker).table())
        except WorkerOver:
            return {}

    def in_flight(self, service: str, replica: str) -> int:
        """Requests at a replica. A draining replica may be stopped when this is 0."""
        return busy(self.counts()).get((service, replica), 0)

    def stop(self, grace_s: float = 5.0) -> bool:
        """Stop the proxy; True if there was one."""
        self._wanted = None
        self._holds.keep(())
        was = self._proxy.presence.stop(grace_s)
        self.router.stop()
        return was

    def pid(self) -> int | None:
        return self._proxy.pid()

    def _change(self, wanted: Wanted, running: str | None, target: str) -> None:
        if running is None:
            self._proxy.presence.stop(grace_s=0)  # a proxy that does not answer
        check_machine(wanted, self._proxy.directory, self._take(running is not None))
        if refusal := self._refusals.get(target):
            raise quote.Refused(refusal)
        self._keep_files(wanted)
        text = render(wanted, self._place, self._weights)
        if running is None:
            self._proxy.start(text, target)
        else:
            self._proxy.reload(text, target)

    def _keep_files(self, wanted: Wanted) -> None:
        for text in _pems(wanted):
            pem.keep(self._proxy.directory, text)
        self.nearest.keep(wanted)

    def _keep_callers(self, wanted: Wanted, rows: Mapping[str, str]) -> None:
        """In the file first: what starts or reloads from now on has them."""
        if any(served.route.asks for served in wanted.services):
            guard.keep(self._proxy.directory, rows)

    def _tell_callers(self, wanted: Wanted, rows: dict[str, str]) -> None:
        """A worker of an earlier configuration still has clients, who may show what has ended."""
        if rows == self._rows or not any(one.route.asks for one in wanted.services):
            return
        self._rows = None  # until all have heard
        _tell_rows(self._proxy.runtime, rows)
        for pid in self._proxy.master.old_workers():
            with contextlib.suppress(WorkerOver):
                _tell_rows(self._proxy.master.worker(pid), rows, BATCH_OF_MASTER)
        self._rows = rows

    def _take(self, running: bool) -> Take:
        own = self._proxy.ports() if running else ()
        return lambda who, where: self._holds.take(who, where, own)

    def _tell_replicas(self, wanted: Wanted) -> None:
        commands = changes(
            wanted,
            self._proxy.runtime.servers(),
            busy(read_counts(self._proxy.runtime.table())),
            self._weights,
        )
        if commands:
            self._proxy.runtime.tell(commands)

    def _follow(self, counts: Mapping[str, ServiceCount]) -> None:
        """Adjust the weights to the new counters."""
        assert self._wanted is not None
        fresh = latencies(self._log.fresh())
        self._recent.take(fresh, self._now_ms())
        commands: list[str] = []
        balances: dict[str, Balance] = {}
        weights: dict[Key, int] = {}
        for served in self._wanted.services:
            name = served.route.service
            count = counts.get(name)
            if count is None:
                continue
            base = {
                replica.id: replica.weight
                for replica in served.replicas
                if replica.state is ReplicaState.READY
            }
            balances[name], new = rebalance(
                self._balances.get(name, Balance()),
                served.route,
                count.servers,
                base,
                {replica: fresh.get((name, replica), []) for replica in base},
                count.queued,
                self._now_ms(),
            )
            now = {server.replica: server.weight for server in count.servers}
            for replica, weight in new.items():
                # Without Lua nothing brings a replica back from weight 0, so none gets it.
                weight = weight if self._binary.lua else max(1, weight)
                weights[name, replica] = weight
                if now.get(replica) != weight:
                    commands.append(f"set server {quote.server(name, replica)} weight {weight}")
        self._balances, self._weights = balances, weights
        if commands:
            self._proxy.runtime.tell(commands)


def _pems(wanted: Wanted) -> list[str]:
    own = (one.certificate for one in wanted.services if one.certificate)
    return [*own, *sites.pems(wanted).values()]


BATCH_OF_MASTER = 1  # commands at a time: it passes on one


def _tell_rows(worker: Runtime, rows: Mapping[str, str], batch: int = BATCH) -> None:
    """Of a worker that began before there was a map, nothing can be taken away."""
    said = worker.ask(f"show map {guard.CALLERS}")
    if said.startswith("Unknown map"):
        return
    worker.tell(guard.map_changes(guard.parse_map(said), rows), batch)


# Computes the runtime commands that turn the proxy's servers into the wanted ones.


def changes(
    wanted: Wanted,
    actual: Iterable[ActualServer],
    busy: Mapping[Key, int],
    weights: Weights | None = None,
) -> list[str]:
    """Commands, in order. A server that is no longer wanted is drained; a later call deletes it,
    once `busy` shows nothing in flight. A replica that runs elsewhere now stays the same server: so
    requests that still try its old address go on at the new one."""
    there = {(server.service, server.replica): server for server in actual}
    services = {served.route.service for served in wanted.services}
    commands: list[str] = []
    for served in wanted.services:
        for replica in served.replicas:
            key = (served.route.service, replica.id)
            server = there.get(key)
            if server is None:
                commands += _add(served.route, replica, (weights or {}).get(key))
                continue
            if not _same_place(server, replica):
                commands += _move(server, replica)
            commands += _set_state(server, replica)
            del there[key]
    for key, server in there.items():
        if key[0] in services:
            commands += _remove(server, busy.get(key, 0))
    return commands


def _add(route: Route, replica: Replica, weight: int | None) -> list[str]:
    if replica.state is ReplicaState.DRAINING:
        return []  # it never got a request
    name = quote.server(route.service, replica.id)
    return [
        f"add server {name} {server_options(route, replica, weight)}",
        f"enable health {name}",
        f"enable server {name}",
    ]


def _same_place(server: ActualServer, replica: Replica) -> bool:
    there, wanted = ip_address(server.address), ip_address(replica.address)
    return (there, server.port) == (wanted, replica.port)


def _move(server: ActualServer, replica: Replica) -> list[str]:
    """Up at once: it is ready, whatever the checks of its old address have shown."""
    name = quote.server(server.service, server.replica)
    where = f"addr {quote.word(replica.address)} port {replica.port}"
    return [f"set server {name} {where}", f"set server {name} health up"]


def _set_state(server: ActualServer, replica: Replica) -> list[str]:
    name = quote.server(server.service, server.replica)
    if replica.state is ReplicaState.DRAINING:
        return [] if server.draining else [f"set server {name} state drain"]
    return [f"set server {name} state ready"] if server.draining or server.maintenance else []


def _remove(server: ActualServer, in_flight: int) -> list[str]:
    name = quote.server(server.service, server.replica)
    if in_flight:
        return [] if server.draining else [f"set server {name} state drain"]
    return [f"set server {name} state maint", f"del server {name}"]


# Finds the services that HAProxy refuses, by halves, so that all others are served.


Refusal = Callable[[Wanted], str]  # empty: it is accepted


def left_out(wanted: Wanted, refusal: Refusal) -> dict[str, str]:
    """The services without which it is accepted, with the problem of each. Of those that are
    refused only beside each other, the first stays. Raises if nothing would be accepted."""
    sound: list[Served] = []
    problems: dict[str, str] = {}

    def refused(*more: Served) -> str:
        return refusal(msgspec.structs.replace(wanted, services=(*sound, *more)))

    def take(part: tuple[Served, ...]) -> None:
        why = refused(*part)
        if not why:
            sound.extend(part)
        elif len(part) == 1:
            problems[part[0].route.service] = f"service {part[0].route.service}: {why}"
        else:
            take(part[: len(part) // 2])
            take(part[len(part) // 2 :])

    if wanted.services:
        take(wanted.services)
    if problems and not sound and (why := refused()):
        raise Refused(why)
    return problems


# Percentiles of the time until an answer began, over the last 15 seconds.


KEPT_MS = 15_000
ANSWERS_KEPT_MAX = 4096  # per service; the newest are a fair sample


class Recent:
    """The newest latencies of each service, with the time they were read."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[int, int]]] = {}

    def take(self, fresh: Mapping[tuple[str, str], Sequence[int]], now_ms: int) -> None:
        for (service, _), latencies in fresh.items():
            kept = self._seen.setdefault(service, deque(maxlen=ANSWERS_KEPT_MAX))
            kept.extend((now_ms, latency) for latency in latencies)
        for service, kept in list(self._seen.items()):
            while kept and now_ms - kept[0][0] > KEPT_MS:
                kept.popleft()
            if not kept:
                del self._seen[service]

    def percentiles(self, service: str) -> dict[str, int]:
        """By their field names in stats and loads; 0 without answers."""
        latencies = sorted(latency for _, latency in self._seen.get(service, ()))
        return {f"p{share}_ms": rank(latencies, share) for share in (50, 95, 99)}


def rank(ordered: Sequence[int], percent: int) -> int:
    """The smallest value that at least `percent` of the values do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0


# Reads latencies from the end of the access log.


READ_BYTES_MAX = 1 << 20  # per call; the end of a longer log is a fair sample


class Line(msgspec.Struct, frozen=True):
    """The fields of a log line that we use."""

    service: str
    replica: str
    status: int
    connect_ms: int
    response_ms: int


class AccessLog:
    """Remembers how far it has read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset, self._number = _size_and_number(path.stat()) if path.exists() else (0, 0)
        self._decode = msgspec.json.Decoder(Line).decode

    def fresh(self) -> list[Line]:
        """The lines since the last call, at most READ_BYTES_MAX of them."""
        try:
            with self.path.open("rb") as file:
                size, number = _size_and_number(os.fstat(file.fileno()))
                if number != self._number:
                    self._offset, self._number = 0, number  # the writer began the next file
                start = max(self._offset, size - READ_BYTES_MAX)
                file.seek(start)
                data = file.read(size - start)
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        begin = data.find(b"\n") + 1 if start > self._offset else 0  # skip the partial line
        self._offset = start + whole
        return list(self._lines(data[begin:whole]))

    def _lines(self, data: bytes) -> Iterable[Line]:
        for text in data.splitlines():
            try:
                yield self._decode(text)
            except msgspec.DecodeError:
                continue  # a partial line, or one of the proxy's own messages


def _size_and_number(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_ino


def latencies(lines: Iterable[Line]) -> dict[tuple[str, str], list[int]]:
    """(service, replica) -> milliseconds until each answer began."""
    found: dict[tuple[str, str], list[int]] = {}
    for line in lines:
        if line.response_ms >= 0 and 0 <= line.status < 500:
            key = (line.service, line.replica)
            found.setdefault(key, []).append(line.response_ms + max(0, line.connect_ms))
    return found


# Implements the controller's balancer port with HAProxy: wanted services in, loads out.


class HaproxyBalancer:
    """Starts the proxy with the first service, stops it with the last. Not thread-safe."""

    def __init__(self, directory: Path, given: Callable[[Where], bool] = lambda _: False) -> None:
        """`given`: places that another process holds for the proxy."""
        self._directory = directory
        self._given = given
        self._gateway: Gateway | None = None
        self._before: dict[str, Served] = {}  # as they last worked

    def look(self, wanted: Wanted) -> dict[str, ServiceLoad]:
        if self._gateway is None:
            if not wanted.services:
                return {}
            self._directory.mkdir(parents=True, exist_ok=True)
            self._gateway = Gateway(self._directory, given=self._given)
        if not wanted.services:
            self._gateway.stop()
            self._gateway = None
            return {}
        problems = self._apply(self._gateway, wanted)
        loads = {stats.service: _load(stats) for stats in self._gateway.tick()}
        for served in wanted.services:
            name = served.route.service
            if served.far and name in loads:
                far = self._gateway.nearest.loads(name)
                closed = {
                    one.site: SiteLoad(trouble=sites.trouble(one) or sites.CLOSED)
                    for one in served.far
                }
                loads[name] = msgspec.structs.replace(loads[name], sites=far or closed)
            if served.route.routing is Routing.CACHE and name in loads:
                draining = [r.id for r in served.replicas if r.state is ReplicaState.DRAINING]
                loads[name] = self._gateway.router.with_tokens(loads[name], draining)
        for name, problem in problems.items():
            load = loads.get(name, ServiceLoad(service=name))
            loads[name] = msgspec.structs.replace(load, trouble=problem)
        return loads

    def _apply(self, gateway: Gateway, wanted: Wanted) -> dict[str, str]:
        """A service with a problem keeps its last working route, or none. The other services are
        not affected."""
        wanted = sites.with_door(wanted)
        problems: dict[str, str] = {}
        try:
            gateway.apply(wanted)
        except GatewayError:
            _, problems = gateway.sound_part(wanted)
            if not problems:
                raise
            wanted = self._as_before(wanted, problems)
            wanted, _ = gateway.sound_part(wanted)
            gateway.apply(wanted)
        self._before = {served.route.service: served for served in wanted.services}
        return problems

    def _as_before(self, wanted: Wanted, problems: dict[str, str]) -> Wanted:
        services = tuple(
            msgspec.structs.replace(
                self._before[served.route.service], replicas=served.replicas, owner=served.owner
            )
            if served.route.service in problems
            else served
            for served in wanted.services
            if served.route.service not in problems or served.route.service in self._before
        )
        return msgspec.structs.replace(wanted, services=services)


def _load(stats: ServiceStats) -> ServiceLoad:
    return ServiceLoad(
        service=stats.service,
        in_flight=stats.in_flight,
        queued=stats.queued,
        held=stats.held,
        answers_per_ks=round(stats.requests_per_s * 1000),
        failures_per_ks=round(stats.failed_per_s * 1000),
        response_ms=stats.response_ms,
        p50_ms=stats.p50_ms,
        p95_ms=stats.p95_ms,
        p99_ms=stats.p99_ms,
        replicas={
            one.replica: ReplicaLoad(
                one.up, one.in_flight, round(one.requests_per_s * 1000), one.response_ms
            )
            for one in stats.replicas
        },
    )
