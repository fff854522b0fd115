"""The rendered configuration is what the golden files say, and HAProxy takes it.

After a change on purpose: SHOAL_GOLDEN=write python -m pytest tests/gateway/test_render.py
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import msgspec
import pytest
from harness.sites import door_certificate

from shoal.gateway.binary import GatewayError, find_binary
from shoal.gateway.guard import CALLERS
from shoal.gateway.render import Place, digest, render
from shoal.gateway.sites import RANKS, file_name, pems
from shoal.model.far import Far
from shoal.model.service import (
    GatewayEntry,
    Replica,
    Route,
    Routing,
    Served,
    Wanted,
    problem_with_services,
)
from shoal.model.tokens import ReplicaState

CERTIFICATE, PEM = door_certificate("west")
GOLDEN = Path(__file__).parent / "golden"
PLACE = Place()


def replicas(*ports: int) -> tuple[Replica, ...]:
    return tuple(Replica(id=f"r{port}", address="10.0.0.1", port=port) for port in ports)


CASES = {
    "empty": Wanted(),
    "plain": Wanted(
        services=(Served(route=Route(service="chat", concurrency=8), replicas=replicas(1, 2)),)
    ),
    "models": Wanted(
        services=(
            Served(
                route=Route(service="chat", routing=Routing.CACHE, concurrency=8),
                replicas=replicas(1, 2),
            ),
            Served(
                route=Route(service="code", routing=Routing.CACHE, access=("art",)),
                tenant="lab",
                replicas=replicas(3),
            ),
            Served(route=Route(service="web", access=("cluster",)), tenant="lab"),
        ),
    ),
    "all": Wanted(
        entry=GatewayEntry(address="::", port=443, certificate="/etc/gateway.pem", threads=2),
        services=(
            Served(
                route=Route(service="p2c", routing=Routing.P2C, rate_per_s=10, rate_header="x-key"),
                replicas=(
                    Replica(id="six", address="fd00::1", port=80, weight=50),
                    Replica(id="old", address="10.0.0.9", port=81, state=ReplicaState.DRAINING),
                ),
            ),
            Served(route=Route(service="llm", routing=Routing.PREFIX, host="llm.example.com")),
            Served(route=Route(service="user", routing=Routing.STICKY, sticky_header="X-User")),
            Served(
                route=Route(
                    service="web",
                    routing=Routing.STICKY,
                    sticky_cookie="sid",
                    path="/web/app",
                    port=8443,
                    certificate="web-tls",
                    body_bytes_max=0,
                ),
                certificate="a certificate and its key",
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_configuration_is_as_written_down(name: str) -> None:
    text = render(CASES[name], PLACE)
    path = GOLDEN / f"{name}.cfg"
    if os.environ.get("SHOAL_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("lua", [True, False])
@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("routing", list(Routing))
def test_haproxy_takes_it(tmp_path: Path, routing: Routing, lua: bool, log: bool) -> None:
    try:
        binary = find_binary()
    except GatewayError as error:
        pytest.skip(str(error))
    import shoal.gateway.render as module

    (tmp_path / "hold.lua").write_text(Path(module.__file__).with_name("hold.lua").read_text())
    route = Route(
        service="chat",
        routing=routing,
        sticky_header="X-User" if routing is Routing.STICKY else "",
        rate_per_s=3,
        host="chat.example.com",
        concurrency=4,
    )
    wanted = Wanted(services=(Served(route=route, replicas=replicas(1, 2)),))
    (tmp_path / "callers.map").touch()
    (tmp_path / "it.cfg").write_text(render(wanted, Place(lua=lua, log=log)))
    done = subprocess.run(
        [binary.path, "-c", "-f", "it.cfg"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr


def shared(*routes: Route, far: tuple[Far, ...]) -> Wanted:
    services = tuple(Served(route=route, far=far, replicas=replicas(1)) for route in routes)
    return Wanted(entry=GatewayEntry(door=8081, door_pem=PEM), services=services)


def test_haproxy_takes_services_of_several_sites(tmp_path: Path) -> None:
    try:
        binary = find_binary()
    except GatewayError as error:
        pytest.skip(str(error))
    far = tuple(
        Far(site=site, address=address, port=8081, certificate=CERTIFICATE)
        for site, address in (("west", "10.0.0.2"), ("south.1", "fd00::2"))
    )
    routes = [
        Route(service="a", concurrency=8, rate_per_s=3, host="a.example.com", port=8100),
        Route(service="b", routing=Routing.PREFIX, access=("cluster",)),
        Route(service="c", routing=Routing.STICKY, sticky_cookie="sid", retries=0),
        Route(service="d", routing=Routing.CACHE),
        Route(service="e", routing=Routing.P2C, concurrency=1),
    ]
    wanted = shared(*routes, far=far)
    text = render(wanted, Place(lua=False))
    for one in pems(wanted).values():
        (tmp_path / file_name(one)).write_text(one)
    for file in (CALLERS, RANKS):
        (tmp_path / file).touch()
    (tmp_path / "it.cfg").write_text(text)
    done = subprocess.run(
        [binary.path, "-c", "-f", "it.cfg"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr
    assert "_far-b" in text and "_far-d" not in text  # the token router sees its own cluster only


def test_a_feature_that_is_not_used_changes_no_configuration() -> None:
    """So an upgrade needs no reload."""
    wanted = CASES["plain"]
    entry = GatewayEntry(door=8081, door_pem=PEM)
    assert digest(msgspec.structs.replace(wanted, entry=entry), PLACE) == digest(wanted, PLACE)
    far = Far(site="west", address="10.0.0.2", port=8081, certificate=CERTIFICATE)
    route = wanted.services[0].route
    used = digest(shared(route, far=(far,)), PLACE)
    priced = msgspec.structs.replace(far, price=1_000_000)
    moved = msgspec.structs.replace(far, address="10.0.0.3")
    assert digest(shared(route, far=(priced,)), PLACE) == used != digest(wanted, PLACE)
    assert digest(shared(route, far=(moved,)), PLACE) != used


def test_only_routes_name_a_configuration_not_replicas_or_weights() -> None:
    wanted = CASES["plain"]
    without = msgspec.structs.replace(wanted, services=(Served(route=wanted.services[0].route),))
    assert digest(wanted, PLACE) == digest(without, PLACE)
    assert f"description shoal:{digest(wanted, PLACE)}\n" in render(wanted, PLACE)
    for field in ("concurrency", "queue_max", "retries"):
        route = msgspec.structs.replace(wanted.services[0].route, **{field: 5})
        other = msgspec.structs.replace(wanted, services=(Served(route=route),))
        assert digest(other, PLACE) != digest(wanted, PLACE), field


def test_weights_and_drains_survive_a_reload() -> None:
    text = render(CASES["plain"], PLACE, {("chat", "r1"): 7})
    assert " weight 7 " in text and " weight 100 " in text
    assert re.search(r"server old 10.0.0.9:81 id \d+ weight 0 ", render(CASES["all"], PLACE))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"routing": Routing.STICKY}, "needs either sticky_header or sticky_cookie"),
        ({"sticky_header": "X"}, "need routing: sticky"),
        ({"certificate": "x-tls"}, "certificate of its own needs a port of its own"),
        (
            {"certificate": "/x.pem", "port": 1},
            "'/x.pem' is not the name of a secret; set one with",
        ),
        ({"path": "chat"}, "is not a path such as /chat"),
        ({"path": "/"}, "is not a path such as /chat"),
        ({"port": 8080}, "port 8080 is already used by the gateway itself"),
    ],
)
def test_what_makes_no_sense_is_named(change: dict[str, object], problem: str) -> None:
    route = msgspec.structs.replace(Route(service="chat"), **change)
    said = problem_with_services(Wanted(services=(Served(route=route),)))
    assert said is not None and problem in said and said.startswith("service chat: ")


@pytest.mark.parametrize(
    "route",
    [
        {"service": "a b"},
        {"service": "Chat"},
        {"service": "_entry"},
        {"service": "chat", "host": "x\n    bind :1"},
        {"service": "chat", "path": "/x }"},
        {"service": "chat", "sticky_header": "X) or"},
        {"service": "chat", "certificate": "/a b.pem"},
        {"service": "chat", "header_bytes_max": 1 << 20},
    ],
)
def test_nothing_can_be_smuggled_into_the_configuration(route: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(route, Route)
