"""Redrawing disturbs nobody: not a click, not the focus, not a selection, and clocks go on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.browser import WAIT_MS, Visit
from harness.waiting import until

from tests.live.cluster import Live

WAIT_S = WAIT_MS / 1000
# Every change in a part of the page, so that a test can wait for redraws.
COUNT = """selector => {
    window.changes = 0;
    const watcher = new MutationObserver(found => { window.changes += found.length });
    watcher.observe(document.querySelector(selector),
        {subtree: true, childList: true, characterData: true});
}"""
QUEUE, REASONS = "section[aria-label=Queue]", "[aria-label=Waiting]"


@pytest.fixture
def queue(visit: Visit, live: Live) -> Iterator[list[str]]:
    """The four nodes are held, and three jobs wait behind them."""
    holders = [live.run("sleep 600", gpus=4, name=f"holds-{n}") for n in range(4)]
    waiting = [live.run("true", gpus=4, name=f"waits-{n}") for n in range(3)]
    for job in holders:
        live.wait(job, "running")
    visit.go("jobs?tab=queue")
    visit.page.locator(f"{QUEUE} tr[data-job={waiting[-1]}]").wait_for()
    yield waiting
    for job in [*waiting, *holders]:
        live.client.cancel(job)


def redrawn(visit: Visit, times: int, before: int | None = None) -> None:
    """Wait until the watched part was changed so many times, from now on or since then."""
    target = (visit.page.evaluate("window.changes") if before is None else before) + times
    visit.page.wait_for_function("target => window.changes >= target", arg=target)


def test_a_click_counts_though_the_table_changes_under_it(
    visit: Visit, live: Live, queue: list[str]
) -> None:
    page = visit.page
    page.evaluate(COUNT, REASONS)
    button = page.locator(f"{QUEUE} tr[data-job={queue[1]}] button", has_text="Cancel")
    for turn in range(3):
        box = button.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.mouse.down()
        before = page.evaluate("window.changes")
        more = live.run("true", gpus=4, priority=10 + turn)  # a row above it comes meanwhile
        for _ in range(2):  # the second was asked for when the job was there
            with page.expect_response(lambda answer: "/v1/queue" in answer.url):
                pass
        redrawn(visit, 1, before)  # the reasons above go on; the pressed table holds still
        assert page.locator(f"{QUEUE} tr[data-job={more}]").count() == 0
        page.mouse.up()
        page.locator("dialog h2", has_text=f"Cancel {queue[1]} ").wait_for()
        page.get_by_role("button", name="Keep as is").click()
        page.locator(f"{QUEUE} tr[data-job={more}]").wait_for()
        live.client.cancel(more)
        page.locator(f"{QUEUE} tr[data-job={more}]").wait_for(state="detached")


def test_focus_and_selection_stay_with_their_row(
    visit: Visit, live: Live, queue: list[str]
) -> None:
    page = visit.page
    where = "document.activeElement.closest('tr')?.dataset.job + document.activeElement.textContent"
    chosen = "getSelection().toString()"
    page.evaluate(
        """job => {
        const rows = [...document.querySelectorAll("tr[data-job]")];
        const row = rows.find(one => one.textContent.includes("waits-2"));
        getSelection().selectAllChildren(row.querySelector("a"));
        document.querySelector(`tr[data-job=${job}] [data-key=change]`).focus();
    }""",
        queue[1],
    )
    before = page.evaluate(chosen)
    assert before == queue[2]
    page.evaluate(COUNT, QUEUE)
    redrawn(visit, 5)
    assert page.evaluate(chosen) == before, "what was selected is still selected"
    live.client.cancel(queue[0])  # the row above goes
    page.locator(f"{QUEUE} tr[data-job={queue[0]}]").wait_for(state="detached")
    first = live.run("true", gpus=4, priority=50)  # and another comes
    page.locator(f"{QUEUE} tr[data-job={first}]").wait_for()
    assert page.evaluate(where) == f"{queue[1]}Change"
    assert page.evaluate(chosen) == before
    live.client.cancel(queue[1])
    page.locator(f"{QUEUE} tr[data-job={queue[1]}]").wait_for(state="detached")
    assert page.evaluate(where) != f"{queue[2]}Change", "nobody is offered another's button"
    live.client.cancel(first)


def test_clocks_go_on_where_nothing_happens(visit: Visit, queue: list[str]) -> None:
    assert queue
    page = visit.page
    visit.go("jobs")
    page.locator(".jobs-rows [data-name=submitted]").first.wait_for()
    seen = "document.querySelector('.jobs-rows [data-name=submitted]').textContent"
    before = page.evaluate(seen)
    page.wait_for_function(f"before => {seen} !== before", arg=before)


def test_a_bar_that_writes_over_itself_is_one_line_and_page_up_stops_following(
    visit: Visit, live: Live
) -> None:
    gate = live.home.path / "bar"
    bar = "i=0; while [ $i -lt 40 ]; do printf '\\r%3d%%|###' $i; i=$((i+1)); sleep 0.02; done"
    lines = "i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i+1)); done"
    rest = f"while [ ! -e {gate} ]; do sleep 0.05; done; echo more; sleep 600"
    job = live.run(f"{lines}; {bar}; {rest}", cpu_milli=100)
    visit.go(f"job/{job}")
    page, log = visit.page, visit.page.locator(".log")
    log.get_by_text("39%|###").wait_for()
    assert log.inner_text().count("%|###") == 1
    assert page.is_checked("#follow")
    log.focus()
    page.keyboard.press("PageUp")
    page.wait_for_function("() => !document.getElementById('follow').checked")
    gate.touch()
    log.get_by_text("more").wait_for()
    # What comes during the smooth scroll does not end it, and nothing leads back.
    away = "log.scrollHeight - log.scrollTop - log.clientHeight >= 40"
    page.wait_for_function(
        f"() => {{ const log = document.querySelector('.log'); return {away}; }}"
    )
    assert not page.is_checked("#follow")
    page.keyboard.press("End")
    page.wait_for_function("() => document.getElementById('follow').checked")
    live.client.cancel(job)


def test_a_drained_node_is_told_from_one_that_drains(visit: Visit, live: Live) -> None:
    from shoal.model.node import NodeIntent

    live.client.set_intent("n4", NodeIntent.DRAINING)
    visit.go("cluster")
    visit.page.locator(".trouble .chip[data-state=drained]", has_text="n4").wait_for()
    live.client.set_intent("n4", NodeIntent.OPEN)
    visit.page.locator(".trouble .chip", has_text="n4").wait_for(state="detached")


def test_a_job_that_makes_no_steps_any_more_says_so(visit: Visit, queue: list[str]) -> None:
    assert queue
    page = visit.page
    visit.go("jobs")
    runs = page.locator(".chip[data-state=running]")  # jobs of other tests have the same names
    row = page.locator(".jobs-rows [data-job]").filter(has=runs)
    moved, still = (row.filter(has_text=f"holds-{n}").first for n in range(2))
    script = """([id, ago]) => shoalMap.cluster.jobs.set(id, {
        ...shoalMap.cluster.jobs.get(id), step: 5, step_us: 9_000_000,
        moved_ms: shoalMap.cluster.heard - ago})"""
    words = still.locator(".chip[data-state=suspect]", has_text="No step for")

    def says_so() -> bool:
        """The controller's next word about a job takes the place of ours."""
        for one, ago in ((moved, 80_000), (still, 200_000)):
            page.evaluate(script, [one.get_attribute("data-job"), ago])
        return bool(words.count())

    until(says_so, look_s=0.3)
    assert moved.locator(".chip[data-state=suspect]").count() == 0
