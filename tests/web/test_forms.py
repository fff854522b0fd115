"""Jobs from the page: a new one, one that is run again with changes, and remedies as buttons."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from harness.browser import WAIT_MS, Visit
from harness.waiting import until

from shoal.model.identity import Role
from shoal.model.node import NodeIntent
from shoal.model.people import NewToken
from tests.live.cluster import Live

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Request, Route

WAIT_S = WAIT_MS / 1000


def open_form(visit: Visit, query: str = "") -> None:
    visit.page.evaluate("hash => { location.hash = hash }", f"#/new{query}")
    visit.page.wait_for_selector("main[data-view=new] [data-field=command]")


def shown_job(visit: Visit) -> str:
    visit.page.wait_for_selector("main[data-view=job] h1")
    return str(visit.page.evaluate("location.hash.split('/')[2]"))


def test_a_job_is_submitted_once_from_the_form_that_shows_its_command_line(
    visit: Visit, live: Live
) -> None:
    page = visit.page
    open_form(visit)
    page.fill("[name=command]", "sh -c 'echo \"$GREETING\"'")
    page.fill("[name=name]", "from-page")
    page.fill("[name=env]", "GREETING=hello there\nSEED=1")
    page.fill("[name=gpus]", "many")
    problem = page.locator("[data-field=gpus] .problem")
    problem.get_by_text("'many' is not a number of GPUs").wait_for()
    assert page.get_attribute("[name=gpus]", "aria-invalid") == "true"
    page.fill("[name=gpus]", "99")  # only the cluster knows that this is too much
    problem.wait_for(state="hidden")
    page.get_by_role("button", name="Submit").click()
    problem.get_by_text("no node has more than 4").wait_for()
    visit.complaints.clear()  # a browser logs each refusal
    page.fill("[name=gpus]", "1")
    line = page.locator(".code")
    line.get_by_text("-g 1").wait_for()
    words = shlex.split(line.inner_text())
    assert words[:4] == ["shoal", "run", "--name", "from-page"]
    assert words[-3:] == ["sh", "-c", 'echo "$GREETING"']

    page.get_by_role("button", name="Job file").click()
    text = page.get_by_label("Job file", exact=True).last
    text.wait_for()
    assert "GREETING: hello there" in text.input_value()
    page.get_by_role("button", name="Form", exact=True).click()
    assert page.input_value("[name=env]") == "GREETING=hello there\nSEED=1"

    # The answer of the first request is lost, and the second click is a double one.
    tries: list[str] = []

    def lose_first(route: Route, request: Request) -> None:
        tries.append(request.post_data or "")
        if len(tries) == 1:
            route.fetch()
            route.abort()
        else:
            route.continue_()

    page.route("**/v1/form/submit", lose_first)
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("no second job is created").wait_for()
    visit.complaints.clear()  # of the request that was cut
    page.get_by_role("button", name="Submit").dblclick()
    job = shown_job(visit)
    page.unroute("**/v1/form/submit")
    assert len(set(tries)) == 1, "the same request, with the same key"
    assert live.wait(job) == "succeeded"
    assert b"hello there" in live.client.logs(job).data
    named = [row.id for row in live.client.jobs(finished=True) if row.name == "from-page"]
    assert named == [job]

    # Again, with a change: everything else is as it was.
    page.get_by_role("link", name="Run with changes").click()
    page.wait_for_selector("main[data-view=new] [data-field=command]")
    assert page.input_value("[name=gpus]") == "1"
    page.fill("[name=env]", "GREETING=good bye\nSEED=1")
    page.get_by_role("button", name="Submit").click()
    until(lambda: shown_job(visit) != job)
    again = shown_job(visit)
    assert live.wait(again) == "succeeded"
    was, now = live.client.job(job).spec, live.client.job(again).spec
    assert now.env == {**was.env, "GREETING": "good bye"}
    assert (now.command, now.gpus, now.name) == (was.command, was.gpus, was.name)


def test_remedies_are_buttons_that_change_a_waiting_job_or_open_a_node(
    visit: Visit, live: Live
) -> None:
    page = visit.page
    holders = [live.run("sleep 600", gpus=3, name=f"holds-{n}") for n in range(4)]
    job = live.run("sleep 600", gpus=4, name="wide")
    visit.go(f"job/{job}")
    page.locator(".help").get_by_role("button", name="Apply and resubmit").first.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("With 1 GPU per member instead of 4, it would start now").wait_for()
    dialog.get_by_role("button", name="Apply and resubmit").click()
    until(lambda: shown_job(visit) != job)
    new = shown_job(visit)
    page.locator("main .chip[data-state=running]").first.wait_for()
    assert live.client.job(job).why.startswith(f"replaced by {new}")
    assert (live.client.job(new).gpus, live.client.job(new).name) == (1, "wide")

    live.client.cancel(new)
    live.client.cancel(holders[0])
    live.wait(holders[0])
    node = next(one.id for one in live.client.nodes() if one.gpus_free == 4)
    live.client.set_intent(node, NodeIntent.CORDONED)
    closed = live.run("sleep 600", gpus=4, name="closed-out")
    visit.go(f"job/{closed}")
    page.get_by_role("button", name=f"Uncordon {node}").click()
    page.get_by_role("button", name="Uncordon node").click()
    page.locator("main .chip[data-state=running]").first.wait_for()
    for one in (*holders[1:], closed):
        live.client.cancel(one)


def test_a_viewer_has_no_form_and_a_member_no_choice_of_tenant(
    browser: Browser, live: Live
) -> None:
    live.client.add_tenant("lab")
    for name, role in (("vera", Role.VIEWER), ("mona", Role.MEMBER)):
        live.client.add_user(name, {"lab": role})
        secret = live.client.add_token(NewToken(user=name, tenant="lab")).secret
        visit = Visit(browser, live.client.url, secret, width=360, scheme="dark")
        visit.sign_in()
        visit.page.evaluate("location.hash = '#/new'")
        if role is Role.VIEWER:
            visit.page.wait_for_selector("main[data-view=new][data-state=denied]")
        else:
            visit.page.wait_for_selector("[name=command]")
            assert visit.page.locator("[name=tenant]").count() == 0
            wide = visit.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 360, "nothing is cut on a phone"
        visit.close()
