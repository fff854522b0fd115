"""The commonest tasks, each by at most four clicks from the page that people have open."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from harness.browser import Visit
from harness.waiting import until

from shoal.api.web import FOLDER
from shoal.model.identity import Role
from shoal.model.ledger import Price, PriceList
from shoal.model.service import Scale
from tests.live.cluster import Live
from tests.live.serving import Serving, need_gateway, replica_ports

if TYPE_CHECKING:
    from playwright.sync_api import Locator

CLICKS_MAX = 4
# Where a node's first GPU, and a moment on the time line, are on the screen.
CELL = """node => { const area = shoalMap.canvas.getBoundingClientRect();
    const { x, y } = shoalMap.cellAt(shoalMap.placeOf(node), 0);
    return [area.left + x + 4, area.top + y + 4] }"""
HOURS = """ms => { const { gantt } = shoalTime, area = gantt.canvas.getBoundingClientRect();
    return [area.left + gantt.x(ms), area.top + 8] }"""
TRAINER = Path(__file__).parent / "trainer.py"


class Hand:
    """Counts what a person does. Typed text counts as one."""

    def __init__(self, visit: Visit) -> None:
        self.page, self.deeds = visit.page, list[str]()

    def click(self, target: Locator) -> None:
        self.deeds.append(f"click {target}")
        target.click()

    def point(self, name: str, at: list[float]) -> None:
        """A click on a canvas."""
        self.deeds.append(f"click {name}")
        self.page.mouse.click(*at)

    def press(self, keys: str) -> None:
        self.deeds.append(f"press {keys}")
        self.page.keyboard.press(keys)

    def type(self, text: str) -> None:
        self.deeds.append(f"type {text}")
        self.page.keyboard.type(text)

    def done(self) -> None:
        assert len(self.deeds) <= CLICKS_MAX, self.deeds


def job_of(visit: Visit) -> str:
    address = str(visit.page.evaluate("location.hash"))
    return address.partition("#/job/")[2].partition("?")[0]


def row(visit: Visit, job: str) -> Locator:
    return visit.page.locator(f"[role=row][data-job={job}]")


def test_find_why_a_job_waits_and_fix_it(visit: Visit, live: Live) -> None:
    holders = [live.run("sleep 600", gpus=3, name=f"holds-{n}") for n in range(4)]
    job = live.run("sleep 600", gpus=4, name="stuck")
    visit.go("jobs")
    page, hand = visit.page, Hand(visit)
    hand.click(row(visit, job).get_by_role("link", name=job))
    waits = page.locator("section[aria-label=Waiting]")
    waits.get_by_text("no node has 4 GPUs").wait_for()
    waits.get_by_text("#1 in queue").wait_for()
    assert page.locator("section[aria-label=Log]").is_hidden(), "there is no output yet"
    hand.click(waits.get_by_role("button", name="Apply and resubmit").first)
    hand.click(page.get_by_role("dialog").get_by_role("button", name="Apply and resubmit"))
    page.locator("main .chip[data-state=running]").first.wait_for()
    hand.done()
    assert job_of(visit) != job
    for one in (*holders, job_of(visit)):
        live.client.cancel(one)


def test_roll_a_service_back(visit: Visit, live: Live) -> None:
    need_gateway()
    live.client.set_policy(msgspec.structs.replace(live.client.policy(), **replica_ports()))
    serving = Serving(live, "model")
    for name in ("one", "two", "three"):
        script = f"exec {sys.executable} -m tests.api.chat_server $PORT {name}"
        put = serving.put(serving.shell(script), Scale(least=1, most=1))
        serving.settles(version=put.version)
    visit.go("cluster")
    page, hand = visit.page, Hand(visit)
    hand.click(page.get_by_role("link", name="Services"))
    hand.click(page.get_by_role("button", name="Roll back"))
    dialog = page.get_by_role("dialog")
    dialog.locator(".diff ins", has_text="two").wait_for()
    dialog.get_by_label("Version").select_option("1")  # any of the last ten
    hand.deeds.append("choose version 1")
    dialog.locator(".diff ins", has_text="one").wait_for()
    hand.click(dialog.get_by_role("button", name="Roll back service"))
    serving.settles(version=4)
    hand.done()
    assert "chat_server $PORT one" in serving.view().spec.replica.command[-1]
    visit.go("cluster")  # a view of it would ask for what is no longer there
    live.client.stop_service("model")


def test_read_a_traceback_and_run_again_with_a_change(visit: Visit, live: Live) -> None:
    code = "import os; os.environ['SHARDS'] or int('none')"
    command = f'{sys.executable} -c "{code}"'
    env = {"SHARDS": ""}
    job = live.run(command, name="breaks", env=env, cpu_milli=100, restart="never")
    assert live.wait(job) == "failed"
    visit.go("jobs")
    page, hand = visit.page, Hand(visit)
    hand.click(row(visit, job).get_by_role("link", name=job))
    alert = page.locator("section[aria-label=Failure]")
    alert.get_by_role("heading", name="Exited with code 1").wait_for()
    alert.get_by_text("ValueError: invalid literal").last.wait_for()
    hand.click(alert.get_by_role("button", name="First error in log"))
    page.locator(".log .line[aria-current]", has_text="Traceback").wait_for()
    hand.done()

    line = page.locator("[data-copy='Command to run it again'] .code")
    assert line.inner_text().startswith("shoal run --name breaks")
    hand = Hand(visit)
    hand.click(page.get_by_role("link", name="Run with changes"))
    page.wait_for_function("() => /SHARDS/.test(document.querySelector('[name=command]')?.value)")
    page.fill("[name=env]", "SHARDS=8")
    hand.deeds.append("type SHARDS=8")
    hand.click(page.get_by_role("button", name="Submit"))
    until(lambda: job_of(visit) not in ("", job), within_s=60)
    hand.done()
    assert live.wait(job_of(visit)) == "succeeded"


def test_compare_the_loss_of_two_runs(visit: Visit, live: Live) -> None:
    env = {"PYTHONPATH": str(FOLDER.parent.parent), "LR": "0.1"}
    jobs = [
        live.client.submit(
            live.spec(sys.executable, str(TRAINER), "40", env=env, cpu_milli=100, name=f"lr-{n}")
        ).id
        for n in range(2)
    ]
    for job in jobs:
        live.wait(job)
    visit.go("jobs?q=lr-")
    page, hand = visit.page, Hand(visit)
    for job in jobs:
        hand.click(row(visit, job).get_by_role("checkbox"))
    hand.click(page.get_by_role("link", name="Compare"))
    page.locator("[data-chart=loss] svg").first.wait_for()
    hand.done()


def test_drain_a_node_with_a_reason_and_find_out_what_happened_then(
    visit: Visit, live: Live
) -> None:
    page, reason = visit.page, "replacing a memory module"
    job = live.run("sleep 600", gpus=4, name="mover")
    live.wait(job, "running")
    (node,) = live.client.job(job).nodes
    visit.go("cluster")
    page.wait_for_function("node => window.shoalMap?.where?.has(node)", arg=node)
    hand = Hand(visit)
    hand.point(node, page.evaluate(CELL, node))
    hand.click(page.locator(".panel").get_by_role("button", name="Drain"))
    dialog = page.get_by_role("dialog")
    dialog.get_by_text(job).first.wait_for()  # what it moves
    hand.type(reason)
    hand.click(dialog.get_by_role("button", name="Drain node"))
    hand.done()
    until(lambda: live.client.job(job).attempt == 2, within_s=60)
    live.wait(job, "running")

    moment = live.client.status().now_ms
    hand = Hand(visit)
    hand.click(page.get_by_role("link", name="Time", exact=True))
    page.wait_for_function("() => window.shoalTime?.gantt.nodes.length")
    hand.point("the hours", page.evaluate(HOURS, moment))
    then = page.locator("section[aria-label='Cluster at this time']")
    then.locator(".events").get_by_text(reason).wait_for()
    hand.done()
    live.client.change_node(node, "uncordon")
    live.client.cancel(job)


def test_submit_a_sweep_and_find_its_best_run(visit: Visit, live: Live) -> None:
    visit.go("new")
    page, hand = visit.page, Hand(visit)
    env = f"env PYTHONPATH={FOLDER.parent.parent} PACE_S=0.05"
    page.fill("[name=command]", f"{env} {sys.executable} {TRAINER} 60")
    page.fill("[name=grid]", "LR=0.02,0.1,0.4")
    hand.deeds += ["type the command", "type LR=0.02,0.1,0.4"]
    hand.click(page.get_by_role("button", name="Submit"))
    page.locator("main[data-view=sweep]").wait_for()
    page.get_by_role("status").filter(has_text=".2 with loss").wait_for()
    assert page.locator("tr[data-trial]", has=page.locator("td.best")).get_by_text("0.4").count()
    hand.done()


def test_invite_a_colleague(visit: Visit, live: Live) -> None:
    live.client.add_tenant("lab")
    page, hand = visit.page, Hand(visit)
    hand.click(page.get_by_role("link", name="People"))
    hand.click(page.locator(".push").get_by_role("button", name="Invite"))
    page.get_by_role("dialog").wait_for()
    page.keyboard.type("nora")  # a name has to be typed; tenant and role are filled in
    hand.click(page.get_by_role("button", name="Create invite"))
    hand.click(page.get_by_role("button", name="Copy: Invite link"))
    hand.done()
    assert live.client.users()[0].roles == {"lab": Role.MEMBER}
    live.client.remove_user("nora")
    live.client.remove_tenant("lab")


def test_who_used_most_this_week_and_what_idling_cost(visit: Visit, live: Live) -> None:
    live.client.set_prices(PriceList(currency="EUR", gpus={"*": Price(per_hour=2.5)}))
    live.wait(live.run("sleep 0.5", gpus=4, user="ada"))
    page, hand = visit.page, Hand(visit)
    hand.click(page.get_by_role("link", name="Ledger"))
    hand.click(page.locator("label", has=page.locator("input[name=by][value=user]")))
    page.locator("tr[data-us]").get_by_text("ada").wait_for()
    page.locator("main").get_by_text("idle").first.wait_for()
    assert "€" in page.locator("main").inner_text()
    hand.done()
