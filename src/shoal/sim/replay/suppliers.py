"""The suppliers of a replay: they bring the nodes that the policy orders, after a delay, and may
refuse an order or lose it. The policy's `sim_delay`, `sim_refuse` and `sim_loss` say how."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from shoal.core.nodebook import NodeBook
from shoal.core.state.state import State
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.supply import (
    OrderPhase,
    OrderStatus,
    Provision,
    Release,
    Supply,
    SupplyCommand,
    SupplyReport,
)
from shoal.sim.replay.clusters import NEVER_MS
from shoal.sim.replay.metrics import SupplyUse, time_option_ms
from shoal.sim.replay.simulated import SimCluster, SimNode

DELAY_MS = 60_000  # from an order to its nodes, unless the policy says otherwise
CPU_MILLI, MEMORY_MB = 64_000, 1_000_000  # of a node whose supply does not say what it has
HOUR_MS = 3_600_000


class SimSuppliers:
    def __init__(self, policy: Policy, cluster: SimCluster, seed: int) -> None:
        self.uses = {one.name: SupplyUse(name=one.name) for one in policy.supply}
        self._cluster = cluster
        self._rng = random.Random(f"supply {seed}")
        self._engines = list(dict.fromkeys(one.engine for one in policy.supply))
        self._orders: dict[str, tuple[Provision, OrderStatus]] = {}
        self._began_ms: dict[str, int] = {}
        self._heap: list[tuple[int, int, str, OrderStatus]] = []
        self._pushed = 0
        self._news = bool(self._engines)  # the controller hears of the engines at once
        self._now_ms = 0

    def next_ms(self) -> int:
        if self._news:
            return self._now_ms
        return self._heap[0][0] if self._heap else NEVER_MS

    def take(self, commands: Sequence[SupplyCommand]) -> None:
        for command in commands:
            if isinstance(command, Provision) and command.order not in self._orders:
                self._provision(command)
            elif isinstance(command, Release) and command.order in self._orders:
                self._set(command.order, OrderPhase.ENDED, "CANCELLED")

    def look(self, state: State, now_ms: int) -> list[SupplyReport]:
        """What has happened by now; nothing if there is no news."""
        self._now_ms = now_ms
        while self._heap and self._heap[0][0] <= now_ms:
            _, _, order, status = heapq.heappop(self._heap)
            if order in self._orders and self._orders[order][1].phase is not OrderPhase.ENDED:
                self._set(order, status.phase, status.reason, failed=status.failed)
        if not self._news:
            return []
        self._news = False
        for order in [one for one in self._orders if one not in state.orders]:
            if self._orders[order][1].phase is OrderPhase.ENDED:
                del self._orders[order]  # the controller knows
        return [
            SupplyReport(
                engine=engine,
                orders=tuple(
                    status
                    for command, status in self._orders.values()
                    if command.supply.engine == engine
                ),
            )
            for engine in self._engines
        ]

    def close(self, now_ms: int) -> list[SupplyUse]:
        """What the nodes of each supply cost until now."""
        self._now_ms = now_ms
        for order in list(self._began_ms):
            self._book(order)
        return list(self.uses.values())

    def _provision(self, command: Provision) -> None:
        one, use = command.supply, self.uses[command.supply.name]
        use.orders += 1
        refused = self._rng.random() < float(one.options.get("sim_refuse", "0"))
        phase = OrderPhase.ENDED if refused else OrderPhase.PENDING
        use.refused += refused
        self._orders[command.order] = (
            command,
            OrderStatus(order=command.order, phase=phase, reason="refused", failed=refused),
        )
        self._news = True
        if not refused:
            delay_ms = time_option_ms(one, "sim_delay", DELAY_MS)
            self._later(command.order, self._now_ms + delay_ms, OrderPhase.RUNNING, "")

    def _later(
        self, order: str, at_ms: int, phase: OrderPhase, why: str, *, failed: bool = False
    ) -> None:
        self._pushed += 1
        status = OrderStatus(order=order, phase=phase, reason=why, failed=failed)
        heapq.heappush(self._heap, (at_ms, self._pushed, order, status))

    def _set(
        self, order: str, phase: OrderPhase, reason: str = "", *, failed: bool = False
    ) -> None:
        command, before = self._orders[order]
        if before.phase is phase:
            return
        status = OrderStatus(order=order, phase=phase, reason=reason, failed=failed)
        self._orders[order] = (command, status)
        self._news = True
        one = command.supply
        if phase is OrderPhase.RUNNING:
            self._began_ms[order] = self._now_ms
            for name in command.nodes:
                self._bring(name, one, order)
            if one.lasts_ms:
                self._later(order, self._now_ms + one.lasts_ms, OrderPhase.ENDED, "TIMEOUT")
            mean_ms = time_option_ms(one, "sim_loss", 0)
            if mean_ms:
                lost_ms = self._now_ms + 1 + int(self._rng.expovariate(1 / mean_ms))
                self._later(order, lost_ms, OrderPhase.ENDED, "NODE_FAIL", failed=True)
        elif order in self._began_ms:
            self.uses[one.name].lost += failed
            self._book(order)
            for name in command.nodes:
                self._cluster.switch_off(self._cluster.nodes[name], self._now_ms)

    def _book(self, order: str) -> None:
        command, _ = self._orders[order]
        one, use = command.supply, self.uses[command.supply.name]
        node_ms = (self._now_ms - self._began_ms.pop(order)) * len(command.nodes)
        use.node_hours += node_ms / HOUR_MS
        use.cost += node_ms / HOUR_MS * one.price / 1_000_000

    def _bring(self, name: str, one: Supply, order: str) -> None:
        spec = NodeSpec(
            id=name,
            gpus=one.gpus,
            gpu_model=one.gpu_model,
            gpu_memory_mb=one.gpu_memory_mb,
            cpu_milli=one.cpu_milli or CPU_MILLI,
            memory_mb=one.memory_mb or MEMORY_MB,
            containers="podman",
            labels=one.labels,
            taints=one.taints,
            origin=one.name,
            order=order,
        )
        cluster, node = self._cluster, self._cluster.nodes.get(name)
        if node is None:
            node = SimNode(spec, len(cluster.order), 1.0)
            cluster.order.append(node)
            cluster.nodes[name] = node
        else:
            node.book = NodeBook(spec, node.book.incarnation + 1)
        cluster.switch_on(node, self._now_ms)
