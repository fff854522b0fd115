"""How long nothing is accepted when the head that leads is lost, and whether anything is lost.

python -m bench.failover [--tries 50]

Two heads and a real PostgreSQL on this machine. Tries take turns: the leader is killed (-9); it is
stopped (SIGSTOP) and continued after another has taken over; its link to the database is cut; its
clock is set by an hour; the database is killed (-9) and started; it hangs for two seconds.
Meanwhile clients submit, cancel, requeue and read through both heads, and what they were answered
is checked against the log at the end. Jobs write down themselves that they ran, and whether another
attempt of theirs was alive. Measured: from the fault until the next accepted submission. Goal: p99
< 5 s, 0 lost, 0 doubled, no two attempts alive at once. The last line is JSON.

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
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec
from harness import clocks
from harness.clients import Recorder, whole_log
from harness.clusters import Head, Measured, two_heads
from harness.history import OK, check
from harness.postgres import Postgres

from bench.figures import machine, percentile, table
from shoal.client import Client, ShoalError
from shoal.core.state.events.log import Recorded
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobFinished
from shoal.model.job import JobSpec, Outcome

CLIENTS = 6
PAUSE_S = 0.3
GOAL_S = 5.0
PATIENCE_S = 60.0
SETTLE_S = (0.2, 2.0)  # anywhere between two renewals of the lease
TRY_S, ASK_S = 0.05, 1.0
HANG_S = 2.0
# Its job's lock is held for as long as a process of this attempt is alive.
WORK = """
exec 9>>"$NOTES/${SHOAL_REF%.*.*}.lock"
flock -n 9 || echo "$SHOAL_REF" >>"$NOTES/twice"
echo "$SHOAL_REF" >>"$NOTES/ran"
sleep 0.1
"""

Undo = Callable[[], None]


def killed(leader: Head, _: Postgres) -> Undo:
    os.kill(leader.controller(), signal.SIGKILL)
    return lambda: None


def stopped(leader: Head, _: Postgres) -> Undo:
    pid = leader.controller()
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


def cut(leader: Head, _: Postgres) -> Undo:
    assert leader.relay is not None
    leader.relay.cut()
    return leader.relay.mend


def clock(leader: Head, _: Postgres) -> Undo:
    assert leader.clock is not None
    leader.clock.set_by(random.choice((3600, -3600)))
    return lambda: leader.clock.set_by(0) if leader.clock else None


def database_killed(_: Head, server: Postgres) -> Undo:
    server.kill()
    server.start()
    return lambda: None


def database_hangs(_: Head, server: Postgres) -> Undo:
    server.freeze()
    time.sleep(HANG_S)
    server.thaw()
    return lambda: None


FAULTS = {
    "leader killed": killed,
    "leader stopped": stopped,
    "its link to the database cut": cut,
    "its clock off by an hour": clock,
    "the database killed": database_killed,
    "the database hangs for 2 s": database_hangs,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tries", type=int, default=50)
    asked = parser.parse_args()
    names = [name for name in FAULTS if FAULTS[name] is not clock or not clocks.missing()]
    seconds: dict[str, list[float]] = defaultdict(list)
    print(machine(), file=sys.stderr)
    with two_heads() as cluster, tempfile.TemporaryDirectory(prefix="shoal-notes-") as folder:
        env = {"PATH": os.environ.get("PATH", os.defpath), "NOTES": folder}
        work = JobSpec(command=("sh", "-c", WORK), env=env)
        recorders = [
            Recorder(number, lambda: cluster.connect(0.5, 10), lambda _: work, number, PAUSE_S)
            for number in range(CLIENTS)
        ]
        for recorder in recorders:
            recorder.start()
        for number in range(asked.tries):
            name = names[number % len(names)]
            seconds[name].append(one_try(cluster, FAULTS[name], work))
            print(f"{number + 1}: {name}: {seconds[name][-1]:.2f} s", file=sys.stderr)
        for recorder in recorders:
            recorder.end()
        for recorder in recorders:
            recorder.join(60)
        ops = [op for recorder in recorders for op in recorder.ops]
        log = settled_log(cluster.client)
        found = check(ops, log)
        own = by_the_jobs(Path(folder), log)
    return report(seconds, found, own, sum(op.result == OK for op in ops))


def settled_log(client: Client) -> list[Recorded]:
    """When every job has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        log = whole_log(client)
        submitted = {one.event.job for one in log if isinstance(one.event, JobSubmitted)}
        if submitted <= {one.event.job for one in log if isinstance(one.event, JobFinished)}:
            return log
        time.sleep(1)
    raise SystemExit(f"jobs have not ended within {PATIENCE_S:g} s")


def by_the_jobs(folder: Path, log: list[Recorded]) -> dict[str, list[str]]:
    """What they wrote: jobs that succeeded and did not run, attempts that ran twice, and attempts
    that met another one of their job."""
    ran = Counter((folder / "ran").read_text().split())
    jobs = {ref.rsplit(".", 2)[0] for ref in ran}
    ends = [one.event for one in log if isinstance(one.event, JobFinished)]
    succeeded = [end.job for end in ends if end.outcome is Outcome.SUCCEEDED]
    met = folder / "twice"
    return {
        "never ran": [job for job in succeeded if job not in jobs],
        "ran twice": [ref for ref, count in ran.items() if count > 1],
        "two attempts alive": met.read_text().split() if met.exists() else [],
    }


def one_try(cluster: Measured, fault: Callable[[Head, Postgres], Undo], work: JobSpec) -> float:
    """From the fault until the next submission is accepted, by whichever head. One client asks each
    head, because one that asks a head which was stopped waits for as long as it has patience."""
    leader, server = cluster.leader(), cluster.server
    assert server is not None
    time.sleep(random.uniform(*SETTLE_S))
    done = threading.Event()
    began = time.monotonic()
    undo = fault(leader, server)
    at: list[float] = []
    askers = [
        threading.Thread(target=_ask, args=(head, work, done, at), daemon=True)
        for head in cluster.heads
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


def _ask(head: Head, work: JobSpec, done: threading.Event, at: list[float]) -> None:
    with Client(head.address().url, head.token(), timeout_s=ASK_S, patience_s=0) as client:
        while not done.is_set():
            with contextlib.suppress(ShoalError):
                client.submit(work, secrets.token_hex(8))
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


def report(
    seconds: dict[str, list[float]], found: list[str], own: dict[str, list[str]], answers: int
) -> int:
    every = [one for own in seconds.values() for one in own]
    rows = [
        [name, len(own), *(f"{percentile(own, part):.2f}" for part in (50, 99)), f"{max(own):.2f}"]
        for name, own in (*seconds.items(), ("all", every))
    ]
    print(table(["until the next accepted submission, s", "tries", "p50", "p99", "most"], rows))
    wrong = found + [f"{what}: {name}" for what, names in own.items() for name in names]
    for text in wrong[:20]:
        print(f"WRONG  {text}")
    lost = sum("acknowledged, and is not in the log" in text for text in found)
    doubled = sum(" made " in text and " and " in text for text in found)
    figures = {
        "machine": machine(),
        "tries": len(every),
        "p50_s": round(percentile(every, 50), 2),
        "p99_s": round(percentile(every, 99), 2),
        "max_s": round(max(every), 2),
        "by_fault": {name: [round(one, 2) for one in own] for name, own in seconds.items()},
        "answers": answers,
        "lost": lost,
        "doubled": doubled,
        "by_the_jobs": {what: len(names) for what, names in own.items()},
        "wrong": len(wrong),
        "goal": percentile(every, 99) < GOAL_S,
    }
    print(msgspec.json.encode(figures).decode())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
