"""A supplier, a probe and an order of one's own.

The supplier lends processes of the head's own machine: each order is one agent. A real one asks a
cloud instead, finds its orders there by the cluster's id, and leaves them alone when it is closed.
"""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path

from shoal.core.scheduling.order import Ordering
from shoal.model.node import NodeSpec
from shoal.model.supply import OrderPhase, OrderStatus, Provision, Release, SupplyReport
from shoal.ports import SupplierKind, SupplyContext, SupplyError
from shoal.probes.reading import Asked, Reading


class Lender:
    engine = "lender"

    def __init__(self, context: SupplyContext) -> None:
        self._context = context
        self._agents: dict[str, Process] = {}

    async def look(self) -> SupplyReport:
        orders = [
            OrderStatus(
                order=order,
                phase=OrderPhase.RUNNING if agent.returncode is None else OrderPhase.ENDED,
                handle=str(agent.pid),
            )
            for order, agent in self._agents.items()
        ]
        return SupplyReport(engine=self.engine, orders=tuple(orders))

    async def provision(self, command: Provision) -> None:
        if command.order in self._agents:
            return
        supply, context = command.supply, self._context
        folder = supply.options.get("folder", "")
        if not folder.startswith("/"):
            raise SupplyError(f"supply {supply.name}: folder: '{folder}' does not begin with /")
        (node,) = command.nodes
        self._agents[command.order] = await asyncio.create_subprocess_exec(
            *(context.python, "-m", "shoal.main", "join", context.join_url, "--foreground"),
            *("--name", node, "--home", f"{folder}/{command.order}"),
            *("--order", command.order, "--origin", supply.name),
            *("--gpus", str(supply.gpus), "--cpus", "2", "--memory", "1G"),
            env={**os.environ, "SHOAL_JOIN_TOKEN": context.join_token},
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=DEVNULL,
        )

    async def release(self, command: Release) -> None:
        agent = self._agents.get(command.order)
        if agent is not None and agent.returncode is None:
            agent.terminate()

    async def drain(self, node: NodeSpec, why: str) -> None:
        """There is nobody to report a sick machine to."""

    async def close(self) -> None:
        agents = [agent for agent in self._agents.values() if agent.returncode is None]
        for agent in agents:
            agent.terminate()
        for agent in agents:
            await agent.wait()


SUPPLIER = SupplierKind("the lender", ("folder",), Lender)


def open_files(_: Asked) -> Reading:
    """A figure that is shown beside the usual; a fault would fail the check."""
    in_use, _free, most = map(int, Path("/proc/sys/fs/file-nr").read_text().split())
    faults = ["all of the kernel's file handles are in use"] if in_use >= most else []
    return Reading({"open_files": in_use}, faults, [])


# Large gangs first.
largest = Ordering(
    job=lambda job: -job.spec.gpus * job.spec.members,
    rank=lambda _state, job, _now_ms: (-job.spec.gpus * job.spec.members,),
)
