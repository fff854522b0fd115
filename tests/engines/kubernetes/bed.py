"""A supplier under test, and what its orders look like."""

from __future__ import annotations

import asyncio
import gc
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from harness.kubernetes.kube import Kube
from harness.waiting import WAIT_S

from shoal.engines.kubernetes.supplier import KubernetesSupplier
from shoal.model.supply import OrderStatus, Provision, Release, Supply, SupplyReport
from shoal.ports import SupplyContext

CLUSTER = "1a2b3c4d"
TOKEN = "shoal_0_secret."


def supply_in(kube: Kube, **options: str) -> Supply:
    words = {
        "kubeconfig": kube.kubeconfig,
        "namespace": kube.namespace,
        "image": "registry.example/shoal:0.4",
        "owner": "shoal-nodes",
        # A test binds its pods itself, so the scheduler of a real one must find no place for them.
        **({"selector": "shoal-test=nowhere"} if kube.real else {}),
        **options,
    }
    chosen = {word: text for word, text in words.items() if text}
    return Supply(name="gpu", engine="kubernetes", gpus=2, lot=2, most=8, options=chosen)


class Bed:
    def __init__(self, supply: Supply, cluster: str = CLUSTER) -> None:
        self.supply = supply
        self.changes = 0
        self.supplier = KubernetesSupplier(
            SupplyContext(
                cluster=cluster,
                home=Path("/nowhere"),
                join_url="https://127.0.0.1:1",
                join_token=TOKEN,
                python="python3",
                supplies=lambda: (self.supply,),
                changed=self._changed,
            )
        )

    def _changed(self) -> None:
        self.changes += 1

    async def provision(self, order: str = "o1") -> None:
        nodes = tuple(f"gpu-{order[1:]}{index}" for index in range(self.supply.lot))
        command = Provision(order=order, supply=self.supply, nodes=nodes, why="a job waits")
        await self.supplier.provision(command)

    async def release(self, order: str = "o1") -> None:
        await self.supplier.release(Release(order=order, engine="kubernetes"))

    async def order(self, order: str = "o1") -> OrderStatus | None:
        found = {one.order: one for one in (await self.supplier.look()).orders}
        return found.get(order)

    async def until(self, fact: Callable[[SupplyReport], bool]) -> SupplyReport:
        """Look until it is so."""
        deadline = time.monotonic() + WAIT_S
        while True:
            report = await self.supplier.look()
            if fact(report):
                return report
            assert time.monotonic() < deadline, report
            await asyncio.sleep(0.02)


def play(bed: Bed, scene: Callable[[Bed], Awaitable[None]]) -> None:
    async def run() -> None:
        try:
            await scene(bed)
        finally:
            await bed.supplier.close()

    run_to_its_end(run())


def run_to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """httpcore leaves a socket to the garbage collector if it is cancelled in a TLS handshake. That
    happens when a supplier is closed while its watch connects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        asyncio.run(work)
        gc.collect()
