"""How machines join over HTTP: who is let in, what a key opens, and each problem in one line."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness.waiting import until

from shoal.api.access import new_token
from shoal.calls.call import Needs
from shoal.calls.table import match
from shoal.client.transport import ShoalError
from shoal.control.jointoken import for_order, keep_standing, standing
from shoal.database.settings import FileSettings
from shoal.engines.linked.joining import prepare
from shoal.link.wire import PROTOCOL, LinkFile
from shoal.machine.files import LINK_FILE
from shoal.model.identity import NodeKey
from shoal.model.node import JOINED, NodeSpec
from shoal.model.report import Nothing, RemoveKey, SetKey, SetPolicy
from shoal.model.supply import Supply, SupplyReport
from shoal.ports import EngineError, SupplyError
from tests.api.server import OPERATORS, Server, serving
from tests.api.test_roles import TABLE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("joining") / "home") as server:
        task = keep_standing(server.loop, FileSettings(server.home.path), "")
        asyncio.run_coroutine_threadsafe(task, server.asyncio).result(120)
        yield server


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def spec(name: str = "gpu7", **more: Any) -> NodeSpec:
    return NodeSpec(id=name, cpu_milli=1000, memory_mb=1024, origin=JOINED, **more)


def body(spec_: NodeSpec, **more: Any) -> dict[str, Any]:
    return {"spec": msgspec.to_builtins(spec_), "protocol": PROTOCOL, **more}


def token(server: Server) -> str:
    return standing(FileSettings(server.home.path)).rstrip(".")


def test_the_standing_token_gets_a_machine_its_own_key(server: Server, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "home", url(server), token(server), spec("first"))
    assert folder == tmp_path / "home" / "nodes" / "first"
    file = msgspec.json.decode((folder / LINK_FILE).read_bytes(), type=LinkFile)
    assert file.urls == (url(server),)
    assert file.certificate == ""
    assert msgspec.json.decode((folder / "spec.json").read_bytes(), type=NodeSpec) == spec("first")
    for private in (LINK_FILE, "spec.json"):
        assert (folder / private).stat().st_mode & 0o077 == 0
    listed = msgspec.json.decode(server.call(OPERATORS, "GET", "/v1/keys").body)
    assert [(key["node"], key["note"]) for key in listed][:2] == [
        ("", "the cluster's own"),
        ("first", ""),
    ]
    assert file.key.split("_", 2)[2] not in repr(listed)


def test_a_key_opens_no_other_route_and_no_users_token_opens_a_nodes(server: Server) -> None:
    joined = server.call(token(server).split(".")[0], "POST", "/v1/join", body(spec("locked")))
    key = msgspec.json.decode(joined.body)["key"]
    for shown in (key, token(server).split(".")[0]):
        for (method, path), asks in TABLE.items():
            for ask in asks:
                if "{" in ask.path or path in REFUSES_ALL:
                    continue
                status = server.call(shown, method, ask.path, ask.body).status
                refused = status == 401 if is_open(method, path) else status != 403
                assert not refused, (method, path, status)
    again = server.call(key, "POST", "/v1/join", body(spec("another")))
    assert again.status == 403
    assert again.message == "is the key of a node; a machine joins with the join token"
    assert server.call(OPERATORS, "POST", "/v1/join", body(spec("another"))).status == 403
    assert server.call(shown, "POST", "/v1/session", {"token": key}).status == 401


# Their own tests ask for these.
REFUSES_ALL = {"/v1/session", "/v1/oidc/callback", "/v1/join", "/v1/invites/accept"}


def is_open(method: str, path: str) -> bool:
    called = match(method, path)
    return called is None or called[0].may is Needs.OPEN


def test_a_machine_that_joins_again_shows_its_old_key(server: Server, tmp_path: Path) -> None:
    first = prepare(tmp_path / "a", url(server), token(server), spec("twice"))
    before = (first / LINK_FILE).read_bytes()
    again = prepare(tmp_path / "a", url(server), token(server), spec("twice", gpus=2))
    assert again == first
    assert (first / LINK_FILE).read_bytes() != before
    old = msgspec.json.decode(before, type=LinkFile).key
    assert server.call(old, "POST", "/v1/join", body(spec("twice"))).status == 401


REFUSALS = [
    ({"protocol": PROTOCOL + 1, "shoal": "9.9"}, 422, "update the head"),
    ({"protocol": PROTOCOL - 1, "shoal": "0.1"}, 422, "update the machine that joins"),
    ({"spec": {"id": "Not A Name", "cpu_milli": 1, "memory_mb": 1}}, 400, ""),
    ({"spec": {"id": "x", "cpu_milli": 1, "memory_mb": 1}}, 422, "one of the head's own nodes"),
    ({"spec": {"id": "n1", "cpu_milli": 1, "memory_mb": 1, "origin": "joined"}}, 422, "--name"),
]


@pytest.mark.parametrize(("change", "status", "text"), REFUSALS)
def test_a_join_that_cannot_be_is_refused_with_the_fix(
    server: Server, change: dict[str, Any], status: int, text: str
) -> None:
    asked = body(spec("odd")) | change
    reply = server.call(token(server).split(".")[0], "POST", "/v1/join", asked)
    assert (reply.status, text in reply.message) == (status, True), reply


def test_bad_tokens_are_refused_in_one_line(server: Server, tmp_path: Path) -> None:
    now_ms = server.loop.clock.now_ms()
    key_id, soon_over, hash_ = new_token()
    server.ask(SetKey(NodeKey(id=key_id, hash=hash_, until_ms=now_ms + 1_000)))
    server.loop.clock.ms += 2_000  # type: ignore[attr-defined]
    cases = [
        ("no token", EngineError, "this is not a join token"),
        (token(server) + "x", ShoalError, "is wrong or was replaced"),
        (soon_over, ShoalError, "has expired"),
        (f"{token(server)}.abc", EngineError, "the join token is damaged"),
    ]
    for given, kind, text in cases:
        with pytest.raises(kind, match=text) as caught:
            prepare(tmp_path / "home", url(server), given, spec("odd"))
        assert "\n" not in str(caught.value)
    server.ask(RemoveKey(key_id))


def test_bad_addresses_are_refused_in_one_line(server: Server, tmp_path: Path) -> None:
    cases = [
        ("ftp://head", "is not an address like https://head:7700"),
        ("http://192.0.2.1:7700", "is not encrypted"),
        (f"https://127.0.0.1:{server.port}", "no response"),
        ("127.0.0.1:1", "no response from 127.0.0.1:1"),
    ]
    for address, text in cases:
        with pytest.raises((EngineError, ShoalError), match=text):
            prepare(tmp_path / "home", address, f"{token(server)}.{'0' * 64}", spec("odd"))


def test_another_join_token_voids_the_one_before_and_no_nodes_key(
    server: Server, tmp_path: Path
) -> None:
    folder = prepare(tmp_path / "home", url(server), token(server), spec("stays"))
    before = token(server)
    reply = server.call(OPERATORS, "POST", "/v1/keys/join")
    made = msgspec.json.decode(reply.body)
    assert made["secret"].rstrip(".") == token(server) != before
    with pytest.raises(ShoalError, match="was replaced"):
        prepare(tmp_path / "home", url(server), before, spec("late"))
    key = msgspec.json.decode((folder / LINK_FILE).read_bytes(), type=LinkFile).key
    assert server.call(key, "GET", "/v1/status").status == 403  # known, but not for this
    own = server.call(OPERATORS, "DELETE", f"/v1/keys/{made['key']['id']}")
    assert (own.status, "shoal token rotate join" in own.message) == (422, True)
    assert server.call(OPERATORS, "DELETE", f"/v1/keys/{key.split('_')[1]}").status == 200
    assert server.call(key, "GET", "/v1/status").status == 401


def test_the_token_of_an_order_is_for_its_machines_alone(server: Server, tmp_path: Path) -> None:
    supply = Supply(name="gpu", engine="fake", least=1)
    server.ask(SetPolicy(msgspec.structs.replace(server.loop.policy, supply=(supply,))))

    def placed() -> bool:
        server.loop.clock.ms += 2_000  # type: ignore[attr-defined]
        server.asyncio.call_soon_threadsafe(server.loop.supplied, SupplyReport(engine="fake"))
        server.ask(Nothing())
        return "o1" in server.loop.tick.state.orders

    until(placed, "no order is placed")

    def token_of(order: str) -> str:
        task = for_order(server.loop, FileSettings(server.home.path), order)
        return asyncio.run_coroutine_threadsafe(task, server.asyncio).result(120)

    given = token_of("o1")
    assert token_of("o1") == given  # the same when it is sent again
    other = body(spec("gpu-1", order="o2"))
    reply = server.call(given.split(".")[0], "POST", "/v1/join", other)
    assert (reply.status, "for the machines of order o1 alone" in reply.message) == (403, True)
    with pytest.raises(ShoalError, match="gpu7 is not a node of order o1"):
        prepare(tmp_path / "odd", url(server), given.rstrip("."), spec("gpu7", order="o1"))
    mine = spec("gpu-1", order="o1")
    prepare(tmp_path / "mine", url(server), given.rstrip("."), mine)
    listed = msgspec.json.decode(server.call(OPERATORS, "GET", "/v1/keys").body)
    assert "order o1" in [key["note"] for key in listed]
    with pytest.raises(SupplyError, match="order o9 is over"):
        token_of("o9")
