"""Kubernetes keeps the contract: the supplier makes pods, a kubelet runs them as processes, and the
agents in them dial a real TLS port."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.kubernetes.kube import REAL, Kube
from harness.kubernetes.kubelet import Kubelet
from harness.waiting import until

from shoal.api.handling import Handler, handles
from shoal.api.http import Connection
from shoal.api.joining import NodeLink
from shoal.api.principal import SCOPE, Principal
from shoal.api.tls import STATE, Certificate
from shoal.calls.page import MachineCalls
from shoal.client.transport import fingerprint
from shoal.control import certificates
from shoal.engines.kubernetes.supplier import KubernetesSupplier
from shoal.model.identity import Role
from shoal.model.joining import Joined, Joining
from shoal.model.supply import Provision, Supply
from shoal.ports import SupplyContext
from tests.engines.contract import ProcessContract
from tests.engines.hand import Rig, clean
from tests.engines.linked_rig import NAME, Head, Keys, LinkedRig

if REAL:
    pytest.skip("a real API server has kubelets of its own", allow_module_level=True)

SECRET = "shoal_01234567_0123456789abcdef"


class KeysAndToken(Keys):
    """The join token opens the route to join, and nothing else."""

    async def guard(self, connection: Connection, handler: Handler) -> None:
        if connection.scope["path"] == "/v1/certificate":
            return
        given = connection.headers.get("authorization", "").removeprefix("Bearer ")
        if given == SECRET and connection.scope["path"] == "/v1/join":
            connection.scope[SCOPE] = Principal(
                user="join token", tenant="", role=Role.VIEWER, key="t"
            )
            return
        await super().guard(connection, handler)


@handles(MachineCalls.join)
async def join(data: Joining) -> Joined:
    return Joined(node=data.spec.id, key=f"key-of-{data.spec.id}", labels={"zone": "z1"})


class JoinedHead(Head):
    routes = (NodeLink, Certificate, join)

    def __init__(self, anchor: str, *parts: Any) -> None:
        super().__init__(*parts)
        self._app.state[STATE] = lambda: anchor


class KubernetesRig(LinkedRig):
    nodes = ("gpu-1", "gpu-2")

    def __init__(self, scratch: Path) -> None:
        Rig.__init__(self, scratch)
        self.keys = KeysAndToken(self.nodes)
        self._door = socket.create_server((NAME, 0))
        self.port = self._door.getsockname()[1]
        self.served = certificates.own(scratch / "tls", (NAME,))
        self.context = certificates.context_of(self.served)
        self.kube = Kube(scratch)
        self.kubelet = Kubelet(self.kube, scratch / "pods")
        for machine in ("k1", "k2"):
            self.kube.add_machine(machine, amounts={"nvidia.com/gpu": "4"})
        asyncio.run(self._order())

    async def _order(self) -> None:
        supply = Supply(
            name="gpu",
            engine="kubernetes",
            gpus=4,
            cpu_milli=8_000,
            memory_mb=4_000,
            lot=2,
            options={"image": "shoal", "kubeconfig": self.kube.kubeconfig, "owner": "shoal-nodes"},
        )
        supplier = KubernetesSupplier(
            SupplyContext(
                cluster="1a2b3c4d",
                home=self.scratch,
                join_url=f"https://{NAME}:{self.port}",
                join_token=f"{SECRET}.{fingerprint(self.served.anchor)}",
                python="",
                supplies=lambda: (supply,),
            )
        )
        try:
            head = self.engine()
            await head.start(Deaf())
            await supplier.provision(Provision(order="o1", supply=supply, nodes=self.nodes))
            await asyncio.to_thread(
                until, lambda: all(self.pid(node) for node in self.nodes), "no agent starts"
            )
            await head.close()
        finally:
            await supplier.close()

    def engine(self) -> JoinedHead:
        return JoinedHead(self.served.anchor, self._door, self.context, self.keys)

    def directory(self, node: str) -> Path:
        pod = f"shoal-1a2b3c4d-o1-{self.nodes.index(node)}"
        return self.kubelet.folder_of(pod) / "home" / "nodes" / node

    def end(self) -> None:
        self.kubelet.end()
        self.kube.end()
        self._door.close()


class Deaf:
    """The inbox of a head that only lets nodes join."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_: 0


@pytest.fixture(scope="module")
def rig() -> Iterator[KubernetesRig]:
    scratch = Path(tempfile.mkdtemp(prefix="shoal-kube-"))
    made = KubernetesRig(scratch)
    try:
        yield made
    finally:
        made.end()
        clean(scratch)


@pytest.mark.soak  # the same agents over the same link as in test_linked.py
class TestKubernetes(ProcessContract):
    pass


def test_each_pod_got_a_machine_of_its_own_and_the_labels_that_the_head_knows(
    rig: KubernetesRig,
) -> None:
    machines = {pod["spec"]["nodeName"] for pod in rig.kube.pods().values()}
    assert machines == {"k1", "k2"}
    for node in rig.nodes:
        assert '"zone":"z1"' in (rig.directory(node) / "spec.json").read_text()
