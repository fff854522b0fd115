"""Replicas for a rate and latency goals: the simulated queue against theory, and its choices."""

from __future__ import annotations

import csv
import gzip
import math
import os
from datetime import datetime
from pathlib import Path

import pytest

from shoal.plan import library
from shoal.plan.hardware import Impossible
from shoal.plan.serving import (
    Goals,
    Latency,
    Load,
    Point,
    Request,
    Server,
    capacity,
    choose,
    measured,
    modeled,
    poisson,
    simulate,
)

TRACES = Path(
    os.environ.get("SHOAL_TRACES")
    or Path(__file__).parent.parent.parent.parent / "shared" / "traces"
)
H100 = library.hardware().cluster("h100", 1)
LLAMA = library.model("llama3-70b")
CHAT = Load(rate=20, input=1000, output=300)


def one_at_a_time(token_s: float, read_s: float = 0.0) -> Server:
    """A queue of the textbook: the service time is proportional to the prompt."""
    return Server(
        gpus=1,
        weight_bytes=read_s,
        dense_bytes=read_s,
        expert_share=0,
        cache_tokens=10**9,
        cache_bytes=0,
        token_s=token_s,
        attention_s=0,
        read_s=1,
        reduce_s=0,
        reduce_token_s=0,
        step_s=0,
        sequences_max=1,
    )


@pytest.mark.parametrize("busy", [0.3, 0.7])
def test_a_server_with_one_request_at_a_time_is_an_m_m_1_queue(busy: float) -> None:
    """Prompts of exponential length: the time in the system is exponential with rate mu - lambda,
    because the service time is."""
    mean = 500
    arrivals = [
        request._replace(output=1)
        for request in poisson(Load(rate=busy, input=mean, output=1), 15_000, seed=1)
    ]
    found = simulate(one_at_a_time(1 / mean), arrivals)
    assert found.busy == pytest.approx(busy, rel=0.03)
    assert found.ttft_p50_s == pytest.approx(math.log(2) / (1 - busy), rel=0.1)
    assert found.ttft_p90_s == pytest.approx(math.log(10) / (1 - busy), rel=0.1)


def test_a_server_whose_steps_take_the_same_time_is_an_m_d_1_queue() -> None:
    """Pollaczek and Khinchine: the mean wait is half of that of M/M/1. The median follows from the
    mean here only in a test, so that the mean is taken from many requests of one length."""
    busy = 0.8
    arrivals = [
        Request(one.at_s, 100, 1) for one in poisson(Load(rate=busy, input=1, output=1), 15_000)
    ]
    waits, free = [], 0.0
    for one in arrivals:  # Lindley's recursion
        waits.append(max(0.0, free - one.at_s))
        free = max(free, one.at_s) + 1
    mean = sum(waits) / len(waits)
    assert mean == pytest.approx(busy / (2 * (1 - busy)), rel=0.1)
    found = simulate(one_at_a_time(0.01), arrivals)
    ordered = sorted(wait + 1 for wait in waits[3000:])
    assert found.ttft_p90_s == pytest.approx(ordered[int(0.9 * len(ordered))], rel=1e-6)


def test_decoding_many_requests_at_once_takes_hardly_longer_than_one() -> None:
    server = modeled(LLAMA, H100, 8)
    alone, many = server.takes_s(0, 0, 1, 1000), server.takes_s(0, 0, 32, 32_000)
    assert 0.009 < alone < 0.014  # 141 GB through 8 x 3.35 TB/s, and the all-reduces
    assert many < 1.3 * alone
    prompt = server.takes_s(2048, 1024, 0, 0)
    assert prompt > 2 * LLAMA.matmul_weights() * 2048 / (8 * 989e12)


def test_a_replica_of_llama_2_70b_is_about_as_fast_as_in_mlperf() -> None:
    """MLPerf inference 4.1, server: about 21,600 tokens/s on 8 H100 in 8 bits, with at most 2 s to
    the first token and 200 ms per token. Prompts and answers have about 294 tokens."""
    model = library.model("llama2-70b")
    load = Load(rate=1, input=294, output=294)
    rate = capacity(modeled(model, H100, 4, "fp8"), load, Goals(ttft_s=2, tpot_s=0.2))
    assert 2 * rate * load.output == pytest.approx(21_600, rel=0.3)


