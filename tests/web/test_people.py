"""The page as a member and a viewer see it: who is signed in, their own jobs, and no more buttons
than their role may press."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from harness.browser import Visit
from harness.waiting import until

from shoal.model.report import RemoveToken
from tests.api.server import serving
from tests.api.world import OURS, POLICY, World

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.filterwarnings("ignore::litestar.exceptions.LitestarDeprecationWarning")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path: Path = tmp_path_factory.mktemp("people") / "home"
    with serving(path, POLICY) as server:
        yield World(server)


def visited(world: World, browser: Browser, who: str) -> Visit:
    url = f"http://127.0.0.1:{world.server.port}"
    visit = Visit(browser, url, world.tokens[who], width=1200, scheme="light")
    visit.sign_in()
    return visit


def test_a_member_sees_and_may_cancel_their_own_and_nothing_of_others(
    world: World, browser: Browser
) -> None:
    visit = visited(world, browser, "member")
    page = visit.page
    page.get_by_text(f"anna · {OURS} · member").wait_for()
    assert page.get_by_role("link", name="Simulate").count() == 0
    page.get_by_text("another tenant's job").first.wait_for()  # 3 of 4 GPUs are theirs
    visit.go("jobs")
    page.locator(f"[role=row][data-job={world.ours['waiting']}]").first.wait_for()
    assert "zebra" not in page.content()
    visit.go(f"job/{world.ours['job']}")
    page.get_by_role("button", name="Cancel").wait_for()
    visit.go(f"job/{world.theirs['job']}")
    page.get_by_text("there is no job").first.wait_for()
    assert "zebra" not in page.content()
    assert all("status of 404" in told for told in visit.complaints), visit.complaints
    visit.context.close()


def test_a_viewer_has_no_buttons_and_is_signed_out_when_the_token_goes(
    world: World, browser: Browser
) -> None:
    visit = visited(world, browser, "viewer")
    page = visit.page
    page.get_by_text(f"vera · {OURS} · viewer").wait_for()
    visit.go(f"job/{world.ours['job']}")
    page.get_by_text("ourjob").first.wait_for()
    assert page.get_by_role("button", name="Cancel").count() == 0
    world.server.ask(RemoveToken(world.tokens["viewer"].split("_")[1]))
    until(lambda: page.locator("input[name=token]").count() == 1)
    visit.context.close()  # what it was refused meanwhile is in its console
