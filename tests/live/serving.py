"""Services of a test on a real cluster, and what a test wants to know of them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import msgspec
import pytest
from harness.waiting import until

from shoal.core.state.events.services import ServiceScaled
from shoal.gateway.binary import GatewayError, find_binary
from shoal.model.job import JobSpec
from shoal.model.service import Probe, Route, Routing, Scale, ServiceSpec
from shoal.model.tokens import Goals
from shoal.model.views import ServiceView
from tests.gateway.world import ROOT, Answer, Clients, get
from tests.live.cluster import Live, all_pids, live_cluster

# Clusters listen on 10,000 to 20,000, their gangs meet on 20,000 to 32,000, and what lies above
# belongs to outgoing connections: a replica must find its port free, so each worker of the test
# run has some of its own.
PORTS = range(4_000, 8_000, 500)


@contextmanager
def serving_cluster() -> Iterator[Live]:
    need_gateway()
    with live_cluster(nodes=2, gpus=4) as live:
        policy = live.client.policy()
        live.client.set_policy(msgspec.structs.replace(policy, **replica_ports()))
        yield live


def need_gateway() -> None:
    try:
        find_binary()
    except GatewayError as error:
        pytest.skip(str(error))


def replica_ports() -> dict[str, int]:
    """As fields of a policy."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return {"port_first": PORTS[worker % len(PORTS)], "port_count": 500}


class Serving:
    """One service of a test, gone after it."""

    def __init__(self, live: Live, name: str) -> None:
        self.live = live
        self.name = name

    def replica(self, name: str) -> JobSpec:
        script = f"exec {sys.executable} -m tests.gateway.replica $PORT {name}"
        return self.shell(script)

    def shell(self, script: str) -> JobSpec:
        env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        return self.live.spec("sh", "-c", script, env=env, workdir=str(ROOT), cpu_milli=100)

    def put(
        self,
        replica: JobSpec,
        scale: Scale | None = None,
        probe: Probe | None = None,
        route: Route | None = None,
    ) -> ServiceView:
        spec = ServiceSpec(
            name=self.name,
            replica=replica,
            scale=scale or Scale(),
            probe=probe or Probe(),
            route=route,
        )
        return self.live.client.submit_service(spec)

    def view(self) -> ServiceView:
        return self.live.client.service(self.name)

    def settles(self, state: str = "ready", version: int = 0) -> ServiceView:
        view = self.view()

        def settled() -> bool:
            nonlocal view
            view = self.view()
            return view.state == state and version in (0, view.version)

        until(settled, more=lambda: f"{view.state}, version {view.version}: {view.why}")
        return view

    def serve(self, name: str, scale: Scale | None = None) -> ServiceView:
        version = self.put(self.replica(name), scale).version
        return self.settles(version=version)

    @property
    def port(self) -> int:
        return urlsplit(self.view().url).port or 0

    def ask(self, path: str = "", method: str = "GET") -> Answer:
        return get(self.port, f"/{self.name}/{path}", method=method)

    def clients(self, path: str = "", count: int = 4, method: str = "POST") -> Clients:
        return Clients(self.port, f"/{self.name}/{path}", count, method)

    def pids(self) -> dict[str, int]:
        """The process of each replica, by the port on its command line."""
        found = {}
        for replica in self.view().replicas:
            port = replica.address.rpartition(":")[2].encode()
            for pid in all_pids():
                with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
                    if b"tests.gateway.replica" in words and port in words:
                        found[replica.job] = pid
        return found

    def scaled(self) -> list[ServiceScaled]:
        records = self.live.client.events(after=-1000, limit=1000).events
        found = [one.event for one in records if isinstance(one.event, ServiceScaled)]
        return [event for event in found if event.service == self.name]

    def gone(self) -> bool:
        return self.name not in [view.name for view in self.live.client.services()]


def language_model(live: Live, gpus: int = 0) -> Serving:
    """A service `chat` with a simulated engine and goals, behind the token router."""
    serving = Serving(live, "chat")
    replica = serving.shell(f"exec {sys.executable} -m harness.engine --speed 50 --model chat")
    spec = ServiceSpec(
        name="chat",
        replica=msgspec.structs.replace(replica, gpus=gpus),
        scale=Scale(least=1, most=1, target=16),
        probe=Probe(path="/v1/models", models=True),
        route=Route(service="chat", routing=Routing.CACHE, concurrency=16),
        goals=Goals(ttft_ms=2_000, share_milli=500),
    )
    live.client.submit_service(spec)
    serving.settles()
    return serving
