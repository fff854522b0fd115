"""HAProxy's runtime socket, and its counters as plain data, per service and per replica."""

from __future__ import annotations

import csv
import io
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from shoal.gateway.binary import GatewayError


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the process began, and the load now."""

    in_flight: int
    queued: int
    begun: int
    answered: int
    failed: int  # answers of 500 and above, refused or broken connections
    response_ms: int  # until an answer began: the proxy's mean of the last few hundred


class ServerCount(Count, frozen=True, kw_only=True):
    """One replica's counters."""

    replica: str
    up: bool
    draining: bool
    weight: int


class ServiceCount(Count, frozen=True, kw_only=True):
    """One service's counters. `in_flight` includes queued and held requests."""

    service: str
    servers: tuple[ServerCount, ...] = ()


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's figures."""

    replica: str
    up: bool
    draining: bool
    weight: int
    in_flight: int
    queued: int
    requests_per_s: float
    failed_per_s: float
    response_ms: int


class ServiceStats(msgspec.Struct, frozen=True, kw_only=True):
    """One service's figures. Requests are in flight at replicas, queued, or held without one."""

    service: str
    in_flight: int
    queued: int
    held: int
    requests_per_s: float
    failed_per_s: float
    response_ms: int
    p50_ms: int = 0  # until an answer began, over the last 15 seconds
    p95_ms: int = 0
    p99_ms: int = 0
    replicas: tuple[ReplicaStats, ...] = ()

    @property
    def work(self) -> int:
        return self.in_flight + self.queued + self.held


def read_counts(rows: Iterable[Mapping[str, str]]) -> dict[str, ServiceCount]:
    """From the rows of `show stat`; names that begin with an underscore are neither services nor
    replicas."""
    servers: dict[str, list[ServerCount]] = {}
    services: dict[str, Mapping[str, str]] = {}
    for row in rows:
        name, kind = row["pxname"], row["svname"]
        if name.startswith("_") or kind.startswith("_") or kind == "FRONTEND":
            continue
        if kind == "BACKEND":
            services[name] = row
        else:
            servers.setdefault(name, []).append(_server(row))
    return {
        name: ServiceCount(
            service=name, servers=tuple(servers.get(name, ())), **_figures(row, begun="req_tot")
        )
        for name, row in services.items()
    }


def with_old_workers(
    counts: Mapping[str, ServiceCount], older: Iterable[Mapping[str, ServiceCount]]
) -> dict[str, ServiceCount]:
    """Adds what workers of an earlier configuration still have in flight."""
    merged = dict(counts)
    for old in older:
        for name, count in old.items():
            if name in merged:
                merged[name] = _add_flight(merged[name], count)
    return merged


def busy(counts: Mapping[str, ServiceCount]) -> dict[tuple[str, str], int]:
    """(service, replica) -> requests in flight or queued at it."""
    return {
        (name, server.replica): server.in_flight + server.queued
        for name, count in counts.items()
        for server in count.servers
    }


def stats(
    before: Mapping[str, ServiceCount], after: Mapping[str, ServiceCount], elapsed_s: float
) -> tuple[ServiceStats, ...]:
    """Rates are over the time between the two; a counter that shrank was restarted."""
    return tuple(
        _service_stats(before.get(name), count, max(elapsed_s, 0.001))
        for name, count in sorted(after.items())
    )


def _service_stats(old: ServiceCount | None, new: ServiceCount, elapsed_s: float) -> ServiceStats:
    known = {server.replica: server for server in old.servers} if old else {}
    replicas = tuple(
        ReplicaStats(
            replica=server.replica,
            up=server.up,
            draining=server.draining,
            weight=server.weight,
            in_flight=server.in_flight,
            queued=server.queued,
            requests_per_s=_rate(known.get(server.replica), server, "answered", elapsed_s),
            failed_per_s=_rate(known.get(server.replica), server, "failed", elapsed_s),
            response_ms=server.response_ms,
        )
        for server in new.servers
    )
    at_replicas = sum(server.in_flight for server in new.servers)
    queued = new.queued + sum(server.queued for server in new.servers)
    return ServiceStats(
        service=new.service,
        in_flight=at_replicas,
        queued=queued,
        held=max(0, new.in_flight - at_replicas - queued),
        requests_per_s=_rate(old, new, "answered", elapsed_s),
        failed_per_s=_rate(old, new, "failed", elapsed_s),
        response_ms=new.response_ms,
        replicas=replicas,
    )


def _rate(old: Count | None, new: Count, name: str, elapsed_s: float) -> float:
    before: int = getattr(old, name, 0)
    now: int = getattr(new, name)
    return round((now - before if before <= now else now) / elapsed_s, 2)


def _server(row: Mapping[str, str]) -> ServerCount:
    status = row["status"]
    return ServerCount(
        replica=row["svname"],
        up=status.startswith(("UP", "DRAIN", "no check", "NOLB")),
        # A replica with weight 0 is resting, not draining.
        draining=status.startswith("DRAIN") and row["weight"] != "0",
        weight=number(row, "weight"),
        **_figures(row, begun="lbtot"),
    )


ANSWERS = ("hrsp_1xx", "hrsp_2xx", "hrsp_3xx", "hrsp_4xx", "hrsp_5xx", "hrsp_other")
FAILURES = ("hrsp_5xx", "econ", "eresp")


