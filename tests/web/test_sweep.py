"""A sweep: its trials in one answer, in the terminal and on the page."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.browser import Visit
from harness.waiting import until

from shoal.api.web import FOLDER
from shoal.cli.app import call
from shoal.client import ShoalError
from shoal.model.sweep import Sweep
from shoal.model.trials import STOPPED_EARLY
from tests.live.cluster import Live

TRAINER = Path(__file__).parent / "trainer.py"


def start(live: Live, steps: int, sweep: Sweep, **fields: Any) -> str:
    env = {"PYTHONPATH": str(FOLDER.parent.parent), "PACE_S": "0.05", **fields.pop("env", {})}
    spec = live.spec(
        sys.executable, str(TRAINER), str(steps), env=env, gpus=1, cpu_milli=100, sweep=sweep,
        **fields,
    )  # fmt: skip
    return live.client.submit(spec).id


@pytest.fixture(scope="module")
def sweep(live: Live) -> str:
    """Six trials over three variables; with LR 0.4 the loss falls quickest."""
    grid = {"LR": ("0.02", "0.1", "0.4"), "SEED": ("1", "2"), "WIDTH": ("64",)}
    job = start(live, 40, Sweep(grid=grid), name="tune")
    assert live.wait(job) == "succeeded"
    until(lambda: len(live.client.trials(job).metrics) == 4, "the metrics are kept")
    until(lambda: all(t.step >= 20 for t in live.client.trials(job).trials), "all are looked at")
    return job


def test_one_answer_says_which_trial_is_best_and_what_each_cost(live: Live, sweep: str) -> None:
    view = live.client.trials(sweep)
    assert (view.variables, view.by, view.total) == (["LR", "SEED", "WIDTH"], "loss", 6)
    assert view.metrics == ["accuracy", "loss", "lr", "tokens/s"]
    rates = [trial.values["LR"] for trial in view.trials]
    assert rates == ["0.4", "0.4", "0.1", "0.1", "0.02", "0.02"]
    assert view.best == view.trials[0].id
    best = view.trials[0]
    assert best.metrics["loss"].low == best.metrics["loss"].last == pytest.approx(0.1, abs=0.01)
    assert best.state == "succeeded"
    assert best.gpu_ms > 0
    assert view.gpu_ms == pytest.approx(sum(trial.gpu_ms for trial in view.trials))
    page = live.client.trials(sweep, by="accuracy", highest=True, sort="-SEED", offset=2, limit=2)
    assert [trial.index for trial in page.trials] == [5, 0]
    assert page.best == best.id
    with pytest.raises(ShoalError, match="is one of LR, SEED, WIDTH, accuracy"):
        live.client.trials(sweep, sort="depth")
    single = live.run("true")
    with pytest.raises(ShoalError, match="is not a sweep"):
        live.client.trials(single)


def test_the_terminal_shows_the_best_and_writes_all(
    live: Live,
    sweep: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(live.home.path))
    best, path = live.client.trials(sweep).best, tmp_path / "trials.csv"
    assert call(["sweep", sweep, "--best", "loss", "-n", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = "TRIAL STATE LR SEED WIDTH BEST loss AT STEP LAST accuracy lr tokens/s STEP GPU-HOURS"
    assert lines[0].split() == head.split()
    assert lines[1].startswith(f"{best} ")
    assert lines[-1].startswith(f"best: {best} (LR=0.4 SEED=")
    assert call(["sweep", sweep, "--csv", str(path)]) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == 6
    assert float(rows[0]["best loss"]) < float(rows[5]["best loss"])
    assert call(["sweep", sweep, "--best", "f1"]) == 1
    assert "the trials report accuracy, loss, lr, tokens/s" in capsys.readouterr().err


def test_the_page_marks_the_best_sorts_compares_and_stops_the_worst(
    visit: Visit, live: Live, sweep: str
) -> None:
    page, best = visit.page, live.client.trials(sweep).best
    rows, status = page.locator("tr[data-trial]"), page.get_by_role("status")
    first = rows.first
    visit.go(f"job/{sweep}")
    page.get_by_role("link", name="Compare trials").click()
    status.filter(has_text=f"Best: {best} with loss").wait_for()
    assert rows.count() == 6
    assert page.locator("td.best").inner_text() == best
    # Two variables differ: a scatter, with the best above all.
    plot = page.locator("figure[data-chart=trials]")
    assert plot.locator("[data-trial]").count() == 6
    assert plot.locator("[data-trial]").last.get_attribute("data-trial") == best
    page.locator("figure[data-chart=loss] polyline").first.wait_for(state="attached")
    # Every choice is in the address, and a click on a head sorts.
    page.get_by_role("button", name="SEED", exact=True).click()
    page.locator("th[aria-sort=ascending]").get_by_text("SEED").wait_for()
    page.get_by_role("button", name="SEED ↑").click()
    until(lambda: first.get_attribute("data-trial") in (f"{sweep}.1", f"{sweep}.3", f"{sweep}.5"))
    assert "sort=-SEED" in page.evaluate("location.href")
    page.get_by_label("Metric").select_option("accuracy")
    page.get_by_label("Best is").select_option("max")
    status.filter(has_text=f"Best: {best} with accuracy").wait_for()
    page.reload()
    status.filter(has_text=f"Best: {best} with accuracy").wait_for()
    with page.expect_download() as saved:
        page.get_by_role("button", name="CSV").click()
    lines = list(csv.DictReader(saved.value.path().read_text().splitlines()))
    assert len(lines) == 6
    assert {"LR", "best accuracy", "step of best accuracy", "last loss", "gpu_hours"} <= set(
        lines[0]
    )
    for name in (best, f"{sweep}.0"):
        page.get_by_label(f"Select {name}", exact=True).check()
    page.get_by_role("link", name="Compare 2 selected").click()
    page.locator("main[data-view=compare]").wait_for()
    assert f"#/compare/{best},{sweep}.0" in page.evaluate("location.href")


def test_the_worst_trials_are_stopped_after_a_question_that_names_them(
    visit: Visit, live: Live
) -> None:
    rates = ("0.01", "0.2", "0.02", "0.3")
    rows = tuple({"LR": lr, "A": lr, "B": lr} for lr in rates)
    running = start(live, 10_000, Sweep(rows=rows))
    until(lambda: all("loss" in one.metrics for one in live.client.trials(running).trials))
    page = visit.page
    visit.go(f"sweep/{running}")
    page.locator("figure[data-chart=trials] polyline").nth(3).wait_for(state="attached")
    page.get_by_role("button", name="Stop the worst").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text(f"{running}.0: loss").wait_for()
    assert dialog.locator("li").count() == 2
    dialog.get_by_label("How many").fill("1")
    until(lambda: dialog.locator("li").count() == 1)
    dialog.get_by_role("button", name="Stop them").click()
    assert live.wait(f"{running}.0") == "cancelled"
    assert live.client.job(f"{running}.1").state == "running"
    live.client.cancel(running)


def test_halving_stops_the_worst_early_and_they_have_ended_well(live: Live) -> None:
    rows = tuple({"LR": lr} for lr in ("0.5", "0.4", "0.3", "0.05", "0.04", "0.03", "0.02", "0.01"))
    job = start(live, 100, Sweep(rows=rows, halve=2, rung=10, at_most=4))
    assert live.wait(job) == "succeeded"
    view = live.client.trials(job)
    early = [trial for trial in view.trials if trial.state == STOPPED_EARLY]
    assert len(early) >= 3
    assert {"0.02", "0.01"} <= {trial.values["LR"] for trial in early}
    assert early[0].why.startswith("loss ")
    halted = live.client.job(early[0].id)
    assert halted.state == "succeeded"
    assert re.match(r"stopped early at step \d+: loss \S+ is \d\w\w of \d", halted.why)
    told = live.client.why(halted.id)
    assert told.attempts[-1].cause == "stopped early"
    assert any("reached step 10: loss" in event.event.sentence() for event in told.events)
