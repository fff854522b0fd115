"""Replicas come, go, fail and hang; requests do not notice. With a real HAProxy."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
from harness.waiting import until

from shoal.model.service import Route, Served
from shoal.model.tokens import ReplicaState
from tests.gateway.world import Answer, Clients, World, raw, read_until

CHAT = Route(service="chat", concurrency=8)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_all_replicas_are_replaced_under_load_and_no_request_fails(
    world: World, method: str
) -> None:
    world.serve(CHAT, *world.start("a1", "b1"))
    pid = world.gateway.pid()
    with Clients(world.port, "/chat/?ms=2", method=method) as clients:
        clients.more()
        for old, new in (("a1", "a2"), ("b1", "b2")):
            others = [world.replica(name) for name in ("b1", "a2") if name in world.ports]
            others = [replica for replica in others if replica.id != old]
            (fresh,) = world.start(new)
            draining = world.replica(old, ReplicaState.DRAINING)
            world.serve(CHAT, *others, fresh, draining)
            until(lambda old=old: world.gateway.in_flight("chat", old) == 0, "the drain")  # type: ignore[misc]
            world.serve(CHAT, *others, fresh)
            world.kill(old)
            clients.more()
    assert clients.failures == []
    assert clients.of("a2") and clients.of("b2")
    assert world.gateway.pid() == pid
    assert [r.replica for r in world.gateway.tick()[0].replicas] == ["a2", "b2"]


def test_a_replica_that_has_moved_is_served_where_it_is_at_once(world: World) -> None:
    """It runs again on another machine, or this gateway was cut off meanwhile."""
    world.serve(CHAT, *world.start("one"))
    assert world.get("/chat/").status == 200
    world.kill("one")
    (moved,) = world.start("two")
    world.serve(CHAT, msgspec.structs.replace(moved, id="one"))
    assert world.get("/chat/").body == "two"


def test_a_request_that_tries_a_replica_where_it_was_gets_its_answer_where_it_is(
    world: World,
) -> None:
    """As when a head comes back whose gateway knows only replicas that have moved meanwhile: the
    request must not fail because its last server was taken from it."""
    with dropping() as port:
        (moved,) = world.start("one")
        world.serve(CHAT, msgspec.structs.replace(moved, port=port))
        answers: list[Answer] = []
        asking = threading.Thread(target=lambda: answers.append(world.get("/chat/")))
        asking.start()
        until(lambda: world.gateway.in_flight("chat", "one") == 1, "the request")
        world.serve(CHAT, moved)
        asking.join()
    assert [(one.status, one.body) for one in answers] == [(200, "one")]


@contextlib.contextmanager
def dropping() -> Iterator[int]:
    """A port at which the kernel answers nobody, as that of a machine which was cut off: its queue
    is full."""
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(socket.socket())
        door.bind(("127.0.0.1", 0))
        door.listen(0)
        for _ in range(4):
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(door.getsockname())
        yield door.getsockname()[1]


@pytest.mark.parametrize(
    "events", [20, pytest.param(150, marks=pytest.mark.soak)], ids=["short", "half a minute"]
)
def test_a_stream_outlives_the_drain_the_removal_and_reloads(world: World, events: int) -> None:
    old, new = world.start("old", "new")
    world.serve(CHAT, old)
    request = f"GET /chat/stream?n={events}&every_ms=200 HTTP/1.1\nHost: x\n\n"
    with raw(world.port, request) as connection:
        read_until(connection, b"old 0\n\n")
        world.serve(CHAT, new, world.replica("old", ReplicaState.DRAINING))
        assert world.gateway.in_flight("chat", "old") == 1
        world.serve(CHAT, new)  # no longer wanted, but not cut
        assert world.get("/chat/").body == "new"
        for number in range(3):  # the stream stays with a worker of an older configuration
            changed = msgspec.structs.replace(CHAT, queue_max=100 + number)
            world.serve(changed, new)
            assert world.gateway.in_flight("chat", "old") == 1
            assert world.get("/chat/").body == "new"
        rest = read_until(connection, b"0\r\n\r\n")
        assert f"old {events - 1}\n".encode() in rest
    until(lambda: world.gateway.in_flight("chat", "old") == 0, "the end of the stream")


def test_reloads_under_load_drop_no_connection(world: World) -> None:
    world.serve(CHAT, *world.start("one", "two"))
    replicas = (world.replica("one"), world.replica("two"))
    with Clients(world.port, "/chat/?ms=1", count=6, method="POST") as clients:
        for number in range(5):
            clients.more(100)
            wanted = world.wanted(CHAT, *replicas)
            extra = Served(route=Route(service=f"extra{number}"))
            world.gateway.apply(msgspec.structs.replace(wanted, services=(*wanted.services, extra)))
        clients.more(100)
    assert clients.failures == []
    assert clients.of("one") and clients.of("two")


def test_a_killed_replica_costs_get_requests_nothing_and_comes_back(world: World) -> None:
    world.serve(CHAT, *world.start("one", "two"))
    with Clients(world.port, "/chat/?ms=5", count=8) as clients:
        clients.more()
        world.kill("one")
        clients.more(200)
        world.start("one")  # at the same port
        before = clients.of("one")
        until(lambda: clients.of("one") > before, "the replica that came back")
    assert clients.failures == []


def test_what_may_have_been_begun_is_not_begun_twice(world: World) -> None:
    """A POST that a replica took and dropped is told to the client; a GET is tried again."""
    world.serve(CHAT, *world.start("one", "two"))
    assert world.get("/chat/close", method="POST", body=b"{}").status == 502
    seen = [int(world.control(name).split()[1]) for name in ("one", "two")]
    assert sum(seen) == 1
    assert world.get("/chat/close").status == 502, "every try was in vain"
    seen = [int(world.control(name).split()[1]) for name in ("one", "two")]
    assert sum(seen) == 1 + 1 + CHAT.retries


def test_a_connection_that_is_refused_goes_elsewhere_whatever_the_method(world: World) -> None:
    one, two = world.start("one", "two")
    world.serve(CHAT, one, two)
    world.kill("one")
    for _ in range(10):
        assert world.get("/chat/", method="POST", body=b"{}").body == "two"


@pytest.mark.parametrize(("path", "status"), [("half", 200), ("huge", 502), ("status", 500)])
def test_a_bad_answer_is_told_and_harms_nobody_else(world: World, path: str, status: int) -> None:
    world.serve(CHAT, *world.start("one"))
    with raw(world.port, f"GET /chat/{path} HTTP/1.1\nHost: x\nConnection: close\n\n") as bad:
        said = b""
        while part := bad.recv(65536):
            said += part
    assert said.startswith(f"HTTP/1.1 {status} ".encode())
    assert (b"half" in said) == (path == "half")
    assert world.get("/chat/").body == "one"


def test_a_replica_that_hangs_is_given_up_and_the_others_go_on(world: World) -> None:
    route = msgspec.structs.replace(CHAT, response_timeout_ms=300, concurrency=1)
    world.serve(route, *world.start("one", "two"))
    hung: list[Answer] = []
    thread = threading.Thread(target=lambda: hung.append(world.get("/chat/hang", method="POST")))
    thread.start()
    until(lambda: world.gateway.tick()[0].in_flight == 1, "the request that hangs")
    assert len({world.get("/chat/").body for _ in range(5)}) == 1
    thread.join()
    assert (hung[0].status, hung[0].body) == (504, '{"error":"the replica did not answer in time"}')
    assert {world.get("/chat/").body for _ in range(6)} == {"one", "two"}


def test_a_faulty_replica_is_set_aside_tested_and_taken_back(world: World) -> None:
    now = [0]
    world.gateway._now_ms = lambda: now[0]
    world.serve(CHAT, *world.start("one", "two", "three"))
    world.control("one", "broken=1")

    def look() -> dict[str, int]:
        now[0] += 1000
        return {r.replica: r.weight for r in world.gateway.tick()[0].replicas}

    for _ in range(3):
        for _ in range(30):
            world.get("/chat/")
        look()
    assert look()["one"] == 0
    assert {world.get("/chat/").status for _ in range(20)} == {200}
    world.control("one", "broken=0")
    for _ in range(30):
        look()
        for _ in range(10):
            assert world.get("/chat/").status == 200
    assert look()["one"] == 100


def test_a_slow_replica_gets_nothing_while_the_others_have_room(world: World) -> None:
    now = [0]
    world.gateway._now_ms = lambda: now[0]
    world.serve(CHAT, *world.start("one", "two", "three"))
    world.control("one", "slow_ms=100")
    with Clients(world.port, "/chat/?ms=5", count=6) as clients:

        def aside() -> bool:
            now[0] += 100  # rests are long: none ends within this test
            return {r.replica: r.weight for r in world.gateway.tick()[0].replicas}["one"] == 0

        until(aside, "the slow one to be set aside")
        until(lambda: world.gateway.in_flight("chat", "one") == 0, "its last answer")
        before = clients.of("one")
        clients.more(200)
        assert clients.of("one") == before
    assert clients.failures == []


def test_replicas_set_aside_are_called_back_when_all_others_are_gone(world: World) -> None:
    """Also with nobody there to drive the gateway."""
    world.serve(CHAT, *world.start("one", "two"))
    world.gateway._proxy.runtime.ask("set server chat/one weight 0")
    world.kill("two")

    def dead() -> bool:
        counts = world.gateway.counts()["chat"].servers
        return not next(server for server in counts if server.replica == "two").up

    until(dead, "the death to be noticed")
    assert {world.get("/chat/").body for _ in range(3)} == {"one"}


def test_slow_and_vanishing_clients_hold_up_nobody(world: World) -> None:
    world.serve(msgspec.structs.replace(CHAT, concurrency=1), *world.start("one"))
    with raw(world.port, "GET /chat/ HTTP/1.1\nHost: x\n"):  # a head that never ends
        assert world.get("/chat/").body == "one"
        with raw(world.port, "GET /chat/hang HTTP/1.1\nHost: x\n\n"):
            until(lambda: world.gateway.tick()[0].in_flight == 1, "the request")
        # It went away, so the replica's only place is free again.
        assert world.get("/chat/").body == "one"
        with raw(world.port, "GET /chat/stream?n=1000000&every_ms=1 HTTP/1.1\nHost: x\n\n"):
            until(lambda: world.gateway.tick()[0].in_flight == 1, "the stream")
        assert world.get("/chat/").body == "one"
