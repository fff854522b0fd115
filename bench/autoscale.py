"""Replays LLM requests against autoscalers: how many begin in time, for how many replica-hours.

    python bench/autoscale.py --azure conv.csv.gz [--servegen total_rates.csv.gz]
                              [--mooncake conversation_trace.jsonl.gz]

Shoal's is the real `core/books/scale.py`. Beside it: fixed fleets sized for the mean and the
peak (both know the trace beforehand), a plain threshold autoscaler (70 % utilization, every 15 s,
down only after 5 minutes). "goal": target 8, and the goal that 99 % begin within 2 s, as a router
would judge it; "goal, day": the same with the day that was learned from the three days before. A
replica takes 30 to 60 s to be ready (or as --start says), works on 8 requests at a time,
and needs for each 50 ms, its prompt at 8,000 tokens/s and its answer at 30 tokens/s. The last line
is one JSON object {load: {scaler: {began_in_2s, slow, p99_wait_s, replica_hours}}}.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from bench.figures import machine, percentile, table
from bench.llm_load import (
    Fleet,
    LoadError,
    Request,
    Scaler,
    read_azure,
    read_day,
    read_mooncake,
    work_over_time,
)
from shoal.control.history.day import Day
from shoal.core.books.goals import DAY_MS, JUDGED_MS
from shoal.core.books.scale import RecentWork, wish
from shoal.model.service import Scale, ServiceLoad
from shoal.model.tokens import Goals, TokenLoad

CONCURRENCY = 8
START_S = (30, 60)
START_MS = (30_000, 60_000)
DAYS_LEARNED = 3
LOOK_MS = 1_000
IN_TIME_MS = 2_000
MOST = 500
HEADER = ("load", "scaler", "began within 2 s", "slowed > 1.5x", "p99 wait s", "replica-hours")


class Result(msgspec.Struct, frozen=True):
    began_in_2s: float
    slow: float
    p99_wait_s: float
    replica_hours: float


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    try:
        loads = _loads(arguments)
    except LoadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(machine())
    found: dict[str, dict[str, Result]] = {}
    rows = []
    start_ms = (arguments.start[0] * 1000, arguments.start[1] * 1000)
    for name, (requests, before) in loads.items():
        found[name] = {}
        for scaler_name, (scaler, first) in scalers(requests, before, start_ms).items():
            result = found[name][scaler_name] = play(requests, scaler, first, start_ms)
            rows.append(
                (
                    name,
                    scaler_name,
                    f"{100 * result.began_in_2s:.2f} %",
                    f"{100 * result.slow:.2f} %",
                    f"{result.p99_wait_s:.1f}",
                    f"{result.replica_hours:.1f}",
                )
            )
    print(table(HEADER, rows))
    print(msgspec.json.encode(found).decode())
    return 0


def scalers(
    requests: Sequence[Request],
    before: Sequence[Sequence[Request]] = (),
    start_ms: tuple[int, int] = START_MS,
) -> dict[str, tuple[Scaler, int]]:
    """Each scaler with its initial number of replicas. `before`: the days before this one."""
    work = work_over_time(requests, LOOK_MS)
    mean = -(-sum(work) // len(work) // CONCURRENCY)
    peak = -(-max(work) // CONCURRENCY)
    begin = max(1, -(-max(work[:60]) // CONCURRENCY))
    found = {
        "fixed, for the mean": (fixed(mean), mean),
        "fixed, for the peak": (fixed(peak), peak),
        "threshold 70 %": (threshold(), begin),
        "shoal, target 8": (shoal(8, start_ms), begin),
        "shoal, target 7": (shoal(7, start_ms), begin),
        "shoal, goal": (with_goal(start_ms), begin),
    }
    if before:
        usual = Day()
        for number, day in enumerate(before):
            for second, work_ in enumerate(work_over_time(day, LOOK_MS)[: DAY_MS // LOOK_MS]):
                usual.add(number * DAY_MS + second * LOOK_MS, work_)
        usual.add(len(before) * DAY_MS, 0)
        found["shoal, goal, day"] = (with_goal(start_ms, usual.slots), begin)
    return found


def fixed(count: int) -> Scaler:
    return lambda *_: count


def threshold(part: float = 0.7, every_ms: int = 15_000, down_ms: int = 300_000) -> Scaler:
    """Enough replicas to bring the utilization of all slots to `part`, with a tolerance of a tenth.
    Fewer only after `down_ms` without a higher proposal. It does not see the queue."""
    proposals: list[tuple[int, int]] = []

    def scale(now_ms: int, fleet: Fleet, wanted: int) -> int:
        if now_ms % every_ms:
            return wanted
        busy = fleet.in_flight / CONCURRENCY
        near = abs(busy / max(1, wanted) / part - 1) <= 0.1
        proposed = wanted if near else max(1, min(MOST, int(-(-busy // part))))
        proposals.append((now_ms, proposed))
        while proposals[0][0] < now_ms - down_ms:
            del proposals[0]
        return max(each for _, each in proposals)

    return scale


def shoal(target: int, start: tuple[int, int] = START_MS) -> Scaler:
    scale, recent = Scale(least=1, most=MOST, target=target), RecentWork()
    start_ms = sum(start) // 2

    def ask(now_ms: int, fleet: Fleet, wanted: int) -> int:
        load = ServiceLoad(service="llm", in_flight=fleet.in_flight, queued=fleet.queued)
        return wish(recent, scale, load, wanted, start_ms, now_ms).wanted

    return ask


def with_goal(start: tuple[int, int] = START_MS, day: tuple[int, ...] = ()) -> Scaler:
    """As a service of route cache: the router judges what began in the last 15 seconds."""
    scale, recent = Scale(least=1, most=MOST, target=CONCURRENCY), RecentWork()
    goals, start_ms = Goals(ttft_ms=IN_TIME_MS), sum(start) // 2
    begun: deque[int] = deque(maxlen=JUDGED_MS // LOOK_MS)

    def ask(now_ms: int, fleet: Fleet, wanted: int) -> int:
        judged = fleet.waits_ms[begun[0] if begun else 0 :]
        begun.append(len(fleet.waits_ms))
        good = sum(wait <= IN_TIME_MS for wait in judged)
        load = ServiceLoad(
            service="llm",
            in_flight=fleet.in_flight,
            queued=fleet.queued,
            ready=tuple(one.id for one in fleet.replicas.values() if not one.draining),
            tokens=TokenLoad(judged=len(judged), good=good),
            day=day,
        )
        return wish(recent, scale, load, wanted, start_ms, now_ms, goals).wanted

    return ask


def play(
    requests: Sequence[Request],
    scaler: Scaler,
    first: int,
    start_ms: tuple[int, int] = START_MS,
) -> Result:
    """Runs until all requests are answered."""
    rng = random.Random("starts")
    fleet = Fleet(requests, CONCURRENCY)
    starting: dict[str, int] = {}  # replica -> when it is ready
    begun_ms: dict[str, int] = {}
    wanted, number, held_ms, now_ms = first, 0, 0, 0
    end_ms = requests[-1].at_ms + 3_600_000
    for number in range(first):
        begun_ms[f"r{number}"] = 0
        fleet.add(f"r{number}", 0)
    while not fleet.done and now_ms < end_ms:
        now_ms += LOOK_MS
        for name, ready_ms in list(starting.items()):
            if ready_ms <= now_ms:
                fleet.advance(ready_ms)
                fleet.add(name, ready_ms)
                del starting[name]
        fleet.advance(now_ms)
        wanted = scaler(now_ms, fleet, wanted)
        open_ = [replica for replica in fleet.replicas.values() if not replica.draining]
        for _ in range(wanted - len(open_) - len(starting)):
            number += 1
            begun_ms[f"r{number}"] = now_ms
            starting[f"r{number}"] = now_ms + rng.randrange(*start_ms)
        spare = len(open_) + len(starting) - wanted
        for name in list(starting)[::-1][: max(0, spare)]:
            del starting[name]
            held_ms += now_ms - begun_ms.pop(name)
            spare -= 1
        for replica in open_[::-1][: max(0, spare)]:
            fleet.drain(replica.id)
        for replica in list(fleet.replicas.values()):
            if replica.draining and not replica.in_flight:
                fleet.remove(replica.id)
                held_ms += now_ms - begun_ms.pop(replica.id)
    held_ms += sum(now_ms - begin_ms for begin_ms in begun_ms.values())
    return Result(
        began_in_2s=round(fleet.kept(IN_TIME_MS), 5),
        slow=round(1 - (len(fleet.waits_ms) - fleet.slow) / len(requests), 5),
        p99_wait_s=round(percentile(fleet.waits_ms, 99) / 1000, 2),
        replica_hours=round(held_ms / 3_600_000, 2),
    )


def _loads(arguments: argparse.Namespace) -> dict[str, tuple[list[Request], list[list[Request]]]]:
    """Each with the days before it, if they are known."""
    azure = read_azure(arguments.azure)
    loads: dict[str, tuple[list[Request], list[list[Request]]]]
    loads = {"azure conv, 1 h": (azure, []), "azure conv x5": (read_azure(arguments.azure, 5), [])}
    if arguments.mooncake:
        loads["mooncake, 1 h"] = read_mooncake(arguments.mooncake), []
    if arguments.servegen:
        read = partial(read_day, arguments.servegen, azure, arguments.rps)
        for model in ("m-small", "deepseek-r1"):
            loads[f"servegen {model}, 1 day"] = read(model), []
        before = [read("m-small", day) for day in range(DAYS_LEARNED)]
        loads["servegen m-small, 4th day"] = read("m-small", DAYS_LEARNED), before
    return loads if not arguments.only else {arguments.only: loads[arguments.only]}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--azure", type=Path, required=True, help="azure-llm-2023: conv.csv.gz")
    parser.add_argument("--mooncake", type=Path, help="mooncake-fast25: its conversations")
    parser.add_argument("--servegen", type=Path, help="servegen: total_rates.csv.gz")
    parser.add_argument("--start", type=int, nargs=2, default=START_S, metavar="SECONDS")
    parser.add_argument("--only", help="one of the loads, by its name")
    parser.add_argument("--rps", type=float, default=4.0, help="mean of a servegen day (default 4)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
