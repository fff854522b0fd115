"""A whole cluster whose nodes are pods: the pool grows with the queue, survives what happens to
pods, and is given back.

With KUBECONFIG and KUBE_IMAGE, an image of this tree, the pods are those of a real cluster. One of
its machines must be this one, because the tests and the jobs share a folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness.kubernetes.kube import IMAGE, REAL, Kube
from harness.kubernetes.kubelet import Kubelet
from harness.waiting import until

from shoal.control.home import ClusterConfig
from shoal.model.policy import Policy
from shoal.model.supply import Supply
from tests.engines.hand import clean
from tests.live.cluster import Live, live_cluster

if REAL and not IMAGE:
    pytest.skip("KUBE_IMAGE names no image of this tree", allow_module_level=True)

ZONE = "topology.kubernetes.io/zone"
GPUS = {"nvidia.com/gpu": "2"}
FOREIGN = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "foreign", "labels": {"app": "other"}},
    "spec": {
        "terminationGracePeriodSeconds": 30,
        "containers": [{"name": "c", "image": IMAGE or "busybox", "command": ["sleep", "600"]}],
    },
}


class Pool:
    """The cluster, and the Kubernetes that it gets its nodes from."""

    def __init__(self, live: Live, kube: Kube) -> None:
        self.live, self.kube = live, kube

    def set(self, **fields: Any) -> None:
        """Use this supply from now on."""
        options = {
            "kubeconfig": self.kube.kubeconfig,
            "image": IMAGE or "registry.example/shoal:0.4",
            "owner": "shoal-nodes",
            "grace": "30",
            **({"pod": self._beside_us()} if self.kube.real else {}),
            **fields.pop("options", {}),
        }
        supply = Supply(
            name="pool",
            engine="kubernetes",
            gpus=2,
            cpu_milli=1_000,
            memory_mb=1_000,
            most=2,
            options=options,
            **{"idle_ms": 1_500, **fields},
        )
        self.live.client.set_policy(Policy(supply=(supply,), silent_after_ms=2_000, grace_ms=5_000))

    def _beside_us(self) -> str:
        """Pods of a real kubelet reach our loopback address and our folder."""
        folder = str(self.kube.folder)
        files = {"name": "files", "hostPath": {"path": folder}}
        mounts = [{"name": "files", "mountPath": folder}]
        inside = [{"name": "node", "volumeMounts": mounts}]
        spec = {"hostNetwork": True, "volumes": [files], "containers": inside}
        return msgspec.json.encode({"spec": spec}).decode()

    def pods(self) -> dict[str, Any]:
        found = self.kube.pods()
        return {name: pod for name, pod in found.items() if name != "foreign"}

    def running(self) -> list[str]:
        return [name for name, pod in self.pods().items() if pod["status"]["phase"] == "Running"]

    def end(self, *jobs: str) -> None:
        for job in jobs:
            assert self.live.wait(job, timeout_s=120) == "succeeded", self.live.output(job)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    scratch = Path(tempfile.mkdtemp(prefix="shoal-kube-"))
    scratch.chmod(0o777)
    kube = Kube(scratch)
    kubelet = None
    if kube.real:
        kube.lend({ZONE: "z2"}, {"nvidia.com/gpu": "4"})
    else:
        kubelet = Kubelet(kube, scratch / "pods")
        for number in (1, 2):
            kube.add_machine(f"k{number}", {ZONE: f"z{number}"}, GPUS)
    kube.admin("POST", kube.path("pods"), FOREIGN)
    try:
        with live_cluster(config=ClusterConfig(nodes=(), port=0, engine="kubernetes")) as live:
            made = Pool(live, kube)
            made.set()
            yield made
            made.live.client.set_policy(Policy())
            until(lambda: not made.pods(), "pods are left")
        assert kube.real or kube.server.invalid == []
        foreign = kube.pods()["foreign"]
        assert foreign["status"]["phase"] == "Running", "a foreign pod was touched"
    finally:
        if kubelet is not None:
            kubelet.end()
        kube.end()
        clean(scratch)


def test_the_pool_grows_with_the_queue_and_back_to_nothing(pool: Pool) -> None:
    assert pool.pods() == {}
    jobs = [pool.live.run("sleep 1", gpus=2) for _ in range(4)]
    until(lambda: len(pool.running()) == 2, "the pool does not grow to two")
    pool.end(*jobs)
    until(lambda: not pool.pods(), "the pool is not given back")


def test_a_node_takes_over_the_labels_of_its_machine(pool: Pool) -> None:
    pool.set(options={"selector": f"{ZONE}=z2"})
    job = pool.live.run("sleep 0.1", gpus=1)
    until(lambda: [node for node in pool.live.client.nodes() if node.health == "ready"], "no node")
    (node,) = [node for node in pool.live.client.nodes() if node.health == "ready"]
    assert node.labels[ZONE] == "z2"
    pool.end(job)
    pool.set()


def test_an_evicted_pod_ends_in_order_and_its_job_goes_on_elsewhere(pool: Pool) -> None:
    script = 'if [ -e "$0" ]; then exit 0; fi; touch "$0"; exec sleep 600'
    marker = str(pool.kube.folder / "evicted")
    spec = pool.live.spec("sh", "-c", script, marker, gpus=2)
    job = pool.live.client.submit(spec).id
    assert pool.live.wait(job, "running", 120) == "running"
    (pod,) = pool.running()
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    pool.kube.admin("POST", pool.kube.path("pods", pod) + "/eviction", eviction)
    pool.end(job)
    assert pod not in pool.pods()
    assert "Eviction API: evicting" in str(pool.live.client.events())


def test_a_pod_that_an_admin_deletes_at_once_costs_its_job_one_attempt(pool: Pool) -> None:
    script = 'if [ -e "$0" ]; then exit 0; fi; touch "$0"; exec sleep 600'
    marker = str(pool.kube.folder / "deleted")
    job = pool.live.client.submit(pool.live.spec("sh", "-c", script, marker, gpus=2)).id
    assert pool.live.wait(job, "running", 120) == "running"
    (pod,) = pool.running()
    now = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
    pool.kube.admin("DELETE", pool.kube.path("pods", pod), now)
    pool.end(job)


def test_an_outage_of_the_api_server_does_not_disturb_jobs(pool: Pool) -> None:
    if pool.kube.real:
        pytest.skip("only the tests' own API server can be stopped; unset KUBECONFIG")
    marker = pool.kube.folder / "go"
    job = pool.live.run(f"until [ -e {marker} ]; do sleep 0.05; done; echo done", gpus=2)
    assert pool.live.wait(job, "running", 120) == "running"
    pool.kube.run(pool.kube.server.stop())
    until(
        lambda: "127.0.0.1" in pool.live.client.supply().supplies[0].state,
        "the outage is not reported",
    )
    marker.touch()
    pool.end(job)
    pool.kube.run(pool.kube.server.start())
    until(lambda: not pool.pods(), "nothing is given back after the outage")


@pytest.mark.soak  # test_supplier.py reads what such a pod says
def test_a_missing_image_is_named_and_its_replacement_is_used(pool: Pool) -> None:
    pool.set(options={"image": "registry.example/missing:1"})
    job = pool.live.run("true", gpus=2)
    until(
        lambda: (
            "registry.example/missing:1" in str(pool.live.client.supply().orders)
            and "registry.example/missing:1" in pool.live.client.why(job).why
        ),
        "the reason is not shown",
    )
    pool.live.client.cancel(job)
    until(lambda: not pool.pods(), "the order is not given back")
    pool.set()
    pool.end(pool.live.run("true", gpus=2))
