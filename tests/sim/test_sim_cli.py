"""`shoal sim` as a user meets it: the table, the JSON, the page, and every refusal in one line."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.cli.app import call
from shoal.control.home import Home
from shoal.control.store.sqlite import SqliteStore
from shoal.core.state.events.cluster import PolicyChanged
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import FabricMeasured, NodeJoined
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobRunning
from shoal.model.fabric import Fabric, Weak
from shoal.model.job import JobSpec, Within
from shoal.model.node import NodeSpec
from shoal.model.policy import Places, Policy

GOLDEN = Path(__file__).parent.parent / "golden"
PLAIN = str(GOLDEN / "traces" / "plain.csv")
FIGURES = GOLDEN / "sim_plain.json"
# How long a step took is the one thing that differs from run to run.
TIMED = ("step_mean_ms", "step_p99_ms")


class Result(NamedTuple):
    code: int
    out: str
    err: str


Sim = Callable[..., Result]


@pytest.fixture
def sim(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sim:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)

    def run(*args: str) -> Result:
        capsys.readouterr()
        code = call(["sim", *args])
        return Result(code, *capsys.readouterr())

    return run


def test_the_figures_of_a_small_trace_are_what_they_were(sim: Sim) -> None:
    """Rewrite them with SHOAL_GOLDEN=1 when a change of the scheduler is meant."""
    result = sim(PLAIN, "--nodes", "2", "--failures", "20000", "--seed", "3", "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    document["trace"] = Path(document["trace"]).name
    for policy in document["policies"]:
        assert all(policy.pop(name) > 0 for name in TIMED)
    if os.environ.get("SHOAL_GOLDEN"):
        FIGURES.write_text(json.dumps(document, indent=2) + "\n")
    assert document == json.loads(FIGURES.read_text())


def test_the_table_has_a_line_for_every_figure(sim: Sim) -> None:
    result = sim(PLAIN, "--nodes", "2", "--check", "1")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].split() == ["FIGURE", "fair"]
    assert [line.split("  ")[0] for line in lines[1:4]] == ["jobs", "failed", "wait, mean"]
    assert "8 jobs over 1h 06m" in result.err


def test_each_policy_has_the_ledgers_accounts_in_hours_and_in_money(
    sim: Sim, tmp_path: Path
) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text(
        'currency: EUR\ngpus: {"*": {per_hour: 2, idle_watts: 50, busy_watts: 500}}\n'
    )
    args = (PLAIN, "--nodes", "2", "-p", "fifo", "-p", "fair", "--prices", str(prices))
    for policy in json.loads(sim(*args, "--json").out)["policies"]:
        assert policy["currency"] == "EUR"
        assert policy["cost"] == pytest.approx(2 * policy["gpu_hours"])
        assert policy["cost"] == pytest.approx(sum(one["cost"] for one in policy["accounts"]))
        assert sum(one["share"] for one in policy["accounts"]) == pytest.approx(1)
    lines = sim(*args).out.splitlines()
    table = lines[lines.index("") + 1 :]
    assert table[0].split() == ["WHERE", "GPU", "TIME", "WENT", "fifo", "fair"]
    assert "Useful work" in table[1] and "€" in table[1]
    assert table[-1].startswith("cost") and "of it for work" in table[-1]
    refused = sim(PLAIN, "--nodes", "2", "--prices", "nowhere.yaml")
    assert refused.code != 0 and "nowhere.yaml" in refused.err


def test_the_same_command_gives_the_same_figures(sim: Sim) -> None:
    args = (PLAIN, "--nodes", "2", "--failures", "50000", "--slow", "0.5:0.5", "--json")
    first, second, other = sim(*args), sim(*args), sim(*args, "--seed", "9")

    def figures(result: Result) -> object:
        (policy,) = json.loads(result.out)["policies"]
        return {key: value for key, value in policy.items() if key not in TIMED}

    assert figures(first) == figures(second)
    assert figures(first) != figures(other)


def test_all_the_flags_at_once(sim: Sim) -> None:
    result = sim(
        *(PLAIN, "--nodes", str(GOLDEN / "traces" / "nodes.csv"), "--format", "plain"),
        *("--jobs", "20", "--load", "1.5", "--scale", "2", "--start-up", "5s"),
        *("--checkpoint", "never", "--restart-cost", "1m", "--repair", "1h"),
        *("--failures", str(GOLDEN / "traces" / "causes.csv"), "--slow", "0.3:0.5"),
        *("--stragglers", "0.1:0.5", "--where", "priority=0", "--seed", "5", "--check", "1"),
    )
    assert result.code == 0, result.err
    assert result.out.splitlines()[1].split() == ["jobs", "20"]


def test_jobs_too_large_are_left_out_on_demand(sim: Sim) -> None:
    result = sim(PLAIN, "--nodes", "1", "--skip-too-large", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["policies"][0]["jobs"] == 6
    assert "left out 2 jobs" in result.err


def test_the_page_is_written(sim: Sim, tmp_path: Path) -> None:
    if find_spec("plotly") is None:
        refused = sim(PLAIN, "--nodes", "2", "--html", str(tmp_path / "page.html"))
        assert refused.code == 1
        assert "pip install 'shoal[sim]'" in refused.err
        pytest.skip("needs plotly: pip install 'shoal[sim]'")
    result = sim(PLAIN, "--nodes", "2", "--html", str(tmp_path / "page.html"))
    assert result.code == 0, result.err
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def lived_home(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    store = SqliteStore(home.database)
    node = NodeSpec(id="n1", gpus=8, cpu_milli=16_000, memory_mb=64_000)
    events: list[Event] = [
        NodeJoined(at_ms=0, node="n1", spec=node, incarnation=1),
        *(
            JobSubmitted(at_ms=n * 1000, job=f"j{n}", spec=JobSpec(command=("x",), gpus=8))
            for n in range(1, 4)
        ),
        *(JobRunning(at_ms=n * 2000, job=f"j{n}", attempt=1) for n in range(1, 4)),
        NodeJoined(at_ms=60_000, node="n1", spec=node, incarnation=2),
    ]
    store.commit(events, [])
    store.close()


def test_a_history_with_a_measured_network_is_replayed(sim: Sim, tmp_path: Path) -> None:
    lived_home(tmp_path)
    store = SqliteStore(Home(tmp_path / "home").database)
    measured = Policy(name="near", place=Places.MEASURED)
    fabric = Fabric(id="t1", places={"n1": "m1/r1"}, weak=(Weak(node="n1", why="slow"),))
    near = JobSpec(command=("x",), gpus=8, within=Within.RACK, within_required=True)
    events: list[Event] = [
        PolicyChanged(at_ms=61_000, policy=measured),
        FabricMeasured(at_ms=62_000, id="t1", nodes=("n1",), fabric=fabric),
        JobSubmitted(at_ms=63_000, job="j4", spec=near),
        JobRunning(at_ms=64_000, job="j4", attempt=1),
    ]
    store.commit(events, [])
    store.close()
    result = sim("--history", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["policies"][0]["jobs"] == 4


def test_a_clusters_own_history_is_replayed_on_its_own_nodes(sim: Sim, tmp_path: Path) -> None:
    lived_home(tmp_path)
    result = sim("--history", "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert (document["nodes"], document["gpus"], document["policies"][0]["jobs"]) == (1, 8, 3)
    more = json.loads(sim("--history", "--nodes", "3", "--json").out)
    assert more["gpus"] == 24
    assert more["policies"][0]["wait"]["mean_s"] == 0
    assert json.loads(sim("--history", "--days", "1", "--json").out)["policies"][0]["jobs"] == 3


BAD: dict[str, tuple[list[str], int, str]] = {
    "no trace": ([], 2, "TRACE is missing"),
    "days": ([PLAIN, "-n", "1", "--days", "3"], 2, "--days: works only with --history"),
    "no nodes": ([PLAIN], 2, "--nodes is missing"),
    "no such file": (["nowhere.csv", "-n", "1"], 1, "nowhere.csv: No such file"),
    "no such nodes": ([PLAIN, "-n", "eight"], 2, "--nodes: eight is neither a number nor a file"),
    "no nodes at all": ([PLAIN, "-n", "0"], 2, "--nodes: must be at least 1"),
    "no GPUs": ([PLAIN, "-n", "1", "-g", "0"], 2, "--gpus: nodes without GPUs need --cpus"),
    "no such policy": ([PLAIN, "-n", "2", "-p", "best"], 2, "--policy: there is no policy"),
    "no such format": ([PLAIN, "-n", "2", "--format", "swf"], 1, "no trace format swf"),
    "too large": ([PLAIN, "-n", "1"], 1, "row 3: members asks for 2 members"),
    "load": ([PLAIN, "-n", "2", "--load", "0"], 2, "--load: must be a number above 0"),
    "scale": ([PLAIN, "-n", "2", "--scale", "x"], 2, "--scale: must be a number"),
    "start-up": ([PLAIN, "-n", "2", "--start-up", "10"], 2, "--start-up: 10 of what?"),
    "checkpoint": ([PLAIN, "-n", "2", "--checkpoint", "x"], 2, "--checkpoint: 'x' is not a time"),
    "failures": ([PLAIN, "-n", "2", "--failures", "-1"], 2, "--failures: must be a number"),
    "failures file": ([PLAIN, "-n", "2", "--failures", PLAIN], 1, "has no column component"),
    "slow": ([PLAIN, "-n", "2", "--slow", "0.5"], 2, "--slow: write SHARE:SPEED"),
    "slow share": ([PLAIN, "-n", "2", "--slow", "2:0.5"], 2, "--slow: must be a number"),
    "where": ([PLAIN, "-n", "2", "--where", "vc"], 2, "--where: write COLUMN=VALUE"),
    "both": ([PLAIN, "--history"], 2, "--history: takes no TRACE"),
    "no history": (["--history"], 1, "--history: there is no log"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_told_in_one_line(name: str, sim: Sim) -> None:
    args, code, message = BAD[name]
    result = sim(*args)
    assert (result.code, result.out) == (code, "")
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("error: ")
    assert message in result.err
    assert "should not happen" not in result.err


def test_a_trace_that_is_cut_off_is_told_in_one_line(sim: Sim, tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(Path(PLAIN).read_bytes())[:-20])
    result = sim(str(path), "-n", "2")
    assert result.code == 1
    assert len(result.err.splitlines()) == 1
    assert "cut off or damaged" in result.err


def test_a_pool_without_nodes_of_its_own_is_replayed(sim: Sim, tmp_path: Path) -> None:
    elastic = tmp_path / "elastic.yaml"
    elastic.write_text("supply: [{engine: slurm, gpus: 8, most: 2, sim_delay: 30s}]\n")
    page = tmp_path / "page.html"
    result = sim(PLAIN, "--nodes", "0", "--policy", str(elastic), "--html", str(page), "--json")
    assert result.code == 0, result.err
    (figures,) = json.loads(result.out)["policies"]
    assert figures["supply"][0]["orders"] and page.exists()
    for policies in ((), ("--policy", "fair", "--policy", str(elastic))):
        refused = sim(PLAIN, "--nodes", "0", *policies)
        assert refused.code and "--nodes" in refused.err and "supply" in refused.err


def test_sleep_shows_what_it_would_have_saved(sim: Sim, tmp_path: Path) -> None:
    trace = tmp_path / "two.csv"
    trace.write_text("submit_s,duration_s,gpus,priority\n0,1000,1,0\n700,100,1,10\n")
    args = (str(trace), "--nodes", "1", "--gpus", "1", "--start-up", "0s", "--restart-cost", "0s")
    shown = sim(*args, "--sleep")
    assert shown.code == 0, shown.err
    assert shown.out.splitlines()[0].split("  ")[-2:] == ["fair", "fair + sleep"]
    assert (
        "fair with sleep: 1 nap, and 0 stops instead of 1. Sleep saves 0.0 GPU-hours" in shown.err
    )
    result = sim(*args, "--sleep", "--json")
    found = json.loads(result.out)
    assert [one["policy"] for one in found["policies"]] == ["fair", "fair + sleep"]
    saved = found["sleep"][0]
    assert (saved["naps"], saved["stops_without"], saved["stops"]) == (1, 1, 0)
    assert saved["lost_gpu_hours"] == 0 and 0.027 < saved["lost_gpu_hours_without"] < 0.029
    idle = sim(PLAIN, "--nodes", "20", "--sleep")
    assert "fair with sleep: no job had to sleep, so nothing changes" in idle.err
    plain = sim(*args)
    assert "sleep" not in plain.err and "naps" not in plain.out
