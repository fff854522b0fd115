"""A stream survives its replica: nothing is doubled, nothing is missing, and its id stays."""

from __future__ import annotations

from typing import Any

import pytest
from harness.waiting import until

from tests.router.engine import TEMPLATE_END, written
from tests.router.world import Answer, Engine, Router, words_of

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
CHAT_TEXT = "\n<user>\nhello" + TEMPLATE_END


def one_of(engines: list[Engine], answer: Answer) -> Engine:
    return next(one for one in engines if one.name == answer.replica)


def killed_at(
    router: Router, engines: list[Engine], place: int, **more: Any
) -> list[dict[str, Any]]:
    """The events of a stream whose replica is killed after so many words."""
    for one in engines:
        one.control(wait_at=place)
    answer = router.stream(24, **more)
    events = answer.events()
    got: list[dict[str, Any]] = []
    while sum(1 for one in got if words_of(one)) < place or not got:
        got.append(next(events))
    first = one_of(engines, answer)
    for one in engines:
        if one is not first:
            one.control(go=True)
    first.kill()
    return [*got, *events]


@pytest.mark.parametrize(
    ("place", "chat"),
    [
        (place, chat)
        for place in (0, 1, 2, 3, 4, 7, 12, 23)
        for chat in (True, False)
        if place or chat
    ],
)
def test_a_killed_replica_is_not_noticed(
    router: Router, engines: list[Engine], place: int, chat: bool
) -> None:
    router.serve(*engines)
    more = {"messages": CHAT} if chat else {}
    events = killed_at(router, engines, place, **more)
    whole = "".join(written(CHAT_TEXT if chat else "hello", 24))
    assert "".join(map(words_of, events)) == whole
    assert events[-1] == {}
    assert len({(one["id"], one["created"]) for one in events if one}) == 1
    if chat:
        roles = [one["choices"][0]["delta"].get("role") for one in events if one.get("choices")]
        assert roles.count("assistant") == 1
    ends = [one["choices"][0].get("finish_reason") for one in events if one.get("choices")]
    assert [one for one in ends if one] == ["length"]
    load = router.tell().services["chat"]
    assert (load.resumed, load.broken) == (1, 0)
    assert [one.failures for one in load.replicas.values()].count(1) == 1


def test_the_usage_of_a_stream_that_moved_is_of_the_whole(
    router: Router, engines: list[Engine]
) -> None:
    router.serve(*engines)
    events = killed_at(router, engines, 7, stream_options={"include_usage": True})
    (usage,) = [one["usage"] for one in events if one.get("usage")]
    assert usage["completion_tokens"] == 24
    (count,) = until(lambda: router.tell().counts)
    assert (count.requests, count.generated) == (1, 24)


@pytest.mark.parametrize("how", ["abort_at", "error_at"])
def test_an_engine_that_gives_up_is_as_one_that_died(
    router: Router, engines: list[Engine], how: str
) -> None:
    router.serve(*engines)
    for one in engines:
        one.control(wait_at=5)
    answer = router.stream(24)
    first = one_of(engines, answer)
    first.control(say={how: 5}, go=True)
    for one in engines:
        one.control(go=True)
    assert "".join(map(words_of, answer.events())) == "".join(written("hello", 24))
    assert router.tell().services["chat"].resumed == 1


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"n": 2}, "more than one answer"),
        ({"logprobs": 3}, "logprobs"),
        ({"prompt": ["hello"]}, "not one text"),
        ({"guided_regex": "a*"}, "grammar"),
    ],
)
def test_what_cannot_go_on_ends_with_a_clear_error(
    router: Router, engines: list[Engine], more: dict[str, Any], why: str
) -> None:
    router.serve(*engines)
    events = killed_at(router, engines, 3, **more)
    assert why in events[-1]["error"]["message"]
    assert events[-1]["error"]["type"] == "server_error"
    assert router.tell().services["chat"].broken == 1


def test_a_call_of_a_tool_is_not_continued(router: Router, engines: list[Engine]) -> None:
    router.serve(*engines)
    for one in engines:
        one.control(say={"tools": 1}, wait_at=3)
    answer = router.stream(24, messages=CHAT)
    events = answer.events()
    for _ in range(4):
        next(events)
    one_of(engines, answer).kill()
    assert "a tool was being sent" in list(events)[-1]["error"]["message"]


def test_without_another_replica_the_stream_waits_for_one(
    router: Router, engines: list[Engine]
) -> None:
    """The replica's successor is told by the controller while the client waits."""
    router.serve(engines[0])
    engines[0].control(wait_at=4)
    answer = router.stream(24)
    events = answer.events()
    got = [next(events) for _ in range(4)]
    engines[0].kill()
    until(lambda: router.tell().services["chat"].queued == 1)
    router.serve(engines[1])
    assert "".join(map(words_of, [*got, *events])) == "".join(written("hello", 24))


def test_a_stream_at_a_replica_that_is_drained_ends_there(
    router: Router, engines: list[Engine]
) -> None:
    router.serve(engines[0])
    engines[0].control(wait_at=4)
    answer = router.stream(24)
    events = answer.events()
    got = [next(events) for _ in range(4)]
    router.serve(engines[1])
    engines[0].control(go=True)
    assert "".join(map(words_of, [*got, *events])) == "".join(written("hello", 24))
    assert not any(one["target"] == "/v1/completions" for one in engines[1].control()["seen"])


def test_a_client_that_hangs_up_ends_its_request_at_the_replica(
    router: Router, engines: list[Engine]
) -> None:
    router.serve(engines[0])
    engines[0].control(wait_at=4)
    answer = router.stream(24)
    next(answer.events())
    answer.hang_up()
    until(lambda: engines[0].control()["cut"] == 1)
    until(lambda: router.tell().services["chat"].replicas["a"].in_flight == 0)
    (count,) = router.tell().counts
    assert count.requests == 1 and 1 <= count.generated <= 4
