"""Percentiles of the time until an answer began, over the last 15 seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

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
