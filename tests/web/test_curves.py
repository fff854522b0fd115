"""Curves on the page: every metric of a run, its GPUs, zoom and smoothing, runs side by side."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pytest
from harness.browser import WAIT_MS, Visit
from harness.waiting import until

from shoal.api.web import FOLDER
from tests.live.cluster import Live

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Route

WAIT_S = WAIT_MS / 1000
TRAINER = Path(__file__).parent / "trainer.py"
CHARTS = ("loss", "m/accuracy", "m/lr", "m/tokens/s", "pace")


def start(live: Live, steps: int, rate: float, **fields: Any) -> str:
    env = {"LR": str(rate), "PYTHONPATH": str(FOLDER.parent.parent), **fields.pop("env", {})}
    spec = live.spec(
        sys.executable, str(TRAINER), str(steps), env=env, name="fit", gpus=1, cpu_milli=100,
        restart="on-failure", retries=1, backoff_ms=1, **fields,
    )  # fmt: skip
    return live.client.submit(spec).id


@pytest.fixture(scope="module")
def runs(live: Live) -> tuple[str, str]:
    """Two runs with different variables; the second fails once and goes on."""
    first = start(live, 60, 0.05, env={"API_TOKEN": "walrus"})
    second = start(live, 50, 0.2, env={"API_TOKEN": "heron", "BREAK": "15"})
    assert live.wait(first) == live.wait(second) == "succeeded"
    return first, second


def chart(visit: Visit, name: str) -> Locator:
    return visit.page.locator(f"figure[data-chart='{name}']")


def choices(visit: Visit) -> dict[str, str]:
    _, _, query = visit.page.evaluate("location.href").partition("?")
    return {key: values[0] for key, values in parse_qs(query).items()}


def with_gpus(route: Route) -> None:
    """The nodes of a test have no driver: each GPU is as busy as its number says."""
    answer = route.fetch()
    series = answer.json()
    count = len(series["at_ms"])
    series["gpus"] = [
        {"gpu": gpu, "busy": [gpu / 10 + 0.05] * count, "memory": [0.5] * count,
         "power_w": [100 + gpu] * count, "temperature_c": [None] * count}
        for gpu in range(4)
    ]  # fmt: skip
    route.fulfill(response=answer, body=json.dumps(series))


def test_a_jobs_page_draws_all_it_logs_and_its_own_gpus_and_a_link_shows_the_same(
    visit: Visit, live: Live, runs: tuple[str, str]
) -> None:
    page, (_, second) = visit.page, runs
    page.route(re.compile("/v1/nodes/.*/series"), with_gpus)
    visit.go(f"job/{second}")
    for name in CHARTS:
        chart(visit, name).locator("polyline").first.wait_for(state="attached")
    assert chart(visit, "m/lr").get_by_role("heading").inner_text() == "learning rate"
    assert chart(visit, "loss").locator(".mark title").inner_html().startswith("attempt 2, after:")
    (member,) = live.client.job(second).gang
    node, gpu = member.node, member.gpus[0]
    busy = chart(visit, "gpu/busy")
    busy.get_by_text(f"{node}/{gpu} {gpu * 10 + 5} %").wait_for()
    assert busy.locator(".key").count() == 1, "GPUs of others are not drawn"
    chart(visit, "gpu/power_w").get_by_text(f"{100 + gpu} W").wait_for()
    assert chart(visit, "gpu/temperature_c").count() == 0, "what no driver reports has no chart"
    chart(visit, "node/cpu").locator("polyline, circle").first.wait_for(state="attached")
    page.locator("section[aria-label=Members]").get_by_role("link", name=node).wait_for()

    # zoom by pointer; smoothing, scale and axis; all of it in the address
    loss = chart(visit, "loss").get_by_role("slider")
    loss.scroll_into_view_if_needed()
    area = loss.bounding_box()
    assert area is not None
    middle = area["y"] + area["height"] / 2
    page.mouse.move(area["x"] + area["width"] * 0.4, middle)
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] * 0.8, middle, steps=4)
    page.mouse.up()
    low, high = map(float, choices(visit)["steps"].split("_"))
    assert 5 < low < high < 50
    page.get_by_label("Smoothing").fill("0.6")
    page.get_by_label("Scale").select_option("log")
    page.get_by_label("Tables").check()
    page.reload()
    chart(visit, "loss").locator("polyline[opacity='0.28']").wait_for()  # the raw curve behind
    assert choices(visit) == {
        "steps": f"{low:.15g}_{high:.15g}", "smooth": "0.6", "scale": "log", "table": "1",
    }  # fmt: skip
    steps = chart(visit, "loss").locator("tbody th").all_inner_texts()
    assert steps and all(low <= int(step) <= high for step in steps)
    loss.dblclick()
    assert "steps" not in choices(visit) and choices(visit)["scale"] == "log"
    page.get_by_label("Axis").get_by_text("Time").click()
    assert choices(visit)["axis"] == "time"
    page.reload()
    chart(visit, "loss").locator(
        "tbody th", has_text=re.compile(r"\d\d:\d\d:\d\d")
    ).first.wait_for()

    # values by keyboard, in all charts at once; a range by keyboard, too
    loss.focus()
    told = loss.get_attribute("aria-valuetext")
    loss.press("ArrowLeft")
    loss.press("ArrowLeft")
    until(lambda: loss.get_attribute("aria-valuetext") != told)
    for name in CHARTS:
        chart(visit, name).locator(".cross:not([hidden])").wait_for(state="attached")
    for _ in range(3):
        loss.press("Shift+ArrowLeft")
    loss.press("Enter")
    assert "range" in choices(visit)
    loss.press("0")
    assert "range" not in choices(visit)


def test_two_runs_are_laid_over_each_other_and_their_differences_listed(
    visit: Visit, runs: tuple[str, str]
) -> None:
    page, (first, second) = visit.page, runs
    visit.go(f"job/{second}")
    page.get_by_role("link", name=f"Compare with {first}").click()
    page.wait_for_selector("main[data-view=compare]")
    assert page.evaluate("location.href").endswith(f"#/compare/{first},{second}")
    for name in CHARTS:
        until(lambda: chart(visit, name).locator("polyline").count() == 2)  # noqa: B023
    mark = chart(visit, "loss").locator(".mark title")
    assert mark.count() == 1 and mark.inner_html().startswith(f"{second} attempt 2")
    table = page.locator("section[aria-label=Differences]")

    def row(name: str) -> list[str]:
        return table.locator(f"tr[data-row='{name}'] td").all_inner_texts()

    assert row("$LR") == ["0.05", "0.2"]
    assert row("$API_TOKEN") == ["(hidden)", "(hidden)"], "secrets are compared, not shown"
    assert row("attempts") == ["1", "2"]
    assert row("command")[0].endswith(" 60") and row("command")[1].endswith(" 50")
    assert len(row("last loss")) == 2
    assert row("name") == [] == row("size")
    table.get_by_label("Show identical rows").check()
    until(lambda: row("name") == ["fit", "fit"] and row("size") == ["1 GPU", "1 GPU"])

    page.get_by_role("button", name=f"Draw {first}").click()
    until(lambda: chart(visit, "loss").locator("polyline").count() == 1)
    page.reload()
    until(lambda: chart(visit, "loss").locator("polyline").count() == 1)
    assert choices(visit) == {"rows": "all", "hide": first}
    page.get_by_label("Job id").fill("j99999")
    page.get_by_role("button", name="Add").click()
    page.locator("[data-run=j99999]").get_by_text("Not found").wait_for()
    chart(visit, "loss").locator("polyline").first.wait_for()
    visit.complaints[:] = [text for text in visit.complaints if "j99999" not in text]

    many = ",".join(f"j{number}" for number in range(1, 12))
    visit.go(f"compare/{many}")
    page.get_by_text("Up to 10 runs can be compared; this address has 11").wait_for()
    assert page.locator("main figure").count() == 0


def test_a_chart_of_100000_points_keeps_its_peaks_and_draws_few(visit: Visit) -> None:
    found = visit.page.evaluate(
        """async () => {
            const { lineChart } = await import("/web/chart-line.js");
            const { smooth, ticks, timeTicks, decades } = await import("/web/chart-scale.js");
            const points = [...Array(100_000).keys()].map((at) => [at, at === 61_234 ? 900 : 1]);
            const chart = lineChart({ title: "many", times: false });
            document.querySelector("main").append(chart.element);
            chart.set([{ name: "", color: "red", points }]);
            const line = () => chart.element.querySelector("polyline");
            while (!line()) await new Promise(requestAnimationFrame);
            const drawn = line().getAttribute("points").split(" ");
            const width = chart.element.querySelector("svg").clientWidth;
            const top = Math.min(...drawn.map((one) => Number(one.split(",")[1])));
            chart.stop();
            const flat = ticks(40_000, 40_000.00000000001, 4).length; // less than a number holds
            return { flat, drawn: drawn.length, width, top, smooth: smooth([1, 1, 4], 0.5),
                     decades: decades(0.02, 300), hours: timeTicks(0, 7.2e6, 4, true).length };
        }"""
    )
    assert found["drawn"] <= 4 * found["width"]
    assert found["top"] < 40, "the one high value is still there"
    # As TensorBoard has it: the mean of what was so far, without a bias to zero.
    assert found["smooth"] == pytest.approx([1, 1, (0.125 + 0.25 + 2) / 0.875])
    assert found["decades"] == [0.1, 1, 10, 100]
    assert found["hours"] >= 4
    assert 1 <= found["flat"] <= 100
