"""What an inference engine says of its own queue and cache, read from its Prometheus text.

vLLM, SGLang and llama.cpp have the same figures under different names. An engine with several
schedulers (data parallel) shows each of them once; ranks of one scheduler (tensor or pipeline
parallel) repeat the same figure.
"""

from __future__ import annotations

import math
import re

from shoal.model.service import EngineFigures

# In the order of preference: vLLM renamed its cache figure, and showed both for a while.
RUNNING = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
)
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
CACHE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
RANKS = frozenset(("tp_rank", "pp_rank", "moe_ep_rank", "attn_tp_rank"))
LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
COUNT_MAX = 1_000_000


def engine_figures(text: str) -> EngineFigures | None:
    """None if the text has no figures of an engine that is known."""
    wanted = frozenset((*RUNNING, *WAITING, *CACHE))
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for line in text.splitlines():
        if not line.startswith(("vllm:", "sglang:", "llamacpp:")):
            continue
        parsed = LINE.match(line)
        if parsed is None or parsed[1] not in wanted:
            continue
        value = _number(parsed[3])
        if value is None:
            continue
        labels = LABEL.findall(parsed[2] or "")
        scheduler = tuple(sorted(label for label in labels if label[0] not in RANKS))
        of_name = found.setdefault(parsed[1], {})
        of_name[scheduler] = max(value, of_name.get(scheduler, 0.0))
    waiting, running, cache = (_first(found, names) for names in (WAITING, RUNNING, CACHE))
    if waiting is None:
        return None
    return EngineFigures(
        waiting=_count(waiting),
        running=_count(running or []),
        cache_milli=min(1000, round(1000 * sum(cache) / len(cache))) if cache else 0,
    )


def _first(
    found: dict[str, dict[tuple[tuple[str, str], ...], float]], names: tuple[str, ...]
) -> list[float] | None:
    return next((list(found[name].values()) for name in names if name in found), None)


def _count(values: list[float]) -> int:
    return min(COUNT_MAX, round(sum(values)))


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
