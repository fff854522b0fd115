"""A job's view on the page: its log, its files, what it belongs to, and how it sleeps."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from harness.browser import WAIT_MS, Visit
from harness.waiting import until

from shoal.api.web import FOLDER
from shoal.model.schedule import ScheduleSpec
from shoal.model.workflow import WorkflowJob
from tests.live.cluster import Live

WAIT_S = WAIT_MS / 1000
COUNT = "n=0; while :; do n=$((n+1)); echo $n; sleep 0.05; done"
BEATER = Path(__file__).parent.parent / "observe" / "beater.py"
TALK = (
    "echo loss of $SHOAL_MEMBER; echo other $SHOAL_MEMBER; echo x > $SHOAL_OUTPUT/m.$SHOAL_MEMBER"
)


def test_a_link_shows_the_same_lines_of_a_job_its_files_and_the_failed_elements(
    visit: Visit, live: Live, tmp_path: Path
) -> None:
    page, client = visit.page, live.client
    sweep = {"ranges": [[0, 3, 1]]}
    array = live.run("test $SHOAL_ARRAY_INDEX != 2", sweep=sweep, cpu_milli=100, restart="never")
    job = live.run(TALK, members=2, cpu_milli=100, after=[f"{array}:any"], labels={"run": "a"})
    client.note_job(job, "goes into <b>the paper</b>")
    nightly = WorkflowJob("nightly", live.spec("true"))
    client.set_schedule(ScheduleSpec(name="nightly", cron="0 3 * * *", jobs=(nightly,)))
    assert live.wait(job) == "succeeded"

    visit.go(f"job/{job}")
    log = page.locator(".log")
    for line in ("[0] loss of 0", "[1] loss of 1", "[1] other 1"):
        log.get_by_text(line).wait_for()
    page.get_by_label("Member", exact=True).select_option("1")
    page.get_by_label("Matches only").check()
    page.get_by_label("Find in log").fill("loss")
    page.get_by_label("Find in log").press("Enter")
    until(lambda: log.inner_text() == "loss of 1", more=lambda: log.inner_text())
    page.reload()  # as for somebody who was sent the address
    page.locator(".log", has_text="loss of 1").wait_for()
    assert log.inner_text() == "loss of 1"
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == f"{job}.1.log"
    assert Path(download.value.path()).read_text() == "loss of 1\n"
    with page.expect_download() as download:
        page.locator("section[aria-label=Files]").get_by_role("button", name="m.0").click()
    assert Path(download.value.path()).read_text() == "x\n"

    page.locator("[data-fact=labels]").get_by_role("link", name="run=a").wait_for()
    page.locator("[data-note]", has_text="goes into <b>the paper</b>").wait_for()
    page.locator("[data-fact='runs after']").get_by_role("link", name=array).click()
    elements = page.locator("section[aria-label=Elements]")
    until(lambda: elements.locator("tr[data-job]").count() == 4)
    elements.get_by_role("button", name="1 failed").click()
    until(lambda: elements.locator("tr[data-job]").count() == 1)
    assert page.evaluate("location.href").endswith(f"#/job/{array}?elements=failed")
    elements.get_by_role("link", name=f"{array}.2").click()
    page.locator("[data-fact=array]", has_text=f"element 2 of {array}").wait_for()
    visit.go("jobs?tab=schedules")
    page.locator("tr[data-schedule=nightly]", has_text="0 3 * * *").wait_for()
    client.remove_schedule("nightly")


def test_run_time_leaves_out_the_waits_between_attempts(visit: Visit, live: Live) -> None:
    page = visit.page
    again = {"restart": "on-failure", "retries": 2, "backoff_ms": 600_000}
    job = live.run("sleep 1; kill -9 $$", name="dies", gpus=1, **again)
    until(lambda: live.client.job(job).not_before_ms > 0, within_s=60)
    visit.go(f"job/{job}")
    alert = page.locator("section[aria-label=Failure]")
    alert.get_by_role("heading", name="Killed by SIGKILL (code 137)").wait_for()
    alert.get_by_text("will be retried").wait_for()
    page.locator("section[aria-label=Waiting]").get_by_text("Retries in").wait_for()
    ran = page.locator(".facts div", has=page.get_by_text("Run time")).locator("dd")
    before = ran.inner_text()
    assert before.endswith("s") and float(before.split()[0]) < 60
    line = page.locator("[aria-label=Timeline]")
    queued = line.locator("[data-key=queued]")
    waited = queued.inner_text()
    until(lambda: queued.inner_text() != waited, "its wait goes on", within_s=60)
    assert ran.inner_text() == before
    assert line.locator(".life .running").count() == line.locator(".life .end").count() == 1
    live.client.cancel(job)


def test_a_jobs_view_shows_its_workflow_and_leads_to_the_others(visit: Visit, live: Live) -> None:
    page = visit.page
    nasty = "sleep 600 # <img src=x onerror=document.title='owned'>"
    jobs = [
        WorkflowJob("prepare", live.spec("sh", "-c", nasty)),
        WorkflowJob("train", live.spec("true"), ("prepare",)),
        WorkflowJob("report", live.spec("true"), ("train:any",)),
    ]
    flow = live.client.submit_workflow(jobs)
    prepare, train, report = (node.id for node in flow.nodes)
    visit.go(f"job/{report}")
    card = page.locator("section[aria-label=Workflow]")
    card.locator(f"a[data-key={prepare}][data-state=running]").wait_for()
    assert card.locator(".edge").count() == 2
    assert card.get_by_text("any end").count() == 1
    card.locator(f"a[data-key={train}]").click()
    page.get_by_role("heading", name=f"{train} train").wait_for()
    live.client.cancel_workflow(flow.id)
    card.locator(f"a[data-key={train}][data-state=cancelled]").wait_for()


def test_the_page_shows_what_limits_a_job_while_it_trains_and_after_its_end(
    visit: Visit, live: Live
) -> None:
    env = {"PACE_S": "0.05", "PYTHONPATH": str(FOLDER.parent.parent)}
    spec = live.spec(sys.executable, str(BEATER), "120", env=env, cpu_milli=100)
    job = live.client.submit(spec).id
    visit.go(f"job/{job}")
    card = visit.page.locator("section[aria-label=Bottleneck]")
    card.get_by_text(re.compile("-bound: .* of each step .*last")).wait_for(timeout=WAIT_MS)
    assert live.wait(job) == "succeeded"
    card.get_by_text(re.compile("all 1[0-9]* steps")).wait_for(timeout=WAIT_MS)
    assert card.locator(".share i").count() >= 1


def test_a_job_sleeps_and_wakes_by_two_buttons(visit: Visit, live: Live) -> None:
    page = visit.page
    job = live.run(COUNT, name="counts", gpus=4)
    until(lambda: sum(visit.cells(job).values()) == 4)
    (node,) = visit.cells(job)
    visit.go(f"job/{job}")
    page.locator(".log").get_by_text(re.compile(r"\b3\b")).first.wait_for()
    page.get_by_role("button", name="Sleep").click()
    page.get_by_role("button", name="Put to sleep").click()
    page.locator("main .chip[data-state=asleep]").first.wait_for()
    page.locator(".facts").get_by_text("resumes on use").wait_for()
    page.locator(".timeline [title^='Suspended for']").first.wait_for()
    page.locator(".events").get_by_text("is asleep and holds no GPU").wait_for()
    page.locator("section[aria-label=Members] tr", has_text="none").get_by_text("asleep").wait_for()
    assert page.get_by_role("button", name="Sleep").count() == 0

    visit.go("jobs")
    row = page.locator(f"[role=row][data-job={job}]")
    row.locator(".chip[data-state=asleep]").wait_for()
    row.get_by_text("Suspended for").wait_for()
    visit.go("cluster")
    until(lambda: not visit.cells(job), "its cells are free")
    page.locator(".figure").get_by_text("1 asleep").wait_for()
    page.evaluate("id => shoalMap.onChoose({ node: id, gpu: 0 })", node)
    page.locator(".panel .asleep").get_by_text("counts").wait_for()
    other = live.run("sleep 600", gpus=4, name="borrows", where=(f"node={node}",))
    until(lambda: visit.cells(other) == {node: 4}, "another has its GPUs")
    live.client.cancel(other)
    live.wait(other)

    visit.go(f"job/{job}")
    page.get_by_role("button", name="Wake").click()
    page.get_by_role("button", name="Wake job").click()
    page.locator("main .chip[data-state=running]").first.wait_for()
    page.locator(".events").get_by_text("goes on after").wait_for()
    page.locator(".facts").get_by_text("1 time").wait_for()
    assert live.client.job(job).attempt == 1
    page.locator("section[aria-label=Cost]").get_by_text("freed for other jobs").wait_for()
    visit.go("ledger")
    page.locator(".notes").get_by_text("jobs were suspended").wait_for()
    live.client.cancel(job)
    live.wait(job)
    told = live.output(job).split()
    assert told == [str(number + 1) for number in range(len(told))], "it went on where it was"
