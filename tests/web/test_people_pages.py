"""The pages of tenants and users: what ran, what it cost, and sums that are the ledger's."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from harness.browser import Visit

from shoal.model.job import Phase
from tests.api.server import serving
from tests.api.world import MARK, OURS, POLICY, THEIRS, World

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path: Path = tmp_path_factory.mktemp("people-pages") / "home"
    with serving(path, POLICY) as server:
        world = World(server)
        world.until(world.submit("member", "ourgpu", gpus=1), Phase.RUNNING)
        world.server.loop.clock.ms += 1_800_000  # type: ignore[attr-defined]
        yield world


def visited(world: World, browser: Browser, who: str) -> Visit:
    url = f"http://127.0.0.1:{world.server.port}"
    visit = Visit(browser, url, world.tokens[who], width=1200, scheme="light")
    visit.sign_in()
    return visit


def amounts(page: Page, by: str) -> dict[str, int]:
    """The exact amounts of a table's rows, without its sum."""
    section = page.locator(f"section[aria-label='By {by}']")
    section.locator("tr[data-us]").first.wait_for()
    found = section.locator("tr[data-us]").evaluate_all(
        "rows => rows.map(row => [row.dataset.key, Number(row.dataset.us)])"
    )
    return dict(found)


def test_the_way_from_the_ledger_to_a_job_keeps_its_sums(world: World, browser: Browser) -> None:
    visit = visited(world, browser, "admin")
    page = visit.page
    visit.go("ledger")
    page.locator(f"a[data-key={THEIRS}]").wait_for()
    whole = int(page.locator(f"tr[data-key={THEIRS}]").get_attribute("data-us") or 0)
    assert whole > 0
    page.locator(f"a[data-key={THEIRS}]").click()
    page.get_by_role("heading", name=f"Tenant {THEIRS}").wait_for()
    users = amounts(page, "user")
    accounts, jobs = amounts(page, "account"), amounts(page, "job")
    assert sum(users.values()) == sum(accounts.values()) == sum(jobs.values()) == whole
    page.locator("section[aria-label=Jobs]").get_by_text("zebrajob").wait_for()
    page.locator(f".gauge[data-tenant={THEIRS}]").wait_for()
    with page.expect_download() as waiting:
        page.locator("section[aria-label='By job'] a.button", has_text="CSV").click()
    rows = list(csv.DictReader(io.StringIO(Path(waiting.value.path()).read_text())))
    assert waiting.value.suggested_filename == "ledger-by-job.csv"
    assert sum(int(row["gpu_us"]) for row in rows) == whole
    assert {row["job"] for row in rows} == set(jobs)

    page.locator("section[aria-label='By user'] a[data-key=zebrauser]").click()
    page.get_by_role("heading", name="User zebrauser").wait_for()
    assert sum(amounts(page, "job").values()) == users["zebrauser"]
    page.locator(f"section[aria-label='By job'] a[data-key={world.theirs['waiting']}]").click()
    page.wait_for_selector("main[data-view=job]")
    assert all("status of 404" in told for told in visit.complaints), visit.complaints
    visit.context.close()


def test_a_member_finds_nothing_of_another_tenant(world: World, browser: Browser) -> None:
    visit = visited(world, browser, "member")
    page = visit.page
    visit.go(f"tenant/{OURS}")
    page.locator(f".gauge[data-tenant={OURS}]").wait_for()
    assert "anna" in amounts(page, "user")
    assert MARK.decode() not in page.content().lower()
    visit.go("user/zebrauser")
    page.get_by_text("No GPU time used in this period").wait_for()
    assert page.locator("section[aria-label=Jobs] tr[data-job]").count() == 0
    visit.go(f"tenant/{THEIRS}")
    page.get_by_text(f"there is no tenant '{THEIRS}' that you may see").wait_for()
    assert all("status of 404" in told for told in visit.complaints), visit.complaints
    visit.context.close()
