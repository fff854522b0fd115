"""How long nothing is accepted when the head that leads is lost, and whether anything is lost.

python -m bench.failover [--tries 50]

Two heads and a real PostgreSQL on this machine. Tries take turns: the leader is killed (-9); it is
stopped (SIGSTOP) and continued after another has taken over; its link to the database is cut; its
clock is set by an hour. Meanwhile clients submit, cancel, requeue and read through both heads, and
what they were answered is checked against the log at the end. Measured: from the fault until the
next accepted submission. Goal: p99 < 5 s, 0 lost, 0 doubled. The last line is JSON.

The floor is the lease: a leader that says nothing is replaced when its lease ends (2.5 s after the
last renewal), and a standby looks every 0.3 s.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import msgspec
from harness import clocks
from harness.clients import Recorder, whole_log
from harness.clusters import Head, Measured, two_heads
from harness.history import OK, check

from bench.figures import machine, percentile, table
from shoal.client import Client, ShoalError
from shoal.model.job import JobSpec

CLIENTS = 6
PAUSE_S = 0.3
GOAL_S = 5.0
PATIENCE_S = 60.0
SETTLE_S = (0.2, 2.0)  # anywhere between two renewals of the lease
TRY_S, ASK_S = 0.05, 1.0
NOTHING = JobSpec(command=("true",), env={"PATH": os.environ.get("PATH", os.defpath)})

Undo = Callable[[], None]


def killed(leader: Head) -> Undo:
    os.kill(leader.controller(), signal.SIGKILL)
    return lambda: None


def stopped(leader: Head) -> Undo:
    pid = leader.controller()
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


def cut(leader: Head) -> Undo:
    assert leader.relay is not None
    leader.relay.cut()
    return leader.relay.mend


def clock(leader: Head) -> Undo:
    assert leader.clock is not None
    leader.clock.set_by(random.choice((3600, -3600)))
    return lambda: leader.clock.set_by(0) if leader.clock else None


FAULTS = {
    "leader killed": killed,
    "leader stopped": stopped,
    "its link to the database cut": cut,
    "its clock off by an hour": clock,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tries", type=int, default=50)
    asked = parser.parse_args()
    names = [name for name in FAULTS if FAULTS[name] is not clock or not clocks.missing()]
    seconds: dict[str, list[float]] = defaultdict(list)
    print(machine(), file=sys.stderr)
    with two_heads() as cluster:
        recorders = [
            Recorder(number, lambda: cluster.connect(0.5, 10), lambda _: NOTHING, number, PAUSE_S)
            for number in range(CLIENTS)
        ]
        for recorder in recorders:
            recorder.start()
        for number in range(asked.tries):
            name = names[number % len(names)]
            seconds[name].append(one_try(cluster, FAULTS[name]))
            print(f"{number + 1}: {name}: {seconds[name][-1]:.2f} s", file=sys.stderr)
        for recorder in recorders:
            recorder.end()
        for recorder in recorders:
            recorder.join(60)
        ops = [op for recorder in recorders for op in recorder.ops]
        found = check(ops, whole_log(cluster.client))
    return report(seconds, found, sum(op.result == OK for op in ops))


def one_try(cluster: Measured, fault: Callable[[Head], Undo]) -> float:
    """From the fault until the next submission is accepted, by whichever head. One client asks each
    head, because one that asks a head which was stopped waits for as long as it has patience."""
    leader = cluster.leader()
    time.sleep(random.uniform(*SETTLE_S))
    done = threading.Event()
    began = time.monotonic()
    undo = fault(leader)
    at: list[float] = []
    askers = [
        threading.Thread(target=_ask, args=(head, done, at), daemon=True) for head in cluster.heads
    ]
    try:
        for asker in askers:
            asker.start()
        if not done.wait(PATIENCE_S):
            raise SystemExit(f"nothing was accepted within {PATIENCE_S:g} s")
        took = min(at) - began
    finally:
        undo()
    for asker in askers:
        asker.join()
    both_are_up(cluster)
    return took


def _ask(head: Head, done: threading.Event, at: list[float]) -> None:
    with Client(head.address().url, head.token(), timeout_s=ASK_S, patience_s=0) as client:
        while not done.is_set():
            with contextlib.suppress(ShoalError):
                client.submit(NOTHING, secrets.token_hex(8))
                at.append(time.monotonic())
                done.set()
            time.sleep(TRY_S)


def both_are_up(cluster: Measured) -> None:
    """The one that was hurt has come back, as a standby or as the leader."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            heads = cluster.client.heads()
            if len(heads) == 2 and all(one.seen_ms_ago < 2_000 for one in heads):
                return
        except ShoalError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"a head did not come back within {PATIENCE_S:g} s")


def report(seconds: dict[str, list[float]], found: list[str], answers: int) -> int:
    every = [one for own in seconds.values() for one in own]
    rows = [
        [name, len(own), *(f"{percentile(own, part):.2f}" for part in (50, 99)), f"{max(own):.2f}"]
        for name, own in (*seconds.items(), ("all", every))
    ]
    print(table(["until the next accepted submission, s", "tries", "p50", "p99", "most"], rows))
    for text in found[:20]:
        print(f"WRONG  {text}")
    lost = sum("acknowledged, and is not in the log" in text for text in found)
    doubled = sum(" made " in text and " and " in text for text in found)
    figures = {
        "machine": machine(),
        "tries": len(every),
        "p50_s": round(percentile(every, 50), 2),
        "p99_s": round(percentile(every, 99), 2),
        "by_fault": {name: [round(one, 2) for one in own] for name, own in seconds.items()},
        "answers": answers,
        "lost": lost,
        "doubled": doubled,
        "wrong": len(found),
        "goal": percentile(every, 99) < GOAL_S,
    }
    print(msgspec.json.encode(figures).decode())
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
