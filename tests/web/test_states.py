"""Every view says what it is: loading, stale, empty, failed, or closed to this reader."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from harness.browser import Visit

from shoal.model.identity import Role
from shoal.model.people import NewToken
from tests.live.cluster import Live

if TYPE_CHECKING:
    from playwright.sync_api import Browser

STATE = "document.querySelector('main').dataset.state"
SHIFTED_MAX = 0.05  # of a window's height, for all views together
SHIFTS = """() => {
    window.shifted = 0;
    new PerformanceObserver(list => { for (const one of list.getEntries())
        if (!one.hadRecentInput) window.shifted += one.value;
    }).observe({ type: "layout-shift", buffered: true });
}"""
EMPTY = {  # views that have nothing to show in a cluster without jobs, and what they say to do
    "services": "shoal serve",
    "job/j999": "shoal ps -a",
    "node/n99": "shoal nodes",
    "network": "shoal check --network",
}


@pytest.fixture(scope="module")
def arguments(live: Live) -> dict[str, str]:
    """What views of one thing are opened with."""
    job = live.run("sleep 600", name="here", gpus=1, user="ada")
    live.wait(job, "running")
    array = live.client.submit(live.spec("true", sweep={"ranges": [[0, 1, 1]]})).id
    views = {"node": "n1", "job": job, "compare": job, "sweep": array}
    return {**views, "tenant": "default", "user": "ada"}


def opened(visit: Visit, arguments: dict[str, str]) -> dict[str, str]:
    """Each view by its address; all have been open once, so that their files are there."""
    names = visit.page.evaluate("import('/web/views.js').then(({ VIEWS }) => Object.keys(VIEWS))")
    views = {name: f"{name}/{arguments[name]}" if name in arguments else name for name in names}
    for address in views.values():
        visit.go(address)
        assert visit.page.evaluate(STATE) == "ready", address
    return views


def test_views_that_wait_fail_or_are_refused_say_so_and_come_back(
    visit: Visit, arguments: dict[str, str]
) -> None:
    page = visit.page
    held: list[Any] = []
    answer: dict[str, Any] = {}

    def meet(route: Any) -> None:
        if answer:
            route.fulfill(status=answer["status"], json={"message": answer["message"]})
        else:
            held.append(route)

    wrong = []
    page.evaluate(SHIFTS)
    views = opened(visit, arguments)
    assert page.evaluate("shifted") < SHIFTED_MAX, "nothing moves while views are opened"
    page.route("**/v1/**", meet)
    asks = 0
    for name, address in views.items():
        visit.go("services")  # asks for nothing while there is no service
        answer.clear()
        held.clear()
        visit.begin(address)
        if name == "services":
            continue
        asks += 1
        page.wait_for_timeout(50)
        words = page.locator("main").inner_text().split("\n")
        if page.evaluate(STATE) != "loading" or len(words) > 1 or words == [""]:
            wrong.append(f"{name}, not answered, is {page.evaluate(STATE)}: {words}")
        assert page.locator("main[aria-busy=true] .bone").count(), name
        for status, state, text in (
            (503, "failed", "Could not load"),
            (403, "denied", "You do not have access"),
        ):
            answer.update(status=status, message=f"because of {status}")
            if status == 503:
                for route in held:
                    meet(route)
            else:
                page.get_by_role("button", name="Retry").click()
            page.wait_for_selector(f"main[data-state={state}]")
            told = page.get_by_role("alert").first.inner_text()
            if text not in told or f"because of {status}" not in told:
                wrong.append(f"{name}, answered with {status}: {told}")
    assert asks > 10
    page.unroute("**/v1/**")
    visit.go("services")
    visit.go(views["job"])
    page.wait_for_selector("main[data-state=ready]")
    page.get_by_role("heading", name="here").wait_for()
    visit.complaints[:] = [text for text in visit.complaints if "status of" not in text]
    assert not wrong, "\n".join(wrong)


def test_what_cannot_be_brought_up_to_date_says_since_when(visit: Visit) -> None:
    page = visit.page
    visit.go("ledger")
    page.wait_for_selector("main[data-state=ready]")
    page.route("**/v1/ledger**", lambda route: route.fulfill(status=500, json={"message": "disk"}))
    page.locator("main").locator("fieldset.choice label").nth(1).click()
    page.locator(".stale", has_text="Update failed: disk. Data from ").wait_for()
    assert page.evaluate(STATE) == "ready", "what was known is still shown"
    page.unroute("**/v1/ledger**")
    page.locator(".stale").get_by_role("button", name="Retry").click()
    page.locator(".stale").wait_for(state="hidden")
    visit.complaints[:] = [text for text in visit.complaints if "500" not in text]


def test_a_controller_that_hangs_makes_no_view_tell_a_falsehood(
    visit: Visit, live: Live, arguments: dict[str, str]
) -> None:
    page = visit.page
    views = opened(visit, arguments)
    visit.go(views["job"])
    page.get_by_role("button", name="Cancel").click()
    question = page.locator("dialog button.primary")
    question.wait_for()
    pid = live.controller_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        page.locator(".stale", has_text="Disconnected: data from ").wait_for()
        page.wait_for_selector(".link-state[data-state=lost]")
        assert question.is_disabled(), "a question that was open"
        page.keyboard.press("Escape")
        assert page.get_by_role("button", name="Cancel").first.is_disabled()
        for name, address in views.items():
            visit.begin(address)
            state = page.evaluate(STATE)
            words = page.locator("main").inner_text().strip()
            assert state == "ready" if name == "services" else state == "loading", name
            assert words, f"{name} says nothing"
            assert state == "ready" or "\n" not in words, f"{name} claims: {words}"
            able = "main button:enabled, main input:enabled, main select:enabled"
            assert not page.locator(able).count(), name
        assert page.locator(".stale").is_visible()
    finally:
        os.kill(pid, signal.SIGCONT)
    page.wait_for_selector(".link-state[data-state=live]")
    page.locator(".stale").wait_for(state="hidden")
    page.wait_for_selector("main[data-state=ready]")
    visit.complaints.clear()  # what was asked meanwhile may have failed, and a browser tells


def test_the_table_is_a_few_keys_away(visit: Visit, arguments: dict[str, str]) -> None:
    assert arguments["job"]
    page = visit.page
    visit.go("jobs?find=here")
    assert page.evaluate("location.href").endswith("#/jobs?q=here"), (
        "what the search was called before"
    )
    page.locator("[role=grid] [data-job]").first.wait_for()
    page.get_by_role("link", name="Skip to content").focus()  # the first stop
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.matches('[role=grid]')")
    page.evaluate("document.querySelector('.tabs a[tabindex=\"0\"]').focus()")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("main[data-view=time]")
    assert page.locator(".tabs a[tabindex='0']").count() == 1, "the tabs are one stop"
    visit.go("ledger?unit=energy")
    assert page.locator("input[name=unit][value=energy]").is_checked()


def test_a_chart_and_a_table_are_saved_as_a_picture_and_as_figures(
    visit: Visit, arguments: dict[str, str]
) -> None:
    page = visit.page

    def saved(title: str, kind: str) -> bytes:
        page.get_by_label(f"Share {title}", exact=True).click()
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Save as {kind}").click()
        assert download.value.suggested_filename.startswith("shoal-")
        assert download.value.suggested_filename.endswith(f".{kind.lower()}")
        return Path(download.value.path()).read_bytes()

    visit.go("jobs")
    page.locator("[role=grid] [data-job]").first.hover()
    head, *rows = csv.reader(saved("Jobs", "CSV").decode().splitlines())
    assert head[0] == "Job"
    assert any(arguments["job"] in row[0] for row in rows)
    picture = saved("Jobs", "PNG")
    assert picture.startswith(b"\x89PNG") and len(picture) > 5_000
    visit.go(f"node/{arguments['node']}")
    page.locator("figure.chart:visible").first.hover()
    title = page.locator("figure.chart:visible h3").first.inner_text()
    assert saved(title, "PNG").startswith(b"\x89PNG")
    assert saved(title, "CSV").startswith(b"series,time,value")
    page.keyboard.press("Control+k")  # by keys alone
    page.get_by_role("combobox", name="Search or run a command").fill(f"save {title} csv")
    page.get_by_role("option", name=f"Save {title} as CSV").wait_for()
    with page.expect_download():
        page.keyboard.press("Enter")


def test_what_is_empty_says_how_it_is_filled(visit: Visit) -> None:
    for address, way in EMPTY.items():
        visit.go(address)
        visit.page.locator("main .empty", has_text=way).first.wait_for()
        assert visit.page.evaluate(STATE) == "ready"
    visit.complaints[:] = [text for text in visit.complaints if "404" not in text]


def test_a_reader_whose_token_is_revoked_is_asked_to_sign_in_and_lands_where_they_were(
    browser: Browser, live: Live
) -> None:
    live.client.add_tenant("lab")
    live.client.add_user("eve", {"lab": Role.VIEWER})
    made = live.client.add_token(NewToken(user="eve", lifetime_ms=600_000))
    visit = Visit(browser, live.client.url, made.secret, 390, "light")
    visit.sign_in()
    page = visit.page
    page.get_by_label("Signed in as eve, viewer · lab").wait_for()
    names = page.evaluate("import('/web/views.js').then(({ VIEWS }) => Object.keys(VIEWS))")
    closed = {"simulate", "network", "new"}
    for name in names:
        if name in ("node", "job", "user", "compare", "sweep", "tenant"):
            continue
        visit.go(name)
        page.wait_for_selector(f"main[data-state={'denied' if name in closed else 'ready'}]")
    visit.go("policy")
    live.client.remove_token(made.token.id)
    page.get_by_text("your token was revoked. Sign in again").wait_for()
    assert page.locator("main").count() == 0
    page.fill("input[name=token]", visit.token)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("alert").wait_for()
    page.fill("input[name=token]", live.home.token.read_text().strip())
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_selector("main[data-view=policy][data-state=ready]")
    visit.complaints[:] = [text for text in visit.complaints if "401" not in text]
    visit.close()
