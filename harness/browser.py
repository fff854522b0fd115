"""A real Chromium, and what it must never do: complain, or ask another host."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, CDPSession, Page

WAIT_MS = 60_000
SHOWN = "main[data-view]{}:not([data-state=loading])"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def missing() -> str:
    """Why there is no browser here; empty if there is one."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is missing: pip install playwright"
    if not _path():
        return "there is no Chromium: apt-get install chromium-headless-shell, or set CHROMIUM"
    return ""


@contextmanager
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_path(), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def _path() -> str:
    """The build without windows opens a page with a fifth of the CPU time."""
    programs = ("chromium-headless-shell", "chromium", "google-chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, programs)), "")


# The curve of a service that was stopped a moment ago: a browser writes down every 404 by itself.
GONE = re.compile(r"/v1/services/[^/']+/series")


AN_HOUR = 14_400  # changes, at four a second
# Changes as the stream brings them: of 40 jobs, some end and others take their place. The view gets
# to draw between them.
CHURN = """async ([from, count]) => {
    const { take, cluster } = await import("/web/live.js");
    const status = { ...cluster.status };
    const job = (number, more) => ({ id: `j${number}`, name: `churn-${number % 7}`,
        tenant: "default", gpus: 1, members: 1, size: 1, attempt: 1,
        submitted_ms: status.now_ms, running_ms: status.now_ms,
        step: number, steps: 1_000_000, step_us: 1000, loss: 1 / (1 + number), ...more });
    for (let turn = from; turn < from + count; turn += 1) {
        const number = 100_000 + turn;
        take({ status: { ...status, last_seq: turn, now_ms: status.now_ms + turn },
            jobs: [job(number, { state: "running" }),
                job(number - 20, { state: "running", step: turn })],
            ended: [job(number - 40, { state: "succeeded", why: `churned ${turn}`,
                finished_ms: status.now_ms + turn })],
            nodes: [{ ...cluster.nodes.get("n1"), held: [[`j${number}`, 0, [turn % 4], 1000]] }],
        }, false);
        if (turn % 25 === 0) await new Promise(requestAnimationFrame);
    }
}"""


def used(session: CDPSession) -> tuple[int, int]:
    """Bytes and elements that are still reachable."""
    session.send("HeapProfiler.collectGarbage")
    session.send("HeapProfiler.collectGarbage")
    told = session.send("Performance.getMetrics")["metrics"]
    found = {one["name"]: one["value"] for one in told}
    return int(found["JSHeapUsedSize"]), int(found["Nodes"])


class Visit:
    """One browser window on one cluster."""

    def __init__(self, browser: Browser, url: str, token: str, width: int, scheme: str) -> None:
        self.url, self.token = url, token
        self.complaints: list[str] = []
        self.strangers: list[str] = []
        self.context: BrowserContext = browser.new_context(
            viewport={"width": width, "height": 800},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        self.context.set_default_timeout(WAIT_MS)
        self.page: Page = self.context.new_page()
        self.page.on("console", lambda told: self._heard(told.type, told.text, str(told.location)))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda asked: self._asked(asked.url))

    def sign_in(self) -> None:
        self.page.goto(self.url)
        self.page.fill("input[name=token]", self.token)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_selector(".link-state[data-state=live]")
        self.page.wait_for_selector(SHOWN.format(""))  # views are loaded when they are opened

    def go(self, view: str) -> None:
        self.begin(view)
        self.page.wait_for_selector(SHOWN.format(f"[data-view={re.split('[/?]', view)[0]}]"))

    def begin(self, view: str) -> None:
        """Opens the view, and does not wait for what it shows."""
        self.page.evaluate("hash => { location.hash = hash }", f"#/{view}")
        self.page.wait_for_selector(f"main[data-view={re.split('[/?]', view)[0]}]")

    def cells(self, job: str) -> dict[str, int]:
        """On which nodes the map shows the job, and on how many GPUs."""
        script = """job => Object.fromEntries([...shoalMap.cluster.nodes.values()]
            .map(node => [node.id, (node.held ?? []).filter(([id]) => id === job)
            .reduce((sum, [, , gpus]) => sum + gpus.length, 0)]).filter(([, count]) => count))"""
        return dict(self.page.evaluate(script, job))

    def color(self, node: str, gpu: int) -> tuple[int, ...]:
        """What is painted in a corner of a GPU's cell, beside its words."""
        script = """([node, gpu]) => {
            const cell = shoalMap.cellAt(shoalMap.placeOf(node), gpu), ratio = devicePixelRatio;
            const x = cell.x + 3, y = cell.y + 3, pen = shoalMap.canvas.getContext("2d");
            return [...pen.getImageData(x * ratio, (y - shoalMap.offset()) * ratio, 1, 1).data];
        }"""
        return tuple(self.page.evaluate(script, [node, gpu]))

    def close(self) -> None:
        self.context.close()
        assert not self.complaints, f"the browser complains: {self.complaints}"
        assert not self.strangers, f"others are asked: {self.strangers}"

    def _heard(self, kind: str, text: str, where: str) -> None:
        if kind == "error" and not ("404" in text and GONE.search(where)):
            self.complaints.append(f"{kind}: {text} {where}")

    def _asked(self, url: str) -> None:
        if urlsplit(url).netloc != urlsplit(self.url).netloc:
            self.strangers.append(url)
