"""The simulated engine: what a step costs, what its memory keeps, and the forms of its answers."""

from __future__ import annotations

import http.client
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from harness.engine.blocks import Blocks
from harness.engine.model import Engine, Sequence, Table
from harness.engine.running import engines
from harness.waiting import until

TABLE = Table(
    step_ms=10,
    prompt_ms=0.5,
    attention_ms=100,
    sequence_ms=1,
    context_ms=0.01,
    block_tokens=4,
    blocks=64,
    batch_max=4,
    chunk_tokens=32,
)


def play(arrivals: list[tuple[float, Sequence]], steps: int) -> Engine:
    """In runs of at most `steps`, as a driver on virtual time does."""
    engine, end_ms, rest = Engine(TABLE), math.inf, list(arrivals)
    while rest or end_ms < math.inf:
        if rest and rest[0][0] < end_ms:
            at_ms, sequence = rest.pop(0)
            engine.submit(sequence, at_ms)
            if not engine.working:
                end_ms = engine.begin(at_ms, steps) or math.inf
            else:
                end_ms = engine.cut(at_ms) or end_ms
        else:
            engine.finish()
            end_ms = engine.begin(end_ms, steps) or math.inf
    return engine


def test_a_request_alone_takes_what_the_table_says() -> None:
    one = Sequence(1, [], 10, 3)
    engine = play([(5.0, one)], 100)
    read_ms = 10 + 0.5 * 10 + 100 * (10 * 5) / 1e6
    assert one.first_ms == pytest.approx(5 + read_ms)
    assert one.last_ms == pytest.approx(one.first_ms + 11 + 0.11 + 11 + 0.12)
    assert engine.answer_tokens == 3
    assert engine.blocks.in_use == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_run_of_many_steps_is_the_same_as_single_ones(seed: int) -> None:
    """The short way that virtual time takes changes no time of any request."""

    def arrivals() -> list[tuple[float, Sequence]]:
        rng, at_ms, found = random.Random(seed), 0.0, []
        for number in range(60):
            at_ms += rng.expovariate(1 / 60)
            prompt, answer = rng.randrange(1, 90), rng.randrange(1, 30)
            shared = rng.randrange(4)
            blocks = [(shared, i) if i < 6 else (number, i) for i in range(prompt // 4)]
            found.append((at_ms, Sequence(number, [hash(b) for b in blocks], prompt, answer)))
        return found

    by_run, by_step = arrivals(), arrivals()
    fast, slow = play(by_run, 1 << 30), play(by_step, 1)
    assert fast.hit_tokens == slow.hit_tokens > 0
    for (_, one), (_, other) in zip(by_run, by_step, strict=True):
        assert one.first_ms == pytest.approx(other.first_ms)
        assert one.last_ms == pytest.approx(other.last_ms)
    for engine in (fast, slow):
        assert engine.blocks.in_use == 0
        assert engine.blocks.held <= TABLE.blocks


def test_a_prompt_that_is_known_is_read_from_memory_but_for_its_end() -> None:
    blocks = [11, 12, 13]
    first, second = Sequence(1, blocks, 12, 1), Sequence(2, blocks, 12, 1)
    play([(0.0, first), (500.0, second)], 1)
    assert (first.cached, second.cached) == (0, 8)  # the last token has to be read
    assert second.first_ms - 500 < first.first_ms


def test_a_prompt_in_the_same_batch_finds_what_was_read_before_it() -> None:
    long = list(range(100, 120))
    first, second = Sequence(1, long, 80, 20), Sequence(2, long, 80, 1)
    play([(0.0, first), (1.0, second)], 1)
    assert 0 < second.cached < 80


def test_memory_forgets_the_end_of_the_oldest_prefix_first() -> None:
    blocks = Blocks(4)
    assert blocks.take((), 3)
    for each in (1, 2, 3):
        assert blocks.fill(each)
    blocks.release([1, 2, 3], 0)
    assert blocks.take((), 2)  # one free, and the room of one
    assert (blocks.found([1, 2, 3]), blocks.held) == (2, 2)
    assert blocks.take([1], 1)  # the room of the other
    assert not blocks.take((), 1)
    assert blocks.found([1, 2]) == 1


def test_what_has_no_room_waits() -> None:
    first, second = Sequence(1, [], 100, 100), Sequence(2, [], 100, 100)
    play([(0.0, first), (1.0, second)], 1 << 30)
    assert second.first_ms > first.last_ms


@pytest.mark.parametrize("when", range(3))
def test_who_leaves_makes_room(when: int) -> None:
    engine = Engine(TABLE)
    first, second = Sequence(1, [1, 2, 3], 60, 50), Sequence(2, [], 40, 2)
    engine.submit(first, 0.0)
    engine.submit(second, 0.0)
    now_ms, ended = 0.0, []
    for _ in range(when):  # it waits, is read, or grows
        now_ms = engine.begin(now_ms) or math.nan
        ended += engine.finish().ended
    engine.cancel(first)
    while end_ms := engine.begin(now_ms):
        now_ms = end_ms
        ended += engine.finish().ended
    assert ended == [second]
    assert second.last_ms > second.first_ms
    assert (engine.blocks.in_use, engine.running) == (0, 0)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    table = '{"step_ms": 1, "block_tokens": 4, "adapter_ms": 1}'
    with engines("--table", table, "--adapters", "1", "--context", "2000") as ports:
        yield ports[0]


def ask(port: int, path: str, body: object = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    text = body if isinstance(body, str) else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, None if body is None else text)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def events(text: str) -> list[dict[str, Any]]:
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def said(found: list[dict[str, Any]]) -> str:
    choices = [each["choices"][0] for each in found if each["choices"]]
    return "".join(
        (one["delta"].get("content") or "") if "delta" in one else one["text"] for one in choices
    )


def completion(**more: object) -> dict[str, object]:
    return {"prompt": "one two three four five", "max_tokens": 20, "ignore_eos": True, **more}


def test_a_stream_says_what_a_whole_answer_says(port: int) -> None:
    status, text = ask(port, "/v1/completions", completion())
    whole = json.loads(text)
    assert status == 200
    assert whole["usage"]["completion_tokens"] == 20
    streamed = completion(stream=True, stream_options={"include_usage": True})
    found = events(ask(port, "/v1/completions", streamed)[1])
    assert said(found) == whole["choices"][0]["text"]
    assert found[-2]["choices"][0]["finish_reason"] == "length"
    assert found[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    without = events(ask(port, "/v1/completions", completion(stream=True))[1])
    assert not any("usage" in each for each in without)


def test_a_text_is_continued_as_if_it_had_never_ended(port: int) -> None:
    whole = json.loads(ask(port, "/v1/completions", completion())[1])["choices"][0]["text"]
    words = whole.split(" ")
    begun = " ".join(words[:8])
    rest = completion(prompt=f"{completion()['prompt']}{begun}", max_tokens=13)
    assert begun + json.loads(ask(port, "/v1/completions", rest)[1])["choices"][0]["text"] == whole


def test_a_chat_is_continued_from_the_assistants_last_words(port: int) -> None:
    chat = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"text": "hi"}]}]
    asked = {"messages": chat, "max_tokens": 300}
    answer = json.loads(ask(port, "/v1/chat/completions", asked)[1])
    whole, finish = answer["choices"][0]["message"]["content"], answer["choices"][0]
    begun = whole[: whole.index(" ", 30)]
    asked["messages"] = [*chat, {"role": "assistant", "content": begun}]
    asked["max_tokens"] = 300 - len(begun.split())
    found = events(ask(port, "/v1/chat/completions", {**asked, "stream": True})[1])
    assert begun + said(found) == whole
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert found[-1]["choices"][0]["finish_reason"] == finish["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", "{", 400),
        ("/v1/completions", {"max_tokens": 3}, 400),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400),
        ("/v1/completions", {"prompt": "a", "max_tokens": 5_000}, 400),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": ["hi"]}, 400),
        ("/v1/nothing", {}, 404),
    ],
)
def test_what_cannot_be_answered_gets_an_error(
    port: int, path: str, body: object, status: int
) -> None:
    found, text = ask(port, path, body)
    assert found == status
    assert json.loads(text)["error"]["code"] == status


def test_adapters_are_loaded_within_a_bound(port: int) -> None:
    load = {"lora_name": "poet", "lora_path": "/adapters/poet"}
    assert ask(port, "/v1/load_lora_adapter", load)[0] == 200
    assert ask(port, "/v1/load_lora_adapter", {**load, "lora_name": "two"})[0] == 400
    named = [each["id"] for each in json.loads(ask(port, "/v1/models")[1])["data"]]
    assert named == ["sim", "poet"]
    for _ in range(2):
        spoken = json.loads(ask(port, "/v1/completions", completion(model="poet"))[1])
        cached = spoken["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (spoken["model"], cached) == ("poet", 4)
    assert ask(port, "/v1/unload_lora_adapter", load)[0] == 200
    assert ask(port, "/v1/completions", completion(model="poet"))[0] == 404


def test_a_client_that_leaves_frees_its_place(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(
        "POST", "/v1/completions", json.dumps(completion(max_tokens=1_900, stream=True))
    )
    assert connection.getresponse().fp.readline()
    connection.close()

    def running() -> float:
        lines = ask(port, "/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if "_requests_running{" in line)

    until(lambda: running() == 0)
