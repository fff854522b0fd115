"""The time line: what every GPU did, why it ended, and the cluster as it was at any moment."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from harness.browser import WAIT_MS, Visit
from harness.waiting import until

from tests.live.cluster import Live

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

WAIT_S = WAIT_MS / 1000
HOUR = 3_600_000
# The bars that the page knows of a job, and the color in the middle of one.
BARS = """job => shoalTime.gantt.nodes.flatMap(node => node.bars)
    .filter(bar => bar.job === job)"""
ROW = "id => shoalTime.gantt.places.find(row => row.node?.id === id)"
POINT = """([id, gpu, ms]) => { const { gantt } = shoalTime;
    const row = gantt.places.find(row => row.node?.id === id);
    const box = gantt.canvas.getBoundingClientRect();
    return [box.left + gantt.x(ms),
        box.top + row.y - gantt.element.scrollTop + (gpu + 0.5) * row.lane] }"""


def bars(visit: Visit, job: str) -> list[dict[str, Any]]:
    return list(visit.page.evaluate(BARS, job))


def test_a_lost_job_is_seen_where_it_ran_and_its_moment_can_be_opened(
    visit: Visit, live: Live
) -> None:
    page = visit.page
    job = live.run("sleep 600", name="past", gpus=4)
    live.wait(job, "running")
    blocked = live.run("true", name="behind", gpus=4, members=4)
    node = live.client.job(job).nodes[0]
    visit.go("time?last=1h")
    until(lambda: [bar["end"] for bar in bars(visit, job)] == [None], "live")
    live.kill_agent(node)
    until(lambda: any(bar["end"] for bar in bars(visit, job)))
    first = next(bar for bar in bars(visit, job) if bar["end"])
    assert (first["node"], first["gpus"], first["name"]) == (node, [0, 1, 2, 3], "past")
    assert first["cause"] in ("lost", "node-loss")

    # Both were there: between the submission of the second and the loss of the first.
    moment = (live.client.job(blocked).submitted_ms + first["end"]) // 2

    # A click says why it ended, and leads to the job.
    # A window that has ended stands still.
    page.evaluate(
        "([from, to]) => shoalTime.gantt.onView(from, to)", [moment - 60_000, moment + 100]
    )
    page.mouse.click(*page.evaluate(POINT, [node, 1, first["begin"] + 1]))
    about = page.locator("[data-name=about]")
    about.get_by_text(f"{job} past").wait_for()
    assert re.search("Ended: (Node lost|Lost)", about.inner_text())
    assert f"{node} · GPU 1" in about.inner_text()
    assert about.get_by_role("link", name=f"Open {job}").get_attribute("href") == f"#/job/{job}"

    # The scrubber: drag it on the axis to when it still ran.
    live.client.cancel(job)
    live.wait(job)
    x, _ = page.evaluate(POINT, [node, 0, moment])
    top = page.evaluate("shoalTime.gantt.canvas.getBoundingClientRect().top")
    page.mouse.move(x - 12, top + 10)  # a pixel is 50 ms; the cluster is young
    page.mouse.down()
    page.mouse.move(x - 6, top + 10)
    page.mouse.move(x, top + 10)
    page.mouse.up()
    past = page.locator("section[aria-label='Cluster at this time']")
    past.locator(f"section[aria-label='Queue at this time'] tr[data-job={blocked}]").wait_for()
    assert "GPU" in past.locator(f"tr[data-job={blocked}] td").nth(1).inner_text(), "its reason"
    held = """job => [...shoalTime.map.cluster.nodes.values()].filter(node =>
        (node.held ?? []).some(([id]) => id === job)).map(node => node.id)"""
    assert page.evaluate(held, job) == [node], "the cells that it had then"
    past.locator(".events").get_by_text(job).first.wait_for()
    assert abs(int(page.evaluate("shoalTime.gantt.at")) - moment) < 2_000
    page.wait_for_function("() => location.hash.includes('at=')")

    # The same link shows the same; "Now" returns.
    page.reload()
    past.locator(f"tr[data-job={blocked}]").wait_for()
    page.get_by_role("button", name="Now").click()
    past.wait_for(state="hidden")
    live.client.cancel(blocked)


def test_keys_step_through_time_and_lanes_and_refusals_are_one_line(
    visit: Visit, live: Live
) -> None:
    page = visit.page
    job = live.run("sleep 600", name="keys", gpus=1)
    live.wait(job, "running")
    visit.go("time?last=1h")
    until(lambda: len(bars(visit, job)) == 1)
    (bar,) = bars(visit, job)
    page.locator(".gantt canvas").focus()
    wide = page.evaluate("shoalTime.gantt.to - shoalTime.gantt.from")
    page.keyboard.press("+")
    assert page.evaluate("shoalTime.gantt.to - shoalTime.gantt.from") == pytest.approx(wide / 2)
    page.keyboard.press("-")
    about = page.locator("[data-name=about]")
    for _ in range(16):
        page.keyboard.press("ArrowDown")
        if f"{job} keys" in about.inner_text():
            break
    about.get_by_text(f"{bar['node']} · GPU {bar['gpus'][0]}").wait_for()
    about.get_by_text("Running").wait_for()
    page.keyboard.press("Shift+ArrowLeft")  # six minutes ago, before there was a cluster
    alert = page.locator("section[aria-label='Cluster at this time'] [role=alert]")
    alert.wait_for()
    assert "Could not load this time:" in alert.inner_text()
    assert "\n" not in alert.inner_text()
    until(lambda: visit.complaints)  # of that answer, which may come after it
    visit.complaints.clear()
    page.keyboard.press("End")
    alert.wait_for(state="hidden")
    page.keyboard.press("Enter")
    page.wait_for_function("job => location.hash === `#/job/${job}`", arg=job)
    live.client.cancel(job)


def many(nodes: int, count: int, now_ms: int) -> dict[str, Any]:
    """An answer with so many bars, and every tenth node lost for an hour."""
    rows, length = [], 30 * 24 * HOUR // (count // nodes + 1)
    for n in range(count):
        begin = now_ms - 30 * 24 * HOUR + (n // nodes) * length
        gpus = list(range(n % 8, min(8, n % 8 + 1 + n % 3)))
        ended = ("failure", "code 3") if n % 5 == 0 else ("succeeded", "")
        rows.append(
            [
                n % nodes,
                gpus,
                f"j{n}",
                1,
                0,
                begin,
                begin + length - HOUR,
                *ended,
                "run",
                "lab",
                1000,
            ]
        )
    states = [[n, "lost", now_ms - 2 * HOUR, now_ms - HOUR, "gone"] for n in range(0, nodes, 10)]
    known = [{"id": f"n{n}", "gpus": 8, "place": f"b{n // 256}/r{n // 16}"} for n in range(nodes)]
    edges = {"from_ms": now_ms - 45 * 24 * HOUR, "to_ms": now_ms + HOUR, "oldest_ms": 1}
    lists = {"nodes": known, "bars": rows, "states": states, "left_out": 7}
    return {**edges, **lists, "known_ms": now_ms, "now_ms": now_ms}


def test_thousands_of_lanes_scroll_and_zoom_on_a_phone_too(browser: Browser, live: Live) -> None:
    token = live.home.token.read_text().strip()
    visit = Visit(browser, live.client.url, token, 360, "dark")
    page, asked = visit.page, list[str]()

    def answer(route: Route) -> None:
        asked.append(route.request.url)
        route.fulfill(content_type="application/json", body=body)

    body = json.dumps(many(2000, 4_000, live.client.status().now_ms))
    page.route(lambda url: "/v1/timeline" in url, answer)
    visit.sign_in()
    visit.go("time?last=30d")
    page.get_by_text("7 short bars hidden. Zoom in to show more.").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    rows = page.evaluate("shoalTime.gantt.places.filter(row => row.node).length")
    drawn = page.evaluate("shoalTime.gantt.draw(), shoalTime.gantt.seen.length")
    assert rows == 2000 and 0 < drawn < 100, "only what is visible is drawn"
    assert page.evaluate("shoalTime.gantt.whole"), "one row for each node"
    page.get_by_text("GPUs", exact=True).click()
    assert not page.evaluate("shoalTime.gantt.whole")
    page.evaluate("shoalTime.gantt.element.scrollTop = 1e9")
    page.wait_for_function("() => shoalTime.gantt.seen.at(-1).node?.id === 'n1999'")

    box = page.locator(".gantt canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    before = page.evaluate("shoalTime.gantt.to - shoalTime.gantt.from")
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    page.wait_for_function(
        "before => shoalTime.gantt.to - shoalTime.gantt.from < before", arg=before
    )
    page.mouse.down()
    page.mouse.move(box["x"] + 260, box["y"] + 100, steps=3)
    page.mouse.up()
    page.wait_for_function("() => location.hash.includes('from=')")
    page.wait_for_function("count => count", arg=len(asked))
    for _ in range(20):
        page.get_by_role("button", name="Zoom in").click()
    assert page.evaluate("shoalTime.gantt.to - shoalTime.gantt.from") == 60_000, "a minute"
    page.get_by_label("Find nodes and jobs").fill("n1999")
    page.get_by_text("1 node").wait_for()
    assert page.evaluate("shoalTime.gantt.places.filter(row => row.node).length") == 1
    visit.close()
