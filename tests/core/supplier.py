"""A supplier in a test's hands: it has what it was asked for, and reports it when asked to."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.supply import (
    OrderPhase,
    OrderStatus,
    Provision,
    Release,
    Supply,
    SupplyReport,
)
from tests.core.build import POLICY, Cluster


def supply(**fields: Any) -> Supply:
    defaults: dict[str, Any] = {"name": "gpu", "engine": "slurm", "gpus": 8, "most": 4}
    return msgspec.convert({**defaults, **fields}, Supply)


def policy(*supplies: Supply, **fields: Any) -> Policy:
    return msgspec.structs.replace(POLICY, supply=supplies, **fields)


class Pool:
    """A cluster without nodes of its own, and one engine that brings them."""

    def __init__(self, *supplies: Supply, engine: str = "slurm", **fields: Any) -> None:
        self.cluster = Cluster(policy(*supplies, **fields))
        self.engine = engine
        self.orders: dict[str, Provision] = {}
        self.phases: dict[str, OrderStatus] = {}
        self.released: list[str] = []
        self.look()

    @property
    def asked(self) -> dict[str, int]:
        """Nodes on order at the supplier, by supply."""
        counts: dict[str, int] = {}
        for order_id, one in self.orders.items():
            if self.phases[order_id].phase is not OrderPhase.ENDED:
                counts[one.supply.name] = counts.get(one.supply.name, 0) + len(one.nodes)
        return counts

    def obey(self) -> None:
        """Carry out what the last step asked for."""
        for command in self.cluster.last.supplies:
            match command:
                case Provision():
                    if command.order not in self.orders:
                        self.orders[command.order] = command
                        self.is_(command.order, OrderPhase.PENDING, "Resources")
                case Release():
                    self.released.append(command.order)
                    self.is_(command.order, OrderPhase.ENDED, "CANCELLED")
                    for spec in self.specs(command.order):
                        self.cluster.books.pop(spec.id, None)

    def is_(self, order: str, phase: OrderPhase, reason: str = "", *, failed: bool = False) -> None:
        self.phases[order] = OrderStatus(order=order, phase=phase, reason=reason, failed=failed)

    def look(self, problem: str = "") -> None:
        """The supplier is asked, and what it says is acted on."""
        report = SupplyReport(
            engine=self.engine,
            orders=() if problem else tuple(self.phases.values()),
            problem=problem,
        )
        self.cluster.step(supplies=(report,))
        self.obey()

    def wait(self, milliseconds: int) -> None:
        """Time passes; nodes that are there keep reporting, and the supplier is asked."""
        end_ms = self.cluster.now_ms + milliseconds
        while self.cluster.now_ms < end_ms:
            self.cluster.wait(min(2_000, end_ms - self.cluster.now_ms))
            if self.cluster.books:
                self.cluster.hear(*self.cluster.books)
                self.obey()
                self.cluster.deliver()
            self.look()

    def submit(self, **fields: Any) -> str:
        self.cluster.wait(1_100)  # the demand is looked at once a second
        job_id = self.cluster.submit(**fields)
        self.obey()
        return job_id

    def specs(self, order: str) -> list[NodeSpec]:
        one = self.orders[order]
        return [
            NodeSpec(
                id=name,
                gpus=one.supply.gpus,
                cpu_milli=one.supply.cpu_milli or 64_000,
                memory_mb=one.supply.memory_mb or 64_000,
                origin=one.supply.name,
                order=order,
            )
            for name in one.nodes
        ]

    def bring(self, order: str, **fields: Any) -> None:
        """The supplier gives machines, and their agents report."""
        self.is_(order, OrderPhase.RUNNING)
        self.look()
        for spec in self.specs(order):
            self.cluster.bring(msgspec.structs.replace(spec, **fields))
            self.obey()
            self.cluster.deliver()
