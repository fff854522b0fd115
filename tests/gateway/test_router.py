"""The token router beside a real HAProxy: started, found again, and done without."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from harness.waiting import until

from shoal.gateway.binary import ROUTER_LOCK, holders
from shoal.gateway.gateway import Gateway
from shoal.gateway.router import adapters_in
from shoal.machine.files import held
from shoal.machine.paths import Hangs
from shoal.model.service import GatewayEntry, Replica, Route, Routing, Served, Wanted
from shoal.model.tokens import ReplicaState
from tests.gateway.test_access import ALL, SECRETS, ask
from tests.gateway.world import Clients, World

CHAT = Route(service="chat", routing=Routing.CACHE, concurrency=64)


def wanted(world: World, *replicas: Replica, access: tuple[str, ...] = ()) -> Wanted:
    route = Route(service="chat", routing=Routing.CACHE, concurrency=64, access=access)
    served = Served(route=route, tenant="lab", replicas=replicas)
    return Wanted(entry=GatewayEntry(port=world.port), services=(served,), callers=ALL)


def routers(world: World) -> list[int]:
    return holders(world.directory / ROUTER_LOCK)


def routed(world: World) -> bool:
    """Answers come by the router by now."""
    world.gateway.tick()
    return "x-shoal-replica" in world.get("/chat/").headers


def test_the_first_such_service_starts_it_and_the_last_one_ends_it(world: World) -> None:
    (one,) = world.start("one")
    world.serve(Route(service="plain"), one)
    world.gateway.tick()
    assert not (world.directory / "router.json").exists() and not routers(world)
    world.gateway.apply(wanted(world, one))
    until(lambda: routed(world), "the router")
    assert world.get("/chat/").body == "one"
    world.serve(Route(service="plain"), one)
    until(lambda: not held(world.directory / ROUTER_LOCK), "its end")
    assert world.get("/plain/").body == "one"


def test_requests_go_on_without_it_and_it_comes_back(world: World) -> None:
    world.gateway.apply(wanted(world, *world.start("one", "two")))
    until(lambda: routed(world), "the router")
    with Clients(world.port, "/chat/v1/completions?ms=1", method="POST") as clients:
        for _ in range(3):
            clients.more(100)
            (pid,) = routers(world)
            os.kill(pid, signal.SIGKILL)
            clients.more(100)  # nobody looks: by the proxy alone
            until(lambda: routed(world), "the next router")
            assert routers(world) != [pid]
    begun = [one for one in clients.failures if "IncompleteRead" in one]  # nobody can take it back
    assert clients.failures == begun and len(begun) <= 1


def test_the_next_gateway_takes_it_over(world: World) -> None:
    replicas = world.start("one", "two")
    world.gateway.apply(wanted(world, *replicas))
    until(lambda: routed(world), "the router")
    before = routers(world)
    world.gateway = Gateway(world.directory)
    world.gateway.apply(wanted(world, replicas[1]))
    until(lambda: world.gateway.router.seen is not None or world.gateway.tick() == (), "an answer")
    assert routers(world) == before
    assert {world.get("/chat/").body for _ in range(8)} == {"two"}


def test_a_router_that_is_stuck_is_started_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.gateway.router.SILENT_MS", 500)
    monkeypatch.setattr("shoal.gateway.router.ANSWER_TIMEOUT_S", 0.2)
    world.gateway.apply(wanted(world, *world.start("one")))
    until(lambda: routed(world), "the router")
    (pid,) = routers(world)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: bool(world.gateway.tick()) and routers(world) not in ([], [pid]), "the next")
    until(lambda: routed(world), "its first answer")


def test_a_replica_is_busy_while_the_router_has_requests_there(world: World) -> None:
    (one,) = world.start("one")
    world.gateway.apply(wanted(world, one))
    until(lambda: routed(world), "the router")
    with Clients(world.port, "/chat/?ms=300", count=3):

        def busy() -> bool:
            world.gateway.tick()
            seen = world.gateway.router.seen
            return seen is not None and seen.services["chat"].replicas["one"].in_flight > 0

        until(busy, "requests in the router")
        leaving = world.replica("one", ReplicaState.DRAINING)
        world.gateway.apply(wanted(world, leaving))
    until(lambda: not busy(), "their end")


def test_the_router_hears_who_calls_and_nobody_else_says_so(world: World) -> None:
    world.gateway.apply(wanted(world, *world.start("one"), access=("cluster",)))
    until(
        lambda: world.gateway.tick() and "x-shoal-replica" in ask(world, "k-chat").headers,
        "the router",
    )
    assert ask(world).status == 401 and ask(world, "k-other").status == 403
    lie = {"X-Shoal-Caller": "k-all", "X-Shoal-Service": "other"}
    assert ask(world, "", **lie).status == 401
    seen = ask(world, "k-chat", "/chat/echo", **lie).body.lower()
    assert "authorization" not in seen and SECRETS["k-chat"].lower() not in seen


def test_the_shared_address_lists_what_a_caller_may_use(world: World) -> None:
    (one,) = world.start("one")
    routes = [
        ("chat", ("cluster",), "lab"),
        ("art", ("art",), "art"),
        ("free", ("open",), ""),
    ]
    served = tuple(
        Served(
            route=Route(service=name, routing=Routing.CACHE, access=access),
            tenant=tenant,
            replicas=(one,),
        )
        for name, access, tenant in routes
    )
    plain = Served(route=Route(service="v1"), replicas=(one,))
    entry = GatewayEntry(port=world.port)
    world.gateway.apply(Wanted(entry=entry, services=(*served, plain), callers=ALL))

    def models(who: str) -> set[str]:
        answer = ask(world, who, "/v1/models")
        data = json.loads(answer.body)["data"] if answer.status == 200 else []
        return {one["id"] for one in data}

    until(lambda: world.gateway.tick() and models("") == {"free"}, "the router")
    assert models("k-chat") == {"chat", "free"}
    assert models("t-art") == {"chat", "art", "free"}
    assert models("k-old") == {"free"}
    body = {"model": "x" * (1 << 20), "prompt": "a"}
    answer = world.get("/v1/completions", method="POST", body=json.dumps(body).encode(), headers={})
    assert answer.status in (400, 404, 413) and len(answer.body) < 2_000
    logged = world.logged()
    assert "xxxx" not in logged


def test_adapters_are_the_folders_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("legal", "medical", ".cache"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").touch()
    assert adapters_in(str(tmp_path)) == {
        "legal": f"{tmp_path}/legal",
        "medical": f"{tmp_path}/medical",
    }
    assert adapters_in("s3://bucket/loras") == adapters_in(f"{tmp_path}/gone") == {}

    def hangs(*_: object) -> None:
        raise Hangs("/srv", 0.0)

    monkeypatch.setattr("shoal.gateway.router.ask", hangs)
    assert adapters_in(str(tmp_path)) == {}, "the gateway does not wait for it"
