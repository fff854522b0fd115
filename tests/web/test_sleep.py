"""A job is put to sleep and woken on the page: it gives its GPUs away, and goes on where it was."""

from __future__ import annotations

import re

import pytest
from harness.browser import WAIT_MS, Visit

from tests.live.cluster import Live, eventually

WAIT_S = WAIT_MS / 1000
COUNT = "n=0; while :; do n=$((n+1)); echo $n; sleep 0.05; done"


@pytest.mark.outside("a real Chromium draws when it gets the time")
def test_a_job_sleeps_and_wakes_by_two_buttons(visit: Visit, live: Live) -> None:
    page = visit.page
    job = live.run(COUNT, name="counts", gpus=4)
    assert eventually(lambda: sum(visit.cells(job).values()) == 4, WAIT_S)
    (node,) = visit.cells(job)
    visit.go(f"job/{job}")
    page.locator(".log").get_by_text(re.compile(r"\b3\b")).first.wait_for()
    page.get_by_role("button", name="Sleep").click()
    page.get_by_role("button", name="Put it to sleep").click()
    page.locator("main .chip[data-state=asleep]").first.wait_for()
    page.locator(".facts").get_by_text("wakes when it is used").wait_for()
    page.locator(".timeline rect title", has_text="asleep for").first.wait_for(state="attached")
    page.locator(".events").get_by_text("asleep after").wait_for()
    page.locator("section[aria-label=Members] tr", has_text="none").get_by_text("asleep").wait_for()
    assert page.get_by_role("button", name="Sleep").count() == 0

    visit.go("queue")
    row = page.locator(f"tr[data-job={job}]")
    row.locator(".chip[data-state=asleep]").wait_for()
    row.get_by_text("asleep for").wait_for()
    visit.go("cluster")
    assert eventually(lambda: not visit.cells(job), WAIT_S), "its cells are free"
    page.locator(".figure").get_by_text("1 asleep").wait_for()
    page.evaluate("id => shoalMap.onChoose({ node: id, gpu: 0 })", node)
    page.locator(".panel .asleep").get_by_text("counts").wait_for()
    other = live.run("sleep 600", gpus=4, name="borrows", where=(f"node={node}",))
    assert eventually(lambda: visit.cells(other) == {node: 4}, WAIT_S), "another has its GPUs"
    live.client.cancel(other)
    live.wait(other)

    visit.go(f"job/{job}")
    page.get_by_role("button", name="Wake").click()
    page.get_by_role("button", name="Wake the job").click()
    page.locator("main .chip[data-state=running]").first.wait_for()
    page.locator(".events").get_by_text("awake, goes on where it was").wait_for()
    page.locator(".facts").get_by_text("1 nap").wait_for()
    assert live.client.job(job).attempt == 1
    page.locator("section[aria-label=Cost]").get_by_text("lent out").wait_for()
    visit.go("ledger")
    page.locator(".notes").get_by_text("jobs slept").wait_for()
    live.client.cancel(job)
    live.wait(job)
    told = live.output(job).split()
    assert told == [str(number + 1) for number in range(len(told))], "it went on where it was"