def _figures(row: Mapping[str, str], begun: str) -> dict[str, int]:
    """The fields of Count; the column with the requests begun differs by kind of row."""
    return {
        "in_flight": number(row, "scur"),
        "queued": number(row, "qcur"),
        "begun": number(row, begun),
        "answered": sum(number(row, name) for name in ANSWERS),
        "failed": sum(number(row, name) for name in FAILURES),
        "response_ms": number(row, "ctime") + number(row, "rtime"),
    }


def number(row: Mapping[str, str], name: str) -> int:
    return int(row.get(name) or 0)


def _add_flight(new: ServiceCount, old: ServiceCount) -> ServiceCount:
    theirs = {server.replica: server for server in old.servers}
    servers = []
    for server in new.servers:
        other = theirs.pop(server.replica, None)
        if other is not None:
            server = msgspec.structs.replace(
                server,
                in_flight=server.in_flight + other.in_flight,
                queued=server.queued + other.queued,
            )
        servers.append(server)
    # A replica that left the configuration is listed until its work is done.
    servers += [
        msgspec.structs.replace(server, draining=True, weight=0)
        for server in theirs.values()
        if server.in_flight
    ]
    return msgspec.structs.replace(
        new,
        in_flight=new.in_flight + old.in_flight,
        queued=new.queued + old.queued,
        servers=tuple(servers),
    )


# HAProxy's runtime socket: commands in, tables out.


ANSWER_TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 64 << 20
BATCH = 50  # commands on one line
LINE_BYTES = 8_192  # of a line; the proxy's buffer holds it

MAINTENANCE = 0x01 | 0x02 | 0x04
DRAINING = 0x08 | 0x10


class RuntimeFailure(GatewayError):
    """The socket does not answer."""


class WorkerOver(RuntimeFailure):
    """The worker has exited."""


class ActualServer(msgspec.Struct, frozen=True):
    """A server in the proxy's tables."""

    service: str
    replica: str
    address: str
    port: int
    weight: int
    draining: bool
    maintenance: bool


class Runtime:
    """One process behind one socket; the proxy wants a new connection for each command."""

    def __init__(self, path: Path, target: str = "") -> None:
        self._path = path
        self._target = target  # on the master's socket: which worker to ask

    def worker(self, pid: int) -> Runtime:
        return Runtime(self._path, f"@!{pid} ")

    def ask(self, command: str) -> str:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.connect(str(self._path))
            connection.sendall(f"{self._target}{command}\n".encode())
            connection.shutdown(socket.SHUT_WR)  # else a master waits for the next command
            return _all_of(connection)
        except OSError as error:
            raise RuntimeFailure(f"{self._path}: {error}") from None
        finally:
            connection.close()

    def tell(self, commands: Iterable[str], batch: int = BATCH) -> list[str]:
        """Send commands in order; returns the answers that are not empty."""
        waiting = list(commands)
        answers: list[str] = []
        while waiting:
            count, size = 0, 0
            while count < min(batch, len(waiting)) and size + len(waiting[count]) <= LINE_BYTES:
                size += len(waiting[count]) + 2
                count += 1
            now, waiting = waiting[: max(1, count)], waiting[max(1, count) :]
            answers += [line for line in self.ask("; ".join(now)).splitlines() if line.strip()]
        return answers

    def info(self) -> dict[str, str]:
        pairs = (line.partition(":") for line in self.ask("show info").splitlines())
        return {key.strip(): value.strip() for key, _, value in pairs}

    def table(self) -> list[dict[str, str]]:
        """`show stat` as rows of named columns."""
        return parse_table(self.ask("show stat"))

    def servers(self) -> list[ActualServer]:
        return parse_servers(self.ask("show servers state"))

    def old_workers(self) -> list[int]:
        """From the master's socket: workers of an earlier configuration that still finish."""
        return parse_old_workers(self.ask("show proc"))


def parse_table(text: str) -> list[dict[str, str]]:
    if text.startswith("Can't"):  # "connect to" or "find the target", in the master's words
        raise WorkerOver(text.strip())
    if not text.startswith("# "):
        raise RuntimeFailure(f"not a table: {text[:80]!r}")
    return list(csv.DictReader(io.StringIO(text[2:].strip() + "\n")))


def parse_servers(text: str) -> list[ActualServer]:
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2 or not lines[1].startswith("# "):
        raise RuntimeFailure(f"not a list of servers: {text[:80]!r}")
    names = lines[1][2:].split()
    servers = []
    for line in lines[2:]:
        row = dict(zip(names, line.split(), strict=False))
        if row["srv_name"].startswith("_"):
            continue
        admin = int(row["srv_admin_state"])
        servers.append(
            ActualServer(
                service=row["be_name"],
                replica=row["srv_name"],
                address=row["srv_addr"],
                port=int(row["srv_port"]),
                weight=int(row["srv_uweight"]),
                draining=bool(admin & DRAINING),
                maintenance=bool(admin & MAINTENANCE),
            )
        )
    return servers


def parse_old_workers(text: str) -> list[int]:
    old = False
    found = []
    for line in text.splitlines():
        if line.startswith("#"):
            old = "old workers" in line
        elif old and line.split()[1:2] == ["worker"]:
            found.append(int(line.split()[0]))
    return found


def _all_of(connection: socket.socket) -> str:
    parts: list[bytes] = []
    size = 0
    while data := connection.recv(1 << 16):
        parts.append(data)
        size += len(data)
        if size > ANSWER_BYTES_MAX:
            raise OSError("the answer is too long")
    return b"".join(parts).decode(errors="replace")
