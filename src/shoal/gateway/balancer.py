"""The gateway behind the port that the controller knows: wishes in, loads out."""

from __future__ import annotations

from pathlib import Path

from shoal.gateway.gateway import Gateway
from shoal.gateway.stats import ServiceStats
from shoal.model.service import ReplicaLoad, ServiceLoad, Wanted


class HaproxyBalancer:
    """Started with the first service, ended with the last. Not for several threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._gateway: Gateway | None = None

    def look(self, wanted: Wanted) -> dict[str, ServiceLoad]:
        if self._gateway is None:
            if not wanted.services:
                return {}
            self._directory.mkdir(parents=True, exist_ok=True)
            self._gateway = Gateway(self._directory)
        if not wanted.services:
            self._gateway.stop()
            self._gateway = None
            return {}
        self._gateway.apply(wanted)
        return {stats.service: _load(stats) for stats in self._gateway.tick()}


def _load(stats: ServiceStats) -> ServiceLoad:
    return ServiceLoad(
        service=stats.service,
        in_flight=stats.in_flight,
        queued=stats.queued,
        held=stats.held,
        answers_per_ks=round(stats.requests_per_s * 1000),
        failures_per_ks=round(stats.failed_per_s * 1000),
        response_ms=stats.response_ms,
        replicas={
            one.replica: ReplicaLoad(
                one.up, one.in_flight, round(one.requests_per_s * 1000), one.response_ms
            )
            for one in stats.replicas
        },
    )
