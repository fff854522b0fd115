"""`shoal plan` as a user meets it: tables, JSON, the inverse, serving, a history, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.cli.app import call
from shoal.control.home import Home
from shoal.control.store.sqlite import SqliteStore
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeJoined
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobFinished, JobPlaced, JobRunning
from shoal.model.job import JobSpec, Outcome
from shoal.model.node import NodeSpec
from shoal.model.resources import Slice

PLAIN = str(Path(__file__).parent.parent / "golden" / "traces" / "plain.csv")
SMALL = ("--model", "llama3-8b", "--tokens", "1T")


class Result(NamedTuple):
    code: int
    out: str
    err: str


Plan = Callable[..., Result]


@pytest.fixture
def plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Plan:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)

    def run(*args: str) -> Result:
        capsys.readouterr()
        code = call(["plan", *args])
        return Result(code, *capsys.readouterr())

    return run


def test_a_plan_shows_time_money_memory_and_what_limits_it(plan: Plan, tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: EUR\nco2_g_per_kwh: 50\ngpus: {h100: {per_hour: 2}}\n")
    result = plan(*SMALL, "--gpu", "h100", "--nodes", "8", "--prices", str(prices))
    assert result.code == 0, result.err
    for words in ("time to train", "MFU", "goodput", "€", "t CO2", "matrix products"):
        assert words in result.out, words
    for words in ("FSDP (ZeRO-3)", "tensor 8", "10% MORE OF", " limit"):
        assert words in result.out, words
    document = json.loads(plan(*SMALL, "--nodes", "8", "--json").out)
    assert document["gpus"] == 64
    cost, hours = document["cost"], document["cost"]["gpu_hours"]
    assert hours == pytest.approx(64 * document["time_s"] / 3600)
    assert cost["money"] == pytest.approx(hours * 4)
    assert "list price" in cost["price_source"]
    assert document["time_s"] * document["faults"]["goodput"] * document["best"]["tokens_s"] == (
        pytest.approx(1e12)
    )


def test_one_gpu_is_one_gpu_and_a_small_model_has_a_warning(plan: Plan, tmp_path: Path) -> None:
    small = ("--model", "gpt2", "--tokens", "1B", "--gpu", "h200")
    one = json.loads(plan(*small, "--gpus", "1", "--json").out)
    assert (one["nodes"], one["gpus"], one["warning"]) == (1, 1, "")
    assert one["best"]["layout"]["micro_batch"] >= 32, "more at a time is faster, and fits"
    assert json.loads(plan(*small, "--gpus", "16", "--json").out)["nodes"] == 2
    for flags, fix in (
        (("-n", "1"), "--gpus 1 for so many GPUs, --nodes 1 for so many whole nodes"),
        (("--gpus", "12"), "12 GPUs are not whole nodes: dgx-h200 has 8; use 8 or 16"),
        (("--gpus", "1", "--nodes", "1"), "cannot be combined with --nodes"),
    ):
        refused = plan(*small, *flags)
        assert refused.code and fix in refused.err, refused.err
    tiny = tmp_path / "tiny.yaml"
    tiny.write_text("layers: 3\nhidden: 96\nheads: 4\nvocab: 76\nsequence: 64\n")
    answer = plan("--model", str(tiny), "--tokens", "1M", "--batch", "4096", "--gpus", "1")
    assert "the smallest model that plans were compared with has 124M" in answer.out + answer.err


def test_a_deadline_finds_the_smallest_cluster_and_a_budget_the_fastest(plan: Plan) -> None:
    found = json.loads(plan(*SMALL, "--deadline", "30d", "--json").out)
    month = 30 * 86_400
    chosen, tried = found["inverse"]["chosen"], found["inverse"]["tried"]
    assert found["nodes"] == chosen["nodes"]
    assert chosen["time_s"] <= month
    assert all(one["time_s"] > month for one in tried if one["nodes"] < chosen["nodes"])
    budget = 1.003 * tried[0]["money"]  # larger clusters are a little less efficient
    found = json.loads(plan(*SMALL, "--budget", f"{budget:.0f}", "--json").out)
    chosen, tried = found["inverse"]["chosen"], found["inverse"]["tried"]
    assert chosen["money"] <= budget
    assert all(one["time_s"] >= chosen["time_s"] for one in tried if one["money"] <= budget)
    result = plan(*SMALL, "--deadline", "1s")
    assert result.code == 1
    assert "the deadline: the fastest, 8,192 nodes (65,536 GPUs), take 0.2 days" in result.err
    result = plan(*SMALL, "--budget", "1k")
    assert "the budget pays for about" in result.err
    result = plan(*SMALL, "--deadline", "30d", "--budget", "1k")
    assert "the smallest cluster that meets the deadline" in result.err


def test_a_service_is_planned_from_a_model_and_from_a_measurement(
    plan: Plan, tmp_path: Path
) -> None:
    asked = ("--serve", "--rate", "20/s", "--ttft", "500ms", "--tpot", "50ms")
    result = plan(*asked, "--model", "llama3-8b", "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert document["replicas"] >= 1
    assert document["choices"][0]["latency"]["tpot_p90_s"] <= 0.05
    points = tmp_path / "points.yaml"
    points.write_text(
        "gpus: 2\npoints:\n- {rate: 1, ttft: 100ms, tpot: 20ms}\n- {rate: 5, ttft: 900ms}\n"
    )
    result = plan(*asked, "--measured", str(points))
    assert result.code == 0, result.err
    assert "7 replicas with 2 GPUs each: 14 GPUs" in result.out


def lived(home: Path) -> None:
    """Six jobs of an hour come at once to one node with 8 GPUs; each takes all of them."""
    events: list[Event] = [
        NodeJoined(
            at_ms=0,
            node="n1",
            incarnation=1,
            spec=NodeSpec(id="n1", cpu_milli=64_000, memory_mb=64_000, gpus=8),
        ),
    ]
    spec = JobSpec(command=("true",), gpus=8)
    held = Slice(node="n1", gpus=tuple(range(8)))
    events += [JobSubmitted(at_ms=1000, job=f"j{n}", spec=spec) for n in range(1, 7)]
    for n in range(1, 7):
        begun = 1000 + (n - 1) * 3_600_000
        events.append(
            JobPlaced(at_ms=begun, job=f"j{n}", attempt=1, slices=(held,), master="", why="")
        )
        events.append(JobRunning(at_ms=begun, job=f"j{n}", attempt=1))
        events.append(
            JobFinished(
                at_ms=begun + 3_600_000,
                job=f"j{n}",
                outcome=Outcome.SUCCEEDED,
                attempt=1,
                code=0,
                why="",
            )
        )
    Home(home).path.mkdir(parents=True)
    store = SqliteStore(Home(home).database)
    store.commit(events, [])
    store.close()


def test_a_history_says_how_many_more_nodes_its_goal_needs_and_their_price(
    plan: Plan, tmp_path: Path
) -> None:
    """Six jobs of an hour on one node wait up to 5 hours; with three nodes, up to 1 hour."""
    lived(tmp_path / "home")
    prices = tmp_path / "prices.yaml"
    prices.write_text('currency: EUR\ngpus: {"*": {per_hour: 1}}\n')
    args = ("--history", "--goal", "p90 wait < 70m", "--prices", str(prices))
    result = plan(*args)
    assert result.code == 0, result.err
    assert "2 more nodes with 8 GPUs, €11,680 a month (1 now, 3 needed)" in result.out
    document = json.loads(plan("--history", "--goal", "mean wait < 9h", "--json").out)
    assert (document["met_now"], document["nodes_needed"]) == (True, 1)
    result = plan("--history", "--goal", "p50 jct < 59m")
    assert "the p50 jct of the work alone is 1h" in result.err
    trace = plan("--history", PLAIN, "--nodes", "2", "--goal", "p90 wait < 1m", "--json")
    assert json.loads(trace.out)["nodes_needed"] == 6


def test_a_larger_cluster_that_is_cheaper_is_named_and_meets_a_smaller_budget(plan: Plan) -> None:
    month = ("--model", "llama3-70b", "--tokens", "2T", "--deadline", "30d")
    found = json.loads(plan(*month, "--json").out)["inverse"]
    small, cheap = found["chosen"], found["cheaper"]
    assert small["nodes"] < cheap["nodes"]
    assert small["money"] > cheap["money"], "a batch is shared better by 128 than by 112 nodes"
    assert f"{cheap['nodes']} nodes would cost less" in plan(*month).out
    between = f"{(small['money'] + cheap['money']) / 2:.0f}"
    both = json.loads(plan(*month, "--budget", between, "--json").out)["inverse"]
    assert both["chosen"]["nodes"] == cheap["nodes"]
    assert "the cheapest that does costs" in plan(*month, "--budget", "1M").err


REFUSED = [
    (("--tokens", "2T"), "--model is missing"),
    (("--model", "llama3-8b"), "--tokens is missing"),
    (("--model", "llama9", "--tokens", "2T"), "did you mean"),
    (("--model", "none.yaml", "--tokens", "2T"), "no such file"),
    ((*SMALL, "--nodes", "0"), "--nodes: must be"),
    ((*SMALL, "--nodes", "-3"), "--nodes"),
    ((*SMALL, "--nodes", "1.5"), "--nodes: must be a whole number"),
    ((*SMALL, "--nodes", "9999999"), "GPUs is"),
    (("--model", "llama3-8b", "--tokens", "1e30"), "--tokens: must be more than 0"),
    (("--model", "llama3-8b", "--tokens", "nan"), "--tokens"),
    (("--model", "llama3-8b", "--tokens", "-1T"), "--tokens"),
    ((*SMALL, "--gpu", "h999"), "no GPU is called"),
    ((*SMALL, "--fabric", "string"), "no fabric is called"),
    ((*SMALL, "--region", "atlantis"), "--region: there is no"),
    ((*SMALL, "--layout", "tensor"), "--layout: write e.g."),
    ((*SMALL, "--nodes", "2", "--layout", "tensor=7"), "tensor 7"),
    ((*SMALL, "--precision", "int3"), "int3"),
    ((*SMALL, "--nodes", "2", "--deadline", "3d"), "--nodes: leave it out"),
    ((*SMALL, "--deadline", "3"), "--deadline: 3 of what?"),
    (("--model", "llama3-405b", "--tokens", "1T", "--nodes", "1"), "the least that fits is"),
    ((*SMALL, "--sequence", "10M"), "(256 GPUs) with a batch of 256 sequences (2.56B tokens)"),
    ((*SMALL, "--storage", "1"), "one of 8 GPUs fails every 6,334.6 hours, and a checkpoint takes"),
    (("--serve", "--model", "llama3-8b"), "--rate is missing"),
    (("--serve", "--model", "llama3-8b", "--rate", "fast"), "--rate: 'fast'"),
    (("--serve", "--model", "llama3-8b", "--rate", "1/s", "--tpot", "1ms"), "idle replica"),
    (("--goal", "p90 wait < 1h"), "--goal: needs --history"),
    (("--history", "--serve", "--goal", "p90 wait < 1h"), "--serve: cannot be combined"),
    (("--history", "--goal", "soon"), "--goal: 'soon' is not a goal"),
    (("--history", "--goal", "p0 wait < 1h"), "percentile"),
    (("--history", "--goal", "p90 wait < 1h"), "no log of a cluster"),
    (("--history", "nowhere.csv", "--goal", "p90 wait < 1h"), "there is no nowhere.csv"),
    (("--history", PLAIN, "--goal", "p90 wait < 1h"), "--nodes is missing"),
]


@pytest.mark.parametrize(("args", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_bad_input_is_refused_in_one_line_that_names_it(
    plan: Plan, args: tuple[str, ...], words: str
) -> None:
    result = plan(*args)
    assert result.code in (1, 2)
    assert result.out == ""
    told = [line for line in result.err.splitlines() if line.startswith("error")]
    assert len(told) == 1
    assert words in told[0]
    assert "Traceback" not in result.err


def test_a_model_file_is_checked_field_by_field(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("layers: 24\nhidden: 2048\nheads: 16\nvocab: 32000\nsequence: 4096\n")
    args = ("--model", str(file), "--tokens", "100B", "--nodes", "1")
    assert plan(*args, "--json").code == 0
    for text, words in (
        ("layers: 24\n", "hidden"),
        ("layers: 0\nhidden: 64\nheads: 4\n", "layers is 0"),
        ("layers: .nan\nhidden: 64\nheads: 4\n", "layers"),
        ("layers: 2\nhidden: 63\nheads: 4\n", "not a multiple of heads"),
        ("layers: 2\nhidden: 64\nheads: 4\ncolor: red\n", "color"),
        ("[", "not YAML"),
    ):
        file.write_text(text)
        result = plan(*args)
        assert (result.code, result.out) == (1, ""), text
        assert words in result.err, text
    hardware = tmp_path / "mine.toml"
    hardware.write_text("[accelerators.h100]\nmemory_gib = -1\n")
    result = plan(*SMALL, "--nodes", "1", "--hardware", str(hardware))
    assert "memory_gib is -1" in result.err
    hardware.write_text("accelerators = 3\n")
    assert "must be a table" in plan(*SMALL, "--hardware", str(hardware)).err
