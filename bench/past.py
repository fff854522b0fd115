"""What the past costs: to keep the bars, and to go to a moment an hour ago in a busy cluster.

    python bench/past.py [EVENTS] [NODES]

The log is made by the real step with nodes in memory: a full cluster with a queue, in which about
fourteen events happen each second. Prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.cluster import POLICY, Cluster, Mix
from bench.figures import machine, percentile
from shoal.api.moment import Moments
from shoal.api.moment_reader import MomentAsk
from shoal.api.principal import THE_OPERATOR
from shoal.api.timeline import fewer
from shoal.control.loop import EVENTS_PER_SNAPSHOT
from shoal.control.past.following import Bars
from shoal.control.store.sqlite import SqliteStore
from shoal.core.step import Step
from shoal.model.policy import Policy
from shoal.model.report import Report
from shoal.tick import Stage, Tick

EVENTS, NODES = 1_000_000, 200
WAITING = 1_000
ENDING = 25  # jobs that end in a turn, and as many begin
TURN_MS = 12_000
HOUR_MS, MONTH_MS = 3_600_000, 30 * 86_400_000
PIXELS = 1_200
SCRUBS = 30


class Logged(Cluster):
    """Every step goes to the log, and the state is stored now and then, as in a live controller."""

    def __init__(self, nodes: int, store: SqliteStore) -> None:
        self._store = store
        self._tick = Tick(store, None, lambda *_: None)
        super().__init__(nodes)

    def step(self, report: Report, policy: Policy = POLICY) -> Step:
        result = super().step(report, policy)
        if result.events:
            last = self._store.commit(result.events, result.finished)
            if last - self._store.snapshot_seq >= EVENTS_PER_SNAPSHOT:
                self._tick.state, self._tick.last_seq = self.state, last
                self._tick.stage = Stage.READY
                self._store.snapshot(*self._tick.snapshot())
        return result


def make(home: Path, events: int, nodes: int) -> tuple[SqliteStore, Logged]:
    store = SqliteStore(home / "shoal.db")
    with store.database.transaction():
        pass
    store.database._writer.execute("PRAGMA synchronous = OFF")  # type: ignore[attr-defined]
    cluster, mix, dice = Logged(nodes, store), Mix(3), random.Random(5)
    cluster.fill(mix)
    cluster.submit(mix.specs(WAITING))
    while store._last < events:
        cluster.now_ms += TURN_MS
        running = cluster.running(lambda job: len(job.members) <= 2)
        ending = dice.sample(running, min(ENDING, len(running)))
        cluster.settle(cluster.step(cluster.end(ending)))
        cluster.submit(mix.specs(WAITING - cluster.state.queue.size))
    return store, cluster


async def kept(home: Path, store: SqliteStore, cluster: Logged) -> dict[str, Any]:
    """The follower's work for all of the log, and reading a month of it."""
    loop: Any = SimpleNamespace(
        last_seq=store._last,
        now_ms=lambda: cluster.now_ms,
        tick=SimpleNamespace(state=cluster.state),
    )
    bars = Bars(home / "bars.db", store, loop, print)
    began, cpu = time.perf_counter(), time.process_time()
    while bars._place.seq < store._last:
        await bars._in_thread(bars._write)
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    from_ms, to_ms = max(0, cluster.now_ms - MONTH_MS), cluster.now_ms
    began = time.perf_counter()
    found, _, _ = await bars.shown(from_ms, to_ms)
    read_s = time.perf_counter() - began
    began = time.perf_counter()
    shown, left_out = fewer(found, (to_ms - from_ms) // PIXELS, to_ms)
    merge_s = time.perf_counter() - began
    began = time.perf_counter()
    hour = (await bars.shown(to_ms - HOUR_MS, to_ms))[0]
    hour_s = time.perf_counter() - began
    await bars.close()
    return {
        "follow_us_per_event": round(1e6 * cpu_s / store._last, 2),
        "follow_wall_s": round(wall_s, 1),
        "bars": len(found),
        "month_read_s": round(read_s, 2),
        "month_merge_s": round(merge_s, 2),
        "month_shown": len(shown),
        "month_left_out": left_out,
        "hour_bars": len(hour),
        "hour_read_ms": round(1000 * hour_s, 1),
    }


async def scrub(home: Path, now_ms: int) -> dict[str, Any]:
    """As the page does: through the process that reads the past."""
    moments = Moments(home)

    async def at(at_ms: int) -> tuple[float, int]:
        began = time.perf_counter()
        ask = MomentAsk(at_ms=at_ms, now_ms=now_ms, who=THE_OPERATOR, others=POLICY.others)
        body = await moments.ask(ask)
        return 1000 * (time.perf_counter() - began), len(body)

    first_ms, size = await at(now_ms - HOUR_MS)
    dice = random.Random(7)
    forward = [await at(now_ms - HOUR_MS + 60_000 * step) for step in range(1, SCRUBS + 1)]
    back = [await at(now_ms - HOUR_MS - 60_000 * step) for step in range(1, SCRUBS + 1)]
    oldest_ms = now_ms // 2
    anywhere = [await at(dice.randrange(oldest_ms, now_ms)) for _ in range(SCRUBS)]
    moments.end()
    return {
        "hour_ago_first_ms": round(first_ms),
        "answer_kb": round(size / 1000),
        **{
            f"{name}_{percent}_ms": round(percentile([ms for ms, _ in times], percent))
            for name, times in (("forward", forward), ("back", back), ("anywhere", anywhere))
            for percent in (50, 99)
        },
    }


def main(events: int = EVENTS, nodes: int = NODES) -> dict[str, Any]:
    home = Path(tempfile.mkdtemp(prefix="shoal-past-"))
    try:
        store, cluster = make(home, events, nodes)
        snapshots = store.database.read("SELECT count(*), sum(length(body)) FROM snapshots")
        result = {
            "events": store._last,
            "nodes": nodes,
            "hours": round(cluster.now_ms / HOUR_MS, 1),
            "snapshots": snapshots[0][0],
            "snapshots_mb": round(snapshots[0][1] / 1e6, 1),
            **asyncio.run(kept(home, store, cluster)),
            **asyncio.run(scrub(home, cluster.now_ms)),
            "machine": machine(),
        }
        store.close()
        return result
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))))
