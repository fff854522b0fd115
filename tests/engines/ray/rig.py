"""Nodes of the linked rig that a real Ray started."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

from harness.ray import RealRay
from harness.waiting import until

from shoal.engines.ray import holder
from shoal.engines.ray.supplier import RaySupplier
from shoal.machine.files import LINK_FILE
from shoal.model.supply import OrderPhase, Provision, Release, Supply, SupplyReport
from shoal.ports import SupplyContext, SupplyError
from tests.engines.linked_rig import LinkedRig

CLUSTER = "0c0ffee0"
# The rig has made the nodes' folders, as `shoal join` would, so its place is taken by the starter.
STARTER = '#!/bin/sh\nexec {python} -m shoal.agent.starter "{nodes}/$7" --foreground\n'


class RayRig(LinkedRig):
    """The nodes of the linked rig, each started by an actor that holds its GPUs."""

    def __init__(self, scratch: Path, ray: RealRay) -> None:
        self._wanted: list[str] = []
        super().__init__(scratch)
        program = scratch / "starter"
        program.write_text(STARTER.format(python=sys.executable, nodes=scratch / "nodes"))
        program.chmod(0o755)
        options = {
            "address": ray.address,
            "token_file": str(ray.token_file),
            "python": str(program),
            "folder": str(scratch / "homes"),
        }
        self._supply = Supply(name="lent", engine="ray", gpus=4, most=2, options=options)
        self._context = SupplyContext(
            cluster=CLUSTER,
            home=scratch,
            join_url="",
            join_token="",
            python=sys.executable,
            supplies=lambda: (self._supply,),
        )
        try:
            asyncio.run(self._bring())
        except BaseException:
            self._door.close()
            self.proxy.close()
            raise

    def start(self, node: str, *words: str) -> None:
        self._wanted.append(node)

    async def _bring(self) -> None:
        supplier = RaySupplier(self._context)
        for number, node in enumerate(self._wanted):
            order = Provision(order=f"o{number}", supply=self._supply, nodes=(node,))
            for _ in range(3):  # a busy machine: the controller would say it again, too
                with contextlib.suppress(SupplyError):
                    await supplier.provision(order)
                    break
        await self._until(supplier, OrderPhase.RUNNING)
        await supplier.close()

    async def _release(self) -> None:
        supplier = RaySupplier(self._context)
        for number in range(len(self._wanted)):
            await supplier.release(Release(order=f"o{number}", engine="ray"))
        await self._until(supplier, OrderPhase.ENDED)
        await supplier.close()

    async def _until(self, supplier: RaySupplier, phase: OrderPhase) -> None:
        report = SupplyReport(engine="ray")
        for _ in range(450):
            report = await supplier.look()
            if [one.phase for one in report.orders] == [phase] * len(self._wanted):
                return
            await asyncio.sleep(0.2)
        raise AssertionError(report)

    def end(self) -> None:
        for node in self.nodes:
            (self.directory(node) / LINK_FILE).unlink()  # nobody would hear its last report
        asyncio.run(self._release())
        until(lambda: not holder.orders_here(CLUSTER), "agents are left")
        super().end()
