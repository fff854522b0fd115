"""Who comes first when replicas are full, and which replica has an adapter or a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from harness.waiting import until

from shoal.model.tokens import Goals
from shoal.router.index import BLOCK_CHARS
from tests.router.world import Answer, Engine, Router

PROMPT: dict[str, Any] = {"model": "chat", "prompt": "hello", "max_tokens": 3}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


class Crowd:
    """Requests of clients that wait."""

    def __init__(self, router: Router, pool: ThreadPoolExecutor) -> None:
        self.router, self.pool = router, pool
        self.asked: list[Future[Answer]] = []

    def ask(self, prompt: str = "hello", shown: bool = True, **headers: Any) -> Future[Answer]:
        body = {**PROMPT, "prompt": prompt}
        before = self.queued()
        asked = self.pool.submit(self.router.ask, "/v1/completions", body, **headers)
        until(lambda: not shown or self.queued() != before or asked.done())
        self.asked.append(asked)
        return asked

    def queued(self) -> int:
        load = self.router.tell().services["chat"]
        return load.queued + sum(one.in_flight for one in load.replicas.values())


@pytest.fixture
def crowd(router: Router, engines: list[Engine], pool: ThreadPoolExecutor) -> Crowd:
    """One replica takes one request at a time, and has one that waits."""
    router.serve(engines[0], concurrency=1, queue_max=3)
    engines[0].control(wait_at=0)
    crowd = Crowd(router, pool)
    crowd.ask()
    until(lambda: engines[0].control()["in_flight"] == 1)
    return crowd


def test_the_most_important_request_is_first(crowd: Crowd, engines: list[Engine]) -> None:
    for prompt, priority in (("low", "-1"), ("high", "5"), ("middle", "0")):
        crowd.ask(prompt, x_shoal_priority=priority)
    engines[0].control(go=True)
    assert [one.result(60).status for one in crowd.asked] == [200] * 4
    sizes = [one["size"] for one in engines[0].control()["seen"] if "completions" in one["target"]]
    base = sizes[0] - len("hello")
    assert [one - base for one in sizes] == [len(one) for one in ("hello", "high", "middle", "low")]
    assert engines[0].control()["most"] == 1


def test_a_full_queue_refuses_the_least_important(crowd: Crowd, engines: list[Engine]) -> None:
    waiting = [crowd.ask(x_shoal_priority=one) for one in ("0", "1", "2")]
    refused = crowd.ask(x_shoal_priority="-1").result(60)
    assert refused.status == 429 and int(refused.response.headers["retry-after"]) >= 1
    assert refused.json["error"]["type"] == "rate_limit_error"
    important = crowd.ask(shown=False, x_shoal_priority="9")  # in the place of another
    assert waiting[0].result(60).status == 429
    engines[0].control(go=True)
    assert [one.result(60).status for one in (*waiting[1:], important)] == [200] * 3
    assert crowd.router.tell().services["chat"].refused == 2


def test_a_request_is_refused_when_its_deadline_has_passed(
    crowd: Crowd, engines: list[Engine]
) -> None:
    assert crowd.ask(x_shoal_deadline_ms="0").result(60).status == 504
    late = crowd.ask(x_shoal_deadline_ms="300").result(60)
    assert (late.status, late.json["error"]["code"]) == (504, "deadline_exceeded")
    engines[0].control(go=True)
    assert crowd.asked[0].result(60).status == 200
    assert sum("completions" in one["target"] for one in engines[0].control()["seen"]) == 1


def test_a_header_that_is_no_number_is_refused(crowd: Crowd, engines: list[Engine]) -> None:
    for name in ("x_shoal_priority", "x_shoal_deadline_ms"):
        wrong: Any = {name: "soon"}
        assert crowd.ask(**wrong).result(60).json["error"]["code"] == "invalid_header"
    engines[0].control(go=True)


def test_a_client_that_leaves_the_queue_makes_room(crowd: Crowd, engines: list[Engine]) -> None:
    with crowd.router.raw() as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-shoal-service: chat\r\n"
            b"content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
        )
        until(lambda: crowd.queued() == 2)
    until(lambda: crowd.queued() == 1)
    engines[0].control(go=True)


def test_who_waits_too_long_for_a_goal_gets_429(
    router: Router, engines: list[Engine], pool: ThreadPoolExecutor
) -> None:
    router.serve(engines[0], goals=Goals(ttft_ms=100), concurrency=1)
    engines[0].control(wait_at=0)
    crowd = Crowd(router, pool)
    first = crowd.ask()
    late = crowd.ask().result(60)
    assert late.status == 429 and late.response.headers["retry-after"]
    engines[0].control(go=True)
    assert first.result(60).status == 200


# -- where a prompt is


def test_a_session_stays_and_another_one_goes_elsewhere(
    router: Router, engines: list[Engine]
) -> None:
    router.serve(*engines)
    homes: dict[str, str] = {}
    texts = {name: name * BLOCK_CHARS * 4 for name in "xyzw"}
    for turn in range(4):
        for name in texts:
            answer = router.ask("/v1/completions", {**PROMPT, "prompt": texts[name]})
            assert homes.setdefault(name, answer.replica) == answer.replica
            texts[name] += answer.json["choices"][0]["text"] + f"turn {turn}" * BLOCK_CHARS
    assert sorted(homes.values()) == ["a", "a", "b", "b"]
    load = router.tell().services["chat"]
    assert all(one.cached_blocks > 8 for one in load.replicas.values())
    assert load.hit_milli > 300


def test_requests_that_share_nothing_are_spread(router: Router, engines: list[Engine]) -> None:
    router.serve(*engines)
    asked = [router.ask("/v1/completions", {**PROMPT, "prompt": f"{n}"}) for n in range(10)]
    assert sorted(one.replica for one in asked) == ["a"] * 5 + ["b"] * 5


# -- adapters


def test_an_adapter_is_loaded_where_it_is_asked_for_and_within_its_bound(
    router: Router, engines: list[Engine]
) -> None:
    adapters = {name: f"/adapters/{name}" for name in ("sql", "poem", "law")}
    router.serve(*engines, adapters=adapters, adapters_max=1)

    def ask(name: str) -> str:
        answer = router.ask("/v1/completions", {**PROMPT, "model": name})
        assert answer.status == 200, answer.body
        return answer.replica

    homes = {name: ask(name) for name in ("sql", "poem")}
    assert len(set(homes.values())) == 2
    for name in ("sql", "poem", "sql", "chat/poem", "sql"):
        assert ask(name) == homes[name.removeprefix("chat/")]
    loads = [one.control()["loads"] for one in engines]
    assert sorted(loads) == [["load poem"], ["load sql"]]
    law = ask("law")
    third = next(one for one in engines if one.name == law)
    assert third.control()["loads"][1:] == [
        f"unload {loads[engines.index(third)][0][5:]}",
        "load law",
    ]
    assert ask("chat") in ("a", "b")
    listed = [one["id"] for one in router.ask("/v1/models").json["data"]]
    assert listed == ["real/model", "sql", "poem", "law"]


def test_a_caller_may_not_load_adapters(router: Router, engines: list[Engine]) -> None:
    router.serve(engines[0], adapters={"sql": "/sql"}, adapters_max=1)
    for path in ("/v1/load_lora_adapter", "/unload_lora_adapter", "/v1/%6coad_%6cora_adapter"):
        body = {"lora_name": "x", "lora_path": "/etc"}
        assert router.ask(path, body).status in (400, 403, 404), path
    assert engines[0].control()["loads"] == []


def test_requests_for_adapters_that_are_all_in_use_wait(
    router: Router, engines: list[Engine], pool: ThreadPoolExecutor
) -> None:
    router.serve(engines[0], adapters={"sql": "/sql", "law": "/law"}, adapters_max=1)
    engines[0].control(wait_at=0)
    first = pool.submit(router.ask, "/v1/completions", {**PROMPT, "model": "sql"})
    until(lambda: engines[0].control()["in_flight"] == 1)
    second = pool.submit(router.ask, "/v1/completions", {**PROMPT, "model": "law"})
    until(lambda: router.tell().services["chat"].queued == 1)
    plain = pool.submit(router.ask, "/v1/completions", PROMPT)
    until(lambda: engines[0].control()["in_flight"] == 2)
    engines[0].control(go=True)
    assert [one.result(60).status for one in (first, second, plain)] == [200] * 3
    assert engines[0].control()["loads"] == ["load sql", "unload sql", "load law"]
