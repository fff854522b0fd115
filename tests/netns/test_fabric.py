"""Hosts in two groups: a tour finds how they are wired, at which rates, and which host is slow."""

from __future__ import annotations

import subprocess

import msgspec
from harness.hosts import Host, Net

from shoal.model.fabric import FabricView
from shoal.model.health import Standing
from shoal.model.policy import Places
from tests.netns.cluster import POLICY, Cluster

NEAR, FAR, SLOW = 400, 160, 48  # Mbit/s: within a group, between groups, of the slow host
GROUPS = (("n1", "h1", "h2"), ("h3", "h4", "h5"))
SLOWED = "h5"
SHAPE = ("burst", "64kb", "latency", "50ms")


def ip(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def shape(host: Host, device: str, mbit: int) -> None:
    """What leaves the host there; each host does so, which shapes both directions."""
    limit = ("root", "tbf", "rate", f"{mbit}mbit", *SHAPE)
    ip("tc", "-n", host.namespace, "qdisc", "replace", "dev", device, *limit)


def wire(net: Net, hosts: dict[str, Host]) -> None:
    """Hosts of a group are on one switch. To the other group each has a slower cable to a spine,
    which is a switch, too. So rounds of a tour, with each host in one pair, do not share cables."""
    ip("ip", "-n", net.switch, "link", "add", "spine", "type", "bridge")
    ip("ip", "-n", net.switch, "link", "set", "spine", "up")
    for number, host in enumerate(hosts.values(), 1):
        space = ("ip", "-n", host.namespace)
        peer = ("peer", "name", "eth1", "netns", host.namespace)
        ip("ip", "-n", net.switch, "link", "add", f"up{number}", "type", "veth", *peer)
        ip("ip", "-n", net.switch, "link", "set", f"up{number}", "master", "spine", "up")
        ip(*space, "address", "add", far(host) + "/24", "dev", "eth1")
        ip(*space, "link", "set", "eth1", "up")
    for group in GROUPS:
        for name in group:
            host = hosts[name]
            for other in hosts.keys() - set(group):
                way = (hosts[other].address, "via", far(hosts[other]), "src", host.address)
                ip("ip", "-n", host.namespace, "route", "add", *way)
            shape(host, "eth0", SLOW if name == SLOWED else NEAR)
            shape(host, "eth1", SLOW if name == SLOWED else FAR)


def far(host: Host) -> str:
    return host.address.replace("10.77.", "10.78.")


def toured(cluster: Cluster) -> FabricView:
    begun = cluster.ask(lambda client: client.check_network())
    found = begun

    def over() -> bool:
        nonlocal found
        found = cluster.ask(lambda client: client.tour(begun.id, wait_s=10))
        return found.ended_ms is not None

    cluster.until(over, "the tour does not end")
    return found


def standing(cluster: Cluster) -> str:
    (node,) = [node for node in cluster.nodes() if node.id == SLOWED]
    return node.standing


def placed(cluster: Cluster, members: int) -> set[str]:
    """Where a gang runs; it runs on."""
    job = cluster.wait(cluster.submit("sleep 1000", members=members, gpus=1), "running")
    assert job.state == "running", cluster.story()
    return set(job.nodes)


def test_wiring_rates_and_the_slow_host_are_found_and_placement_avoids_it(net: Net) -> None:
    cluster = Cluster(net, tuple(name for group in GROUPS for name in group)[1:])
    try:
        wire(net, cluster.hosts)
        measured = msgspec.structs.replace(POLICY, place=Places.MEASURED)
        cluster.ask(lambda client: client.set_policy(measured))
        found = toured(cluster)
        # Suspected by this tour, it is measured again with a few others before it is closed.
        cluster.until(lambda: standing(cluster) == Standing.QUARANTINED, f"{SLOWED} is not closed")
        assert placed(cluster, 3) == set(GROUPS[0])
        assert placed(cluster, 2) == set(GROUPS[1]) - {SLOWED}
    finally:
        cluster.close()
    assert len(found.links) == 15
    group = {name: number for number, names in enumerate(GROUPS) for name in names}
    off = []
    for link in found.links:
        usual = NEAR if group[link.a] == group[link.b] else FAR
        there, back = (SLOW if end == SLOWED else usual for end in (link.a, link.b))
        # The links were shaped with headers, and rates are whole MB/s.
        for mbs, mbit in ((link.mbs, there), (link.back_mbs, back)):
            if abs(mbs - mbit / 8) > max(0.5, 0.1 * mbit / 8):
                off.append(f"{link}: {mbit} Mbit/s")
    # On cores that others use, too, a flow now and then does not fill its link.
    assert len(off) <= len(found.links) // 5, off
    assert [(one.node, one.peer) for one in found.weak] == [(SLOWED, "")]
    assert {frozenset(names) for names in GROUPS} == {
        frozenset(name for name, place in found.places.items() if place == of)
        for of in found.places.values()
    }
