"""What the live page costs with 2,000 nodes x 8 GPUs: the look, what is sent, the browser's part.

    python -m bench.page [NODES] [SHOT.png]

The cluster is full and simulated in memory; the API, the stream and Chromium are real. Twice a
second some jobs end and others take their place; for a while nothing happens. The table of 10,000
jobs is scrolled from end to end, and the time axis goes to an hour ago in a log of its own
(bench/past.py has more of that). The hour of churn is compressed: as many changes as an hour brings
at four a second, one after the other, in four views; memory is what is still reachable then.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import uvicorn
from harness.browser import AN_HOUR, CHURN, Visit, chromium, missing, used

from bench import past
from bench.cluster import POLICY, Cluster, Mix
from bench.figures import machine, percentile, spread, table
from shoal.api.access import Access
from shoal.api.feed import Feed
from shoal.api.page import HANDLERS, provided
from shoal.api.routing import App

NODES = 2_000
LOOKS = 40
ENDING = 25  # jobs that end between two looks
TURN_S = 0.5
WATCH_S = 20
TOKEN = "bench"
SCROLL_FRAMES = 90
FIRST_PAINT = """() => performance.getEntriesByType("paint")
    .find(one => one.name === "first-contentful-paint")?.startTime ?? null"""
PATCH = """() => {
    window.paints = []; window.draws = [];
    const draw = shoalMap.draw.bind(shoalMap);
    shoalMap.draw = () => { draw(); draws.push(shoalMap.drawn);
        if (shoalMap.cluster.taken) {
            paints.push(performance.now() - shoalMap.cluster.taken); shoalMap.cluster.taken = 0;
        } };
}"""
ROWS = 10_000
SCRUB_EVENTS, SCRUB_NODES = 100_000, 200
TO_THE_END = """frames => new Promise(done => {
    const times = [], far = document.documentElement.scrollHeight / frames;
    let last = performance.now(), count = 0;
    const step = () => { const now = performance.now(); times.push(now - last); last = now;
        window.scrollBy(0, far);
        if (++count < frames) requestAnimationFrame(step); else done(times); };
    requestAnimationFrame(step);
})"""
SCROLL = """frames => new Promise(done => {
    const times = []; let last = performance.now(), count = 0;
    const step = () => { const now = performance.now(); times.push(now - last); last = now;
        window.scrollBy(0, 24);
        if (++count < frames) requestAnimationFrame(step); else done(times); };
    requestAnimationFrame(step);
})"""


class Board:
    """The part of a control loop that the page uses."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.state, self.policy, self.finishing = cluster.state, POLICY, dict[str, Any]()
        self.clock = SimpleNamespace(now_ms=lambda: int(time.time() * 1000))
        self.store = SimpleNamespace(
            finished=lambda *_: [], job=lambda _id: None, events=lambda *_: []
        )
        self.started_ms, self.last_seq = self.clock.now_ms(), 0
        self.engine_kind, self.restarts, self.readable = "memory", 0, True
        self.alarms = SimpleNamespace(texts=())
        self.moved = asyncio.Event()
        self._dice = random.Random(5)

    async def settled(self) -> None: ...

    async def changed(self, _job: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self.moved.wait()
        except TimeoutError:
            pass
        self.moved.clear()

    def turn(self) -> None:
        """Some jobs end, and others like them start."""
        running = self.cluster.running(lambda job: len(job.members) <= 8)
        ending = self._dice.sample(running, min(ENDING, len(running)))
        specs = [job.spec for job in ending]
        self.cluster.settle(self.cluster.step(self.cluster.end(ending)))
        self.cluster.submit(specs)
        self.last_seq += 1


def looks(board: Board) -> dict[str, Any]:
    """The duration of one update, and the bytes sent."""
    feed, quiet, busy, sizes = Feed(board), [], [], []  # type: ignore[arg-type]
    began = time.perf_counter_ns()
    feed.look()
    first_ms = (time.perf_counter_ns() - began) / 1e6
    began = time.perf_counter_ns()
    snapshot = feed.snapshot()
    snapshot_ms = (time.perf_counter_ns() - began) / 1e6
    for _ in range(LOOKS):
        began = time.thread_time_ns()
        feed.look()
        quiet.append(time.thread_time_ns() - began)
        board.turn()
        began = time.thread_time_ns()
        piece = feed.advance()
        busy.append(time.thread_time_ns() - began)
        sizes.append(len(piece or b""))
    return {
        "first_look_ms": round(first_ms, 1),
        "snapshot_ms": round(snapshot_ms, 1),
        "snapshot_kb": round(len(snapshot) / 1000),
        "look_without_change_ms": spread(quiet).median_ms,
        "look_with_change_ms": spread(busy).median_ms,
        "change_kb": round(percentile(sizes, 50) / 1000, 1),
    }


class Server(threading.Thread):
    """The page's part of the API, on a thread of its own."""

    def __init__(self, board: Board) -> None:
        super().__init__(daemon=True)
        self.board = board
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.server: uvicorn.Server | None = None
        self.quiet = False  # nothing happens in the cluster

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        access = Access(TOKEN, self.board.clock.now_ms)
        loop: Any = self.board
        parts = provided(loop, access, Feed(loop), None, None)
        app = App(HANDLERS, access, {**parts, "loop": lambda _: loop})
        self.server = uvicorn.Server(
            uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        )
        serving = asyncio.create_task(self.server.serve(sockets=[self.listener]))
        while not serving.done():
            await asyncio.sleep(TURN_S)
            if not self.quiet:
                self.board.turn()
                self.board.moved.set()


def received(visit: Visit, watch_s: float) -> int:
    """Bytes that come in a minute, as they travel."""
    session = visit.context.new_cdp_session(visit.page)
    sizes: list[int] = []
    session.on(
        "Network.dataReceived",
        lambda told: sizes.append(told["encodedDataLength"] or told["dataLength"]),
    )
    session.send("Network.enable")
    visit.page.wait_for_timeout(watch_s * 1000)
    session.detach()
    return round(sum(sizes) * 60 / watch_s)


def row(number: int) -> dict[str, Any]:
    """A job as the list has it."""
    return {
        "id": f"j{number}", "name": f"train-{number % 97}", "state": "succeeded", "tenant": "lab",
        "members": 1, "members_max": 0, "size": 0, "gpus": 8, "gpu_milli": 1000,
        "gpu_memory_mb": 0, "priority": 0, "attempt": 1, "nodes": [f"n{number % 2000}"],
        "submitted_ms": 1_790_000_000_000 + number, "running_ms": 1_790_000_001_000 + number,
        "finished_ms": 1_790_000_900_000 + number, "code": 0, "why": "every member exited 0",
        "command": f"python train.py --seed {number}", "user": "ada", "labels": {"run": "a"},
        "nap": None, "idle_since_ms": None, "progress": None, "array": None, "service": "",
    }  # fmt: skip


def serve_rows(visit: Visit) -> None:
    """The list of 10,000 finished jobs: this cluster in memory keeps none."""

    def answer(route: Any) -> None:
        asked = parse_qs(urlsplit(route.request.url).query)
        begin, many = int(asked.get("cursor", ["0"])[0]), int(asked["limit"][0])
        rows = [row(ROWS - number) for number in range(begin, min(ROWS, begin + many))]
        headers = {"shoal-count": str(ROWS)}
        if begin + many < ROWS:
            headers["shoal-next"] = str(begin + many)
        route.fulfill(json=rows, headers=headers)

    visit.page.route("**/v1/jobs?*", answer)


def scroll_rows(visit: Visit) -> list[float]:
    page = visit.page
    serve_rows(visit)
    visit.go("jobs")
    page.locator(f"[data-job=j{ROWS}]").first.wait_for()
    while page.locator("[data-job=j1]").count() == 0:  # page by page, until all are loaded
        page.evaluate("window.scrollTo(0, document.documentElement.scrollHeight)")
        page.wait_for_timeout(50)
    page.evaluate("window.scrollTo(0, 0)")
    page.locator(f"[data-job=j{ROWS}]").first.wait_for()
    return list(page.evaluate(TO_THE_END, SCROLL_FRAMES))


def churn(visit: Visit) -> dict[str, float]:
    """Reachable memory before and after an hour's changes."""
    session = visit.context.new_cdp_session(visit.page)
    session.send("Performance.enable")
    views = ("cluster", "jobs", "services", "cluster")
    visit.page.evaluate(CHURN, [0, 1_000])  # caches fill up to their bounds
    before = used(session)
    for turn, view in enumerate(views):
        visit.go(view)
        visit.page.evaluate(CHURN, [1_000 + turn * AN_HOUR // 4, AN_HOUR // 4])
    after = used(session)
    session.detach()
    return {
        "changes": AN_HOUR,
        "before_mb": round(before[0] / 1e6, 1),
        "after_mb": round(after[0] / 1e6, 1),
        "elements_before": before[1],
        "elements_after": after[1],
    }


def in_browser(board: Board, shot: str) -> dict[str, Any]:
    server = Server(board)
    server.start()
    with chromium() as browser:
        visit = Visit(browser, server.url, TOKEN, 1400, "light")
        page = visit.page
        began = time.perf_counter()
        visit.sign_in()
        page.wait_for_function(
            "nodes => shoalMap?.cluster.nodes.size === nodes", arg=len(board.state.nodes)
        )
        page.wait_for_function("shoalMap.drawn > 0")
        shown_s = time.perf_counter() - began
        first_paint = page.evaluate(FIRST_PAINT)
        if shot:
            page.wait_for_timeout(1000)
            page.screenshot(path=shot)
        page.evaluate(PATCH)
        busy = received(visit, WATCH_S)
        paints = list(page.evaluate("paints"))
        draws = list(page.evaluate("draws"))
        frames = list(page.evaluate(SCROLL, SCROLL_FRAMES))
        rows = scroll_rows(visit)
        visit.go("cluster")
        server.quiet = True
        page.wait_for_timeout(3000)
        quiet = received(visit, WATCH_S)
        hour = churn(visit)
        visit.context.close()
    if server.server is not None:
        server.server.should_exit = True
    server.join(10)

    def told(times: list[float]) -> dict[str, float]:
        median, p99 = (round(percentile(times, percent), 1) for percent in (50, 99))
        return {"median": median, "p99": p99, "max": round(max(times), 1)}

    return {
        "first_paint_ms": round(first_paint),
        "signed_in_and_shown_s": round(shown_s, 2),
        "update_to_painted_ms": {**told(paints), "count": len(paints)},
        "draw_ms": told(draws),
        "frame_while_scrolling_ms": told(frames),
        f"frame_while_scrolling_{ROWS}_rows_ms": told(rows),
        "bytes_per_minute": {"busy": busy, "quiet": quiet},
        "an_hour_of_churn": hour,
    }


def main() -> None:
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else NODES
    reason = missing()
    if reason:
        sys.exit(f"error: {reason}")
    print(machine())
    cluster = Cluster(nodes)
    cluster.fill(Mix(3))
    board = Board(cluster)
    result = {
        "nodes": nodes,
        "gpus": 8 * nodes,
        "jobs": len(cluster.state.jobs),
        **looks(board),
        **in_browser(board, sys.argv[2] if len(sys.argv) > 2 else ""),
        "scrub": past.main(SCRUB_EVENTS, SCRUB_NODES),
    }
    rows = [(name, json.dumps(value)) for name, value in result.items()]
    print(table(("what", "figure"), rows))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
