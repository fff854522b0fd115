"""The map fills the screen, for every colour vision; a search marks what it finds, and stays."""

from __future__ import annotations

import itertools
import math
from typing import Any

from harness.browser import WAIT_MS, Visit
from harness.waiting import until
from playwright.sync_api import expect

from tests.live.cluster import Live

WAIT_S = WAIT_MS / 1000
COLOURS = 16
# Machado, Oliveira and Fernandes (2009), all of it: what is left of linear red, green and blue.
VISIONS = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
# How much of the map's room the nodes take, and how far anything is outside: for each cluster, with
# the room that this window leaves.
FILL = """async clusters => { const { layout } = await import("/web/layout.js");
    return clusters.map(([count, racks]) => {
        const { width, height } = shoalMap, all = new Map();
        for (let n = 0; n < count; n += 1) all.set(`n${n}`, { id: `n${n}`, gpus: 8,
            place: racks ? `b${Math.floor(n / 256)}/r${Math.floor(n / 16)}` : "" });
        const { tiles, height: tall } = layout(all, width, height);
        const area = tiles.reduce((sum, tile) => sum + tile.width * tile.height, 0);
        return { used: area / (width * height), nodes: tiles.length, below: tall - height,
            beside: Math.max(...tiles.map(tile => tile.x + tile.width)) - width } }) }"""
SHOW = """async ([nodes, jobs]) => { const live = await import("/web/live.js"); live.end();
    const status = live.cluster.status;
    const counted = { ...status, gpus: nodes.reduce((sum, node) => sum + node.gpus, 0) };
    live.take({ status: counted, nodes, jobs }, true);
    await new Promise(requestAnimationFrame); }"""
LUMINANCE = (0.2126, 0.7152, 0.0722)


def made_up(count: int) -> list[list[dict[str, Any]]]:
    """Nodes of 8 GPUs with a job on each, in racks of 16 in blocks of 256."""
    nodes, jobs = [], []
    for n in range(count):
        place = f"b{n // 256}/r{n // 16}"
        held = [[f"j{n}", 0, [0, 1, 2, 3], 1000]]
        nodes.append({"id": f"n{n}", "gpus": 8, "state": "ready", "place": place, "held": held})
        jobs.append({"id": f"j{n}", "state": "running", "tenant": "lab", "name": f"run-{n % 3}"})
    return [nodes, jobs]


def test_a_cluster_fills_one_screen_whatever_its_size(visit: Visit) -> None:
    page = visit.page
    known = list(itertools.product(((4, 0.45), (16, 0.75), (200, 0.6), (2000, 0.6)), (0, 1)))
    clusters = [(count, racks) for (count, _), racks in known]
    for width, height in ((1200, 760), (1920, 1080)):
        page.set_viewport_size({"width": width, "height": height})
        page.evaluate(SHOW, made_up(2000))
        page.wait_for_function(
            "() => shoalMap.plan.tiles.length === 2000 && shoalMap.room() === shoalMap.height"
            " && shoalMap.drawn"
        )
        foot = page.evaluate("shoalMap.canvas.getBoundingClientRect().bottom - innerHeight")
        assert foot <= 0, "the last node is on the screen"
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        for ((count, least), racks), fill in zip(known, page.evaluate(FILL, clusters), strict=True):
            assert fill["nodes"] == count
            assert fill["used"] >= least, (count, racks, fill)
            assert fill["below"] <= 0 and fill["beside"] <= 0, (count, racks, fill)


