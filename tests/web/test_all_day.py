"""A page that stays open all day: it does not grow, and a cut connection is only a pause."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from harness.browser import AN_HOUR, CHURN, Visit, used
from harness.relay import Relay

from tests.live.cluster import Live

if TYPE_CHECKING:
    from playwright.sync_api import Browser

GROWS_BYTES_MAX = 4_000_000  # engines and caches settle by less than this
GROWS_NODES_MAX = 400


@pytest.mark.outside("a real Chromium collects its garbage when it wants")
@pytest.mark.parametrize("changes", [2_000, pytest.param(AN_HOUR, marks=pytest.mark.soak)])
def test_hours_of_churn_leave_the_page_as_small_as_it_was(visit: Visit, changes: int) -> None:
    session = visit.context.new_cdp_session(visit.page)
    session.send("Performance.enable")
    visit.go("jobs")
    visit.page.evaluate(CHURN, [0, 1_000])  # caches fill up to their bounds
    views = ("cluster", "jobs", "services", "ledger")
    for view in (*views, "jobs"):
        visit.go(view)
    begun, part = 1_000, changes // len(views)
    before = used(session)
    for turn, view in enumerate(views):
        visit.go(view)
        visit.page.evaluate(CHURN, [begun + turn * part, part])
    visit.go("jobs")
    after = used(session)
    assert after[0] - before[0] < GROWS_BYTES_MAX, (before, after)
    assert after[1] - before[1] < GROWS_NODES_MAX, (before, after)


def test_a_connection_that_was_cut_goes_on_and_nothing_is_missed(
    browser: Browser, live: Live
) -> None:
    """As with a cable that is pulled: nobody is told, and nothing goes through."""
    port = urlsplit(live.client.url).port or 0
    listening = socket.create_server(("127.0.0.1", 0))
    relay = Relay(listening, lambda: socket.create_connection(("127.0.0.1", port)))
    token = live.home.token.read_text().strip()
    visit = Visit(browser, f"http://127.0.0.1:{relay.port}", token, width=1200, scheme="light")
    visit.sign_in()
    page = visit.page
    visit.go("jobs")
    stays = live.run("sleep 600", name="stays", cpu_milli=100)
    page.locator(f"[data-job={stays}]").first.wait_for()
    relay.cut()
    page.locator(".link-state[data-state=lost]").wait_for()
    page.get_by_text("Disconnected: data from").wait_for()
    ended = live.run("exit 3", name="ended-meanwhile", cpu_milli=100)
    assert live.wait(ended) == "failed"
    live.client.cancel(stays)
    assert live.wait(stays) == "cancelled"
    relay.mend()
    page.locator(".link-state[data-state=live]").wait_for()
    page.locator(f"[data-job={ended}]", has_text="failed").first.wait_for()
    page.locator(f"[data-job={stays}]", has_text="cancelled").first.wait_for()
    visit.complaints.clear()  # requests may have failed meanwhile
    visit.close()
    relay.close()
