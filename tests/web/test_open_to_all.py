"""Every view passes axe's rules of WCAG A and AA, in both themes; and the page stays small."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from harness.browser import Visit

from shoal.api.web import FOLDER, file_of, lean
from tests.live.cluster import Live

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# As axe names them. The last has targets of at least 24 pixels.
RULES = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
OPTIONS = {"runOnly": RULES, "resultTypes": ["violations"]}
TRAVELS_BYTES_MAX = 150 * 1024
WEB = sorted(FOLDER.iterdir())


@pytest.fixture(scope="module")
def jobs(live: Live) -> Iterator[dict[str, str]]:
    """One that runs, one that waits, one that has failed."""
    script = "echo hello; printf '\\033[31mred\\033[0m and 10%%\\r20%%\\n'; sleep 600"
    runs = live.run(script, name="runs", gpus=2, user="ada")
    waits = live.run("true", name="waits", gpus=4, members=4)
    failed = live.run("echo no >&2; exit 3", name="fails", user="ada")
    live.wait(failed)
    live.wait(runs, "running")
    sweep = live.run("sleep 600", name="tune", cpu_milli=100, sweep={"grid": {"LR": ["1", "2"]}})
    yield {"runs": runs, "waits": waits, "failed": failed, "sweep": sweep}
    for job in (runs, waits, sweep):
        live.client.cancel(job)


def of(view: str, jobs: dict[str, str]) -> list[str]:
    """What a view is opened with."""
    named = {
        "job": list(jobs.values()),
        "compare": [f"{jobs['runs']},{jobs['failed']}"],
        "sweep": [jobs["sweep"]],
        "node": ["n1"],
        "user": ["ada"],
        "tenant": ["default"],
    }
    return named.get(view, [""])


def found(page: Any) -> list[str]:
    """What is wrong, and with what. From the top: the sticky head would cover some by half."""
    page.evaluate("scrollTo(0, 0)")
    if not page.evaluate("'axe' in window"):
        page.evaluate(Axe().axe_script)
    told = page.evaluate("options => axe.run(options)", OPTIONS)
    return [
        f"{one['id']}: {one['help']}: {node['html'][:160]} {node['failureSummary'][-200:]}"
        for one in told["violations"]
        for node in one["nodes"][:3]
    ]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360)])
def test_every_view_is_open_to_all(
    browser: Browser, live: Live, jobs: dict[str, str], scheme: str, width: int
) -> None:
    token = live.home.token.read_text().strip()
    visit = Visit(browser, live.client.url, token, width=width, scheme=scheme)
    visit.sign_in()
    names = visit.page.evaluate("import('/web/views.js').then(({ VIEWS }) => Object.keys(VIEWS))")
    assert {"cluster", "job"} <= {*names}
    wrong = {}
    for name in names:
        for argument in of(name, jobs):
            visit.go(f"{name}/{argument}" if argument else name)
            visit.page.locator("main > *").first.wait_for()
            told = found(visit.page)
            if told:
                wrong[f"{name}/{argument}"] = told
    visit.page.keyboard.press("Control+k")
    visit.page.get_by_role("combobox", name="Search or run a command").wait_for()
    if told := found(visit.page):
        wrong["the palette"] = told
    visit.close()
    assert not wrong, "\n".join(
        f"{view}: {line}" for view, lines in wrong.items() for line in lines
    )


def test_the_palette_leads_to_views_and_jobs_by_keys_alone(
    visit: Visit, jobs: dict[str, str]
) -> None:
    page = visit.page
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Search or run a command").fill("ledg")
    page.get_by_role("option", name="Ledger").wait_for()
    page.keyboard.press("Enter")
    page.locator("main[data-view=ledger]").wait_for()
    assert page.get_by_role("dialog").count() == 0
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Search or run a command").fill("runs job")
    page.get_by_role("option", name="runs").first.wait_for()
    page.keyboard.press("Enter")
    page.locator("main[data-view=job]").wait_for()
    assert jobs["runs"] in page.evaluate("location.href")
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Search or run a command").fill("zzzz")
    page.get_by_text("No results").wait_for()
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    page.locator("main[data-view=job]").wait_for()
    expected = {  # what is typed, what is offered first, and where it leads
        "n2": ("n2", "#/node/n2"),
        "ada": ("ada", "#/user/ada"),
        "new job": ("New job", "#/new"),
        "switch theme": ("Switch theme", "#/new"),
    }
    for text, (title, address) in expected.items():
        page.keyboard.press("Control+k")
        page.get_by_role("combobox", name="Search or run a command").fill(text)
        page.get_by_role("option", name=title).first.wait_for()
        page.keyboard.press("Enter")
        page.wait_for_function("address => location.hash === address", arg=address)
    for text, question in (
        ("drain n2", "Drain n2"),
        (f"cancel {jobs['runs']}", f"Cancel {jobs['runs']}"),
    ):
        page.keyboard.press("Control+k")
        page.get_by_role("combobox", name="Search or run a command").fill(text)
        page.get_by_role("option", name=question).first.wait_for()
        page.keyboard.press("Enter")
        page.get_by_role("dialog", name=question).wait_for()
        page.keyboard.press("Escape")
        page.locator("dialog").wait_for(state="detached")


def first_visit() -> set[str]:
    """The files that a first visit loads: the frame, and the views that are fetched ahead."""
    files = {file.name: file.read_text() for file in WEB}
    ahead = re.findall(r"ahead: true,\s+load: \(\) => import\(\"\./([\w.-]+)", files["views.js"])
    assert len(ahead) >= 2
    loaded: set[str] = set()
    coming = {"index.html", *re.findall(r"/web/([\w.-]+)", files["index.html"]), *ahead}
    while coming:
        loaded |= coming
        named = {
            name
            for file in coming
            for name in re.findall(r"(?:from|^import) \"\./([\w.-]+)\"", files[file], re.MULTILINE)
        }
        coming = named - loaded
    return loaded


def test_what_a_first_visit_loads_is_small_as_it_travels() -> None:
    loaded = first_visit()
    assert {"style.css", "app.js", "dom.js", "view-jobs.js", "job-grid.js"} <= loaded
    assert len(loaded) < len(WEB), "other views are loaded when they are opened"
    sizes = {
        file.name: len(file_of(file, file.stat().st_mtime_ns).zipped)
        for file in WEB
        if file.name in loaded
    }
    assert sum(sizes.values()) < TRAVELS_BYTES_MAX, sorted(sizes.items(), key=lambda one: -one[1])


def test_what_travels_lacks_comments_and_indentation_and_nothing_else() -> None:
    text = """// why
/** What it does,
 * in two lines. */
const a = "// kept"; // kept as well
  if (a) go(); /* kept */
a * b;
  /** @type {string} */ (a);
"""
    assert lean(text).split("\n") == [
        "", "", "", 'const a = "// kept"; // kept as well', "if (a) go(); /* kept */", "a * b;",
        "(a);",
    ]  # fmt: skip
    for file in WEB:
        if file.suffix == ".js":
            spans = [line for line in file.read_text().splitlines() if line.count("`") % 2]
            assert not spans, f"{file.name}: text over several lines would lose its indentation"
            wide = [line for line in file.read_text().splitlines() if len(line) > 120]
            assert not wide, f"{file.name}: the formatter does not break these texts"
            code = [line for line in file.read_text().splitlines() if "*/" in line]
            assert all(line.rstrip().endswith("*/") or "/*" in line for line in code), file.name
