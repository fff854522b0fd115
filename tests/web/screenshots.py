"""`make screenshots`: every view of a busy cluster, light and dark, on three widths, to look at.

They go into screenshots/, which is not part of the project; those that the docs show also go into
docs/images/.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from harness.browser import Visit, chromium, missing
from harness.waiting import until

from shoal.cli.demo import plan
from shoal.control.home import ClusterConfig
from shoal.forms.request import carried
from shoal.model.job import JobSpec
from shoal.model.ledger import PriceList
from shoal.model.node import NodeIntent
from tests.live.cluster import Live, live_cluster

if TYPE_CHECKING:
    from playwright.sync_api import Page, ViewportSize

ROOT = Path(__file__).parents[2]
FOLDER, DOCS = ROOT / "screenshots", ROOT / "docs" / "images"
WORK = ("python", "-m", "shoal.cli.demo.work")
WAIT_S = 120
SIZES: dict[int, ViewportSize] = {
    1440: {"width": 1440, "height": 900},
    1024: {"width": 1024, "height": 768},
    390: {"width": 390, "height": 844},
}
TALL = ("job", "compare", "node", "policy", "new")  # views that are longer than a window
SHOWN = (  # by README.md and docs/page.md, as wide as the widest
    "cluster-light", "cluster-dark", "job-light", "jobs-light", "ledger-light", "services-dark",
)  # fmt: skip
PRICES = {
    "currency": "EUR",
    "gpus": {"*": {"per_hour": 2.5, "idle_watts": 70, "busy_watts": 600}},
    "pue": 1.25,
    "co2_g_per_kwh": 380,
}


def fill(live: Live) -> dict[str, str]:
    """What the demo does, for longer; returns the ids of some jobs by name."""
    env, folder = carried(os.environ), str(live.home.path)
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    live.client.set_prices(msgspec.convert(PRICES, PriceList))

    def submit(name: str, *command: str, **fields: object) -> str:
        user = "ada" if len(name) % 2 else "ben"
        told = {
            "name": name, "command": command, "env": env, "workdir": folder, "user": user, **fields,
        }  # fmt: skip
        return live.client.submit(msgspec.convert(told, JobSpec)).id

    known = {
        "train": submit(
            "train-a", *WORK, "train", "3000", "2", members=4, gpus=3, tenant="research"
        ),
    }
    served = live.client.submit_service(plan.service(env, folder))
    submit("ask", *WORK, "ask", served.url, "600", tenant="product")
    submit("map", *WORK, "map", tenant="product")
    for number in range(1, 9):
        tenant = ("research", "vision", "speech")[number % 3]
        submit(f"eval-{number}", "sleep", str(4 + number % 5), gpus=1, tenant=tenant)
    for number in range(1, 6):
        tenant = ("vision", "speech")[number % 2]
        told = {"gpus": 1 + number % 2, "tenant": tenant, "estimate_ms": 400_000}
        submit(f"tune-{number}", "sleep", "400", **told)
    known["flaky"] = submit("flaky", "sh", "-c", "sleep 2; exit 3", gpus=1, tenant="speech")
    submit("train-b", "sleep", "60", gpus=8, members=2, tenant="research")
    submit("wide", "sleep", "60", gpus=4, members=3, tenant="vision", estimate_ms=60_000)
    grid = {"grid": {"LR": ("0.02", "0.1", "0.4"), "SEED": ("1", "2")}}
    known["sweep"] = submit("sweep", *WORK, "train", "300", "2", tenant="vision", sweep=grid)
    return known


def break_something(live: Live, job: str) -> None:
    """A node of the training run dies and it goes on; another node is drained."""
    first = live.client.job(job)
    victim = first.nodes[-1]
    live.kill_agent(victim)
    until(lambda: live.client.job(job).attempt > first.attempt)
    live.wait(job, "running", WAIT_S)
    until(lambda: all(n.health == "ready" for n in live.client.nodes()))
    free = [node.id for node in live.client.nodes() if node.id not in live.client.job(job).nodes]
    if free:
        live.client.set_intent(free[-1], NodeIntent.DRAINING)


def views(jobs: dict[str, str]) -> dict[str, str]:
    """What each view is opened with."""
    return {
        "cluster": "cluster",
        "jobs": "jobs",
        "job": f"job/{jobs['train']}",
        "compare": f"compare/{jobs['train']},{jobs['flaky']}",
        "sweep": f"sweep/{jobs['sweep']}",
        "new": f"new?like={jobs['train']}",
        "time": "time",
        "node": "node/n1",
        "services": "services",
        "ledger": "ledger",
        "policy": "policy",
        "network": "network",
        "neighbors": "neighbors",
        "people": "people",
        "user": "user/ada",
        "tenant": "tenant/research",
        "plan": "plan",
        "simulate": "simulate",
    }


def take(page: Page, visit: Visit, jobs: dict[str, str], scheme: str) -> None:
    names = page.evaluate("import('/web/views.js').then(({ VIEWS }) => Object.keys(VIEWS))")
    assert {*names} == {*views(jobs)}, "a view is missing here"
    for width, size in SIZES.items():
        for name, address in views(jobs).items():
            page.set_viewport_size({**size, "height": 1180} if name in TALL else size)
            visit.go(address)
            page.wait_for_timeout(800)  # the last figures and curves come in
            file = FOLDER / f"{name}-{width}-{scheme}.png"
            page.screenshot(path=str(file))
            print(file.relative_to(ROOT), flush=True)
            if f"{name}-{scheme}" in SHOWN and width == max(SIZES):
                shutil.copy(file, DOCS / f"{name}-{scheme}.png")


def main() -> None:
    reason = missing()
    if reason:
        sys.exit(f"error: {reason}")
    FOLDER.mkdir(exist_ok=True)
    config = ClusterConfig(nodes=plan.nodes(), port=0)
    with live_cluster(config=config) as live, chromium() as browser:
        jobs = fill(live)
        live.wait(jobs["train"], "running", WAIT_S)
        time.sleep(25)  # so that there are curves
        break_something(live, jobs["train"])
        time.sleep(15)
        token = live.home.token.read_text().strip()
        for scheme in ("light", "dark"):
            visit = Visit(browser, live.client.url, token, max(SIZES), scheme)
            visit.sign_in()
            take(visit.page, visit, jobs, scheme)
            visit.close()


if __name__ == "__main__":
    main()
