"""Members of a replay that sleep: what their nodes do, and what that costs.

A member takes as long as its memory on GPUs takes to move, by the rates that the scheduler assumes
of a node that has shown none (`core/scheduling/sleeping.py`). No member refuses to sleep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from shoal.core.scheduling.sleeping import LOCK_MS, SLEEP_MB_S, TURN_MB, WAKE_MB_S
from shoal.model.commands import Sleep, Wake
from shoal.model.job import MemberRef
from shoal.model.node import NodeSpec
from shoal.model.report import Uses
from shoal.model.resources import WHOLE_GPU_MILLI
from shoal.sim.replay.attempts import Attempt

if TYPE_CHECKING:
    from shoal.sim.replay.simulated import SimCluster, SimNode

# Memory of a node that a trace does not describe: 2 TB beside 8 GPUs, as servers with H200 have.
HOST_MB_PER_GPU = 250_000


def able_to_sleep(nodes: Sequence[NodeSpec], *, remaps: bool = False) -> list[NodeSpec]:
    """The same nodes, but each that has GPUs can put jobs to sleep. What a node says of its memory
    counts; one that says nothing has enough for a few sleepers."""
    return [
        node
        if node.sleep or not node.gpus
        else msgspec.structs.replace(
            node,
            sleep="cuda",
            sleep_why="",
            remaps=remaps,
            memory_mb=node.memory_mb or node.gpus * HOST_MB_PER_GPU,
            gpu_memory_mb=node.gpu_memory_mb or TURN_MB,
        )
        for node in nodes
    ]


def gpu_mb(node: NodeSpec, attempt: Attempt, number: int) -> int:
    """What a member has on its GPUs: as the trace says, else as much as TURN_MB on each."""
    slice_ = attempt.slices[number]
    each = attempt.sim_job.arrival.gpu_mb or TURN_MB
    if node.gpu_memory_mb:
        each = min(each, node.gpu_memory_mb)
    return each * len(slice_.gpus) * slice_.gpu_milli // WHOLE_GPU_MILLI


class Sleepers:
    """A job does nothing from the first command to sleep until its last member is awake. One that
    was idle when it was put to sleep misses nothing until it would have worked again; then its user
    comes back, and it is `touched`."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self.touched: list[str] = []  # jobs, for the next step

    def uses(self, node: SimNode) -> tuple[Uses, ...]:
        attempts = self._cluster.attempts
        return tuple(
            Uses(ref, gpu_mb(node.spec, attempts[ref.job], ref.member))
            for ref in node.book.alive
            if ref.job in attempts and attempts[ref.job].number == ref.attempt
        )

    def take(self, node: SimNode, command: Sleep | Wake) -> None:
        ref, cluster = command.ref, self._cluster
        attempt = cluster.attempts[ref.job]
        moved_mb = gpu_mb(node.spec, attempt, ref.member) if node.spec.sleep == "cuda" else 0
        if type(command) is Sleep:
            if attempt.doze_ms < 0 and not attempt.idle:
                attempt.doze_ms = cluster.now_ms
            attempt.down += 1
            node.idle.pop(ref, None)
            took_ms = LOCK_MS + moved_mb * 1000 // SLEEP_MB_S
            cluster.at(cluster.now_ms + took_ms, self._slept, (node, ref, moved_mb, took_ms))
        else:
            took_ms = LOCK_MS + moved_mb * 1000 // WAKE_MB_S
            cluster.at(cluster.now_ms + took_ms, self._awoke, (node, ref, attempt, took_ms))

    def _slept(self, subject: tuple[SimNode, MemberRef, int, int]) -> None:
        node, ref, moved_mb, took_ms = subject
        if ref in node.book.dozing:  # else it ended first
            node.book.slept(ref, moved_mb, took_ms)
            self._cluster.reports(node.spec.id)

    def _awoke(self, subject: tuple[SimNode, MemberRef, Attempt, int]) -> None:
        node, ref, attempt, took_ms = subject
        if ref not in node.book.waking:
            return
        node.book.awoke(ref, took_ms)
        self._cluster.reports(node.spec.id)
        attempt.down -= 1
        if attempt.idle:
            node.idle[ref] = self._cluster.now_ms
        if attempt.down:
            return
        if attempt.doze_ms >= 0:
            attempt.begin_ms += self._cluster.now_ms - attempt.doze_ms
            attempt.doze_ms = -1
        late, attempt.late = attempt.late, []
        for offset_ms, happen in late:
            self._cluster.in_its_run(attempt, offset_ms, happen)

    def missed(self, attempt: Attempt) -> None:
        """The time has come for something that the sleeper can only do awake."""
        if attempt.doze_ms < 0:
            attempt.doze_ms = self._cluster.now_ms
            self.touched.append(attempt.job)
