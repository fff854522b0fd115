"""The figures of vLLM and SGLang are read from what these engines really print."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.control.engine_reader import engine_figures
from shoal.model.service import EngineFigures

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("name", "waiting", "running", "cache_milli"),
    [
        ("vllm-0.11.txt", 72, 24, 341),
        ("vllm-0.7.txt", 2, 5, 910),  # the older name of the cache's figure
        ("vllm-data-parallel.txt", 3, 5, 500),  # two schedulers: requests add up, caches do not
        ("sglang-0.5.txt", 4, 8, 520),
        ("llamacpp.txt", 4, 2, 0),  # it does not show its cache
        ("sglang-ranks.txt", 7, 3, 280),  # tensor parallel ranks repeat one scheduler's figures
    ],
)
def test_the_figures_of_an_engine_are_found(
    name: str, waiting: int, running: int, cache_milli: int
) -> None:
    found = engine_figures((GOLDEN / name).read_text())
    assert found == EngineFigures(waiting=waiting, running=running, cache_milli=cache_milli)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>not found</html>",
        "http_requests_total 3\nllamacpp:n_decode_total 1\n",
        "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.\n",
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 3\n',
        'vllm:num_requests_waiting{a="b"} NaN\n',
        'vllm:num_requests_waiting{a="b"} -1\n',
        "vllm:num_requests_waiting\n",
    ],
)
def test_what_shows_no_such_figures_has_none(text: str) -> None:
    assert engine_figures(text) is None


def test_labels_may_hold_anything_and_figures_are_bounded() -> None:
    odd = 'vllm:num_requests_waiting{model_name="a } \\" 7, {",engine="0"} 1e30 1700000000000\n'
    found = engine_figures(odd + "vllm:kv_cache_usage_perc 7.5\n")
    assert found is not None
    assert (found.waiting, found.cache_milli) == (1_000_000, 1000)
