"""The comparison of routers for language models: what must hold on any trace, and on a real one."""

from __future__ import annotations

import msgspec
import pytest
from harness.engine.model import LLAMA_70B

from bench import tokens, tokens_faults, tokens_published
from bench.token_load import Answer, chat, read, words
from bench.token_policies import POLICIES
from bench.token_router import Cache, parts
from bench.token_traces import BLOCK, FOLDER, MOONCAKE, Request, hot, mooncake
from bench.tokens_virtual import Goal, Outcome, play

NEED = pytest.mark.skipif(
    not (FOLDER / MOONCAKE).exists(),
    reason=f"{FOLDER / MOONCAKE} is not here; SHOAL_TRACES names the folder of the public traces",
)


def test_every_policy_answers_every_request() -> None:
    requests = hot(FOLDER)[:400]
    for policy in POLICIES.values():
        found = play(requests, policy(3), 3, LLAMA_70B, Goal())
        assert (found.requests, found.failed) == (400, 0)
        assert found.hit > 0.8


def test_a_hot_prefix_spreads_by_itself() -> None:
    """One engine alone could not answer so many requests that all begin alike."""
    found = play(hot(FOLDER)[:2_000], Cache(8), 8, LLAMA_70B, Goal())
    assert found.imbalance < 1.2
    assert found.hit > 0.9


@NEED
def test_cache_halves_the_time_to_the_first_token_on_a_real_trace() -> None:
    requests = mooncake(FOLDER)[:1_500]
    found = {
        name: play(requests, policy(8), 8, LLAMA_70B, Goal())
        for name, policy in tokens.CHOICES.items()
    }
    best = min(each.ttft_mean_ms for name, each in found.items() if name != "cache")
    assert found["cache"].ttft_mean_ms <= 0.6 * found["least-loaded"].ttft_mean_ms
    assert found["cache"].ttft_mean_ms <= 0.9 * best
    assert found["cache"].hit > 1.5 * found["least-loaded"].hit


@NEED
def test_the_published_order_of_four_routers(capsys: pytest.CaptureFixture[str]) -> None:
    """And the first three within a fifth, with the ten instances of the paper's Figure 10."""
    assert tokens_published.main(["--instances", "10"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    found = msgspec.json.decode(last, type=dict[str, dict[str, tuple[float, float]]])["10"]
    seconds = [ttft_s for ttft_s, _ in found.values()]
    assert seconds == sorted(seconds, reverse=True)
    for way in ("random", "local cache"):
        published = tokens_published.PUBLISHED_S[way] / tokens_published.PUBLISHED_S["least load"]
        assert found[way][0] / found["least load"][0] == pytest.approx(published, rel=0.2)


def test_a_request_over_http_has_as_many_words_as_tokens() -> None:
    for prompt in (3 * BLOCK, 2 * BLOCK + 100):
        request = Request(0, [0, 7, 8], prompt, 9)
        assert sum(len(text.split()) for text in words(request)) == prompt
    one, other = Request(0, [0, 7, 8], 1_500, 9), Request(0, [0, 7, 9], 1_500, 9)
    assert words(one)[0] == words(other)[0]
    shared = [a for a, b in zip(parts(one), parts(other), strict=True) if a == b]
    assert len(shared) == 2 * BLOCK * 4 // 256
    assert msgspec.json.decode(chat(one))["max_tokens"] == 9


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('data: {"choices": [{"text": "a"}]}\n\n', "ended early"),
        ('data: {"choices": [{"text": "a"}]}\n\ndata: {"error": {}}\n\n', "error event"),
        (
            'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n',
            "",
        ),
    ],
)
def test_a_broken_stream_is_seen(text: str, problem: str) -> None:
    answer = Answer()
    answer.status = 200
    read(answer, text.encode())
    assert (answer.problem, answer.text) == (problem, "a")


def test_figures_go_out_as_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--trace", "decode", "--seconds", "20", "--only", "p2c", "least-loaded", "cache"]
    assert tokens.main(asked) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    found = msgspec.json.decode(last, type=dict[str, dict[str, Outcome]])
    assert list(found["decode, 8 engines"]) == ["least-loaded", "p2c", "cache"]


def test_an_unknown_trace_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert tokens.main(["--trace", "nothing"]) == 2
    assert capsys.readouterr().out.splitlines()[-1].startswith("tokens: no trace 'nothing'")


def test_no_stream_is_broken_by_a_kill_and_a_drain(capsys: pytest.CaptureFixture[str]) -> None:
    assert tokens_faults.main(["--streams", "20"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out.splitlines()[-1])["streams"]
    assert (found["broken"], found["equal"], found["equal_undisturbed"]) == ({}, 20, 20)
    assert found["resumed"] >= 5
