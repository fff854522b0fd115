"""What services of several tenants may have of the gateway that they share."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.core.policies import SHIPPED
from shoal.model.policy import Policy, Tenant, problem_with
from shoal.model.report import Accepted, AddTenant, Answer, Refused, RemoveTenant, SetService
from shoal.model.service import (
    GatewayEntry,
    Route,
    Served,
    Wanted,
    problem_with_names,
    problem_with_services,
)
from tests.core.serving import Serving, service_spec


class Shared(Serving):
    """Two tenants were added; `may` grants the first one something."""

    def __init__(self, **may: Any) -> None:
        tenants = (Tenant(name="lab", **may), Tenant(name="team", parent="lab"))
        super().__init__(policy=msgspec.structs.replace(SHIPPED["fair"], tenants=tenants))
        for name in ("lab", "team", "shop"):
            assert isinstance(self.ask(AddTenant(name)), Accepted)

    def put(self, tenant: str, name: str, scope: str = "", **route: Any) -> Answer:
        fields = {"route": {"service": name, **route}} if route else {}
        spec = service_spec(name, replica={"tenant": tenant}, **fields)
        return self.ask(SetService(spec, scope=scope or tenant))


def refusal(answer: Answer) -> str:
    assert isinstance(answer, Refused), answer
    return f"{answer.field}: {answer.message}"


@pytest.mark.parametrize("path", ["/llm/v1", "/llm/v1/chat", "/llm"])
def test_no_tenant_gets_a_path_inside_anothers(path: str) -> None:
    cluster = Shared()
    assert isinstance(cluster.put("lab", "llm"), Accepted)
    said = refusal(cluster.put("shop", "thief", path=path))
    assert said.startswith("path: ") and "is already used by another tenant" in said
    assert "service llm" not in said
    assert isinstance(cluster.put("lab", "own", path="/llm/v2"), Accepted), "its own may be nested"


def test_no_tenant_gets_a_path_around_anothers() -> None:
    cluster = Shared()
    assert isinstance(cluster.put("lab", "llm", path="/a/b/c"), Accepted)
    assert "is already used" in refusal(cluster.put("shop", "thief", path="/a"))
    assert isinstance(cluster.put("shop", "other", path="/a/bc"), Accepted), "it only looks so"


def test_a_path_of_the_operator_is_not_nested_either_and_a_removed_tenants_stays_its_own() -> None:
    cluster = Shared()
    assert isinstance(cluster.put("default", "llm", "*"), Accepted)
    assert "is already used" in refusal(cluster.put("shop", "thief", path="/llm/v1"))
    assert isinstance(cluster.put("lab", "late"), Accepted)
    cluster.ask(RemoveTenant("lab"))
    if "late" in cluster.state.services:
        assert "is already used" in refusal(cluster.put("default", "x", "*", path="/late/v1"))


def test_a_lone_user_notices_nothing() -> None:
    """Names of tenants without a record are the operator's own."""
    cluster = Serving()
    for tenant, name, route in (
        ("default", "a", {}),
        ("lab", "b", {"path": "/a/v1"}),
        ("lab", "c", {"host": "c.example.com"}),
        ("default", "d", {"port": 9443, "certificate": "tls"}),
    ):
        spec = service_spec(
            name, replica={"tenant": tenant}, route={"service": name, **route} if route else None
        )
        assert isinstance(cluster.ask(SetService(spec)), Accepted)


@pytest.mark.parametrize(
    ("route", "field", "grant"),
    [
        ({"host": "Chat.Lab.example.com"}, "host", {"hosts": "*.lab.example.com"}),
        ({"host": "chat.example.com"}, "host", {"hosts": "a.b, chat.example.com"}),
        ({"host": "chat.example.com"}, "host", {"hosts": "*"}),
        ({"port": 9050}, "port", {"ports": "8443, 9000-9099"}),
        ({"port": 9050, "certificate": "tls"}, "port", {"ports": "*"}),
    ],
)
def test_a_host_and_a_port_need_a_grant(
    route: dict[str, Any], field: str, grant: dict[str, str]
) -> None:
    cluster = Shared()
    said = refusal(cluster.put("lab", "chat", **route))
    assert said.startswith(f"{field}: {route[field]} is not granted to lab; an admin may grant it")
    granted = Shared(**grant)
    assert isinstance(granted.put("lab", "chat", **route), Accepted)
    assert refusal(granted.put("shop", "shop", **route)).startswith(f"{field}: ")


