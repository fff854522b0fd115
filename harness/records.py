"""What the nodes wrote down themselves: which members their agents started, on which GPUs, and when
each ended, read from the agents' logs."""

from __future__ import annotations

import re
import time
from pathlib import Path

from harness.history import Launched

# 2026-11-16 17:50:47,123 j1.1.0 starts: process 12, GPUs 0,1
LINE = re.compile(
    r"^(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(?P<ms>\d{3}) (?:"
    r"(?P<begun>\S+) starts: process \S+, GPUs (?P<gpus>\S+)"
    r"|(?P<ended>\S+) ended with code -?\d+"
    r"|(?P<life>\S+) is up as incarnation (?P<incarnation>\d+))$"
)


def launched(nodes: Path) -> list[Launched]:
    """Of every node with a folder here."""
    found = []
    for folder in sorted(nodes.iterdir()) if nodes.exists() else []:
        found += launched_on(folder)
    return found


def launched_on(folder: Path) -> list[Launched]:
    """When an agent has died, its keeper ends its members before the next agent starts, so that is
    when they ended at the latest."""
    text = ""
    for name in ("agent.log.1", "agent.log"):
        if (folder / name).exists():
            # A file system that broke leaves zeros where its last block was.
            text += (folder / name).read_text(errors="replace").replace("\0", "")
    done: list[Launched] = []
    running: dict[str, tuple[float, tuple[int, ...]]] = {}
    for line in text.splitlines():
        match = LINE.match(line)
        if match is None:
            continue
        at = time.mktime(time.strptime(match["at"], "%Y-%m-%d %H:%M:%S")) + int(match["ms"]) / 1000
        if match["begun"]:
            gpus = [] if match["gpus"] == "-" else match["gpus"].split(",")
            running[match["begun"]] = at, tuple(map(int, gpus))
        elif match["ended"]:
            if match["ended"] in running:
                done.append(_member(folder.name, match["ended"], *running.pop(match["ended"]), at))
        else:
            done += [_member(folder.name, ref, *begun, at) for ref, begun in running.items()]
            running.clear()
    return done + [_member(folder.name, ref, *begun, None) for ref, begun in running.items()]


def _member(
    node: str, ref: str, began: float, gpus: tuple[int, ...], ended: float | None
) -> Launched:
    job, attempt, member = ref.rsplit(".", 2)
    return Launched(
        job=job,
        attempt=int(attempt),
        member=int(member),
        node=node,
        gpus=gpus,
        began=began,
        ended=ended,
    )
