"""How a request finds its service and its replica, through a real HAProxy."""

from __future__ import annotations

import base64
import collections
import os
import ssl
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import pytest
from harness.ports import free_port
from harness.waiting import until

from shoal.api.access import Access
from shoal.gateway.binary import GatewayError
from shoal.model.service import GatewayEntry, Route, Routing, Served, Wanted
from tests.gateway.world import Clients, World, get, raw, read_until


def chat_body(system: str, question: str, *more: str) -> bytes:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    messages += [{"role": "assistant", "content": text} for text in more]
    return msgspec.json.encode({"model": "m", "messages": messages})


def test_a_service_is_found_by_path_by_host_and_by_its_own_port(world: World) -> None:
    (one, two) = world.start("one", "two")
    own = free_port()
    world.gateway.apply(
        Wanted(
            entry=GatewayEntry(port=world.port),
            services=(
                Served(route=Route(service="chat", host="ai.example.com"), replicas=(one,)),
                Served(route=Route(service="other", port=own, path="/x/y"), replicas=(two,)),
            ),
        )
    )
    assert world.get("/chat").body == "one"
    assert world.get("/chatter").status == 404
    stripped = world.get("/chat/echo?a=1").body
    assert stripped.startswith("GET /echo\n") and "x-forwarded-prefix: /chat" in stripped
    assert world.get("/x/y/echo").body.startswith("GET /echo\n")
    assert world.get("/other/").status == 404, "its own path is instead of its name"
    for host in ("chat.localhost", "Chat.Localhost:80", "ai.example.com", "AI.example.com:80"):
        whole = world.get("/echo", headers={"Host": host}).body
        assert whole.startswith("GET /echo\n") and "x-forwarded-prefix" not in whole
    assert get(own, "/x/y/z").body == "two"
    assert get(own, "/echo").body.startswith("GET /echo\n")
    lost = world.get("/nobody/home")
    assert (lost.status, lost.body) == (404, '{"error":"no service of this name"}')


def test_no_service_gets_requests_that_were_sent_to_an_address_or_to_another_name(
    world: World,
) -> None:
    (one, two) = world.start("one", "two")
    greedy = Route(service="127", host="chat.localhost")  # as an old log may still have it
    world.gateway.apply(
        Wanted(
            entry=GatewayEntry(port=world.port, domain="localhost"),
            services=(
                Served(route=greedy, replicas=(one,)),
                Served(route=Route(service="chat"), replicas=(two,)),
            ),
        )
    )
    own = f"127.0.0.1:{world.port}"
    for host in (own, "127.0.0.1", "127.example.com", "chat.example.com", "chat.localhost.evil"):
        assert world.get("/chat/", headers={"Host": host}).body == "two", host
        assert world.get("/", headers={"Host": host}).status == 404, host
    assert world.get("/", headers={"Host": "127.localhost"}).body == "one"
    assert world.get("/", headers={"Host": "chat.localhost"}).body == "two", "its own name"


def test_the_pages_session_does_not_reach_services(world: World) -> None:
    own = free_port()
    world.serve(Route(service="chat", port=own), *world.start("one"))
    name = Access("the token of this cluster", lambda: 0).cookie
    other = Access("that of another one", lambda: 0).cookie
    for sent, passed in {
        f"{name}=a.1.b": None,
        f"{name}=a.1.b; sid=7": "sid=7",
        f"sid=7; {name}=a.1.b": "sid=7; ",
        f"sid=7; {name}=a.1.b; t=8; {other}=c; u=9": "sid=7; t=8; u=9",
        f"{name}=1; {name}=2; {name}=3; {other}=4; {other}=5; {name}=6": None,
        f"{name}=1; sid=7; {name}=2; t=8; {name}=3": "sid=7; t=8; ",
        f"my{name}=1; a={name}=2; {name}x=3": f"my{name}=1; a={name}=2; {name}x=3",
    }.items():
        for port, path in ((world.port, "/chat/echo"), (own, "/echo")):
            lines = get(port, path, headers={"Cookie": sent}).body.splitlines()
            found = [line for line in lines if line.startswith("cookie:")]
            assert found == ([] if passed is None else [f"cookie: {passed.strip()}"]), sent


