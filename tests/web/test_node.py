"""A node's page, and what a browser follows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from harness.browser import WAIT_MS, Visit
from harness.waiting import until

from shoal.model.node import NodeIntent
from tests.live.cluster import Live

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WAIT_S = WAIT_MS / 1000


def test_a_nodes_page_has_its_jobs_curves_checks_and_who_drained_it_and_why(
    visit: Visit, live: Live
) -> None:
    page = visit.page
    job = live.run("sleep 600", name="lives", gpus=1, where=("node=n2",))
    visit.go("node/n2")
    page.get_by_role("heading", name="n2", exact=True).wait_for()
    row = page.locator(f"section[aria-label=Jobs] tr[data-job={job}]")
    row.get_by_text("Current", exact=True).wait_for()
    page.locator(".verdict", has_text="Healthy; 1 job; 1 of 4 GPUs in use.").wait_for()
    page.locator(".facts").get_by_text("1 of 4 in use").wait_for()
    page.locator("section[aria-label=Load]").get_by_text("CPU and memory").wait_for()

    page.get_by_role("button", name="Cordon", exact=True).click()
    page.get_by_label("Reason").fill("a <b>fan</b> is loud")
    page.get_by_role("button", name="Cordon node").click()
    page.locator("main .chip[data-state=cordoned]").wait_for()
    history = page.locator("section[aria-label=History]")
    history.get_by_text("a <b>fan</b> is loud").wait_for()
    assert page.locator("main b", has_text="fan").count() == 0, "text is only text"
    live.client.set_intent("n2", NodeIntent.DRAINING, "new memory")
    history.get_by_text("drained by a user: new memory").wait_for()
    page.locator(".reason", has_text=": new memory").wait_for()
    page.locator(".verdict", has_text=": new memory.").wait_for()
    page.get_by_role("button", name="Uncordon").click()
    page.locator("dialog .effects", has_text="new memory").wait_for()
    page.get_by_role("button", name="Uncordon node").click()
    page.locator("main .chip[data-state=ready]").wait_for()

    page.get_by_role("button", name="Check now").click()
    page.get_by_role("button", name="Check node").click()
    checks = page.locator("section[aria-label=Checks]")
    checks.locator("[role=status]", has_text="Passed").or_(
        checks.locator("[role=status]", has_text="Failed")
    ).wait_for()
    checks.locator("tr .chip").first.wait_for()
    live.client.cancel(job)
    visit.go("node/n99")
    page.get_by_text("There is no node n99").wait_for()


def test_what_is_followed_is_told_once_and_nothing_from_before(
    browser: Browser, live: Live
) -> None:
    token = live.home.token.read_text().strip()
    visit = Visit(browser, live.client.url, token, width=1200, scheme="light")
    # The headless browser shows no notices: what would be shown is kept.
    visit.context.add_init_script(
        """window.told = []; window.Notification = class {
            static permission = sessionStorage.getItem("may") ?? "default";
            static async requestPermission() {
                Notification.permission = "granted"; asked += 1;
                sessionStorage.setItem("may", "granted"); }
            constructor(title, { body }) { told.push(body); } close() {} };
        window.asked = 0;"""
    )
    page = visit.page
    try:
        visit.sign_in()
        job = live.run("sleep 600", name="told", gpus=1)
        assert live.wait(job, "running") == "running"
        assert page.evaluate("asked") == 0, "no question before a click"
        for place in (f"job/{job}", "node/n3"):
            visit.go(place)
            page.get_by_role("button", name="☆ Follow").click()
            page.get_by_role("button", name="★ Following").wait_for()
        assert page.evaluate("asked") == 1, "one question"
        live.client.set_intent("n3", NodeIntent.CORDONED)
        until(
            lambda: page.evaluate("told") == ["n3 is cordoned"],
            more=lambda: page.evaluate("[told, JSON.stringify(localStorage)]"),
        )
        assert page.title().startswith("(1) ")
        page.reload()
        page.wait_for_selector(".link-state[data-state=live]")
        live.client.cancel(job)
        told = [f"{job} told cancelled"]  # after a reload only what is new
        until(lambda: page.evaluate("told") == told, more=lambda: page.evaluate("told"))
        page.get_by_role("button", name=re.compile("^Following [0-9]")).click()
        listed = page.locator("dialog.follow-list")
        listed.get_by_text("n3 is cordoned").wait_for()
        assert f"job {job}" not in listed.inner_text(), "what has ended is not followed any more"
        assert not page.title().startswith("(")
        listed.get_by_role("button", name="Unfollow").click()
        listed.get_by_text("node n3").wait_for(state="detached")
        live.client.set_intent("n3", NodeIntent.OPEN)
    finally:
        visit.close()
