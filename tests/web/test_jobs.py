"""The table of all jobs: found, sorted and chosen, with every choice in the address; many at once
changed with one question; and ten thousand rows of which a window exists."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from harness.browser import WAIT_MS, Visit
from harness.waiting import until

from tests.live.cluster import Live

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Route

WAIT_S = WAIT_MS / 1000
MANY = 10_000


def row(visit: Visit, job: str) -> Locator:
    return visit.page.locator(f"[role=row][data-job={job}]")


def shown(visit: Visit) -> list[str]:
    script = "[...document.querySelectorAll('[role=row][data-job]')].map(row => row.dataset.job)"
    return list(visit.page.evaluate(script))


def becomes(visit: Visit, jobs: list[str]) -> None:
    until(lambda: shown(visit) == jobs, more=lambda: (shown(visit), jobs))


def test_a_link_shows_the_same_jobs_in_the_same_order_and_columns(visit: Visit, live: Live) -> None:
    page = visit.page
    script = "exit 3 # quagga"
    one = live.run(script, name="zeta", labels={"run": "web"}, cpu_milli=100)
    two = live.run(script, name="alpha", labels={"run": "web"}, cpu_milli=100)
    fine = live.run("true # quagga", name="fine", cpu_milli=100)
    for job in (one, two, fine):
        live.wait(job)
    visit.go("jobs")
    page.keyboard.press("/")
    page.keyboard.type("QUAGGA")
    becomes(visit, [fine, two, one])
    page.get_by_role("combobox", name="State").select_option("failed")
    becomes(visit, [two, one])
    page.get_by_role("columnheader", name="Job").get_by_role("button").click()
    becomes(visit, [one, two])  # from z to a
    page.locator("summary", has_text="Columns").click()
    page.get_by_label("Labels").check()
    page.get_by_label("Run time").uncheck()
    page.keyboard.press("Escape")
    row(visit, one).get_by_text("run=web").wait_for()
    assert parse_qs(page.evaluate("location.href").partition("?")[2]) == {
        "q": ["QUAGGA"],
        "state": ["failed"],
        "sort": ["-name"],
        "cols": ["id,state,shape,why,nodes,submitted,labels"],
    }
    page.reload()
    becomes(visit, [one, two])
    head = page.get_by_role("columnheader", name="Job")
    assert head.get_attribute("aria-sort") == "descending"
    assert page.get_by_role("columnheader", name="Run time").count() == 0
    page.get_by_role("button", name="Remove filter: state failed").click()
    becomes(visit, [one, fine, two])
    row(visit, one).get_by_role("link", name="run=web").click()
    page.locator("[data-filter=label]").wait_for()
    becomes(visit, [two, one])

    page.evaluate("location.hash = '#/find/state%3Asucceeded%20quagga'")  # as people kept it
    becomes(visit, [fine])
    page.evaluate("location.hash = '#/jobs?q=quagga&cols=job,size,attempts&sort=attempts'")
    page.locator("[role=grid] [data-key=try][aria-sort=ascending]").wait_for()
    assert page.locator("[role=grid] [role=columnheader]").count() == 4, "with the boxes"
    page.get_by_label("Search jobs").fill("nosuchjobatall")
    page.get_by_text("No jobs match.").wait_for()
    page.get_by_role("button", name="Show all jobs").click()
    row(visit, one).wait_for()
    page.evaluate("location.hash = '#/queue'")
    page.wait_for_function("() => location.hash === '#/jobs?tab=queue'")
    page.keyboard.press("Control+k")
    page.keyboard.type("quagga")  # only the server knows commands
    page.get_by_role("option", name="All jobs matching “quagga”").click()
    becomes(visit, [fine, two, one])


def test_many_are_cancelled_and_requeued_with_one_question(visit: Visit, live: Live) -> None:
    page = visit.page
    jobs = [live.run("sleep 600 # bulky", name=f"b{n}", cpu_milli=100) for n in range(4)]
    for job in jobs:
        live.wait(job, "running")
    visit.go("jobs?q=bulky")
    becomes(visit, jobs[::-1])
    page.locator("[role=grid]").focus()
    page.keyboard.press("Space")
    for _ in range(3):
        page.keyboard.press("Shift+ArrowDown")
    page.get_by_text("4 selected").wait_for()
    live.client.cancel(jobs[0])  # somebody else is faster
    live.wait(jobs[0])
    page.get_by_role("button", name="Cancel", exact=True).last.click()
    page.locator("dialog .effects li").first.wait_for()  # what would be lost
    assert page.locator("dialog .consequences tbody tr").count() >= 3
    page.get_by_role("button", name="Cancel 4 jobs").click()
    page.get_by_text("3 cancelled, 1 already ended").first.wait_for()
    assert {live.wait(job) for job in jobs} == {"cancelled"}
    for job in jobs:
        row(visit, job).locator(".chip[data-state=cancelled]").wait_for()

    assert page.locator("[aria-selected=true]").count() == 0
    row(visit, jobs[1]).get_by_role("checkbox").click()
    page.get_by_role("button", name="Requeue").click()
    page.get_by_role("button", name="Requeue 1 job").click()
    page.get_by_text(re.compile("1 submitted again as j")).first.wait_for()
    until(lambda: len(shown(visit)) == 5)
    again = shown(visit)[0]
    assert live.client.job(again).name == "b1"
    page.locator("[role=grid]").focus()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    page.wait_for_function("job => location.hash === `#/job/${job}`", arg=again)
    live.client.cancel(again)


def test_a_pressed_pointer_and_selected_text_keep_their_row(visit: Visit, live: Live) -> None:
    page = visit.page
    jobs = [live.run("sleep 600 # steady", name=f"s{n}", cpu_milli=100) for n in range(3)]
    visit.go("jobs?q=steady")
    becomes(visit, jobs[::-1])
    page.evaluate(
        """job => getSelection().selectAllChildren(
            document.querySelector(`[data-job=${job}] [data-name=id]`))""",
        jobs[0],
    )
    box = row(visit, jobs[1]).get_by_role("checkbox").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 8, box["y"] + 8)
    page.evaluate("addEventListener('mousedown', e => e.preventDefault(), {once: true})")
    page.mouse.down()
    more = live.run("sleep 600 # steady", name="comes", cpu_milli=100)
    with page.expect_response(lambda answer: "q=steady" in answer.url and more in answer.text()):
        pass
    page.wait_for_timeout(150)
    assert shown(visit) == jobs[::-1], "nothing moves under the pointer"
    page.mouse.up()
    becomes(visit, [more, *jobs[::-1]])
    assert row(visit, jobs[1]).get_attribute("aria-selected") == "true"
    assert page.locator("[aria-selected=true]").count() == 1
    assert page.evaluate("getSelection().toString()").split() == [jobs[0], "s0"]
    for job in [*jobs, more]:
        live.client.cancel(job)


def test_reasons_of_waiting_jobs_filter_the_table_and_the_queue(visit: Visit, live: Live) -> None:
    page = visit.page
    holders = [live.run("sleep 600", gpus=3, estimate_ms=600_000) for _ in range(4)]
    waits = [live.run("true", gpus=4, name=f"wide-{n}") for n in range(6)]
    later = live.run("true", name="later", begin_ms=int(time.time() * 1000) + 3_600_000)
    page.set_viewport_size({"width": 1440, "height": 900})
    visit.go("jobs")
    reason = page.locator("[data-group]", has_text=re.compile("^6No free capacity: no node has 4"))
    reason.wait_for()
    page.locator("[data-group]", has_text="Scheduled for later").wait_for()
    row(visit, later).wait_for()
    top = page.locator("[role=grid]").bounding_box()
    assert top is not None and top["y"] <= 200, "the table comes first"
    reason.click()
    becomes(visit, waits[::-1])
    assert "group=" in page.evaluate("location.href")
    page.reload()
    becomes(visit, waits[::-1])
    page.get_by_label("Search jobs").fill("wide-3")
    becomes(visit, [waits[3]])

    page.get_by_role("link", name="Queue 7").click()
    line = page.locator("section[aria-label=Queue]")
    until(lambda: line.locator("tr[data-job]").count() == 7)
    first = line.locator(f"tr[data-job={waits[0]}]")
    first.get_by_text(re.compile("^in (about )?[0-9]")).wait_for()
    waited, starts = (float(one) for one in first.locator(".range").evaluate(RANGE))
    assert 0 <= waited < starts <= 100, "the wait so far, and when it will start"
    page.locator("[data-group]", has_text="Scheduled for later").click()
    until(lambda: line.locator("tr[data-job]").count() == 1)
    page.reload()
    line.locator(f"tr[data-job={later}]").wait_for()
    page.set_viewport_size({"width": 390, "height": 844})
    visit.go("jobs?q=wide")
    card = row(visit, waits[5]).bounding_box()
    assert card is not None and card["y"] < 360, "a phone shows a job on its first screen"
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    for job in [*waits, later, *holders]:
        live.client.cancel(job)
    page.locator("[aria-label=Waiting]").wait_for(state="hidden")


RANGE = """bar => {
    const whole = bar.clientWidth / 100, [waited, range] = bar.children;
    return [waited.offsetWidth / whole, range.offsetLeft / whole];
}"""


def stub(route: Route) -> None:
    """Ten thousand jobs that nobody had to submit."""
    query = parse_qs(urlsplit(route.request.url).query)
    first = int(query.get("cursor", ["0"])[0])
    last = min(MANY, first + int(query["limit"][0]))
    rows: list[dict[str, object]] = [
        {
            "id": f"j{MANY - n}", "name": f"row-{n + 1}", "state": "succeeded", "tenant": "default",
            "members": 1, "members_max": 0, "size": 0, "gpus": 1, "gpu_milli": 1000,
            "gpu_memory_mb": 0, "priority": 0, "attempt": 1, "nodes": ["n1"],
            "submitted_ms": 1, "running_ms": 2, "finished_ms": 3, "code": 0, "command": "true",
            "why": "every member exited 0", "progress": None, "user": "ada", "labels": {},
        }
        for n in range(first, last)
    ]  # fmt: skip
    headers = {"content-type": "application/json", "shoal-count": str(MANY)}
    headers |= {"shoal-next": str(last)} if last < MANY else {}
    route.fulfill(body=json.dumps(rows), headers=headers)


WHOLE_ROWS = """() => {
    const heads = document.querySelectorAll("[role=columnheader]").length;
    const rows = [...document.querySelectorAll(".jobs-rows > .jobs-row")];
    return rows.length > 0 && rows.every(row => row.children.length === heads);
}"""


def test_of_ten_thousand_rows_a_window_exists(visit: Visit) -> None:
    page = visit.page
    page.route(re.compile(r"/v1/jobs\?.*sort=-submitted"), stub)
    visit.go("jobs?user=ada")
    page.locator("[data-name=count]", has_text="10,000 jobs").wait_for()
    page.locator("[role=grid]").focus()
    last = page.get_by_text("row-9990", exact=True).or_(row(visit, "j11")).first

    def at_the_end() -> bool:
        page.keyboard.press("End")
        return last.is_visible()

    until(at_the_end)
    assert len(shown(visit)) < 80, "only those near the screen are there"
    assert page.locator(".jobs-rows").evaluate("rows => rows.clientHeight") == MANY * 34
    page.evaluate("scrollTo(0, 34 * 5000)")
    page.locator("[role=row]", has_text=re.compile(r"row-50\d\d(?!\d)")).first.wait_for()
    page.wait_for_function(WHOLE_ROWS)  # rows that are scrolled past may lack columns
    assert len(shown(visit)) < 80
    assert row(visit, "j11").count() == 0
    assert page.evaluate("document.activeElement.getAttribute('role')") == "grid"
    page.keyboard.press("ArrowUp")  # the current row comes back
    row(visit, "j2").wait_for()


def test_on_a_phone_a_job_is_a_card(browser: Browser, live: Live) -> None:
    job = live.run("exit 3", name="in-a-pocket", cpu_milli=100)
    live.wait(job)
    visit = Visit(browser, live.client.url, live.home.token.read_text().strip(), 360, "dark")
    visit.sign_in()
    visit.go("jobs?q=in-a-pocket&state=failed")
    card = row(visit, job).locator(".jobs-card")
    card.get_by_text("it exited 3").wait_for()
    card.locator(".chip[data-state=failed]").wait_for()
    box, page = row(visit, job).bounding_box(), visit.page
    assert box is not None and box["width"] <= 360 and box["height"] == 82
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    card.get_by_role("link").click()
    page.wait_for_function("job => location.hash === `#/job/${job}`", arg=job)
    visit.close()
