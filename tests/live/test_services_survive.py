"""Services on a full cluster of two racks: roll-outs with no room, gangs, and what is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import msgspec
import pytest
from harness.waiting import until

from shoal.control.home import ClusterConfig
from shoal.model.job import JobSpec
from shoal.model.node import NodeSpec
from shoal.model.service import Rollout, Scale, ServiceSpec
from shoal.model.views import ReplicaView
from tests.live.cluster import all_pids, live_cluster
from tests.live.serving import Serving, need_gateway, replica_ports

PLACES = {"n1": "b/r1", "n2": "b/r1", "n3": "b/r2", "n4": "b/r2"}


@pytest.fixture(scope="module")
def full() -> Iterator[Serving]:
    """Four nodes in two racks; each has room for one member of a replica."""
    need_gateway()
    nodes = tuple(
        NodeSpec(id=name, gpus=0, cpu_milli=1_000, memory_mb=1_000, place=place)
        for name, place in PLACES.items()
    )
    with live_cluster(config=ClusterConfig(nodes=nodes, port=0)) as live:
        policy = live.client.policy()
        live.client.set_policy(msgspec.structs.replace(policy, **replica_ports()))
        yield Serving(live, "chat")


def put(serving: Serving, replica: JobSpec, replicas: int, **fields: object) -> int:
    scale = Scale(least=replicas, most=replicas)
    wish = {"name": serving.name, "replica": whole(replica), "scale": scale, "drain_ms": 10_000}
    spec = ServiceSpec(**wish, **fields)  # type: ignore[arg-type]
    return serving.live.client.submit_service(spec).version


def whole(replica: JobSpec, **fields: object) -> JobSpec:
    """A member of it fills a node."""
    return msgspec.structs.replace(replica, cpu_milli=1_000, **fields)


def gang(serving: Serving, name: str) -> JobSpec:
    script = f"exec {sys.executable} -m tests.live.gang_replica {name}"
    return whole(serving.shell(script), members=2, members_per_node=1)


def racks(replicas: list[ReplicaView]) -> list[list[str]]:
    return sorted(sorted({PLACES[node] for node in replica.nodes}) for replica in replicas)


def member_pid(job: str, rank: int) -> int:
    """The process of a member, by what Shoal has put into its environment."""
    wanted = {f"SHOAL_JOB_ID={job}".encode(), f"RANK={rank}".encode()}
    for pid in all_pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if wanted <= set(file.read().split(b"\0")):
                return pid
    raise AssertionError(f"{job} has no member {rank}")


def test_a_full_cluster_is_rolled_out_without_a_failed_request(full: Serving) -> None:
    put(full, full.replica("v1"), 4)
    view = full.settles()
    assert sorted(replica.node for replica in view.replicas) == sorted(PLACES)
    with full.clients() as clients:
        clients.more()
        version = put(full, full.replica("v2"), 4)
        until(lambda: "--rollout replace" in full.view().why, more=lambda: full.view().why)
        assert full.view().state == "rolling"
        assert full.view().ready == 4, "nothing was given up for what has no room"
        clients.more()
        put(full, full.replica("v2"), 4, rollout=Rollout.REPLACE, at_a_time=2)
        view = full.settles(version=version)
        assert {replica.version for replica in view.replicas} == {version}
        clients.more()
        # Another shape: two gangs take the places of four single replicas.
        version = put(full, gang(full, "v3"), 2, rollout=Rollout.REPLACE, at_a_time=2)
        view = full.settles(version=version)
        assert racks(view.replicas) == [["b/r1"], ["b/r2"]], "a gang stays in its rack"
        clients.more()
    assert not clients.failures
    assert clients.of("v1") and clients.of("v2") and clients.of("v3")


@pytest.mark.parametrize("how", [pytest.param("member", marks=pytest.mark.soak), "agent"])
def test_a_gang_that_loses_a_member_is_replaced_as_one_under_load(full: Serving, how: str) -> None:
    put(full, gang(full, "v3"), 2, rollout=Rollout.REPLACE, at_a_time=2)
    before = full.settles()
    lost = before.replicas[0]
    with full.clients(method="GET") as clients:
        # Both get requests: the only one would leave nobody to try again at.
        until(lambda: all(r.requests_per_s for r in full.view().replicas))
        leader = member_pid(lost.job, 0)
        if how == "member":
            os.kill(member_pid(lost.job, 1), signal.SIGKILL)
        else:
            full.live.kill_agent(lost.nodes[1])
        until(lambda: leader not in all_pids(), "member 0 went with it")
        until(lambda: full.view().ready == 2, more=lambda: full.view().why)
        clients.more()
    assert not clients.failures
    after = full.settles()
    assert racks(after.replicas) == [["b/r1"], ["b/r2"]]


def test_a_rack_that_is_lost_leaves_half_and_no_service_outlives_its_stop(full: Serving) -> None:
    put(full, full.replica("v4"), 4, rollout=Rollout.REPLACE, at_a_time=4)
    view = full.settles()
    kept = {replica.job for replica in view.replicas if PLACES[replica.node] == "b/r1"}
    for node in ("n3", "n4"):
        full.live.kill_agent(node)
    assert len(kept) == 2
    assert full.ask().body == "v4"
    until(lambda: full.view().ready == 4, more=lambda: full.view().why)
    assert kept <= {replica.job for replica in full.view().replicas}, "the others came back there"
    full.live.client.stop_service(full.name)
    until(full.gone)
