"""What the gateways of several heads see together. Pure.

Each head has a gateway. A standby's report of its own is in its row of the table `heads`, and the
leader adds it to what its own gateway sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from shoal.model.service import ReplicaLoad, ReplicaState, Service, ServiceLoad, Wanted

REPORT_BYTES_MAX = 1 << 20


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """`open`: replicas that the gateway may send new requests to."""

    loads: tuple[ServiceLoad, ...] = ()
    open: tuple[str, ...] = ()


def report_of(wanted: Wanted, loads: Mapping[str, ServiceLoad]) -> bytes:
    """After the gateway has put `wanted` in place. A report that would be too long for a row says
    less about each replica."""
    ready = tuple(
        replica.id
        for served in wanted.services
        for replica in served.replicas
        if replica.state is ReplicaState.READY
    )
    body = msgspec.json.encode(GatewayReport(loads=tuple(loads.values()), open=ready))
    if len(body) <= REPORT_BYTES_MAX:
        return body
    brief = tuple(msgspec.structs.replace(load, replicas={}) for load in loads.values())
    return msgspec.json.encode(GatewayReport(loads=brief, open=ready))


def read_reports(rows: Iterable[bytes]) -> list[GatewayReport]:
    """Of heads of other versions, what can be read."""
    found = []
    for row in rows:
        try:
            found.append(msgspec.json.decode(row, type=GatewayReport))
        except msgspec.DecodeError:
            continue
    return found


def together(
    services: Mapping[str, Service],
    own: Mapping[str, ServiceLoad],
    others: Sequence[GatewayReport],
    dozing: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, ServiceLoad]:
    """Sums, so that services scale by all their requests. A replica that drains counts as busy
    until every gateway has stopped sending it new requests; so does one that falls asleep
    (`dozing`, by service)."""
    if not others:
        return dict(own)
    found = {}
    for name, service in services.items():
        loads = [load for load in (own.get(name), *_loads(name, others)) if load is not None]
        if not loads:
            continue
        load = loads[0]
        for other in loads[1:]:
            load = _sum(load, other)
        leaving = (*service.draining, *(dozing or {}).get(name, ()))
        late = {job for job in leaving if any(job in one.open for one in others)}
        found[name] = msgspec.structs.replace(load, replicas=_held(load.replicas, late))
    return found


def _loads(name: str, others: Sequence[GatewayReport]) -> list[ServiceLoad]:
    return [load for one in others for load in one.loads if load.service == name and load.tells]


def _sum(one: ServiceLoad, two: ServiceLoad) -> ServiceLoad:
    """Times are those of the mean request; of high percentiles, the higher one."""
    parts = one.answers_per_ks, two.answers_per_ks
    ids = dict.fromkeys((*one.replicas, *two.replicas))
    return msgspec.structs.replace(
        one,
        seen=one.seen or two.seen,
        in_flight=one.in_flight + two.in_flight,
        queued=one.queued + two.queued,
        held=one.held + two.held,
        answers_per_ks=sum(parts),
        failures_per_ks=one.failures_per_ks + two.failures_per_ks,
        response_ms=_mean(one.response_ms, two.response_ms, parts),
        p50_ms=_mean(one.p50_ms, two.p50_ms, parts),
        p95_ms=max(one.p95_ms, two.p95_ms),
        p99_ms=max(one.p99_ms, two.p99_ms),
        replicas={job: _both(one.replicas.get(job), two.replicas.get(job)) for job in ids},
    )


def _both(one: ReplicaLoad | None, two: ReplicaLoad | None) -> ReplicaLoad:
    """Up if any gateway reaches it."""
    if one is None or two is None:
        found = one or two
        assert found is not None
        return found
    parts = one.answers_per_ks, two.answers_per_ks
    return ReplicaLoad(
        one.up or two.up,
        one.in_flight + two.in_flight,
        sum(parts),
        _mean(one.response_ms, two.response_ms, parts),
    )


def _mean(one: int, two: int, parts: tuple[int, int]) -> int:
    if not sum(parts):
        return max(one, two)
    return (one * parts[0] + two * parts[1]) // sum(parts)


def _held(replicas: Mapping[str, ReplicaLoad], late: set[str]) -> dict[str, ReplicaLoad]:
    found = dict(replicas)
    for job in sorted(late):
        seen = found.get(job, ReplicaLoad(up=True, in_flight=0))
        found[job] = msgspec.structs.replace(seen, in_flight=max(1, seen.in_flight))
    return found
