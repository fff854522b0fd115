"""The page's view of neighbors: two real clusters, and what cannot be made quickly with those."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import pytest
from harness.browser import Visit
from harness.waiting import until

from shoal.calls.histories import SharedView
from shoal.core.state.events.log import Recorded, published
from shoal.core.state.events.neighbors import JobHanded, JobReturned
from shoal.model.identity import Role
from shoal.model.neighbor_views import GoneView, NeighborView, NewNeighbor, ThereView
from shoal.model.people import NewToken
from shoal.model.views import Done
from tests.live.cluster import Live, live_cluster
from tests.web.test_open_to_all import found

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

HOUR_MS = 3_600_000
WEST = NeighborView(
    name="west",
    url="https://west.example.com:7700",
    cluster="0123abcd",
    version="0.7.0",
    gpus=64,
    gpus_free=12,
    waiting=3,
    price=1.25,
    currency="EUR",
    labels={"region": "eu"},
    round_trip_ms=83,
    heard_ms_ago=900,
    count=5,
    jobs=[],
)
NORTH = NeighborView(
    name="north",
    url="https://north.example.com:7700",
    cluster="4567abcd",
    gpus=8,
    heard_ms_ago=40_000,
    problem="https://north.example.com:7700 does not answer",
)
BOOK = {
    "currency": "EUR",
    "rows": [
        {"key": "south", "account": "useful", "gpu_ms": HOUR_MS, "cost": 3.5},
        {"key": "south", "account": "lost", "gpu_ms": HOUR_MS, "cost": 1.25},
    ],
    "owed": [{"neighbor": "west", "gpu_ms": HOUR_MS, "cost": 4.2}],
}
MOVED = [
    JobHanded(at_ms=1, job="j7", attempt=1, neighbor="west", why="it starts there at once"),
    JobReturned(at_ms=1, job="j8", attempt=1, neighbor="west", why="it is full", away_after_ms=0),
]
SHARED = SharedView(
    price=2.5,
    currency="EUR",
    guests=["south"],
    moved=published([Recorded(seq, event) for seq, event in enumerate(MOVED, 1)]),
)


def invited(there: Live, name: str) -> str:
    there.client.add_tenant(name)
    there.client.add_user(name, {name: Role.MEMBER})
    new = NewToken(user=name, tenant=name, role=Role.MEMBER, only="neighbor")
    return there.client.add_token(new).secret


@pytest.fixture(scope="module")
def west() -> Iterator[Live]:
    with live_cluster(nodes=1) as cluster:
        yield cluster


def test_neighbors_have_a_tab_while_there_are_some_and_show_whose_jobs_are_where(
    browser: Browser, visit: Visit, live: Live, west: Live
) -> None:
    page = visit.page
    asked: list[str] = []
    page.on("request", lambda one: asked.append(one.url))
    page.reload()
    page.wait_for_selector(".link-state[data-state=live]")
    tab = page.locator(".tabs a[data-view=neighbors]")
    assert tab.count() == 1 and tab.is_hidden()
    visit.go("neighbors")
    page.get_by_text("This cluster has no neighbors").wait_for()
    visit.go("cluster")
    asked.clear()
    wanted = NewNeighbor(url=west.client.url, token=invited(west, "home"))
    live.client.set_neighbor("west", wanted)
    job = live.run("sleep 600", cluster="west", name="travels")
    tab.wait_for()
    assert not [url for url in asked if "neighbors" in url]

    def runs_there() -> bool:
        return any(one.running_ms for view in live.client.neighbors() for one in view.jobs)

    until(runs_there, "it does not run there")
    tab.click()
    page.get_by_role("region", name="Our jobs there").get_by_role("row", name="travels").wait_for()
    page.get_by_text(re.compile("was handed over to west")).wait_for()
    page.locator("[data-key=west]").get_by_text("Reachable").wait_for()

    there = Visit(browser, west.client.url, west.home.token.read_text().strip(), 1200, "light")
    there.sign_in()
    there.page.locator(".tabs a[data-view=neighbors]").click()
    row = there.page.get_by_role("region", name="Their jobs here").locator("tr", has_text=job)
    row.get_by_text("home", exact=True).wait_for()
    there.close()

    page.locator("[data-key=west]").get_by_role("button", name="Remove").click()
    dialog = page.get_by_role("dialog", name="Declare west gone")
    dialog.get_by_text(
        f"these wait here again and may run twice if west still runs them: {job}"
    ).wait_for()
    dialog.get_by_role("button", name="Declare gone").click()
    page.get_by_text("This cluster has no neighbors").wait_for()
    assert not live.client.neighbors()
    live.client.cancel(job)


def there() -> list[ThereView]:
    now_ms = int(time.time() * 1000)
    return [
        ThereView(
            job="j7",
            id="j90",
            state="running",
            since_ms=now_ms - 2 * HOUR_MS,
            running_ms=now_ms - HOUR_MS,
            gpus=8,
            price=1.25,
        ),
        ThereView(
            job="j8",
            id="j91",
            state="constructor",
            since_ms=now_ms - 1000,
            gpus=1,
            withdrawn="not needed",
        ),
    ]


def stubbed(visit: Visit) -> list[str]:
    """As if there were two neighbors and one that only sends jobs; what is removed."""
    removed: list[str] = []

    def answer(route: Route) -> None:
        path = route.request.url.partition("/v1/neighbors")[2]
        body: object = [msgspec.structs.replace(WEST, jobs=there()), NORTH]
        if route.request.method == "DELETE":
            removed.append(path)
            body = Done(id="north")
        elif path == "/shared":
            body = SHARED
        elif path.endswith("/gone"):
            body = GoneView(name="north", lines=["north is forgotten"], jobs=[])
        route.fulfill(body=msgspec.json.encode(body), content_type="application/json")

    visit.page.route("**/v1/ledger**", lambda route: route.fulfill(json=BOOK))
    visit.page.route("**/v1/neighbors**", answer)
    visit.page.route("**/v1/neighbors/**", answer)
    return removed


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 390)])
def test_what_each_neighbor_offers_and_what_was_moved_is_shown_to_all(
    browser: Browser, live: Live, scheme: str, width: int
) -> None:
    token = live.home.token.read_text().strip()
    visit = Visit(browser, live.client.url, token, width, scheme)
    removed = stubbed(visit)
    visit.sign_in()
    visit.go("neighbors")
    page = visit.page
    page.get_by_text("No contact with north; 5 jobs of ours there").wait_for()
    text = page.locator("[data-key=west]").inner_text()
    for word in ("region=eu", "12 of 64", "€1.25", "83 ms", "0.7.0", "€4.20"):
        assert word in text, text
    assert "€2.50" in page.locator("[data-key=here]").inner_text()
    page.locator("[data-key=north]").get_by_text("does not answer (last heard 40 s ago)").wait_for()
    page.locator("[data-key=south]").get_by_text("Only sends jobs").wait_for()
    assert "€4.75" in page.locator("[data-key=south]").inner_text(), "that they used here"
    assert "€10." in page.locator("[data-key=j7]").first.inner_text(), "of an hour of 8 GPUs"
    page.get_by_text("Being taken back: not needed").wait_for()
    page.get_by_text("constructor").wait_for()  # whatever a neighbor says
    page.get_by_text("and 3 more jobs").wait_for()
    page.get_by_text("came back from west").wait_for()
    assert not found(page)
    wide = "document.documentElement.scrollWidth <= innerWidth"
    assert page.evaluate(wide), "nothing is cut off"
    page.locator("[data-key=north]").get_by_role("button", name="Remove").click()
    page.get_by_role("dialog", name="Remove north").get_by_text("north is forgotten").wait_for()
    page.get_by_role("button", name="Remove neighbor").click()
    page.get_by_text("north is not a neighbor any more").wait_for()
    assert removed == ["/north"]
    visit.close()
