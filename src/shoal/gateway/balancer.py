"""Implements the controller's balancer port with HAProxy: wanted services in, loads out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.gateway.binary import GatewayError
from shoal.gateway.gateway import Gateway
from shoal.gateway.refuse import Where
from shoal.gateway.stats import ServiceStats
from shoal.model.service import ReplicaLoad, Served, ServiceLoad, Wanted


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
        for name, problem in problems.items():
            load = loads.get(name, ServiceLoad(service=name))
            loads[name] = msgspec.structs.replace(load, trouble=problem)
        return loads

    def _apply(self, gateway: Gateway, wanted: Wanted) -> dict[str, str]:
        """A service with a problem keeps its last working route, or none. The other services are
        not affected."""
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
        return Wanted(entry=wanted.entry, services=services)


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
