"""The page in a real browser: it shows what happens as it happens, and does what it is told."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest
from harness import openid
from harness.browser import WAIT_MS, Visit
from harness.waiting import until

from shoal.model.job import JobSpec
from shoal.model.people import GroupRule, OidcConfig
from shoal.model.service import Probe, Scale, ServiceSpec
from tests.live.cluster import Live

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WAIT_S = WAIT_MS / 1000
# Each view, and what is there when it is filled.
VIEWS = {
    "cluster": ".lately li",
    "jobs": "[role=grid] [data-job]",
    "time": ".gantt canvas",
    "services": ".empty, .service",
    "ledger": ".figures, .empty",
    "simulate": ".asks label",
    "plan": "select[name=model] option",
}
NASTY = "<img src=x onerror=document.title='owned'>"


def test_a_job_appears_runs_loses_its_node_and_heals_before_our_eyes(
    visit: Visit, live: Live
) -> None:
    page = visit.page
    free = visit.color("n1", 0)
    job = live.run("sleep 600", name="eyes", gpus=4)
    until(lambda: sum(visit.cells(job).values()) == 4)
    (before,) = visit.cells(job)
    until(lambda: visit.color(before, 0) != free, "its cells are painted")
    page.get_by_role("button", name="eyes").wait_for()

    live.kill_agent(before)
    page.locator(".trouble, .lately").get_by_text(f"{before} is lost").or_(
        page.locator(".chip[data-state=lost]", has_text=before)
    ).first.wait_for()
    until(lambda: list(visit.cells(job)) not in ([], [before]))
    (after,) = visit.cells(job)
    assert after != before, "the cell moved"
    until(lambda: visit.color(after, 0) != free)

    visit.go(f"job/{job}")
    page.locator(".events").get_by_text(f"lost with {before}").first.wait_for()
    page.locator("[aria-label=Timeline] tr[data-key='2']").wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel job").click()
    page.locator("main .chip[data-state=cancelled]").first.wait_for()
    assert live.wait(job) == "cancelled"
    until(lambda: not visit.cells(job))


def test_the_log_is_told_as_it_is_written_and_text_is_only_text(visit: Visit, live: Live) -> None:
    gate = live.home.path / "gate"
    job = live.run(
        f'echo "{NASTY}"; while [ ! -e {gate} ]; do sleep 0.05; done; echo "and more"; sleep 600',
        name="talks",
        cpu_milli=100,
    )
    visit.go(f"job/{job}")
    log = visit.page.locator(".log")
    log.get_by_text(NASTY).wait_for()
    assert "and more" not in log.inner_text()
    gate.touch()
    log.get_by_text("and more").wait_for()
    assert visit.page.locator("main img").count() == 0, "what a job writes is never markup"
    visit.page.locator("dd.mono", has_text="<img src=x").wait_for()  # its command
    assert "owned" not in visit.page.title()
    with pytest.raises(msgspec.ValidationError, match="name"):
        live.run("true", name="<img onerror>")  # a name cannot even be one
    live.client.cancel(job)


def test_the_queue_says_why_and_what_would_help(visit: Visit, live: Live) -> None:
    holders = [live.run("sleep 600", gpus=3, name=f"holds-{n}") for n in range(4)]
    job = live.run("true", gpus=4, name="late")
    visit.go("jobs?tab=queue")
    row = visit.page.locator(f"section[aria-label=Queue] tr[data-job={job}]")
    row.get_by_text("no node has 4 GPUs").wait_for()
    row.get_by_text("with 1 GPU per member instead of 4, it would start now").wait_for()
    live.client.cancel(holders[0])
    row.wait_for(state="detached")
    assert live.wait(job) == "succeeded"
    for holder in holders[1:]:
        live.client.cancel(holder)


def test_a_node_is_drained_and_opened_and_a_job_requeued_after_a_question(
    visit: Visit, live: Live
) -> None:
    page = visit.page
    job = live.run("sleep 600", gpus=2, name="moves")
    until(lambda: bool(visit.cells(job)))
    (node,) = visit.cells(job)
    panel = page.locator(".panel")

    def open_panel() -> bool:
        """The map may move between the look and the click, when the legend gets longer."""
        if not panel.is_visible():
            place = page.evaluate(
                "id => { const t = shoalMap.placeOf(id);"
                " const c = shoalMap.canvas.getBoundingClientRect();"
                " return [c.left + t.x + 8, c.top + t.y + t.top + 4] }",
                node,
            )
            page.mouse.click(*place)
        return panel.is_visible()

    until(open_panel)
    panel.get_by_role("button", name="Drain").click()
    page.locator("dialog .effects", has_text=job).wait_for()
    page.get_by_role("button", name="Drain node").click()
    until(lambda: list(visit.cells(job)) not in ([], [node]))
    panel.locator(".chip[data-state=drained]").wait_for()
    panel.get_by_role("button", name="Uncordon").click()
    page.get_by_role("button", name="Uncordon node").click()
    panel.locator(".chip[data-state=ready]").wait_for()

    visit.go(f"job/{job}")
    attempt = live.client.job(job).attempt
    page.get_by_role("button", name="Requeue").click()
    page.get_by_role("button", name="Stop and requeue").click()
    until(lambda: live.client.job(job).attempt > attempt)
    page.locator(".events").get_by_text("requeued by a user").first.wait_for()
    live.client.cancel(job)
    live.wait(job)
    page.get_by_role("button", name="Run again").click()
    page.get_by_role("button", name="Submit again").click()
    page.wait_for_function("job => !location.hash.endsWith(job)", arg=f"/{job}")
    again = page.evaluate("location.hash.split('/').at(-1)")
    assert live.client.job(again).name == "moves"
    live.client.cancel(again)


def test_a_service_is_scaled_from_the_page(visit: Visit, live: Live) -> None:
    sleeps = (sys.executable, "-c", "import time; time.sleep(600)")
    replica = JobSpec(command=sleeps, cpu_milli=100, members=2, members_per_node=1)
    live.client.submit_service(
        ServiceSpec(name="chat", replica=replica, scale=Scale(least=1, most=1), probe=Probe())
    )
    visit.go("services")
    card = visit.page.locator("section[data-service=chat]")
    card.get_by_role("button", name="Scale").click()
    visit.page.fill("dialog input[name=least]", "2")
    visit.page.fill("dialog input[name=most]", "3")
    visit.page.get_by_role("button", name="Scale service").click()
    card.get_by_text("2 to 3").wait_for()
    card.get_by_text(re.compile(r"n\d, n\d \(2 members\)")).first.wait_for()
    assert live.client.service("chat").least == 2
    live.client.stop_service("chat")
    card.wait_for(state="detached")


def test_the_last_days_are_replayed_under_other_policies(visit: Visit, live: Live) -> None:
    assert live.wait(live.run("true", gpus=1)) == "succeeded"
    visit.go("simulate")
    visit.page.get_by_role("button", name="Replay").click()
    table = visit.page.locator("table.compare")
    table.wait_for()
    assert table.locator("thead th").all_inner_texts() == ["Metric", "current (fair)", "fifo"]
    verdict = visit.page.locator(".verdict").inner_text()
    assert "wins: " in verdict or verdict.startswith("No difference: ")
    table.get_by_text("Wait, mean").wait_for()


def test_a_training_run_is_planned_and_a_wrong_amount_is_refused_in_words(visit: Visit) -> None:
    visit.go("plan")
    page = visit.page
    page.locator("select[name=model] option").first.wait_for(state="attached")
    page.select_option("select[name=model]", "llama3-8b")
    page.fill("input[name=tokens]", "many")
    page.get_by_role("button", name="Plan").click()
    page.get_by_role("alert").get_by_text("--tokens: 'many' is not an amount").wait_for()
    visit.complaints.clear()  # of that answer
    page.fill("input[name=tokens]", "1T")
    page.fill("input[name=nodes]", "4")
    page.get_by_role("button", name="Plan").click()
    page.locator(".verdict", has_text="4 nodes (32 GPUs) finish in ").wait_for()
    page.get_by_text("Time to train").wait_for()
    page.reload()  # the link has the choices, and shows the same plan
    page.locator(".verdict", has_text="4 nodes (32 GPUs) finish in ").wait_for()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.soak)])
def test_on_a_phone_nothing_is_wider_than_the_screen(
    browser: Browser, live: Live, scheme: str
) -> None:
    job = live.run("echo " + "word" * 200 + "; sleep 600", gpus=1, name="narrow", cpu_milli=100)
    waits = live.run("true", gpus=4, members=4, name="waits")
    visit = Visit(browser, live.client.url, live.home.token.read_text().strip(), 360, scheme)
    visit.sign_in()
    for view, filled in {**VIEWS, f"job/{job}": ".events li", f"job/{waits}": ".events li"}.items():
        visit.go(view)
        visit.page.locator(filled).first.wait_for(state="attached")
        wide = visit.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{view} is {wide} px too wide"
    visit.close()
    live.client.cancel(job)
    live.client.cancel(waits)


def test_the_map_is_walked_with_the_keyboard(visit: Visit) -> None:
    visit.page.locator(".map canvas").focus()
    visit.page.keyboard.press("ArrowRight")
    visit.page.get_by_text("n1 · GPU 1").first.wait_for(state="attached")
    visit.page.keyboard.press("Enter")
    visit.page.locator(".panel h2", has_text="n1").wait_for()


def test_the_page_comes_back_when_the_controller_does(visit: Visit, live: Live) -> None:
    live.kill_controller()
    job = live.run("sleep 600", gpus=1, name="after")
    until(lambda: sum(visit.cells(job).values()) == 1, "without signing in")
    live.client.cancel(job)
    visit.complaints.clear()  # a stream that breaks is told of by the browser itself


def test_signing_in_anew_in_another_tab_does_not_break_this_one(visit: Visit, live: Live) -> None:
    job = live.run("sleep 600", name="tabs", cpu_milli=100)
    visit.go(f"job/{job}")
    visit.page.get_by_role("button", name="Cancel").wait_for()
    other = visit.context.new_page()
    other.goto(live.client.page_link())
    other.wait_for_selector(".link-state[data-state=live]")
    visit.page.get_by_role("button", name="Cancel").click()
    visit.page.get_by_role("button", name="Cancel job").click()
    assert live.wait(job) == "cancelled"
    visit.page.locator("main .chip[data-state=cancelled]").first.wait_for()
    visit.complaints = [told for told in visit.complaints if "403" not in told]


def test_a_link_signs_in_once(browser: Browser, live: Live) -> None:
    visit = Visit(browser, live.client.page_link(), "", 1200, "light")
    visit.url = live.client.url
    visit.page.goto(live.client.page_link())
    visit.page.wait_for_selector(".link-state[data-state=live]")
    assert "code" not in visit.page.evaluate("location.href")
    (cookie,) = visit.context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
    assert visit.page.evaluate("document.cookie") == "", "no script can read it"
    visit.page.get_by_label("Signed in as").click()
    visit.page.get_by_role("button", name="Sign out").click()
    visit.page.get_by_text("Sign in to Shoal").wait_for()
    visit.page.reload()
    visit.page.get_by_text("Sign in to Shoal").wait_for()
    # What the page had asked for when it was signed out is refused, and a browser tells.
    visit.complaints[:] = [text for text in visit.complaints if "(Unauthorized)" not in text]
    visit.close()


def test_a_person_signs_in_through_their_organization(browser: Browser, live: Live) -> None:
    """At npm's oidc-provider, on its own pages."""
    if missing := openid.missing():
        pytest.skip(missing)
    live.client.add_tenant("lab")
    client = {
        "client_id": "shoal",
        "client_secret": "secret",
        "id_token_signed_response_alg": "ES256",
        "redirect_uris": [f"{live.client.url}/v1/oidc/callback"],
    }
    ann = {"sub": "ann", "preferred_username": "ann", "groups": ["team"]}
    with openid.provider(clients=[client], people={"ann": ann}, algorithms=["ES256"]) as provider:
        groups = {"team": GroupRule(tenant="lab")}
        live.client.set_oidc(
            OidcConfig(
                issuer=provider.issuer, client_id="shoal", client_secret="secret", groups=groups
            )
        )
        visit = Visit(browser, live.client.url, "", 1200, "light")
        elsewhere = re.compile(r"https?://(?!127\.0\.0\.1[:/])")  # the provider's pages want fonts
        visit.context.route(elsewhere, lambda route: route.abort())
        visit.page.goto(live.client.url)
        visit.page.get_by_role("link", name="Sign in through your organization").click()
        visit.page.fill("input[name=login]", "ann")
        visit.page.fill("input[name=password]", "any")
        visit.page.get_by_role("button", name="Sign-in").click()
        agree = visit.page.get_by_role("button", name="Continue")
        agree.wait_for()
        visit.strangers.clear()
        visit.complaints.clear()
        agree.click()
        visit.page.wait_for_selector(".link-state[data-state=live]")
        assert visit.page.evaluate("fetch('/v1/me').then(r => r.json())")["user"] == "ann"
        assert all(url.startswith(provider.issuer) for url in visit.strangers)
        visit.strangers.clear()
        visit.close()
    live.client.remove_oidc()
