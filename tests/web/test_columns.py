"""A column that is declared stands on the page, which nobody had to change for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from harness.browser import Visit
from harness.generated import columns

from shoal.model.columns import COLUMNS
from tests.api.server import OPERATORS, serving
from tests.api.test_columns import LENGTH
from tests.api.world import POLICY, World

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_a_declared_column_is_shown_and_sorts(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COLUMNS, LENGTH.name, LENGTH)
    with serving(tmp_path / "home", POLICY) as server:
        world = World(server)
        visit = Visit(browser, f"http://127.0.0.1:{server.port}", OPERATORS, 1200, "light")
        page = visit.page
        page.route(  # as `make generate` writes it
            re.compile("/web/columns.js"),
            lambda route: route.fulfill(body=columns(""), content_type="text/javascript"),
        )
        visit.sign_in()
        visit.go("jobs?q=done")
        page.locator("summary", has_text="Columns").click()
        page.get_by_label("Length").check()
        page.keyboard.press("Escape")
        for done, letters in ((world.ours["done"], "7"), (world.theirs["done"], "9")):
            cell = page.locator(f"[data-job={done}] [data-name=length]")
            cell.get_by_text(letters, exact=True).wait_for()
        page.get_by_role("columnheader", name="Length").get_by_role("button").click()
        page.locator("[data-key=length][aria-sort=descending]").wait_for()
        first = page.locator(f"[aria-rowindex='2'][data-job={world.theirs['done']}]")
        first.wait_for()
        visit.close()
