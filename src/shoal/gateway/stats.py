"""What the proxy counted, as plain data: per service and per replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec


class ServerCount(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's counters since its process began, and what it does now."""

    service: str
    replica: str
    up: bool
    draining: bool
    weight: int
    in_flight: int
    queued: int
    begun: int
    answered: int
    failed: int  # answers of 500 and above, connections refused or broken off
    response_ms: int  # the proxy's mean of the last few hundred: until an answer began
    total_ms: int
    queue_ms: int


class ServiceCount(msgspec.Struct, frozen=True, kw_only=True):
    """One service's counters. `in_flight` has those that are queued or held in it."""

    service: str
    in_flight: int
    queued: int
    begun: int
    answered: int
    failed: int
    response_ms: int
    total_ms: int
    queue_ms: int
    servers: tuple[ServerCount, ...] = ()


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True):
    """A replica for people and for the autoscaler."""

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
    """Work is what is in flight at replicas, what is queued, and what is held for want of one."""

    service: str
    in_flight: int
    queued: int
    held: int
    requests_per_s: float
    failed_per_s: float
    response_ms: int
    total_ms: int
    queue_ms: int
    p50_ms: int = 0  # until an answer began, of the last seconds
    p95_ms: int = 0
    p99_ms: int = 0
    replicas: tuple[ReplicaStats, ...] = ()

    @property
    def work(self) -> int:
        return self.in_flight + self.queued + self.held


def read_counts(rows: Iterable[Mapping[str, str]]) -> dict[str, ServiceCount]:
    """From the rows of `show stat`; what is not a service's begins with an underscore."""
    servers: dict[str, list[ServerCount]] = {}
    services: dict[str, ServiceCount] = {}
    for row in rows:
        name, kind = row["pxname"], row["svname"]
        if name.startswith("_") or kind == "FRONTEND":
            continue
        if kind != "BACKEND":
            servers.setdefault(name, []).append(_server(name, kind, row))
            continue
        services[name] = ServiceCount(
            service=name,
            in_flight=_number(row, "scur"),
            queued=_number(row, "qcur"),
            begun=_number(row, "req_tot"),
            answered=_answered(row),
            failed=_failed(row),
            response_ms=_number(row, "ctime") + _number(row, "rtime"),
            total_ms=_number(row, "ttime"),
            queue_ms=_number(row, "qtime"),
        )
    return {
        name: msgspec.structs.replace(count, servers=tuple(servers.get(name, ())))
        for name, count in services.items()
    }


def with_old_workers(
    counts: Mapping[str, ServiceCount], older: Iterable[Mapping[str, ServiceCount]]
) -> dict[str, ServiceCount]:
    """What processes of an earlier configuration still have in flight counts as well."""
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
    """Rates are over the time between the two; a counter that went back began anew."""
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
            requests_per_s=_rate(known.get(server.replica), server, elapsed_s),
            failed_per_s=_failures(known.get(server.replica), server, elapsed_s),
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
        requests_per_s=_rate(old, new, elapsed_s),
        failed_per_s=_failures(old, new, elapsed_s),
        response_ms=new.response_ms,
        total_ms=new.total_ms,
        queue_ms=new.queue_ms,
        replicas=replicas,
    )


Counted = ServerCount | ServiceCount


def _rate(old: Counted | None, new: Counted, elapsed_s: float) -> float:
    base = old.answered if old and old.answered <= new.answered else 0
    return round((new.answered - base) / elapsed_s, 2)


def _failures(old: Counted | None, new: Counted, elapsed_s: float) -> float:
    base = old.failed if old and old.failed <= new.failed else 0
    return round((new.failed - base) / elapsed_s, 2)


def _server(service: str, replica: str, row: Mapping[str, str]) -> ServerCount:
    status = row["status"]
    return ServerCount(
        service=service,
        replica=replica,
        up=status.startswith(("UP", "DRAIN", "no check", "NOLB")),
        # Without weight a replica is merely set aside.
        draining=status.startswith("DRAIN") and row["weight"] != "0",
        weight=_number(row, "weight"),
        in_flight=_number(row, "scur"),
        queued=_number(row, "qcur"),
        begun=_number(row, "lbtot"),
        answered=_answered(row),
        failed=_failed(row),
        response_ms=_number(row, "ctime") + _number(row, "rtime"),
        total_ms=_number(row, "ttime"),
        queue_ms=_number(row, "qtime"),
    )


ANSWERS: Sequence[str] = (
    "hrsp_1xx",
    "hrsp_2xx",
    "hrsp_3xx",
    "hrsp_4xx",
    "hrsp_5xx",
    "hrsp_other",
)


def _answered(row: Mapping[str, str]) -> int:
    return sum(_number(row, name) for name in ANSWERS)


def _failed(row: Mapping[str, str]) -> int:
    return _number(row, "hrsp_5xx") + _number(row, "econ") + _number(row, "eresp")


def _number(row: Mapping[str, str], name: str) -> int:
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
    # A replica that is no longer in the configuration is there for as long as it has work.
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