def test_branches_have_what_their_tenant_has_and_no_more() -> None:
    cluster = Shared(hosts="*.lab.example.com", ports="9000-9010")
    assert isinstance(cluster.put("team", "a", host="a.lab.example.com"), Accepted)
    refused: list[dict[str, Any]] = [{"host": "lab.example.com"}, {"host": "x.example.com"}]
    for route in (*refused, {"port": 9011}):
        assert "is not granted to team" in refusal(cluster.put("team", "b", **route))


def test_what_an_admin_has_set_stays_when_a_member_changes_the_rest() -> None:
    cluster = Shared()
    assert isinstance(cluster.put("lab", "chat", "*", host="a.example.com", port=9000), Accepted)
    same: dict[str, Any] = {"host": "a.example.com", "port": 9000}
    assert isinstance(cluster.put("lab", "chat", **same, queue_max=5), Accepted)
    more = cluster.put("lab", "chat", **same, certificate="tls")
    assert refusal(more).startswith("certificate: ")
    assert refusal(cluster.put("lab", "chat", host="b.example.com")).startswith("host: ")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hosts": "a b"}, "tenants.lab.hosts: 'a b' is not like"),
        ({"hosts": "a.*"}, "tenants.lab.hosts"),
        ({"ports": "9-"}, "tenants.lab.ports: '9-' is not like 8443 or 9000-9099, or *"),
    ],
)
def test_a_grant_that_says_nothing_is_refused(fields: dict[str, str], said: str) -> None:
    problem = problem_with(Policy(tenants=(Tenant(name="lab", **fields),)))  # type: ignore[arg-type]
    assert problem is not None and problem.startswith(said)


ENTRY = GatewayEntry(domain="ai.example.com", names=("head", "front.example.org", "*.wild.net"))


@pytest.mark.parametrize(
    "host",
    [
        *("head", "HEAD", "head.example.com", "front.example.org.", "x.wild.net", "x.localhost"),
        *("ai.example.com", "llm.ai.example.com", "a.b.ai.example.com"),
    ],
)
def test_no_tenant_gets_a_name_of_the_head(host: str) -> None:
    route = Route(service="thief", host=host)
    problem = problem_with_names(ENTRY, route, "lab")
    assert problem is not None and problem.startswith(f"host: {host!r} is a name of the head")
    assert problem_with_names(ENTRY, route, "") is None, "the operator may"
    wanted = Wanted(entry=ENTRY, services=(Served(route=route, owner="lab"),))
    assert f"service thief: {problem}" == problem_with_services(wanted)


@pytest.mark.parametrize("host", ["lab.example.com", "overhead.example.com", "wild.net.org"])
def test_other_names_are_free(host: str) -> None:
    assert problem_with_names(ENTRY, Route(service="a", host=host), "lab") is None


@pytest.mark.parametrize(
    ("domain", "name", "free"),
    [
        ("example.org", "front", False),
        ("example.com", "head", False),  # its short name, in the cluster's domain
        ("localhost", "head", True),
        ("wild.net", "any", True),  # a certificate for *.wild.net makes no name the head's
    ],
)
def test_no_tenants_service_is_named_like_the_head(domain: str, name: str, free: bool) -> None:
    entry = msgspec.structs.replace(ENTRY, domain=domain)
    problem = problem_with_names(entry, Route(service=name), "lab")
    assert (problem is None) is free
    assert problem is None or problem.startswith(f"name: {name}.{domain} is a name of the head")


def test_the_gateway_refuses_what_an_earlier_version_has_admitted() -> None:
    services = (
        Served(route=Route(service="llm"), owner="lab"),
        Served(route=Route(service="thief", path="/llm/v1"), owner="shop"),
    )
    said = problem_with_services(Wanted(services=services))
    assert said == "service thief: a path inside or around /llm/v1 is already used by service llm"
    same = tuple(msgspec.structs.replace(one, owner="") for one in services)
    assert problem_with_services(Wanted(services=same)) is None


def test_no_tenant_has_a_folder_of_the_head_listed_for_its_adapters() -> None:
    cluster = Shared()

    def put(scope: str, **fields: Any) -> Answer:
        route = {"service": "chat", "routing": "cache"}
        spec = service_spec(
            "chat", replica={"tenant": "lab"}, route=route, adapters="/srv/loras", **fields
        )
        return cluster.ask(SetService(spec, scope=scope))

    assert refusal(put("lab")).startswith("adapters: ")
    assert isinstance(put("*"), Accepted)
    assert isinstance(put("lab", adapters_max=4), Accepted), "what an admin has set stays"
