"""Services of neighbors, as the host's API takes them: within the neighbor's tenant, one hop, and
nothing that a proxy could not load."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from shoal.api.feed_rows import service_line
from shoal.api.principal import acting
from shoal.api.reach import Reach
from shoal.api.views import service_view
from shoal.cli.verbs.services import _print_whole
from shoal.control.certificates import self_signed
from shoal.control.neighboring.door import certificate_in, door_pem, plain
from shoal.database.settings import FileSettings
from shoal.model.far import Far
from shoal.model.identity import EVERY_TENANT, Role
from shoal.model.policy import Policy
from shoal.model.service import GatewayEntry
from shoal.model.sites import DoorView
from tests.api.server import OPERATORS, Reply, Server, serving
from tests.core.test_sites import Several

REPLICA: dict[str, Any] = {"command": ["serve"], "cpu_milli": 100}
PEM = self_signed("one").decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sites")
    settings = FileSettings(folder)
    with serving(folder / "home", Policy(silent_after_ms=3_600_000)) as made:
        made.loop.door = lambda: (9_080, door_pem(settings))
        for tenant in ("east", "zebra"):
            made.tenant(tenant)
        yield made


@pytest.fixture(scope="module")
def east(server: Server) -> str:
    return server.token("east", "east", only="neighbor")


def put(server: Server, token: str, name: str, **fields: Any) -> Reply:
    spec = {"name": name, "replica": REPLICA, **fields}
    return server.call(token, "PUT", f"/v1/services/{name}", spec)


def told(server: Server, token: str, name: str, *doors: dict[str, Any]) -> Reply:
    return server.call(token, "PUT", f"/v1/services/{name}/sites", list(doors))


def door(**fields: Any) -> dict[str, Any]:
    return {"site": "home", "address": "192.0.2.1", "port": 9080, "certificate": PEM, **fields}


def test_a_service_of_a_neighbor_is_its_tenants_alone(server: Server, east: str) -> None:
    way = {"service": "chat", "access": ["cluster"]}
    assert put(server, east, "chat", route=way).status == 200
    state = server.loop.tick.state
    spec = state.services["chat"].spec
    assert (spec.replica.tenant, spec.way.access) == ("east", ("east",))
    assert spec.replica.labels == {"home": "east"}
    assert put(server, east, "open", route={"service": "open", "access": ["open"]}).status == 200
    assert state.services["open"].spec.way.access == ("open",)
    for refused in (
        put(server, east, "chat", clusters=["here"]),
        put(server, east, "chat", replica={**REPLICA, "cluster": "any"}),
        put(server, east, "chat", replica={**REPLICA, "tenant": "zebra"}),
    ):
        assert refused.status in (403, 422), refused
    zebra = server.token("zebra", "zebra", only="neighbor")
    assert b"is taken in this cluster" in put(server, zebra, "chat").body
    for method, path in (("GET", ""), ("POST", "/stop")):
        assert server.call(zebra, method, f"/v1/services/chat{path}").status == 404
    assert told(server, zebra, "chat", door()).status == 404
    assert not [one for one in server.call(zebra, "GET", "/v1/services").body if one not in b"[]"]
    for method, path in (
        ("POST", "/v1/services/chat/rollback"),
        ("POST", "/v1/services/chat/try"),
        ("GET", "/v1/services/chat/series"),
    ):
        assert server.call(east, method, path, {}).status == 403, path


def test_doors_are_told_by_a_neighbor_and_answered_with_our_own(server: Server, east: str) -> None:
    put(server, east, "told")
    reply = told(server, east, "told", door(), door(site="south"))
    assert reply.status == 200, reply
    ours = msgspec.json.decode(reply.body, type=DoorView)
    assert ours.port == 9_080 and "PRIVATE" not in ours.certificate
    assert [one.site for one in server.loop.tick.state.services["told"].far] == ["home", "south"]
    again = msgspec.json.decode(told(server, east, "told").body, type=DoorView)
    assert again == ours and server.loop.tick.state.services["told"].far == ()
    put(server, OPERATORS, "own")
    assert told(server, OPERATORS, "own", door()).status == 422


@pytest.mark.parametrize(
    "lie",
    [
        {"certificate": ""},
        {"certificate": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"},
        {"certificate": PEM.replace("M", "N")},
        {"address": "0.0.0.0"},
        {"address": "224.0.0.1"},
        {"address": "169.254.169.254"},
        {"address": "1.2.3"},
        {"address": "192.0.2.1 check"},
        {"site": "a b"},
        {"site": "home\n"},
        {"port": 0},
        {"more": 1},
    ],
)
def test_no_door_is_taken_that_a_proxy_could_not_load(
    server: Server, east: str, lie: dict[str, Any]
) -> None:
    put(server, east, "lies")
    reply = told(server, east, "lies", door(), door(**{"site": "south", **lie}))
    assert reply.status in (400, 422), reply
    assert server.loop.tick.state.services["lies"].far == ()


def test_of_a_certificate_nothing_else_is_kept() -> None:
    alone = certificate_in(PEM)
    assert "PRIVATE" in PEM and "PRIVATE" not in alone
    assert certificate_in(f"    daemon\n{PEM}\nglobal\n    lua-load /x") == alone
    der = ssl.PEM_cert_to_DER_cert(alone)
    for wrong in (der + der, der[:-1], der + b"global"):
        with pytest.raises(ValueError, match="certificate"):
            certificate_in(ssl.DER_cert_to_PEM_cert(wrong))
    found = plain(Far(site="a", address="::1", port=1, certificate=PEM))
    assert (found.address, found.certificate) == ("::1", alone)


def test_the_doors_certificate_is_made_once_by_a_head_that_leads(tmp_path: Any) -> None:
    settings = FileSettings(tmp_path)
    assert not door_pem(settings, leads=False)
    made = door_pem(settings)
    assert door_pem(settings) == made == door_pem(settings, leads=False)
    assert (tmp_path / "door.pem").stat().st_mode & 0o777 == 0o600


def test_people_see_in_which_clusters_it_is_and_what_a_roll_out_waits_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = Several("west", "south")
    home.served(clusters=["west", "south"])
    home.talk(6)
    home.there["west"].failing = True
    home.serve(version=2, clusters=["west", "south"])
    home.talk(6)
    clock = SimpleNamespace(now_ms=lambda: home.now_ms)
    loop = SimpleNamespace(state=home.state, policy=home.policy, clock=clock)
    reach = Reach(cast(Any, loop), acting(home.state.identity, "ada", EVERY_TENANT, Role.ADMIN))
    view = service_view(reach, home.service(), GatewayEntry())
    assert [(one.name, one.state, one.version) for one in view.sites] == [
        ("west", "failing", 1),
        ("south", "ready", 1),
    ]
    assert view.why.startswith("west: version 2 is not ready there"), view.why
    line = service_line(reach, home.service())
    assert [(one.name, one.why) for one in line.sites] == [("west", ""), ("south", "")]
    _print_whole(view, [], home.now_ms)
    shown = capsys.readouterr().out
    assert "CLUSTER" in shown and "192.0.2.1:9080" in shown
    assert "version 2 comes after those before it have it ready" in shown
