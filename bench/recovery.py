"""How soon a training gang continues after a member, or a whole node, is killed.

Run with `python bench/recovery.py [--runs 3] [--ray PYTHON]`. Shoal, torchrun elastic and, with an
interpreter that has it, Ray Train take turns to run the same script (`recovery_train.py`), so that
other load on the machine affects all. Measured: the time from the start command to the first
finished step, and from SIGKILL to the next; the steps that have to be repeated. Goals: at most a
third of torchrun's time, a fifth of Ray Train's.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections import defaultdict
from typing import Any

import msgspec

from bench.figures import machine, ratio, table
from bench.recovery_peers import WAIT_S, Mark, Peer, RayTrain, Shoal, Torchrun, TorchrunNodes

BEFORE_STEPS = 60  # three checkpoints, and long enough for a warm interpreter
FRESH, AGAIN, MEMBER, NODE = "start", "start again", "member killed", "node killed"
GOALS = {"torchrun": 3.0, "ray train": 5.0}

Figures = dict[str, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="of each contender")
    parser.add_argument("--ray", default=sys.executable, help="an interpreter that has Ray")
    parser.add_argument("--only", default="", help="one contender by name")
    asked = parser.parse_args()
    peers: list[type[Peer]] = [Shoal, Torchrun, TorchrunNodes]
    RayTrain.python = asked.ray
    if has_ray(asked.ray):
        peers.append(RayTrain)
    else:
        print(f"Ray Train is left out: {asked.ray} cannot import ray.train.torch")
    seconds: Figures = defaultdict(lambda: defaultdict(list))
    lost: Figures = defaultdict(lambda: defaultdict(list))
    parts: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(asked.runs):
        for peer in peers:
            if asked.only in ("", peer.name):
                print(f"run {number + 1}: {peer.name}", file=sys.stderr)
                one_run(peer, seconds, lost, parts)
    report(seconds, lost, parts)


def has_ray(python: str) -> bool:
    found = subprocess.run([python, "-c", "import ray.train.torch"], capture_output=True)
    return found.returncode == 0


def one_run(
    kind: type[Peer], seconds: Figures, lost: Figures, parts: dict[str, list[dict[str, float]]]
) -> None:
    peer = kind()
    try:
        began = peer.start()
        started = first_step(peer, began, set()).at - began
        if kind is not TorchrunNodes:
            seconds[kind.name][FRESH].append(started)
        faults = {MEMBER: peer.kill_member, NODE: peer.kill_node}
        if isinstance(peer, Torchrun):  # with a single agent nothing would be left
            del faults[MEMBER if isinstance(peer, TorchrunNodes) else NODE]
        for what, hurt in faults.items():
            start = last_step(peer.marks())
            peer.wait(lambda marks, start=start: last_step(marks) >= start + BEFORE_STEPS)  # type: ignore[misc]
            peer.settle()
            known = {mark.pid for mark in peer.marks()}
            killed = hurt()
            try:
                after = first_step(peer, killed, known)
            except TimeoutError:
                print(f"{kind.name}, {what}: no step within {WAIT_S:.0f} s, counted as that")
                seconds[kind.name][what].append(WAIT_S)
                break
            before = [mark for mark in peer.marks() if mark.what.isdigit() and mark.pid in known]
            seconds[kind.name][what].append(after.at - killed)
            lost[kind.name][what].append(last_step(before) + 1 - int(after.what))
            if isinstance(peer, Shoal):
                parts[what].append(breakdown(peer, killed, known, after))
        if isinstance(peer, Shoal):
            known = {mark.pid for mark in peer.marks()}
            began = peer.start_again()
            seconds[kind.name][AGAIN].append(first_step(peer, began, known).at - began)
    finally:
        peer.close()


def last_step(marks: list[Mark]) -> int:
    return max((int(mark.what) for mark in marks if mark.what.isdigit()), default=0)


def first_step(peer: Peer, since: float, known: set[int]) -> Mark:
    """The first step of a new process."""

    def steps(marks: list[Mark]) -> list[Mark]:
        return [m for m in marks if m.at > since and m.pid not in known and m.what.isdigit()]

    peer.wait(lambda marks: bool(steps(marks)))
    return steps(peer.marks())[0]


def breakdown(peer: Shoal, killed: float, known: set[int], after: Mark) -> dict[str, float]:
    """When each part of a recovery was done, in seconds from the kill."""
    told = peer.client.why(peer.job).events
    times: dict[str, float] = {}
    for recorded in told:
        at = recorded.event.at_ms / 1000
        name = type(recorded.event).__name__
        if at >= killed - 0.001 and name in ("JobStopping", "JobRequeued", "JobPlaced"):
            times.setdefault(name, at - killed)
    for what in ("begin", "joined", "restored"):
        of_it = [m.at for m in peer.marks() if m.what == what and m.pid not in known]
        if of_it:
            times[what] = max(of_it) - killed
    times["first step"] = after.at - killed
    return times


def report(seconds: Figures, lost: Figures, parts: dict[str, list[dict[str, float]]]) -> None:
    names = list(seconds)
    rows = []
    ratios: dict[str, dict[str, float]] = defaultdict(dict)
    for what in (FRESH, AGAIN, MEMBER, NODE):
        ours = _median(seconds["shoal"][what])
        row: list[object] = [what]
        for name in names:
            measured = _median(seconds[name].get(what) or seconds[name][FRESH])
            row.append(f"{measured:.2f}" if what in seconds[name] else "")
            if name in GOALS and what != FRESH and ours:
                ratios[name][what] = ratio(measured, ours)
        row += [
            f"{ratios[name].get(what, 0):.1f}" if ratios[name].get(what) else ""
            for name in names
            if name in GOALS
        ]
        row += [
            f"{_median(lost[name][what]):.0f}" if lost[name].get(what) else "" for name in names
        ]
        rows.append(row)
    header = ["median s until a step is done", *names]
    header += [f"{name} / shoal" for name in names if name in GOALS]
    header += [f"steps lost, {name}" for name in names]
    print(machine())
    print(table(header, rows))
    for name, goal in GOALS.items():
        for what in (MEMBER, NODE):
            if what in ratios[name]:
                verdict = "met" if ratios[name][what] >= goal else "missed"
                print(f"{what}: {ratios[name][what]:.1f} x {name}, goal {goal:g}: {verdict}")
    shares = {what: _shares(found) for what, found in parts.items()}
    for what, share in shares.items():
        told = ", ".join(f"{name} {at:.2f}" for name, at in share.items())
        print(f"shoal, {what}, median s from the kill until: {told}")
    figures: dict[str, Any] = {
        "machine": machine(),
        "seconds": seconds,
        "lost": lost,
        "ratios": ratios,
        "parts": shares,
    }
    print(msgspec.json.encode(figures).decode())


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _shares(found: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for times in found for name in times)
    medians = {n: _median([times[n] for times in found if n in times]) for n in names}
    return dict(sorted(medians.items(), key=lambda item: item[1]))


if __name__ == "__main__":
    main()
