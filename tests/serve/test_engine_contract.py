"""The simulated engine answers in the forms of a real llama.cpp server, but for what is named."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.engine import llama
from harness.engine.running import engines
from harness.waiting import until

CHAT = [{"role": "user", "content": "hi there"}]
BEGUN = [*CHAT, {"role": "assistant", "content": "well"}]
USAGE = {"stream_options": {"include_usage": True}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("completions", {"prompt": "hello there"}),
    "chat": ("chat/completions", {"messages": CHAT}),
    "continued chat": ("chat/completions", {"messages": BEGUN}),
    "continued chat, as vLLM is asked": (
        "chat/completions",
        {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False},
    ),
}
REFUSED: dict[str, tuple[str, str]] = {
    "no JSON": ("/v1/completions", '{"prompt":'),
    "no prompt": ("/v1/completions", '{"max_tokens": 2}'),
    "no messages": ("/v1/chat/completions", '{"max_tokens": 2}'),
    "too long": ("/v1/completions", json.dumps({"prompt": "a " * 3_000})),
    "no such route": ("/v1/nothing", "{}"),
}
# What llama.cpp has beyond OpenAI's interface.
MORE = {"timings", "system_fingerprint"}


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    folder = tmp_path_factory.mktemp("llama")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    real = llama.Llama(llama.python(folder / "env"), port, folder)
    try:
        until(lambda: answers(port), more=lambda: Path(real.log.name).read_text()[-2_000:])
        with engines("--context", "512", "--table", '{"step_ms": 1}') as simulated:
            yield port, simulated[0]
    finally:
        real.close()


def answers(port: int) -> bool:
    try:
        return ask(port, "/health", None)[0] == 200
    except OSError:
        return False


def ask(port: int, path: str, body: str | None) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("GET" if body is None else "POST", path, body, headers)
    answer = connection.getresponse()
    kind = (answer.getheader("Content-Type") or "").partition(";")[0]
    found = answer.status, kind, answer.read().decode()
    connection.close()
    return found


def form(value: Any) -> Any:
    """Names and types, without values."""
    if isinstance(value, dict):
        return {name: form(each) for name, each in sorted(value.items()) if name not in MORE}
    if isinstance(value, list):
        return [form(each) for each in value[:1]]
    return "number" if isinstance(value, int | float) else type(value).__name__


def events(text: str) -> list[dict[str, Any]]:
    lines = text.split("\n\n")
    assert [line.strip() for line in lines[-2:]] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line[6:]) for line in lines[:-2]]


def told(event: dict[str, Any]) -> str:
    """Which of its kind an event is."""
    if not event["choices"]:
        return "usage"
    choice = event["choices"][0]
    if choice["finish_reason"]:
        return "end"
    return "begin" if "role" in choice.get("delta", ()) else "text"


@pytest.mark.soak  # pip fetches an engine once
@pytest.mark.parametrize("name", REQUESTS)
def test_answers_have_the_same_form(ports: tuple[int, int], name: str) -> None:
    route, asked = REQUESTS[name]
    body = json.dumps({**asked, "max_tokens": 3, "temperature": 0})
    (status, kind, real), (of_ours, kind_of_ours, ours) = (
        ask(port, f"/v1/{route}", body) for port in ports
    )
    assert (status, kind) == (of_ours, kind_of_ours) == (200, "application/json")
    assert form(json.loads(real)) == form(json.loads(ours))
    for each in (json.loads(real), json.loads(ours)):
        assert each["choices"][0]["finish_reason"] == "length"
        assert each["usage"]["completion_tokens"] == 3


@pytest.mark.soak
@pytest.mark.parametrize("name", REQUESTS)
def test_streams_have_the_same_form(ports: tuple[int, int], name: str) -> None:
    route, asked = REQUESTS[name]
    body = json.dumps({**asked, "max_tokens": 3, "temperature": 0, "stream": True, **USAGE})
    found = [ask(port, f"/v1/{route}", body) for port in ports]
    assert {(status, kind) for status, kind, _ in found} == {(200, "text/event-stream")}
    real, ours = (events(text) for _, _, text in found)
    if "messages" in asked:
        assert [told(each) for each in real] == [told(each) for each in ours]
    else:  # llama.cpp has the usage of a completion in its last event; OpenAI says after it
        assert [told(each) for each in real] == [
            told(each) for each in ours if told(each) != "usage"
        ]
        assert "usage" in real[-1]
    for one, other in zip(real, ours, strict=False):
        expected = {**other, "usage": ours[-1]["usage"]} if "usage" in one else other
        assert form(one) == form(expected)


@pytest.mark.soak
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_have_the_same_form(ports: tuple[int, int], name: str) -> None:
    path, body = REFUSED[name]
    found = [ask(port, path, body) for port in ports]
    assert found[0][:2] == found[1][:2]
    for _, _, text in found:
        error = json.loads(text)["error"]
        assert {"message", "type", "code"} <= error.keys()
        assert error["code"] == found[0][0]
