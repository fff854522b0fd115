"""Requests through a real router to real engines, and what it refuses."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness.waiting import until

from shoal.model.service import ReplicaState
from shoal.model.tokens import RoutedReplica, RoutedService, RouterWanted
from shoal.router.openai import TOKENS_MAX
from tests.router.engine import written
from tests.router.world import Engine, Router, words_of

PROMPT: dict[str, Any] = {"model": "chat", "prompt": "hello", "max_tokens": 5}
OK = b"HTTP/1.1 200"


def test_a_completion_is_answered_and_its_model_is_named_as_the_engine_does(
    router: Router, engines: list[Engine]
) -> None:
    router.serve(*engines)
    answer = router.ask("/v1/completions", PROMPT)
    assert answer.status == 200, answer.body
    assert answer.json["choices"][0]["text"] == "".join(written("hello", 5))
    known = router.ask("/v1/completions", {**PROMPT, "model": "real/model"})
    assert known.status == 200
    assert router.ask("/v1/completions", {**PROMPT, "model": "other"}).status == 404


def test_a_stream_has_the_usage_only_if_its_client_asks(
    router: Router, engines: list[Engine]
) -> None:
    router.serve(*engines)
    events = list(router.stream(12).events())
    assert "".join(map(words_of, events)) == "".join(written("hello", 12))
    assert events[-1] == {}
    assert all("usage" not in one for one in events)
    asked = list(router.stream(12, stream_options={"include_usage": True}).events())
    assert [one["usage"]["completion_tokens"] for one in asked if one.get("usage")] == [12]
    assert [one.generated for one in router.tell().counts] == [24]


def test_tokens_are_counted_by_service_and_caller_and_survive_kill_9(
    router: Router, engines: list[Engine]
) -> None:
    router.serve(*engines)
    for caller in ("", "ann", "ann"):
        headers: Any = {"x_shoal_caller": caller} if caller else {}
        router.ask("/v1/completions", PROMPT, **headers)
    before = router.tell()
    assert {one.caller: (one.requests, one.generated) for one in before.counts} == {
        "": (1, 5),
        "ann": (2, 10),
    }
    path = router.folder / "counts.json"
    until(lambda: b'"caller":"ann","requests":2' in path.read_bytes(), more=path.read_text)
    router.kill()
    router.start()
    after = router.tell()
    assert sorted(after.counts, key=str) == sorted(before.counts, key=str)
    assert after.folder == before.folder
    assert path.stat().st_mode & 0o777 == 0o600


def test_it_serves_on_without_a_controller(router: Router, engines: list[Engine]) -> None:
    """Also after its own death: it reads what the last controller wanted."""
    router.serve(*engines)
    until(lambda: (router.folder / "router.json").exists())
    router.kill()
    router.start()
    assert router.ask("/v1/completions", PROMPT).status == 200


def test_a_second_router_in_the_folder_does_not_start(router: Router) -> None:
    first = router.process
    words = [*router.process.args]  # type: ignore[misc]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "a router runs in" in done.stderr and len(done.stderr.splitlines()) == 1
    assert first.poll() is None and router.answers()


def test_sockets_are_private(router: Router) -> None:
    for name in ("router.sock", "router-control.sock", "router.lock"):
        assert (router.folder / name).stat().st_mode & 0o777 == 0o600, name


# -- a replica that fails before it has answered


def test_an_answer_that_dies_with_its_replica_comes_from_another(
    router: Router, engines: list[Engine]
) -> None:
    router.serve(*engines)
    for one in engines:
        one.control(wait_at=0)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(router.ask, "/v1/completions", PROMPT)
        first = until(lambda: next((e for e in engines if e.control()["in_flight"]), None))
        assert first is not None
        first.kill()
        (other,) = [one for one in engines if one is not first]
        other.control(go=True)
        answer = asked.result(60)
    assert answer.status == 200 and answer.replica == other.name


@pytest.mark.parametrize("say", [{"garbage": 1}, {"status": 503}, {"status": 429}])
def test_an_answer_that_is_none_comes_from_another_replica(
    router: Router, engines: list[Engine], say: dict[str, Any]
) -> None:
    router.serve(*engines)
    engines[0].control(say=say)
    for _ in range(4):
        answer = router.ask("/v1/completions", {**PROMPT, "model": "real/model"})
        assert (answer.status, answer.replica) == (200, "b")


def test_without_another_replica_its_own_refusal_is_passed_on(
    router: Router, engines: list[Engine]
) -> None:
    router.serve(engines[0])
    engines[0].control(say={"status": 503})
    answer = router.ask("/v1/completions", {**PROMPT, "model": "real/model"})
    assert answer.status == 503 and b"asked to" in answer.body


def test_a_request_that_kills_its_engine_kills_no_more_than_three(router: Router) -> None:
    engines = [Engine(f"e{place}") for place in range(5)]
    try:
        router.serve(*engines)
        for one in engines:
            one.control(say={"garbage": 1})
        answer = router.ask("/v1/completions", {**PROMPT, "model": "real/model"})
        assert answer.status == 502 and answer.json["error"]["code"] == "bad_gateway"
        assert sum(len(one.control()["seen"]) for one in engines) == 3
    finally:
        for one in engines:
            one.close()


def test_a_post_of_another_kind_is_sent_once(router: Router, engines: list[Engine]) -> None:
    router.serve(*engines)
    for one in engines:
        one.control(say={"garbage": 1})
    assert router.ask("/size", b"x", method="POST").status == 502
    assert sum(len(one.control()["seen"]) for one in engines) == 1
    assert router.ask("/size").status == 502
    assert sum(len(one.control()["seen"]) for one in engines) >= 3


def test_no_replica_is_503_and_an_unknown_service_404(router: Router) -> None:
    router.serve(queue_timeout_ms=1)
    answer = router.ask("/v1/completions", PROMPT)
    assert answer.status == 503 and answer.response.headers["retry-after"]
    assert router.ask("/v1/completions", PROMPT, service="none").status == 404


def test_the_first_answer_of_a_new_replica_says_how_long_its_first_token_took(
    router: Router, engines: list[Engine]
) -> None:
    def stream() -> None:
        assert list(router.stream(3).events())

    def first_ms() -> dict[str, int]:
        loads = router.tell().services["chat"].replicas
        return {name: load.first_ms for name, load in loads.items()}

    router.serve(engines[0])
    stream()
    assert first_ms() == {"a": 0}, "it was there when the router began, so it may be old"
    router.serve(engines[1])
    stream()
    once = first_ms()
    assert once.keys() == {"b"} and once["b"] > 0
    stream()
    assert first_ms() == once, "only the first counts"
    router.serve(engines[0])
    assert router.ask("/v1/completions", PROMPT).status == 200
    stream()
    assert first_ms() == {"a": 0}, "its first answer was not a stream"


def test_a_replica_that_drains_gets_no_new_request(router: Router, engines: list[Engine]) -> None:
    leaving = RoutedReplica(
        id="a", address="127.0.0.1", port=engines[0].port, state=ReplicaState.DRAINING
    )
    service = RoutedService(name="chat", replicas=(leaving, engines[1].replica))
    router.tell(RouterWanted(services=(service,)))
    assert {router.ask("/v1/completions", PROMPT).replica for _ in range(4)} == {"b"}


# -- bytes that are only copied


def test_other_paths_and_methods_are_copied(router: Router, engines: list[Engine]) -> None:
    router.serve(engines[0])
    assert router.ask("/size", b"x" * 3_000_000, method="POST").json["size"] == 3_000_000
    parts = router.ask("/size", iter([b"ab", b"c" * 70_000]), method="PUT")
    assert parts.json["size"] == 70_002
    assert router.ask("/nothing").status == 404
    assert router.ask("/until-close").body == b"to the end"
    assert router.ask("/size", method="HEAD").status == 200


def test_a_websocket_goes_through(router: Router, engines: list[Engine]) -> None:
    router.serve(engines[0])
    with router.raw() as client:
        client.sendall(
            b"GET /ws HTTP/1.1\r\nhost: x\r\nx-shoal-service: chat\r\n"
            b"connection: upgrade\r\nupgrade: websocket\r\n\r\nfirst"
        )
        got = receive(client, b"hellofirst")
        assert got.startswith(b"HTTP/1.1 101")
        client.sendall(b"second")
        assert receive(client, b"second")
        engines[0].kill()
        assert client.recv(10) == b""
    until(lambda: router.tell().services["chat"].replicas["a"].in_flight == 0)


def test_what_only_the_proxy_says_does_not_reach_a_replica(
    router: Router, engines: list[Engine]
) -> None:
    router.serve(engines[0])
    more: Any = {"x_shoal_caller": "k1", "connection": "x-secret", "x_secret": "1", "x_mine": "2"}
    sent = router.ask("/size", b"x", method="POST", **more).json["headers"]
    names = {name.lower() for name, _ in sent}
    assert "x-mine" in names
    assert not {name for name in names if "shoal" in name or name in ("x-secret", "connection")}
    router.ask("/v1/completions", PROMPT, X_Shoal_Caller="k1")
    names = {name.lower() for name, _ in engines[0].control()["seen"][-1]["headers"]}
    assert not {name for name in names if "shoal" in name}


# -- what is refused


def receive(client: socket.socket, end: bytes) -> bytes:
    got = b""
    while not got.endswith(end) and (data := client.recv(65_536)):
        got += data
    return got


def statuses(router: Router, data: bytes) -> list[bytes]:
    """Of all answers on one connection, until the router ends it."""
    with router.raw() as client:
        client.sendall(data)
        got = b""
        while more := client.recv(65_536):
            got += more
    return re.findall(rb"HTTP/1\.1 (\d{3})", got)


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-shoal-service: chat\r\n"
SMUGGLED = b"GET /size HTTP/1.1\r\nhost: x\r\nx-shoal-service: chat\r\n\r\n"


AMBIGUOUS = [
    b"content-length: 3\r\ncontent-length: 4\r\n",
    b"content-length: 3\r\ncontent-length: 3\r\n",
    b"content-length: 3\r\ntransfer-encoding: chunked\r\n",
    b"transfer-encoding: chunked\r\ncontent-length: 3\r\n",
    b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
    b"transfer-encoding: identity, chunked, identity\r\n",
    b"transfer-encoding : chunked\r\n",
    b"content-length: +3\r\n",
    b"content-length: 3, 3\r\n",
    b"x-shoal-caller: a\r\nx-shoal-caller: b\r\n",
    b"x-shoal-service: other\r\n",
    b"host: y\r\n",
    b"x: a\nb: c\x00\r\n",
    b"x: a\r\n folded: 1\r\n",
    b"x" * 200_000 + b": 1\r\n",
    b"".join(b"x%d: 1\r\n" % place for place in range(300)),
]


def test_a_head_that_can_be_read_in_two_ways_is_refused(
    router: Router, engines: list[Engine]
) -> None:
    router.serve(engines[0])
    for head in AMBIGUOUS:
        found = statuses(router, HEAD + head + b"\r\n0\r\n\r\n" + SMUGGLED)
        assert found in ([b"400"], [b"431"]), head[:60]
    assert engines[0].control()["seen"] == []


def test_requests_that_come_at_once_are_answered_in_order(
    router: Router, engines: list[Engine]
) -> None:
    router.serve(*engines)
    one = SMUGGLED.replace(b"GET /size", b"GET /nothing")
    last = one.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    assert statuses(router, (SMUGGLED + one) * 10 + last) == [*[b"200", b"404"] * 10, b"404"]
    assert statuses(router, SMUGGLED * 200)[-1] == b"400"


def test_bodies_are_bounded(router: Router, engines: list[Engine]) -> None:
    router.serve(engines[0], body_bytes_max=1_000)
    large = {**PROMPT, "prompt": "x" * 1_000}
    assert router.ask("/v1/completions", large).json["error"]["code"] == "body_too_large"
    parts = iter([json.dumps(large).encode()])
    kind: Any = {"content_type": "application/json"}
    assert router.ask("/v1/completions", parts, method="POST", **kind).status == 413
    assert router.ask("/size", b"x" * 1_001, method="POST").status == 413
    assert not any(one["size"] for one in engines[0].control()["seen"])


NO_REQUESTS = [
    (b"{", "invalid_json"),
    (b"[]", "invalid_json"),
    (b'{"model": 3}', "invalid_type"),
    (b'{"stream": "x"}', "invalid_type"),
    (b'{"messages": [3]}', "invalid_type"),
    (b'{"model": "' + b"m" * 1_000_000 + b'"}', "invalid_model"),
    (b"\xff\xfe", "invalid_json"),
    (b'{"model": "\xff"}', "invalid_type"),
    (b'{"\xff": 1}', "invalid_json"),
    (b'{"messages": ' + b"[" * 100_000, "invalid_json"),
]


def test_a_body_that_is_no_request_is_refused_in_openais_form(
    router: Router, engines: list[Engine]
) -> None:
    router.serve(engines[0])
    for body, code in NO_REQUESTS:
        answer = router.ask(
            "/v1/chat/completions", body, method="POST", content_type="application/json"
        )
        assert (answer.status, answer.json["error"]["code"]) == (400, code), body[:40]
        assert len(answer.body) < 1_000
    assert engines[0].control()["seen"] == []


def test_a_prompt_is_not_logged(router: Router, engines: list[Engine], tmp_path: Path) -> None:
    router.serve(engines[0])
    secret = "hunter2" * 10
    router.ask("/v1/completions", {**PROMPT, "prompt": secret})
    router.ask("/v1/completions", {"model": secret * 100, "prompt": secret})
    engines[0].control(say={"garbage": 1})
    router.ask("/v1/completions", {**PROMPT, "prompt": secret})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert router.log in files
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []


# -- the address that all services share


def test_the_shared_address_offers_what_a_caller_may_use(
    router: Router, engines: list[Engine]
) -> None:
    replica, now_ms = (engines[0].replica,), int(time.time() * 1e3)
    router.tell(
        RouterWanted(
            services=(
                RoutedService(name="chat", replicas=replica, adapters={"sql": "/l/sql"}),
                RoutedService(name="ours", replicas=replica, callers=("k1",)),
            ),
            refused={"k7": 0, "k8": 9 * now_ms, "k9": now_ms + 3_000_000, "k6": 1},
        )
    )

    def models(**headers: Any) -> list[str]:
        found = router.ask("/v1/models", service="*", **headers).json["data"]
        return [one["id"] for one in found]

    assert models() == ["chat", "chat/sql"]
    assert models(x_shoal_caller="k1") == ["chat", "chat/sql", "ours"]
    body = {**PROMPT, "model": "ours"}
    allowed = router.ask("/v1/completions", body, service="*", x_shoal_caller="k1")
    assert allowed.status == 200
    for caller, why in (("", (401, "invalid_api_key")), ("k2", (404, "model_not_found"))):
        refused = router.ask("/v1/completions", body, service="*", x_shoal_caller=caller)
        assert (refused.status, refused.json["error"]["code"]) == why
        unlisted = router.ask("/v1/models/ours", service="*", x_shoal_caller=caller)
        assert (unlisted.status, unlisted.json["error"]["code"]) == why
    assert router.ask("/v1/models/chat/sql", service="*").json["parent"] == "chat"
    spent = router.ask("/v1/completions", PROMPT, service="*", x_shoal_caller="k9")
    assert (spent.status, spent.json["error"]["code"]) == (429, "insufficient_quota")
    assert 60 < int(spent.response.headers["retry-after"]) <= 3_000  # what is left of its window
    for caller, after_s in (("k6", "1"), ("k7", "60"), ("k8", "86400")):
        spent = router.ask("/v1/models", service="*", x_shoal_caller=caller)
        assert (spent.status, spent.response.headers["retry-after"]) == (429, after_s)
    assert router.ask("/metrics", service="*").status == 404


def test_a_model_that_is_named_twice_is_one_for_the_router_and_the_replica(
    router: Router, engines: list[Engine]
) -> None:
    router.serve(engines[0], callers=("k1",))
    router.serve(engines[0], name="open")
    body = b'{"prompt": "x", "max_tokens": 1, "model": "chat", "model": "open"}'
    answer = router.ask(
        "/v1/completions", body, method="POST", service="*", content_type="application/json"
    )
    assert answer.status == 200
    assert [one.service for one in router.tell().counts] == ["open"]


# -- callers and replicas that mean harm


def test_no_spelling_of_a_request_escapes_the_count(router: Router, engines: list[Engine]) -> None:
    router.serve(engines[0], callers=("k1",))
    body = json.dumps(PROMPT).encode()
    caller: Any = {"x_shoal_caller": "k1"}
    for path, kind in (
        ("/v1/completions", "text/plain"),
        ("/v1/completions", "application/x-www-form-urlencoded"),
        ("/%761/%63ompletions", "application/json"),
    ):
        router.ask(path, body, method="POST", content_type=kind, **caller)
    assert [(one.requests, one.caller) for one in router.tell().counts] == [(3, "k1")]
    packed: Any = {"content_type": "application/json", "content_encoding": "gzip", **caller}
    assert router.ask("/v1/completions", body, method="POST", **packed).status == 415
    assert router.ask("/size", body, method="POST", **caller).status == 200
    router.tell(msgspec.structs.replace(router.wanted, limited=("k1",)))
    assert router.ask("/size", body, method="POST", **caller).status == 403
    assert router.ask("/v1/completions", PROMPT, **caller).status == 200
    assert router.ask("/v1/models", **caller).status == 200


def test_a_very_late_deadline_is_one(router: Router, engines: list[Engine]) -> None:
    router.serve(engines[0])
    assert router.ask("/v1/completions", PROMPT, x_shoal_deadline_ms="9" * 400).status == 200


@pytest.mark.parametrize("said", [-(10**30), 10**30])
def test_usage_that_is_a_lie_is_bounded(router: Router, engines: list[Engine], said: int) -> None:
    router.serve(engines[0])
    lie = {"prompt_tokens": said, "completion_tokens": said}
    engines[0].control(say={"usage": {**lie, "prompt_tokens_details": {"cached_tokens": said}}})
    long = {**PROMPT, "prompt": "x" * 10_000}
    for _ in range(2):
        assert router.ask("/v1/completions", long).status == 200
        assert list(router.stream(3, "x" * 10_000).events())[-1] == {}
    (count,) = router.tell().counts
    assert all(0 <= one <= 4 * TOKENS_MAX for one in (count.prompt, count.cached, count.generated))


@pytest.mark.parametrize("part", ["head", "1xx", "trailer"])
def test_a_replica_whose_headers_have_no_end_is_given_up(
    router: Router, engines: list[Engine], part: str
) -> None:
    router.serve(engines[0])
    engines[0].control(say={"endless": part})
    answer = router.ask("/v1/completions", PROMPT)
    assert (answer.status, answer.json["error"]["code"]) == (502, "bad_gateway")
    assert b"too long" in answer.body
