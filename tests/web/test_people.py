"""The page as a member and a viewer see it: who is signed in, their own jobs, and no more buttons
than their role may press."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from harness.browser import Visit
from harness.waiting import until

from shoal.model.identity import Role
from shoal.model.report import RemoveToken
from tests.api.server import serving
from tests.api.world import OURS, POLICY, THEIRS, World
from tests.web.test_open_to_all import found

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


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
    page.get_by_label(f"Signed in as anna, member · {OURS}").wait_for()
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
    page.get_by_label(f"Signed in as vera, viewer · {OURS}").wait_for()
    visit.go(f"job/{world.ours['job']}")
    page.get_by_text("ourjob").first.wait_for()
    assert page.get_by_role("button", name="Cancel").count() == 0
    world.server.ask(RemoveToken(world.tokens["viewer"].split("_")[1]))
    until(lambda: page.locator("input[name=token]").count() == 1)
    visit.context.close()  # what it was refused meanwhile is in its console


def answer(page: Page, verb: str, **values: str) -> None:
    """Fills the open dialog and confirms it."""
    box = page.get_by_role("dialog")
    box.wait_for()
    for name, value in values.items():
        field = box.locator(f"[name='{name}']")
        if field.evaluate("one => one.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    box.get_by_role("button", name=verb).click()


def test_an_admin_manages_users_tokens_tenants_and_limits(world: World, browser: Browser) -> None:
    visit = visited(world, browser, "admin")
    page, identity = visit.page, world.server.loop.state.identity
    visit.go("people")
    page.get_by_role("button", name="Add user").click()
    answer(page, "Add user", name="nora", tenant=OURS, role="viewer")
    row = page.locator("tr[data-user=nora]")
    row.get_by_text(f"viewer · {OURS}").wait_for()
    row.get_by_role("button", name="Edit roles").click()
    answer(page, "Save roles", **{f"in {OURS}": "", "tenant": THEIRS, "role": "member"})  # moved
    row.get_by_text(f"member · {THEIRS}").wait_for()
    assert identity.users["nora"].roles == {THEIRS: Role.MEMBER}

    row.get_by_role("button", name="New token").click()
    answer(page, "Create token", hours="8", note="the <b>laptop</b>")
    secret = page.get_by_label("Token", exact=True).inner_text()
    assert world.server.call(secret, "GET", "/v1/me").status == 200
    page.get_by_role("button", name="Done").click()
    assert secret not in page.content()  # shown once
    page.get_by_role("radio", name="Tokens").check(force=True)
    row = page.locator(f"tr[data-token='{secret.split('_')[1]}']")
    row.get_by_text("the <b>laptop</b>").wait_for()
    row.get_by_role("button", name="Revoke").click()
    answer(page, "Revoke token")
    row.wait_for(state="detached")
    assert world.server.call(secret, "GET", "/v1/me").status == 401

    page.get_by_role("radio", name="Tenants").check(force=True)
    page.locator(f"tr[data-tenant={OURS}]").get_by_role("button", name="Edit limits").click()
    world.ask(
        "operator", "PUT", "/v1/policy", {**world.ask("operator", "GET", "/v1/policy"), "spares": 1}
    )
    answer(page, "Save limits", quota_gpus="3")
    page.get_by_role("alert").get_by_text("the policy was changed meanwhile").wait_for()
    page.get_by_role("button", name="Keep as is").click()
    page.locator(f"tr[data-tenant={OURS}]").get_by_role("button", name="Edit limits").click()
    answer(page, "Save limits", quota_gpus="3")
    page.get_by_text("3 GPUs").wait_for()
    assert world.server.loop.policy.spares == 1  # the other admin's change is still there

    page.get_by_role("radio", name="Audit log").check(force=True)
    page.get_by_text("users.add").first.wait_for()
    assert secret.split("_")[2] not in page.content()
    visit.close()


def test_a_member_manages_only_their_own_tokens(world: World, browser: Browser) -> None:
    visit = visited(world, browser, "member")
    page = visit.page
    visit.go("people")
    page.locator("tr[data-token]").first.wait_for()
    assert set(page.locator("tr[data-token] td:nth-child(2)").all_inner_texts()) == {"anna"}
    assert page.get_by_role("button", name="Add user").count() == 0
    assert "zebra" not in page.content()
    page.get_by_role("button", name="New token").click()
    answer(page, "Create token", note="mine")
    page.get_by_role("button", name="Done").click()
    page.get_by_text("mine", exact=True).wait_for()
    visit.close()


def test_a_member_adds_a_key_sees_it_once_and_revokes_it(world: World, browser: Browser) -> None:
    visit = visited(world, browser, "member")
    page, keys = visit.page, world.server.loop.tick.state.identity.api_keys
    asked: list[str] = []
    page.on("request", lambda one: asked.append(f"{one.method} {one.url} {one.post_data}"))
    visit.go("people?tab=keys")
    old = page.locator(f"tr[data-api-key='{world.ours['api_key']}']")
    old.get_by_text("ourservice").wait_for()
    look(page, "list")
    page.get_by_role("button", name="New API key").click()
    page.get_by_role("checkbox", name="ourservice").check()
    look(page, "form")
    answer(page, "Create key", user="app", tokens="1000000", per="month", rpm="60", hours="720")
    secret = page.get_by_label("API key", exact=True).inner_text()
    line = page.get_by_label("OpenAI client", exact=True).inner_text()
    assert line.startswith('client = OpenAI(base_url="http') and "/ourservice/v1" in line
    look(page, "secret")
    page.get_by_role("button", name="Done").click()
    made = keys[secret.split("_")[1]]
    assert (made.services, made.user, made.rpm) == (("ourservice",), "app", 60)
    assert (made.tokens, made.per, made.until_ms - made.since_ms) == (10**6, "month", 2_592_000_000)
    row = page.locator(f"tr[data-api-key='{made.id}']")
    row.get_by_text("1M/month").wait_for()
    page.reload()
    row.wait_for()  # the tab is in the address
    kept = page.evaluate("JSON.stringify({...localStorage, ...sessionStorage})")
    assert secret not in str(asked) + kept + page.content(), "it is shown once"
    assert "zebra" not in page.content()

    row.get_by_role("button", name="Revoke").click()
    page.get_by_text("Programs of app that use it are refused").wait_for()
    look(page, "revoke")
    answer(page, "Revoke key")
    row.wait_for(state="detached")
    old.wait_for()
    assert made.id not in keys and world.ours["api_key"] in keys
    visit.close()


def test_keys_are_for_an_admin_by_tenant_and_not_for_a_viewer(
    world: World, browser: Browser
) -> None:
    visit = visited(world, browser, "admin")
    page, keys = visit.page, world.server.loop.tick.state.identity.api_keys
    visit.go("people?tab=keys")
    page.locator(f"tr[data-api-key='{world.theirs['api_key']}']").wait_for()
    page.get_by_role("button", name="New API key").click()
    page.locator("select[name=tenant]").select_option(THEIRS)
    assert page.get_by_role("checkbox").count() == 1
    answer(page, "Create key", user="zed")
    key_id = page.get_by_label("API key", exact=True).inner_text().split("_")[1]
    page.get_by_role("button", name="Done").click()
    page.locator(f"tr[data-api-key='{key_id}']").get_by_text("all services of zebra").wait_for()
    assert (keys[key_id].tenant, keys[key_id].services) == (THEIRS, ())
    visit.close()
    visit = visited(world, browser, "viewer of all")
    visit.go("people?tab=keys")
    visit.page.get_by_role("button", name="New token").wait_for()
    assert not visit.page.get_by_text("API keys").count()
    visit.close()


def look(page: Page, name: str) -> None:
    """It is open to all; and pictures for people, if they are asked for."""
    assert not found(page)
    if folder := os.environ.get("SHOAL_SHOTS"):
        for width, scheme in ((1440, "light"), (1440, "dark"), (390, "light"), (390, "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
            page.screenshot(path=f"{folder}/keys-{name}-{width}-{scheme}.png")
        page.set_viewport_size({"width": 1200, "height": 800})


def test_an_invite_signs_one_person_in_and_its_code_is_nowhere_after(
    world: World, browser: Browser
) -> None:
    visit = visited(world, browser, "admin")
    page = visit.page
    visit.go("people")
    page.locator(".push").get_by_role("button", name="Invite").click()
    answer(page, "Create invite", name="iris", tenant=OURS, role="member")
    link = page.get_by_label("Invite link", exact=True).inner_text()
    assert page.get_by_label("Command", exact=True).inner_text().startswith("shoal login http")
    page.get_by_role("button", name="Done").click()
    page.locator("tr[data-user=iris]").get_by_text("invited").wait_for()

    code = link.partition("#invite=")[2]
    guest = Visit(browser, link, "", width=390, scheme="dark")
    asked: list[str] = []
    guest.page.on("request", lambda one: asked.append(f"{one.url} {one.headers.get('referer')}"))
    guest.page.goto(link)
    guest.page.get_by_role("button", name="Accept invite").wait_for()
    assert code not in guest.page.evaluate("location.href")  # looking at the link uses nothing up
    guest.page.get_by_role("button", name="Accept invite").click()
    guest.page.wait_for_selector("main[data-view]")
    assert not [line for line in asked if code in line]
    entries = guest.page.evaluate("navigation.entries().map(one => one.url)")
    kept = guest.page.evaluate("JSON.stringify({...localStorage, ...sessionStorage})")
    assert code not in str(entries) + kept + guest.page.content()
    guest.go("people")
    guest.page.locator("main").get_by_text(f"member · {OURS}").first.wait_for()
    guest.page.goto("about:blank")
    guest.page.goto(link)  # signed in already, but it was used
    guest.page.get_by_role("button", name="Accept invite").click()
    guest.page.get_by_role("alert").get_by_text("this invite was accepted").wait_for()
    assert all("status of 401" in told for told in guest.complaints), guest.complaints
    guest.context.close()

    row = page.locator("tr[data-user=iris]")
    row.get_by_role("button", name="Remove").click()
    page.locator("tr[data-kind=token]").get_by_text("is revoked").wait_for()
    answer(page, "Remove user", end="true")
    row.wait_for(state="detached")
    visit.close()
