"""The log of a job on the page: colors, order, any part of a long one, and what is looked for."""

from __future__ import annotations

import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from harness.browser import WAIT_MS, Visit
from harness.waiting import until

from shoal.control.logs import FINE_MS
from tests.live.cluster import Live

if TYPE_CHECKING:
    from playwright.sync_api import Locator

WAIT_S = WAIT_MS / 1000
# Member 1 fails, and speaks between what member 0 says.
TALK = r"""
import os, sys, time
me, folder = int(os.environ["SHOAL_MEMBER"]), sys.argv[1]
def say(text): os.write(1, text.encode("latin-1"))
def turn(number):
    while not os.path.exists(f"{folder}/turn{number}"): time.sleep(0.02)
if me == 0:
    say("\x1b[31mred\x1b[0m \x1b[1;4mbold\x1b[0m \x1b[38;5;226myellow\x1b[0m "
        "\x1b[38;2;250;250;250mwhite\x1b[0m \x1b[44;30mon blue\x1b[0m \x1b[2mdim\x1b[0m\n")
    say("10%\r50%\r\x1b[K100%\rdone\n")
    say("bad \xff\xfe \x00\x07 \x1b]0;title\x07 \x1b[2J\x1b[999;999H <b>x</b> \x1b[31")
    say("mstill red\n\x1b[0mplain\n")
    turn(1)
    say("zero later\n")
    turn(2)
    say("zero last\n")
else:
    turn(0)
    say("one speaks\nTraceback (most recent call last):\n  File x\nValueError: no\n")
    turn(2)
    sys.exit(3)
"""
CONTRAST = """row => {
    const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (text) => rgb(text).slice(0, 3).map((v) => v / 255)
        .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
    const paper = getComputedStyle(row.closest(".log")).backgroundColor;
    return [...row.querySelectorAll("span")].map((span) => {
        const style = getComputedStyle(span);
        const own = rgb(style.backgroundColor)[3] === 0 ? paper : style.backgroundColor;
        const [low, high] = [light(style.color), light(own)].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    });
}"""


def test_colors_bars_nasty_bytes_the_order_of_members_and_the_first_error(
    visit: Visit, live: Live, tmp_path: Path
) -> None:
    page = visit.page
    visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
    script = tmp_path / "talk.py"
    script.write_text(TALK)
    spec = live.spec(sys.executable, str(script), str(tmp_path), members=2, cpu_milli=100)
    job = live.client.submit(spec).id
    visit.go(f"job/{job}")
    log, lines = page.locator(".log"), page.locator(".log .line")

    def line(text: str) -> Locator:
        return lines.filter(has_text=text)

    line("still red").wait_for()
    red = line("red bold").locator("span", has_text=re.compile("^red$"))
    assert red.evaluate("e => getComputedStyle(e).color") != log.evaluate(
        "e => getComputedStyle(e).color"
    )
    bold = line("red bold").locator("span.bold.under")
    assert bold.inner_text() == "bold"
    for theme in ("light", "dark"):
        page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
        page.evaluate("dispatchEvent(new Event('shoal-theme'))")
        line("red bold").wait_for()
        found = line("red bold").evaluate(CONTRAST)
        assert len(found) == 7 and min(found) >= 4.5, (theme, found)
    assert line("done").inner_text() == "[0] done", "a bar is its last state"
    nasty = line("bad").inner_text()
    assert nasty.startswith("[0] bad") and nasty.endswith("<b>x</b> still red")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]|title", nasty)
    assert line("still red").locator("span", has_text="still red").count() == 1
    assert line("plain").locator("span").count() == 1, "colors end where they are reset"

    # What is selected stays selected while lines arrive; members interleave as they speak.
    line("plain").evaluate("e => getSelection().selectAllChildren(e)")
    # Times are known to a second: what member 0 says next must not be within that of the last mark.
    marks = live.home.logs / job / "1.0.times"
    until(lambda: time.time() > marks.stat().st_mtime + FINE_MS / 1000)
    for turn, text in enumerate(("one speaks", "zero later")):
        (tmp_path / f"turn{turn}").touch()
        line(text).wait_for()
    assert page.evaluate("getSelection().toString()") == "[0] plain"
    page.evaluate("getSelection().removeAllRanges()")
    (tmp_path / "turn2").touch()
    assert live.wait(job) == "failed"
    page.get_by_text("Ended ·").wait_for()
    page.reload()
    line("zero last").wait_for()
    told = [text[:14] for text in log.inner_text().splitlines()]
    order = [told.index(text) for text in ("[0] plain", "[1] one speaks", "[0] zero later")]
    assert order == sorted(order), "also for one who comes later"
    page.get_by_label("times").check()
    assert re.match(r"\d\d:\d\d:\d\d", line("plain").get_attribute("data-time") or "")

    # A member that is not shown: the first error is there.
    page.get_by_label("Member", exact=True).select_option("0")
    line("Traceback").wait_for(state="detached")
    page.get_by_role("button", name="First error", exact=True).click()
    marked = log.locator("[aria-current]")
    marked.filter(has_text="Traceback").wait_for()
    assert f"line={marked.get_attribute('data-line')}".replace(":", "%3A") in page.evaluate(
        "location.href"
    )
    page.get_by_role("button", name="Copy link").click()
    page.get_by_text("Link copied").wait_for()
    link = page.evaluate("navigator.clipboard.readText()")
    assert "attempt=" in link and "member=1" in link
    page.get_by_label("wrap").uncheck()
    assert log.evaluate("e => getComputedStyle(e).whiteSpace") == "pre"

    visit.go("cluster")
    page.goto(link)
    marked.filter(has_text="Traceback").wait_for()
    with page.expect_download() as download:
        page.get_by_label("Member", exact=True).select_option("all")
        line("zero last").wait_for()
        page.get_by_role("button", name="Download").click()
    whole = Path(download.value.path()).read_bytes()
    assert b"[0] \x1b[0mplain\n" in whole and b"[1] one speaks\n" in whole
    assert whole.index(b"one speaks") < whole.index(b"zero later"), "in order"


