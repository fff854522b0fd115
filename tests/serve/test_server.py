"""The example of a model server, as a process: whole answers, streams, and what it refuses."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import WAIT_S

from tests.needs import need
from tests.train.gangs import ROOT, Gang

need("torch")

EXAMPLES = ROOT / "examples"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "The value of "}]


@contextmanager
def server(*arguments: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "serve" / "server.py"), *arguments],
        env={**os.environ, "PORT": "0"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("port "), line
            yield int(line.split()[1].rstrip(",")), process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with server() as (found, _):
        yield found


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def complete(port: int, **fields: Any) -> tuple[int, Any]:
    body = {"messages": HELLO, "max_tokens": 8, **fields}
    return ask(port, "POST", CHAT, json.dumps(body).encode())


def test_it_tells_its_models_and_that_its_weights_are_random(port: int) -> None:
    status, models = ask(port, "GET", "/v1/models")
    assert (status, models["data"][0]["id"]) == (200, "chars")
    status, health = ask(port, "GET", "/health")
    assert status == 200 and health["weights"].startswith("random: ")


def test_a_completion_has_the_length_that_was_asked_for(port: int) -> None:
    status, answer = complete(port, max_tokens=8, model="chars")
    assert (status, answer["object"]) == (200, "chat.completion")
    choice = answer["choices"][0]
    assert len(choice["message"]["content"]) == 8
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "length")
    assert answer["usage"] == {"prompt_tokens": 13, "completion_tokens": 8, "total_tokens": 21}


def test_the_same_seed_writes_the_same_and_another_does_not(port: int) -> None:
    texts = [
        complete(port, seed=seed, max_tokens=40)[1]["choices"][0]["message"]["content"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_content_may_come_in_parts(port: int) -> None:
    parts = [{"type": "text", "text": "The value "}, {"type": "text", "text": "of "}]
    whole = complete(port, temperature=0)
    split = complete(port, temperature=0, messages=[{"role": "user", "content": parts}])
    assert whole[1]["choices"] == split[1]["choices"]


def test_a_stream_brings_one_character_after_the_other(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    body = {"messages": HELLO, "max_tokens": 5, "temperature": 0, "stream": True}
    connection.request("POST", CHAT, json.dumps(body).encode())
    response = connection.getresponse()
    assert response.headers["content-type"] == "text/event-stream"
    events = response.read().decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert (
        text == complete(port, max_tokens=5, temperature=0)[1]["choices"][0]["message"]["content"]
    )
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 6 + ["length"]
    connection.request("GET", "/health")  # the connection is kept
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": "hello"}, 400, "messages"),
        ({"messages": [{"role": "user"}]}, 400, "messages"),
        ({"messages": [3]}, 400, "messages"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 10**9}, 400, "max_tokens"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"max_tokens": True}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": float("nan")}, 400, "temperature"),
        ({"seed": 2**70}, 400, "seed"),
        ({"stream": "yes"}, 400, "stream"),
        ({"model": "gpt"}, 404, "model"),
    ],
)
def test_a_bad_field_is_named(port: int, fields: dict[str, Any], status: int, param: str) -> None:
    got, answer = complete(port, **fields)
    assert (got, answer["error"]["param"]) == (status, param)
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_refused(port: int, body: bytes) -> None:
    status, answer = ask(port, "POST", CHAT, body)
    assert status == 400
    assert answer["error"]["message"]


def test_what_is_too_large_or_not_there_is_refused(port: int) -> None:
    # The server may answer and close before all is sent: only the head need be.
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {2 << 20}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(100).split()[1] == b"413"
    assert ask(port, "POST", "/nowhere", b"{}")[0] == 404
    assert ask(port, "GET", "/nowhere")[0] == 404


def test_a_client_that_vanishes_disturbs_nobody(port: int) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 2000, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
        connection.sendall(head.encode() + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert complete(port)[0] == 200


def test_an_end_lets_an_answer_end() -> None:
    with server() as (found, process):
        connection = http.client.HTTPConnection("127.0.0.1", found, timeout=WAIT_S)
        body = {"messages": HELLO, "max_tokens": 200, "stream": True}
        connection.request("POST", CHAT, json.dumps(body).encode())
        response = connection.getresponse()
        process.send_signal(signal.SIGTERM)
        assert response.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(WAIT_S) == 0
        connection.close()


def test_what_was_trained_is_served(tmp_path: Path) -> None:
    env = {"SHOAL_CHECKPOINT_DIR": str(tmp_path)}
    script = str(EXAMPLES / "train" / "chars.py")
    with Gang(script, "--steps", 3, "--batch", 8, world=1, env=env) as gang:
        gang.succeed()
    with server("--checkpoint", str(tmp_path)) as (found, _):
        assert ask(found, "GET", "/health")[1]["weights"].startswith("step 3, from checkpoint-")
        trained = complete(found, temperature=0, max_tokens=40)[1]["choices"]
    with server("--checkpoint", str(tmp_path / "none")) as (found, _):
        assert "there is no checkpoint in" in ask(found, "GET", "/health")[1]["weights"]
        assert complete(found, temperature=0, max_tokens=40)[1]["choices"] != trained