def test_the_choices_meet_their_goals_and_the_first_has_the_fewest_gpus() -> None:
    goals = Goals(ttft_s=0.5, tpot_s=0.05)
    found = choose(LLAMA, H100, CHAT, goals)
    assert [one.total_gpus for one in found.choices] == sorted(
        one.total_gpus for one in found.choices
    )
    assert "141 GB" in found.problems[1]
    for one in found.choices:
        assert isinstance(one.latency, Latency)
        assert one.replicas * one.rate_max >= CHAT.rate
        assert one.latency.tpot_p90_s <= goals.tpot_s
    server = modeled(LLAMA, H100, 4)
    assert simulate(server, poisson(CHAT)) == simulate(server, poisson(CHAT))  # the same seed
    harder = capacity(server, CHAT, Goals(ttft_s=0.25, tpot_s=0.025))
    assert harder < next(one.rate_max for one in found.choices if one.gpus == 4)


def test_without_goals_a_replica_still_has_to_keep_up_with_its_requests() -> None:
    server = modeled(LLAMA, H100, 4)
    rate = capacity(server, CHAT, Goals())
    within = capacity(server, CHAT, Goals(ttft_s=0.5, tpot_s=0.05))
    assert within <= rate < 4 * within
    over = Load(rate=2 * rate, input=CHAT.input, output=CHAT.output)
    assert not simulate(server, poisson(over)).meets(Goals())


def test_goals_that_no_replica_meets_are_refused_with_what_an_idle_one_takes() -> None:
    with pytest.raises(Impossible, match=r"even an idle replica needs .* ms per token"):
        choose(LLAMA, H100, CHAT, Goals(tpot_s=0.001))
    with pytest.raises(Impossible, match="to the first token"):
        choose(LLAMA, H100, CHAT, Goals(ttft_s=0.001))
    with pytest.raises(Impossible, match="rate is 0"):
        choose(LLAMA, H100, Load(rate=0, input=1, output=1), Goals())
    with pytest.raises(Impossible, match="cache holds"):
        choose(LLAMA, H100, Load(rate=1, input=9_000_000, output=1), Goals())


def test_a_model_that_is_too_large_for_a_node_is_served_by_several() -> None:
    found = choose(library.model("llama3-405b"), H100, Load(rate=1, input=500, output=100), Goals())
    assert [one.gpus for one in found.choices] == [16, 32] or found.choices[0].gpus == 16
    assert set(found.problems) == {1, 2, 4, 8}


def test_a_measured_server_needs_as_many_replicas_as_its_points_say() -> None:
    points = [
        Point(rate=1, ttft_s=0.1, tpot_s=0.02),
        Point(rate=4, ttft_s=0.3, tpot_s=0.03),
        Point(rate=8, ttft_s=1.1, tpot_s=0.05),
    ]
    found = measured(points, 4, CHAT, Goals(ttft_s=0.5))
    assert found.rate_max == pytest.approx(5)
    assert (found.replicas, found.total_gpus) == (4, 16)
    assert measured(points, 4, CHAT, Goals()).rate_max == 8  # nothing beyond what was measured
    with pytest.raises(Impossible, match="at its lowest rate"):
        measured(points, 4, CHAT, Goals(tpot_s=0.01))


def test_real_arrivals_have_a_longer_tail_than_poisson_ones() -> None:
    """An hour of Azure's conversations, at the rate that a replica takes with Poisson arrivals."""
    path = TRACES / "azure-llm-2023" / "conv.csv.gz"
    if not path.exists():
        pytest.skip("needs azure-llm-2023 in ../shared/traces, or where SHOAL_TRACES says")
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))[:4000]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    sizes = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
    mean = [round(sum(column) / len(rows)) for column in zip(*sizes, strict=True)]
    server, goals = modeled(LLAMA, H100, 4), Goals(ttft_s=0.5, tpot_s=0.05)
    rate = capacity(server, Load(rate=1, input=mean[0], output=mean[1]), goals)
    speed = rate * (times[-1] - times[0]) / len(rows)
    real = [Request((at - times[0]) / speed, *size) for at, size in zip(times, sizes, strict=True)]
    found = simulate(server, real)
    assert found.ttft_p90_s > goals.ttft_s / 2  # it is near its goal,
    assert found.tpot_p90_s < 2 * goals.tpot_s  # and not overrun
