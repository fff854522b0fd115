"""The map fills the screen, for every color vision; a search marks what it finds, and stays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.browser import WAIT_MS, Visit
from harness.waiting import until
from playwright.sync_api import expect

from tests.live.cluster import Live

if TYPE_CHECKING:
    from playwright.sync_api import Route

WAIT_S = WAIT_MS / 1000
COLORS = 12
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
PAIRS = tuple(itertools.combinations(range(4), 2))
RATES = {"write_mbs": 800, "read_mbs": 900, "small_per_s": 50, "notes": [], "problem": ""}
FULL = {"node": "n1", "problem": "the disk is full", "notes": []}
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


def reply(answer: object) -> Callable[[Route], None]:
    return lambda route: route.fulfill(json=answer)


def test_a_cluster_fills_one_screen_whatever_its_size(visit: Visit) -> None:
    page = visit.page
    known = list(itertools.product(((4, 0.45), (16, 0.75), (200, 0.6), (2000, 0.6)), (0, 1)))
    clusters = [(count, racks) for (count, _), racks in known]
    for width, height in ((1200, 760), (1920, 1080)):
        page.set_viewport_size({"width": width, "height": height})
        page.evaluate(SHOW, made_up(400))
        page.wait_for_function(
            "() => shoalMap.plan.tiles.length === 400 && shoalMap.room() === shoalMap.height"
            " && shoalMap.drawn"
        )
        foot = page.evaluate("shoalMap.canvas.getBoundingClientRect().bottom - innerHeight")
        assert foot <= 0, "the last node is on the screen"
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        for ((count, least), racks), fill in zip(known, page.evaluate(FILL, clusters), strict=True):
            assert fill["nodes"] == count
            assert fill["used"] >= least, (count, racks, fill)
            assert fill["below"] <= 0 and fill["beside"] <= 0, (count, racks, fill)


def test_a_large_cluster_is_racks_with_their_share_and_zooms_to_nodes(visit: Visit) -> None:
    page = visit.page
    nodes, jobs = made_up(2000)
    nodes[17] |= {"state": "drained"}
    nodes[20] |= {"standing": "quarantined"}
    page.evaluate(SHOW, [nodes, jobs])
    page.wait_for_function("() => shoalMap.plan.tiles.length === 125 && shoalMap.drawn")
    rack = page.evaluate("shoalMap.sumOf(shoalMap.racks.get('b0/r1'), { dark: false })")
    assert (rack["gpus"], rack["held"], rack["closed"]) == (128, 64, 4)
    assert (rack["trouble"], rack["worst"]) == (2, "quarantined")
    box = page.evaluate(
        "() => { const { x, y, width, height } = shoalMap.placeOf('b0/r1');"
        " const area = shoalMap.canvas.getBoundingClientRect();"
        " return [area.left + x + width / 2, area.top + y + height / 2] }"
    )
    page.mouse.move(*box)
    tip = page.locator(".tip")
    tip.get_by_text("64 of 128 GPUs in use (50 %)").wait_for()
    tip.get_by_text("n20 quarantined").wait_for()
    page.mouse.click(*box)
    page.wait_for_function("() => shoalMap.plan.tiles.length === 16")
    assert "zoom=b0%2Fr1" in page.evaluate("location.href")
    page.locator("nav[aria-label='Part of the cluster']").get_by_text("r1").wait_for()
    page.keyboard.press("Escape")
    page.wait_for_function("() => shoalMap.plan.tiles.length === 125")
    assert "zoom" not in page.evaluate("location.href")

    # Keys: the first block, then its first rack, and out again.
    page.locator(".map canvas").focus()
    for key, count in (("+", 256), ("+", 16), ("-", 256), ("-", 125)):
        page.keyboard.press(key)
        assert page.evaluate("shoalMap.plan.tiles.length") == count, key
    page.mouse.move(*box)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    page.wait_for_function("() => shoalMap.zoom === 'b0'")
    # A cluster without racks is shown in parts, too.
    flat = [node | {"place": ""} for node in nodes[:600]]
    page.evaluate(SHOW, [flat, jobs[:600]])
    page.wait_for_function("() => shoalMap.racks?.has('n0\u2013n31') && shoalMap.racks.size === 19")


def test_neighbors_differ_in_color_and_each_block_has_one_label(visit: Visit) -> None:
    """Four gangs that had one color by their numbers, and small jobs that come and go."""
    page = visit.page
    nodes: list[dict[str, Any]] = [
        {
            "id": f"n{n}",
            "gpus": 8,
            "state": "ready",
            "held": [[f"j{16 * (n // 4)}", n, list(range(8)), 1000]],
        }
        for n in range(16)
    ]
    jobs = [{"id": f"j{16 * n}", "state": "running", "name": f"big-{n}"} for n in range(4)]
    page.evaluate(SHOW, [nodes, jobs])
    colors = """async ids => { const { jobColor } = await import("/web/colors.js");
        return ids.map(id => jobColor(id, false)) }"""
    first = page.evaluate(colors, [job["id"] for job in jobs])
    assert len(set(first)) == 4
    legend = page.locator(".legend .dot").first.evaluate("dot => dot.style.background")
    assert visit.color("n0", 0)[:3] == tuple(map(int, legend[4:-1].split(","))), "one assignment"
    blocks = """async () => { const { blocks } = await import("/web/layout.js");
        const { plan, cluster } = shoalMap;
        return blocks(plan, plan.tiles, (tile, gpu) => {
            const held = cluster.nodes.get(tile.id).held;
            return held.find(([, , gpus]) => gpus.includes(gpu))?.[0] ?? "" })
            .map(block => [block.key, block.tile.id, block.gpu, block.width > 0]) }"""
    labels = page.evaluate(blocks)
    assert len(labels) < 16 and {key for key, *_ in labels} == {job["id"] for job in jobs}
    for n in (3, 7, 11):  # a small job beside each
        nodes[n]["held"] = [
            [nodes[n]["held"][0][0], n, [0, 1, 2, 3, 4, 5], 1000],
            [f"j{100 + n}", 0, [6, 7], 1000],
        ]
        jobs.append({"id": f"j{100 + n}", "state": "running", "name": "small"})
    page.evaluate(SHOW, [nodes, jobs])
    after = page.evaluate(colors, [job["id"] for job in jobs])
    assert after[:4] == first, "a job keeps its color"
    assert len(set(after)) == 7
    assert ["j103", "n3", 6, True] in page.evaluate(blocks)


def test_what_is_found_stays_marked_and_is_in_the_address(visit: Visit) -> None:
    page = visit.page
    page.evaluate(SHOW, made_up(200))
    found = page.locator("[data-name=found]")
    page.locator("input[type=search]").fill("RUN-2")
    found.get_by_text("66 jobs", exact=True).wait_for()
    page.wait_for_function("() => shoalMap.lit.jobs.has('j2') && !shoalMap.queued")
    one = visit.color("n2", 0)
    page.locator("input[type=search]").fill("b0/r3")
    found.get_by_text("16 nodes").wait_for()
    page.locator("input[type=search]").fill("n1")
    found.get_by_text("1 node").wait_for()
    found.get_by_role("link", name="n1").wait_for()
    page.locator("input[type=search]").fill("no such thing")
    found.get_by_text("No matches").wait_for()
    page.keyboard.press("Escape")
    page.wait_for_function("() => shoalMap.lit === null && !shoalMap.queued")
    clear = visit.color("n0", 0)
    assert "find" not in page.evaluate("location.href")

    key = page.locator(".legend button").nth(2)  # of j2
    key.click()
    found.get_by_text("1 job").wait_for()
    expect(key).to_have_attribute("aria-pressed", "true")
    assert page.evaluate("location.href").endswith("?q=j2")
    until(lambda: visit.color("n0", 0) != clear, "the others are dim")
    assert visit.color("n2", 0) == one
    page.mouse.move(400, 500)  # the pointer over another job changes nothing
    page.evaluate("shoalMap.light('j0'), shoalMap.draw()")
    assert visit.color("n0", 0) != clear
    link = page.evaluate("location.href")
    page.goto("about:blank")
    page.goto(link)
    page.locator("[data-name=found]").get_by_text("No matches").wait_for()  # on the live one
    assert page.locator("input[type=search]").input_value() == "j2"
    page.keyboard.press("Escape")
    page.wait_for_function("() => shoalMap.lit === null")


def test_layers_show_the_health_of_gpus_links_and_storage(visit: Visit, live: Live) -> None:
    page = visit.page
    assert live.client.storage_check("last").id == "", "none was asked for"
    nodes, jobs = made_up(4)
    nodes[1] |= {"standing": "quarantined", "why": "GPU 3 is slow"}
    nodes[2] |= {"state": "drained"}
    links = [[f"n{a}", f"n{b}", 9, 100 if b == 3 else 900, 900, ""] for a, b in PAIRS]
    answers = {
        "samples": {"n0": {"at_ms": 1, "gpus": [{"temperature_c": 91}, {"temperature_c": 40}]}},
        "fabric": {"id": "t1", "begun_ms": 1, "ended_ms": 2, "usual_mbs": 900, "links": links}
        | {"weak": [{"node": "n3", "peer": ""}], "outliers": ["n3: its links are weak"]},
        "storage/checks/last": {"id": "s1", "target": "/data", "begun_ms": 1, "ended_ms": 2}
        | {"alone": [], "together": [RATES | {"node": f"n{n}"} for n in (0, 2)] + [FULL]},
    }
    for path, answer in answers.items():
        page.route(f"**/v1/{path}", reply(answer))
    page.evaluate(SHOW, [nodes, jobs])
    known = {
        "Health": {"healthy": 15, "hot": 1, "quarantined": 8, "closed": 8},
        "Links": {"usual": 3, "quarter": 1},
        "Storage": {"usual": 2, "failed": 1, "none": 1},
    }
    for layer, counts in known.items():
        page.get_by_text(layer, exact=True).click()
        page.wait_for_function(
            "keys => keys.every(key => document.querySelector(`.legend [data-class=${key}]`))",
            arg=list(counts),
        )
        for key, count in counts.items():
            expect(page.locator(f".legend [data-class={key}] .dim")).to_contain_text(f"{count} ")
        assert f"by={layer.lower()}" in page.evaluate("location.href")
    assert visit.color("n0", 0) != visit.color("n3", 0), "not measured"
    words = "shoalMap.layer.lines(shoalMap.cluster.nodes.get('n1'), 0).join()"
    assert "the disk is full" in page.evaluate(words)
    page.get_by_text("Job", exact=True).click()
    page.wait_for_function("() => shoalMap.layer === null")


def test_a_node_opens_has_a_page_and_stays_open_in_the_address(visit: Visit, live: Live) -> None:
    page = visit.page
    page.wait_for_function("() => window.shoalMap?.plan?.tiles.length === 4")
    page.locator(".map canvas").focus()
    page.keyboard.press("ArrowDown")  # 4 GPUs of a node may stand in two rows
    page.keyboard.press("Enter")
    page.locator(".panel h2").wait_for()
    node = page.locator(".panel h2").inner_text()
    assert f"node={node}" in page.evaluate("location.href")
    assert page.locator(".panel a", has_text="Open node").get_attribute("href") == (
        f"#/node/{node}"
    )
    page.reload()
    page.locator(".panel h2", has_text=node).wait_for()
    page.keyboard.press("Escape")
    page.locator(".panel").wait_for(state="hidden")


def test_colors_differ_for_every_kind_of_color_vision(visit: Visit) -> None:
    """In OKLab, where 0.02 can just be seen."""
    script = """async ([count, dark]) => { const found = await import("/web/colors.js");
        const all = Array.from({ length: count }, (_, at) => found.hue(at, dark));
        const more = [0, 30, 56, 80, 100].map(share => found.heatColor(share, dark));
        return [all, [...all, ...more, found.jobColor("", dark)].map(color =>
            [color, found.inkOn(color)])] }"""
    for dark in (False, True):
        colors, inks = visit.page.evaluate(script, [COLORS, dark])
        for color, ink in inks:
            assert contrast(linear(color), linear(ink)) >= 4.5, (color, ink)
        for vision, matrix in VISIONS.items():
            seen = [oklab(seen_as(linear(color), matrix)) for color in colors]
            for one, two in itertools.combinations(range(COLORS), 2):
                assert math.dist(seen[one], seen[two]) >= 0.05, (vision, dark, one, two)


def linear(color: str) -> list[float]:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]


def seen_as(color: list[float], matrix: tuple[tuple[float, ...], ...]) -> list[float]:
    sums = (sum(a * b for a, b in zip(row, color, strict=True)) for row in matrix)
    return [min(1.0, max(0.0, one)) for one in sums]


def contrast(one: list[float], two: list[float]) -> float:
    lights = sorted(sum(a * b for a, b in zip(LUMINANCE, c, strict=True)) for c in (one, two))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def oklab(color: list[float]) -> tuple[float, float, float]:
    r, g, b = color
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    medium = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    small = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * small,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * small,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * small,
    )