def test_what_is_found_stays_marked_and_is_in_the_address(visit: Visit) -> None:
    page = visit.page
    page.evaluate(SHOW, made_up(200))
    found = page.locator("[data-name=found]")
    page.locator("input[type=search]").fill("RUN-2")
    found.get_by_text("66 jobs match", exact=True).wait_for()
    page.wait_for_function("() => shoalMap.lit.jobs.has('j2') && !shoalMap.queued")
    one = visit.colour("n2", 0)
    page.locator("input[type=search]").fill("b0/r3")
    found.get_by_text("16 nodes match").wait_for()
    page.locator("input[type=search]").fill("n1")
    found.get_by_text("1 node matches").wait_for()
    found.get_by_role("link", name="n1").wait_for()
    page.locator("input[type=search]").fill("no such thing")
    found.get_by_text("nothing matches").wait_for()
    page.keyboard.press("Escape")
    page.wait_for_function("() => shoalMap.lit === null && !shoalMap.queued")
    clear = visit.colour("n0", 0)
    assert "find" not in page.url

    key = page.locator(".legend button").nth(2)  # of j2
    key.click()
    found.get_by_text("1 job matches").wait_for()
    expect(key).to_have_attribute("aria-pressed", "true")
    assert page.url.endswith("?find=j2")
    until(lambda: visit.colour("n0", 0) != clear, "the others are dim")
    assert visit.colour("n2", 0) == one
    page.mouse.move(400, 500)  # the pointer over another job changes nothing
    page.evaluate("shoalMap.light('j0'), shoalMap.draw()")
    assert visit.colour("n0", 0) != clear
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    page.locator("[data-name=found]").get_by_text("nothing matches").wait_for()  # on the live one
    assert page.locator("input[type=search]").input_value() == "j2"
    page.keyboard.press("Escape")
    page.wait_for_function("() => shoalMap.lit === null")


def test_a_node_opens_has_a_page_and_stays_open_in_the_address(visit: Visit, live: Live) -> None:
    page = visit.page
    page.wait_for_function("() => window.shoalMap?.plan?.tiles.length === 4")
    page.locator(".map canvas").focus()
    page.keyboard.press("ArrowDown")  # 4 GPUs of a node may stand in two rows
    page.keyboard.press("Enter")
    page.locator(".panel h2").wait_for()
    node = page.locator(".panel h2").inner_text()
    assert f"node={node}" in page.url
    assert page.locator(".panel a", has_text="All about it").get_attribute("href") == (
        f"#/node/{node}"
    )
    page.reload()
    page.locator(".panel h2", has_text=node).wait_for()
    page.keyboard.press("Escape")
    page.locator(".panel").wait_for(state="hidden")


def test_colours_differ_for_every_kind_of_colour_vision(visit: Visit) -> None:
    """In OKLab, where 0.02 can just be seen; successive jobs differ in lightness as well."""
    script = """async ([count, dark]) => { const found = await import("/web/colours.js");
        return Array.from({ length: count },
            (_, at) => [found.hue(at, dark), found.inkOn(at, dark)]) }"""
    for dark in (False, True):
        told = visit.page.evaluate(script, [COLOURS, dark])
        for colour, ink in told:
            assert contrast(linear(colour), linear(ink)) >= 4.5, (colour, ink)
        for vision, matrix in VISIONS.items():
            seen = [oklab(seen_as(linear(colour), matrix)) for colour, _ in told]
            for one, two in itertools.combinations(range(COLOURS), 2):
                assert math.dist(seen[one], seen[two]) >= 0.03, (vision, dark, one, two)
            for one in range(COLOURS):
                here, after = seen[one], seen[(one + 1) % COLOURS]
                assert math.dist(here, after) >= 0.09, (vision, dark, one)
                assert abs(here[0] - after[0]) >= 0.06, (vision, dark, one)


def linear(colour: str) -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]


def seen_as(colour: list[float], matrix: tuple[tuple[float, ...], ...]) -> list[float]:
    sums = (sum(a * b for a, b in zip(row, colour, strict=True)) for row in matrix)
    return [min(1.0, max(0.0, one)) for one in sums]


def contrast(one: list[float], two: list[float]) -> float:
    lights = sorted(sum(a * b for a, b in zip(LUMINANCE, c, strict=True)) for c in (one, two))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def oklab(colour: list[float]) -> tuple[float, float, float]:
    r, g, b = colour
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    medium = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    small = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * small,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * small,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * small,
    )
