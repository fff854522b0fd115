"""The policy on the page: shown, edited, compared, replayed and applied; budgets as gauges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from harness.browser import Visit

from tests.api.server import serving
from tests.api.world import MARK, OURS, POLICY, World

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path: Path = tmp_path_factory.mktemp("policies") / "home"
    with serving(path, POLICY) as server:
        yield World(server)


def visited(world: World, browser: Browser, who: str, width: int = 1200) -> Visit:
    url = f"http://127.0.0.1:{world.server.port}"
    visit = Visit(browser, url, world.tokens[who], width=width, scheme="light")
    visit.sign_in()
    return visit


def test_an_admin_edits_compares_simulates_and_applies(world: World, browser: Browser) -> None:
    visit = visited(world, browser, "admin")
    page = visit.page
    visit.go("policy")
    rules = page.locator("section[aria-label=Rules]")
    rules.locator("td").get_by_text("a blocked job can be overtaken for this long").wait_for()
    page.locator(f".gauge[data-tenant={OURS}]").get_by_text("of 100 GPU-hours").wait_for()
    rules.get_by_text("Other fields").click()
    page.get_by_role("button", name="Edit", exact=True).click()
    page.get_by_label("patience", exact=True).fill("soon")
    page.get_by_role("button", name="Compare").click()
    problem = page.locator(".policy-edit > .problem")
    problem.get_by_text("patience").wait_for()
    page.get_by_label("patience", exact=True).fill("25m")
    page.get_by_label(f"quota_gpus of {OURS}").fill("3")
    page.get_by_role("button", name="Compare").click()
    row = page.locator("tr[data-field=patience]")
    row.get_by_text("25m").wait_for()
    assert "1h" in row.locator(".old").inner_text()
    assert page.locator(f"tr[data-field='tenants.{OURS}.quota_gpus'] .new").inner_text() == "3"
    assert page.locator("tr[data-field]").count() == 2, "and nothing else differs"
    assert page.get_by_role("button", name="Apply", exact=True).count() == 0, "not before a replay"
    page.get_by_role("button", name="Apply without simulating").wait_for()
    page.get_by_role("button", name="Simulate first").click()
    page.locator("table.compare th", has_text="edited").wait_for()
    page.get_by_role("button", name="Apply", exact=True).click()
    page.locator("dialog").get_by_role("button", name="Apply", exact=True).click()
    page.get_by_text("Policy applied").wait_for()
    newest = page.locator("section[aria-label=History] tr[data-seq]").first
    newest.get_by_text("1h → 25m").wait_for()
    assert "ada" in newest.inner_text()
    rules.locator("td").get_by_text(
        "how many such ports there are"
    ).wait_for()  # what was open stays open
    assert world.server.loop.policy.patience_ms == 25 * 60_000
    assert world.server.loop.policy.tenant(OURS).quota_gpus == 3
    assert [told for told in visit.complaints if "422" not in told] == []  # the first wish
    visit.context.close()


def test_a_second_admin_in_between_is_not_overwritten(world: World, browser: Browser) -> None:
    visit = visited(world, browser, "admin")
    page = visit.page
    visit.go("policy")
    page.get_by_role("button", name="Edit", exact=True).click()
    page.get_by_label("spares", exact=True).fill("0")
    page.get_by_label("reservations", exact=True).fill("5")
    page.get_by_role("button", name="Compare").click()
    page.locator("tr[data-field=reservations]").wait_for()
    theirs = msgspec.structs.replace(world.server.loop.policy, hangs_max=7)
    world.ask("operator", "PUT", "/v1/policy", theirs)
    page.get_by_role("button", name="Apply without simulating").click()
    page.locator("dialog").get_by_role("button", name="Apply", exact=True).click()
    page.locator("dialog .problem", has_text="changed by someone else").wait_for()
    page.get_by_role("button", name="Keep as is").click()
    page.locator(".policy-edit > .problem", has_text="Compare again").wait_for()
    assert world.server.loop.policy == theirs
    page.get_by_role("button", name="Compare").click()
    page.locator("tr[data-field=reservations]").wait_for()
    assert page.locator("tr[data-field]").count() == 1, "the other's change stays"
    page.get_by_role("button", name="Apply without simulating").click()
    page.locator("dialog").get_by_role("button", name="Apply", exact=True).click()
    page.get_by_text("Policy applied").wait_for()
    assert world.server.loop.policy == msgspec.structs.replace(theirs, reservations=5)

    # The one before can be looked at and edited from, as text.
    earlier = page.locator("section[aria-label=History] tr[data-seq]")
    earlier.first.get_by_text("0 → 5").wait_for()
    second = earlier.nth(1)
    second.get_by_role("button", name="View").click()
    page.get_by_label("An earlier policy as a file").get_by_text("hangs_max: 7").wait_for()
    page.get_by_role("button", name="Show diff").click()
    page.locator("tr[data-changed=reservations] .new").get_by_text("5").wait_for()
    second.get_by_role("button", name="Roll back").click()
    box = page.get_by_role("dialog")
    assert box.locator("tr[data-changed=reservations] .new").inner_text() == "0"
    assert box.locator("tr[data-changed]").count() == 1
    box.get_by_role("button", name="Roll back to this version").click()
    page.get_by_text("Rolled back").wait_for()
    assert world.server.loop.policy.reservations == 0
    earlier.first.get_by_text("5 → 0").wait_for()
    second = earlier.nth(1)
    second.get_by_role("button", name="Edit from here").click()
    text = page.get_by_label("The policy as text")
    assert "reservations: 5" in text.input_value()
    page.get_by_role("button", name="Compare").click()
    page.locator("tr[data-field=reservations] .new").get_by_text("5").wait_for()
    visit.go("simulate")  # the draft comes along, and waits when one comes back
    assert page.locator("input[name=policy][value=edited]").is_checked()
    visit.go("policy")
    page.get_by_role("button", name="Continue editing").wait_for()
    assert [told for told in visit.complaints if "409" not in told] == []
    visit.context.close()


def test_members_and_viewers_see_their_own_and_cannot_edit(world: World, browser: Browser) -> None:
    for who in ("member", "viewer"):
        visit = visited(world, browser, who, width=360)
        page = visit.page
        visit.go("policy")
        page.locator(f".gauge[data-tenant={OURS}]").wait_for()
        page.locator(f"section[aria-label=Tenants] tr[data-tenant={OURS}]").wait_for()
        assert page.locator(".gauge").count() == 1
        assert page.get_by_role("button", name="Edit").count() == 0
        assert page.locator("section[aria-label=History]").is_hidden()
        assert MARK.decode() not in page.content().lower()
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, "it fits a phone"
        visit.close()
