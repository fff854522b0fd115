"""The gateway as the controller uses it: one service's trouble is no other's."""

from __future__ import annotations

import socket

from harness.waiting import until

from shoal.gateway.gateway import HaproxyBalancer
from shoal.model.service import GatewayEntry, Route, Served, Wanted
from tests.gateway.world import World, get


def test_what_cannot_be_served_is_told_and_all_else_is(world: World) -> None:
    one, two = world.start("one", "two")
    balancer = HaproxyBalancer(world.directory)
    entry = GatewayEntry(port=world.port)

    def look(*services: Served) -> dict[str, str]:
        loads = balancer.look(Wanted(entry=entry, services=services))
        return {name: load.trouble for name, load in loads.items()}

    good = Served(route=Route(service="good"), replicas=(one,))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        bad = Served(route=Route(service="bad", port=port), replicas=(two,))
        # From the first moment on, as after a controller's restart.
        troubles = look(good, bad)
        assert troubles["good"] == ""
        assert f"service bad: cannot listen on 127.0.0.1 port {port}" in troubles["bad"]
        until(lambda: world.get("/good/").body == "one", "the good one")
        assert world.get("/bad/").status == 404
        # Changed into what cannot be, it stays as it was, with the replicas of now.
        plain = Served(route=Route(service="bad"), replicas=(one,))
        assert look(good, plain) == {"good": "", "bad": ""}
        until(lambda: world.get("/bad/").body == "one", "the plain one")
        assert "cannot listen" in look(good, bad)["bad"]
        until(lambda: world.get("/bad/").body == "two", "the other replica")
    assert look(good, bad) == {"good": "", "bad": ""}
    until(lambda: get(port, "/").body == "two", "a port of its own")
    assert look() == {}
