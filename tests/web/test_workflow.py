"""The graph of a workflow on the page, in a real browser."""

from __future__ import annotations

import pytest
from harness.browser import Visit

from shoal.model.workflow import WorkflowJob
from tests.live.cluster import Live


@pytest.mark.outside("a real Chromium draws when it gets the time")
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