def test_any_part_of_a_long_log_is_reached_and_the_page_stays_small(
    visit: Visit, live: Live
) -> None:
    page, count = visit.page, 150_000
    script = f"for n in range({count}): print('step', n, 'x' * 88)"
    job = live.client.submit(live.spec(sys.executable, "-c", script, cpu_milli=1000)).id
    assert live.wait(job) == "succeeded"
    size = live.client.logs(job, offset=-1).next_offset
    assert size > 15_000_000
    visit.go(f"job/{job}")
    log, rows = page.locator(".log"), page.locator(".log .line")
    last = rows.filter(has_text=f"step {count - 1} ")
    last.wait_for()
    assert page.is_checked("#follow")
    cdp = visit.context.new_cdp_session(page)

    def heap() -> int:
        cdp.send("HeapProfiler.collectGarbage")
        return int(cdp.send("Runtime.getHeapUsage")["usedSize"])

    def first() -> int:
        return int(re.findall(r"step (\d+)", rows.first.inner_text())[0]) if rows.count() else -1

    def near(wanted: float) -> bool:
        return first() >= 0 and abs(first() - wanted) < count / 20

    def above(seen: int) -> bool:
        return 0 <= first() < seen

    page.get_by_role("button", name="Start").click()
    rows.filter(has_text=re.compile("step 0 ")).wait_for()
    before = heap()
    for share in (500, 100, 900, 300):
        page.get_by_label("Position in log").fill(str(share))
        until(partial(near, count * share / 1000))
    # On foot: each end of the window moves on, and what is far away is dropped.
    for _ in range(4):
        seen = first()
        log.evaluate("e => { e.scrollTop = 0 }")
        until(partial(above, seen), "what came before is fetched")
        assert rows.count() <= 2_500
    numbers = [int(n) for n in re.findall(r"step (\d+) ", log.inner_text())]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "no line is missing"
    page.get_by_label("Find in log").fill(f"STEP {count - 2} ")
    page.get_by_label("Find in log").press("Enter")
    page.get_by_text("1 of 1 line").wait_for()
    log.locator("[aria-current]", has_text=f"step {count - 2} ").wait_for()
    assert page.evaluate("CSS.highlights.get('log-find').size >= 0")
    page.get_by_role("button", name="End").click()
    last.wait_for()
    assert heap() < before + 8_000_000, "nothing grows with what was read"