def test_a_request_has_an_id_that_the_client_may_choose(world: World) -> None:
    world.serve(Route(service="chat"), *world.start("one"))
    made = world.get("/chat/echo")
    assert len(made.headers["x-request-id"]) == 36
    assert f"x-request-id: {made.headers['x-request-id']}" in made.body
    assert world.get("/nowhere").headers["x-request-id"]
    kept = world.get('/chat/echo?q="x"', headers={"X-Request-Id": 'mine"\\'})
    assert kept.headers["x-request-id"] == 'mine"\\'
    until(lambda: world.logged().count("\n") == 3, "three lines in the access log")
    # Several threads write it: lines of one moment may change places.
    lines = {line["id"]: line for line in map(msgspec.json.decode, world.logged().splitlines())}
    assert lines['mine"\\']["path"] == '/chat/echo?q="x"'
    assert sorted(line["status"] for line in lines.values()) == [200, 200, 404]
    first = lines[made.headers["x-request-id"]]
    assert (first["service"], first["replica"]) == ("chat", "one")


def test_what_is_left_out_of_the_log_has_no_id_but_the_clients_own_and_failures_have(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.gateway.render.LOG_ALL_PER_S", 0)
    monkeypatch.setattr("shoal.gateway.render.LOG_ONE_OF", 1_000_000)
    world.serve(Route(service="chat"), *world.start("one"))
    left_out = world.get("/chat/echo")
    assert left_out.status == 200 and "x-request-id" not in left_out.headers
    assert "x-request-id" not in left_out.body
    own = world.get("/chat/echo", headers={"X-Request-Id": "mine"})
    assert own.headers["x-request-id"] == "mine" and "x-request-id: mine" in own.body
    world.control("one", "broken=1")
    failed = world.get("/chat/")
    until(lambda: "\n" in world.logged(), "the failure in the access log")
    (line,) = map(msgspec.json.decode, world.logged().splitlines())
    assert (line["status"], line["id"]) == (500, failed.headers["x-request-id"])


@pytest.mark.parametrize("routing", [Routing.LEAST_LOADED, Routing.P2C])
def test_no_replica_works_on_more_than_its_limit_and_the_rest_waits(
    world: World, routing: Routing
) -> None:
    route = Route(service="chat", routing=routing, concurrency=2)
    world.serve(route, *world.start("one", "two"))
    with Clients(world.port, "/chat/?ms=20", count=12) as clients:
        until(lambda: world.gateway.tick()[0].queued >= 4, "a queue")
        clients.more(50)
    assert clients.failures == []
    assert clients.of("one") and clients.of("two")
    for name in ("one", "two"):
        assert world.control(name).split()[0] == "2", "most at a time"


def test_past_the_bound_of_the_queue_there_is_a_503_at_once(world: World) -> None:
    world.serve(Route(service="chat", concurrency=1, queue_max=1), *world.start("one"))
    with (
        raw(world.port, "GET /chat/hang HTTP/1.1\nHost: x\n\n"),
        raw(world.port, "GET /chat/hang HTTP/1.1\nHost: x\n\n"),
    ):
        until(lambda: world.gateway.tick()[0].queued == 1, "a full queue")
        answer = world.get("/chat/")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.body == '{"error":"the queue is full"}'
    # Who waited and went away leaves the queue.
    until(lambda: world.gateway.tick()[0].work == 0, "an empty queue")
    assert world.get("/chat/").body == "one"


def test_whoever_waits_too_long_in_the_queue_gets_a_503(world: World) -> None:
    world.serve(Route(service="chat", concurrency=1, queue_timeout_ms=100), *world.start("one"))
    with raw(world.port, "GET /chat/hang HTTP/1.1\nHost: x\n\n"):
        until(lambda: world.gateway.tick()[0].in_flight == 1, "a busy replica")
        answer = world.get("/chat/")
    assert answer.status == 503
    assert "retry-after" in answer.headers


@pytest.mark.outside("HAProxy counts rates, failures and waits by its own clock")
def test_past_a_tenants_rate_there_is_a_429_and_others_are_served(world: World) -> None:
    world.serve(Route(service="chat", rate_per_s=5), *world.start("one"))
    greedy = [world.get("/chat/", headers={"Authorization": "Bearer a"}) for _ in range(20)]
    statuses = collections.Counter(answer.status for answer in greedy)
    assert statuses[200] >= 5 and statuses[429] > 0
    refused = next(answer for answer in greedy if answer.status == 429)
    assert refused.headers["retry-after"] == "1"
    assert world.get("/chat/", headers={"Authorization": "Bearer b"}).status == 200
    # What was refused does not count: a tenant that goes on asking gets its rate, not nothing.
    again = lambda: world.get("/chat/", headers={"Authorization": "Bearer a"}).status == 200  # noqa: E731
    until(again, "the next second")


def test_headers_and_bodies_have_limits(world: World) -> None:
    route = Route(service="chat", header_bytes_max=1000, body_bytes_max=1000)
    world.serve(route, *world.start("one"))
    assert world.get("/chat/", headers={"X": "y" * 900}).status == 431
    assert world.get("/chat/", method="POST", body=b"y" * 1001).status == 413
    assert world.get("/chat/", method="POST", body=b"y" * 1000).status == 200


def test_conversations_stay_where_their_beginning_is_cached(world: World) -> None:
    route = Route(service="chat", routing=Routing.PREFIX, concurrency=8)
    world.serve(route, *world.start("one", "two", "three"))

    def ask(body: bytes) -> str:
        # One that is not quite over yet would count as load.
        until(lambda: world.gateway.counts()["chat"].in_flight == 0, "the last to be over")
        return world.get("/chat/v1/chat/completions", method="POST", body=body).body

    homes = {}
    for number in range(12):
        question = f"question {number}"
        homes[question] = ask(chat_body("the same for all", question))
        for turn in range(3):  # each turn is longer; the last does not fit the proxy's buffer
            body = chat_body("the same for all", question, "answer" * 10 ** (2 * turn))
            assert ask(body) == homes[question]
    assert set(homes.values()) == {"one", "two", "three"}
    # Without a system's part, what follows the first question is not a part of the name.
    bare = [{"role": "user", "content": "hello"}]
    first = ask(msgspec.json.encode({"messages": bare}))
    bare += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "and?"}]
    assert ask(msgspec.json.encode({"messages": bare})) == first
    # A reload moves none of them: a replica's place follows from its id.
    other = Served(route=Route(service="other"))
    wanted = world.wanted(route, *(world.replica(name) for name in ("three", "one", "two")))
    world.gateway.apply(msgspec.structs.replace(wanted, services=(*wanted.services, other)))
    assert {q: ask(chat_body("the same for all", q)) for q in homes} == homes


