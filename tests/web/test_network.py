"""The page's view of the network: measured by a click, read with a pointer and with keys."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
from harness.browser import Visit

from shoal.model.fabric import Collective
from tests.cli.test_network import view_of

if TYPE_CHECKING:
    from playwright.sync_api import Route

# A tour of 2,000 nodes, made in the browser, because it is 2 million links.
LARGE = """async () => {
    const { matrix } = await import("/web/matrix.js");
    const nodes = [...Array(2000).keys()].map((number) => `n${number}`), links = [];
    for (let a = 0; a < 2000; a += 1) for (let b = 0; b < a; b += 1)
        links.push([nodes[a], nodes[b], 20, a === 1500 ? 90 : 900, 950, ""]);
    const made = matrix();
    document.querySelector("main").replaceChildren(made.element);
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    made.set({ usual_mbs: 900, links }, [["m1", nodes.slice(0, 1000)], ["m2", nodes.slice(1000)]]);
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    const canvas = made.element.querySelector("canvas");
    const pen = canvas.getContext("2d"), row = Math.floor(1500.5 * canvas.height / 2000);
    return [...pen.getImageData(10, row, 1, 1).data, ...pen.getImageData(10, row - 40, 1, 1).data];
}"""


def test_the_network_is_measured_by_a_click_and_shown_for_pointers_and_keys(visit: Visit) -> None:
    page = visit.page
    visit.go("network")
    page.get_by_text("has not been measured yet").wait_for()
    page.get_by_role("button", name="Measure now").click()
    page.get_by_role("button", name="Measure", exact=True).click()
    page.get_by_text("answered after").wait_for()
    page.get_by_text("4 nodes, 6 links, measured").wait_for(timeout=90_000)
    page.locator(".verdict", has_text="6 links").wait_for()
    canvas = page.locator("canvas")
    canvas.focus()
    readout = page.get_by_text(re.compile("^n. - n.: .* MB/s .* back, .* µs$"))
    readout.wait_for()
    before = readout.text_content()
    page.keyboard.press("ArrowDown")
    page.get_by_text(re.compile("^n.$")).last.wait_for()  # a node and itself
    page.keyboard.press("ArrowRight")
    readout.wait_for()
    assert readout.text_content() != before


def test_weak_links_groups_and_collectives_are_shown_and_thousands_of_nodes_are_drawn(
    visit: Visit,
) -> None:
    view = view_of(6, 3)
    view.outliers = ["n2 - n5: 95 MB/s, where 420 MB/s is usual"]
    view.collectives = [
        Collective(
            name="all-reduce",
            size_bytes=1 << power,
            ranks=6,
            took_us=100 << (power - 10),
            algorithm_mbs=800,
            bus_mbs=100 * power,
        )
        for power in (10, 15, 20)
    ]

    def answer(route: Route) -> None:
        route.fulfill(body=msgspec.json.encode(view), content_type="application/json")

    page = visit.page
    page.route("**/v1/fabric", answer)
    visit.go("network")
    page.get_by_text("n2 - n5: 95 MB/s").wait_for()
    page.get_by_text("n4, n5, n6").wait_for()
    page.get_by_role("cell", name="32 KiB").wait_for()
    box = page.locator("canvas").bounding_box()
    assert box is not None
    cell = box["height"] / 6
    page.mouse.move(box["x"] + box["width"] - 0.5 * cell, box["y"] + 0.5 * cell)
    page.get_by_text("n1 - n6: refused").wait_for()
    drawn = page.evaluate(LARGE)
    assert drawn[:3] != drawn[4:7], "the slow row has another color"
    assert drawn[0] > drawn[2], "it is orange"
