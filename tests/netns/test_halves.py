"""Four hosts in two racks with one cable between them: each link is fast, and the cut is not."""

from __future__ import annotations

import pytest
from harness.hosts import Net

from shoal.model.fabric import FabricView
from tests.netns.cluster import Cluster
from tests.netns.test_fabric import SHAPE, ip

UPLINK = 160  # Mbit/s, for both hosts of a rack together


def wire(net: Net) -> None:
    """The first two hosts on one switch, the others on a second."""
    space = ("ip", "-n", net.switch)
    ip(*space, "link", "add", "rack2", "type", "bridge")
    ip(*space, "link", "set", "rack2", "up")
    ip(*space, "link", "add", "up1", "type", "veth", "peer", "name", "up2")
    for device, master in (("up1", "bridge"), ("up2", "rack2")):
        ip(*space, "link", "set", device, "master", master, "up")
        limit = ("root", "tbf", "rate", f"{UPLINK}mbit", *SHAPE)
        ip("tc", "-n", net.switch, "qdisc", "replace", "dev", device, *limit)
    for number in (3, 4):
        ip(*space, "link", "set", f"port{number}", "master", "rack2")


@pytest.mark.soak
def test_a_cut_that_is_oversubscribed_shows_at_the_same_moment_only(net: Net) -> None:
    cluster = Cluster(net, ("h1",))
    found = FabricView(id="")
    try:
        cluster.join(net.add("h2"), net.add("h3"), flags=("--place", "b1/r2"))
        cluster.until(lambda: cluster.ready() == {"n1", "h1", "h2", "h3"}, "not all joined")
        wire(net)
        begun = cluster.ask(lambda client: client.check_network(halves=True))

        def over() -> bool:
            nonlocal found
            found = cluster.ask(lambda client: client.tour(begun.id, wait_s=10))
            return found.ended_ms is not None

        cluster.until(over, "the check does not end")
        said = cluster.shoal(cluster.head, "check", "--network", "--halves")
    finally:
        cluster.close()
    (half,) = found.halves
    assert not half.problem, half
    assert (set(half.one), set(half.other)) == ({"n1", "h1"}, {"h2", "h3"})
    both = UPLINK / 8  # either pair alone fills the cable, and both together no more
    assert abs(half.plan_mbs - 2 * both) < 0.25 * 2 * both, half
    assert abs(half.mbs - both) < 0.25 * both, half
    assert "% below" in said