def test_a_hot_conversation_spills_over_and_what_is_not_json_is_spread(world: World) -> None:
    route = Route(service="chat", routing=Routing.PREFIX)
    world.serve(route, *world.start("one", "two", "three"))
    spread = {world.get("/chat/", method="POST", body=b"not json").body for _ in range(40)}
    assert spread == {"one", "two", "three"}
    assert {world.get("/chat/").body for _ in range(40)} == {"one", "two", "three"}
    body = chat_body("s", "hot")
    homes: list[str] = []

    def ask() -> None:
        homes.append(world.get("/chat/?ms=300", method="POST", body=body).body)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(collections.Counter(homes).values()) <= 9, "twice its share, and one"


def test_the_same_header_or_cookie_goes_to_the_same_replica(world: World) -> None:
    replicas = world.start("one", "two", "three")
    world.serve(Route(service="chat", routing=Routing.STICKY, sticky_header="X-User"), *replicas)
    homes = {u: world.get("/chat/", headers={"X-User": u}).body for u in "abcdefghijkl"}
    assert set(homes.values()) == {"one", "two", "three"}
    assert {u: world.get("/chat/", headers={"X-User": u}).body for u in homes} == homes

    world.serve(Route(service="chat", routing=Routing.STICKY, sticky_cookie="sid"), *replicas)
    first = world.get("/chat/")
    cookie = first.headers["set-cookie"].partition(";")[0]
    assert cookie.startswith("sid=")
    for _ in range(6):
        again = world.get("/chat/", headers={"Cookie": cookie})
        assert again.body == first.body and "set-cookie" not in again.headers


