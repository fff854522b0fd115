"""Small records that the state keeps beside jobs and nodes."""

from __future__ import annotations

import msgspec

AGES_MAX = 1024
WEAR_MAX = 256
NODE_BELIEF_MS = 30 * 24 * 3600 * 1000  # the prior: one loss a month on each node


class Reservation(msgspec.Struct, frozen=True):
    """Room on these nodes, by index in ascending order, is reserved for a job at the front."""

    start_ms: int | None
    nodes: tuple[int, ...]
    made_ms: int
    promised_ms: int  # its first start time, or when it came to the front if unknown
    members: tuple[int, ...] = ()  # of the job, on each of the nodes; empty: the whole nodes


class Wear(msgspec.Struct):
    """How often nodes were lost recently: losses, and the node time in which they happened."""

    node_ms: int = 0
    losses: int = 0

    def add(self, node_ms: int, lost: bool) -> None:
        self.node_ms += node_ms
        self.losses += lost
        if self.losses > WEAR_MAX:
            self.node_ms //= 2
            self.losses //= 2

    def between_ms(self, nodes: int) -> int:
        """The mean time between losses for a gang on this many nodes."""
        return (NODE_BELIEF_MS + self.node_ms) // (1 + self.losses) // max(1, nodes)


class Ages(msgspec.Struct):
    """How old recent jobs were when they ended."""

    total_ms: int = 0
    jobs: int = 0

    def add(self, age_ms: int) -> None:
        self.total_ms += age_ms
        self.jobs += 1
        if self.jobs > AGES_MAX:
            self.total_ms //= 2
            self.jobs //= 2


class Unfolded(msgspec.Struct):
    """The elements of an array that are live jobs, and how many of them were never placed."""

    jobs: dict[str, None] = {}
    fresh: int = 0
