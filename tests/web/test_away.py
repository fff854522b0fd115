"""A job at a neighbor, on the page: in the list, on its own page, and in the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.browser import Visit

from shoal.model.job import Outcome
from shoal.model.neighbor import Ending, HandedJob, NeighborReport, Offer
from shoal.model.policy import Policy
from shoal.model.report import Nothing
from tests.api.server import OPERATORS, Server, serving
from tests.control.test_loop import HandClock

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def heard(server: Server, *, after_ms: int = 30_000, **word: Any) -> None:
    report = NeighborReport(name="west", clock_ms=1, **word)
    clock = server.loop.clock
    assert isinstance(clock, HandClock)
    clock.ms += after_ms
    server.run(lambda: server.loop.tick.neighbors([report]))
    server.ask(Nothing())


def test_the_page_shows_where_a_job_is_and_what_is_owed(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path / "home", Policy()) as server:
        spec = {"command": ["true"], "cluster": "west", "name": "far", "gpus": 1}
        made = server.call(OPERATORS, "POST", "/v1/jobs", {"spec": spec})
        assert made.status == 201
        heard(server, offers=(Offer(job="j1", start_ms=0, price=2_500_000),))
        heard(server, jobs=(HandedJob(job="j1", attempt=1, id="j93", phase="running"),))
        visit = Visit(browser, f"http://127.0.0.1:{server.port}", OPERATORS, 1200, "light")
        visit.sign_in()
        page = visit.page

        visit.go("jobs?state=away")
        row = page.locator("[data-job=j1]")
        row.locator("[data-name=cluster]").get_by_text("west", exact=True).wait_for()
        row.locator("[data-state=away]").wait_for()

        visit.go("job/j1")
        page.get_by_text("runs at west as j93").wait_for()
        page.get_by_text("west, as j93, 2.50 per GPU-hour").wait_for()
        page.get_by_role("button", name="Cancel").wait_for()
        assert not page.get_by_role("button", name="Requeue").count(), "it runs elsewhere"

        ended = Ending(outcome=Outcome.SUCCEEDED, started=True, gpu_ms=5_400_000, money=3_750_000)
        last = (HandedJob(job="j1", attempt=1, id="j93", ended=ended),)
        heard(server, after_ms=5_400_000, jobs=last)
        page.locator("h1 ~ [data-state=succeeded]").wait_for()
        page.get_by_role("img", name="1 attempt, ").wait_for()
        page.locator(".life .away[title='At a neighbor for 30 s: attempt 1 at west']").wait_for()
        page.locator(".life .running[title$=': attempt 1 at west']").wait_for()

        visit.go("ledger")
        owed = page.get_by_role("region", name="Owed to neighbors")
        owed.get_by_role("row", name="west default 1 1.5 3.75").wait_for()
        # This server keeps no files of jobs.
        visit.complaints = [text for text in visit.complaints if "/files" not in text]
        visit.close()
