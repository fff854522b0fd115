"""At the API, no tenant gets the gateway's names, ports or paths of others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.server import serving
from tests.api.world import POLICY, World

JOB = {"command": ["true"]}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with serving(tmp_path_factory.mktemp("claims") / "home", POLICY) as server:
        yield World(server)


def put(world: World, who: str, name: str, **route: Any) -> tuple[int, str]:
    body = {"name": name, "replica": JOB, "route": {"service": name, **route}}
    reply = world.server.call(world.tokens[who], "PUT", f"/v1/services/{name}", body)
    return reply.status, reply.body.decode()


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ({"path": "/{service}/v1"}, "path"),
        ({"host": "chat.example.com"}, "host"),
        ({"host": "llm.localhost"}, "host"),
        ({"port": 9443}, "port"),
        ({"sticky_cookie": "shoal-0123abcd", "routing": "sticky"}, "sticky_cookie"),
        ({"host": "-f"}, "host"),
        ({"host": "a b"}, "host"),
    ],
)
def test_a_member_is_refused_with_the_field(
    world: World, route: dict[str, Any], field: str
) -> None:
    route = {
        key: value.format(**world.theirs) if isinstance(value, str) else value
        for key, value in route.items()
    }
    status, said = put(world, "member", "thief", **route)
    assert status in (400, 422) and field in said, said
    assert "zebra" not in said.replace(world.theirs["service"], "")


def test_the_operator_may_have_any_name(world: World) -> None:
    status, said = put(world, "operator", "front", host=socket.gethostname().lower())
    assert status == 200, said