def test_events_are_passed_on_as_they_come(world: World) -> None:
    world.serve(Route(service="chat"), *world.start("one"))
    request = "GET /chat/stream?n=2&every_ms=60000 HTTP/1.1\nHost: x\n\n"
    with raw(world.port, request) as connection:
        assert b"data: one 0" in read_until(connection, b"one 0\n\n")


def test_a_small_chunk_is_not_held_back_in_the_hope_of_more(world: World) -> None:
    """Held back, each of them takes 200 ms, on any machine; not held back, one soon takes less, on
    a busy one too. The next is made only when the one before has arrived."""
    world.serve(Route(service="chat"), *world.start("one"))
    took_s: list[float] = []
    with raw(world.port, "GET /chat/stepped HTTP/1.1\nHost: x\n\n") as connection:

        def a_token_in_time() -> bool:
            begun = time.monotonic()
            world.control("one", "step=1")
            assert b"token " in read_until(connection, b"token \r\n")
            took_s.append(time.monotonic() - begun)
            return min(took_s) < 0.1

        until(a_token_in_time, "a token that comes at once")


def test_websockets_pass_through(world: World) -> None:
    world.serve(Route(service="chat"), *world.start("one"))
    key = base64.b64encode(os.urandom(16)).decode()
    request = (
        "GET /chat/websocket HTTP/1.1\nHost: x\nConnection: Upgrade\nUpgrade: websocket\n"
        f"Sec-WebSocket-Version: 13\nSec-WebSocket-Key: {key}\n\n"
    )
    with raw(world.port, request) as connection:
        assert b" 101 " in read_until(connection, b"\r\n\r\n")
        for frame in (b"\x81\x85\x00\x00\x00\x00hello", b"\x81\x83\x00\x00\x00\x00bye"):
            connection.sendall(frame)
            assert frame in read_until(connection, frame)


def certificate(directory: Path, name: str) -> tuple[bytes, bytes]:
    key, file = directory / f"{name}.k", directory / f"{name}.c"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    words += f" -subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout {key} -out {file}"
    subprocess.run(["openssl", *words.split()], check=True, capture_output=True)
    return file.read_bytes(), key.read_bytes()


def test_a_certificate_makes_it_https_and_one_that_does_not_match_is_refused(
    world: World, tmp_path: Path
) -> None:
    public, key = certificate(tmp_path, "one")
    _, wrong_key = certificate(tmp_path, "two")
    good, bad = tmp_path / "good.pem", tmp_path / "bad.pem"
    good.write_bytes(public + key)
    bad.write_bytes(public + wrong_key)
    (one,) = world.start("one")
    served = (Served(route=Route(service="chat"), replicas=(one,)),)
    world.gateway.apply(
        Wanted(entry=GatewayEntry(port=world.port, certificate=str(good)), services=served)
    )
    context = ssl.create_default_context(cadata=public.decode())
    with (
        raw(world.port, "") as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        secure.sendall(b"GET /chat/echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"x-forwarded-proto: https" in secure.recv(65536)
    for file, text in (
        (bad, "does not match its key"),
        (tmp_path / "none.pem", "does not exist"),
        (tmp_path / "one.k", "is not a PEM file with a certificate and its key"),
    ):
        with pytest.raises(GatewayError, match=text) as told:
            world.gateway.apply(
                Wanted(entry=GatewayEntry(port=world.port, certificate=str(file)), services=served)
            )
        assert str(file) in str(told.value) and "\n" not in str(told.value)
