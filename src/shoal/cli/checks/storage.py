"""`shoal check --storage`: what nodes can write and read at one place, alone and together."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from shoal.cli import cluster
from shoal.cli.checks.feeding import Needs, findings, interval, listed, rate, size, summary
from shoal.cli.screen import show
from shoal.cli.screen.show import Cell, Column
from shoal.client.transport import ShoalError
from shoal.forms.failure import USAGE, Failure
from shoal.model.events import JobCheckpointed
from shoal.model.fabric import rate_text
from shoal.model.kept import Kind
from shoal.model.storage import Rates, StorageRequest, StorageView, target_problem

if TYPE_CHECKING:
    from shoal.client import Client

WAIT_S = 2.0
ANSWER_S_MORE = 60.0
ALONE_MAX = 8  # nodes that measure alone first
NOT_FOUND = 404
EVENTS_MAX = 1000
NODES_SHOWN = 40
NOTES_SHOWN = 8


class Wanted(NamedTuple):
    """As it was written."""

    job: str
    needs_read: str
    checkpoint: str
    every: str


def check_storage(
    target: str, texts: tuple[str, ...], wanted: Wanted, json: bool, home: Path
) -> int:
    if problem := target_problem(target):
        raise Failure(f"--storage: {problem}", USAGE)
    needs = Needs(
        read_mbs=rate("--needs-read", wanted.needs_read),
        checkpoint_mb=size("--checkpoint", wanted.checkpoint),
        every_ms=interval("--every", wanted.every),
    )
    asked = list(dict.fromkeys(cluster.node_id(text) for text in texts))
    with cluster.connect(home) as client, show.Spinner(quiet=json) as progress:
        if wanted.job:
            _learn(client, cluster.job_id(client, wanted.job), needs)
        if needs.every_ms and not needs.checkpoint_mb and not wanted.job:
            raise Failure("--every: needs the size of a checkpoint, too: --checkpoint 500GB", USAGE)
        view = _measured(client, target, asked, progress)
    found = findings(view, needs)
    if json:
        show.as_json({"storage": view, "needs": needs, "findings": found})
    else:
        print_storage(view)
        for one in found:
            show.line(one.text, "green" if one.ok else "red bold")
        for note in needs.notes:
            show.line(f"note: {note}", "dim")
    return 0 if view.together and all(one.ok for one in found) else 1


def _learn(client: Client, job: str, needs: Needs) -> None:
    """What the job itself shows; flags count first."""
    known = client.job(job)
    events = client.events(after=-EVENTS_MAX, limit=EVENTS_MAX, job=known.id).events
    saves = [one.event for one in events if isinstance(one.event, JobCheckpointed)]
    gaps = [
        later.at_ms - earlier.at_ms
        for earlier, later in pairwise(saves)
        if later.attempt == earlier.attempt
    ]
    if not needs.every_ms and gaps:
        needs.every_ms = round(median(gaps))
        needs.notes.append(f"{job} saves about every {needs.every_ms / 1000:.0f} s")
    if not needs.every_ms:
        needs.notes.append(f"{job} has not saved twice yet: give --every")
    if not needs.checkpoint_mb:
        needs.checkpoint_mb = _checkpoint_mb(client, known.id)
        if not needs.checkpoint_mb:
            needs.notes.append(
                f"the head has no copy of {job}'s checkpoints: give their size by --checkpoint"
            )
    if not needs.read_mbs:
        needs.notes.append(f"{job} reports no data rate: give --needs-read")


def _checkpoint_mb(client: Client, job: str) -> float:
    """The largest of those that the head has copied."""
    sizes: dict[str, int] = {}
    for file in client.files(job, kind=Kind.CHECKPOINT).files:
        whole = file.path.partition("/")[0]
        sizes[whole] = sizes.get(whole, 0) + file.size
    return max(sizes.values(), default=0) / 1e6


def _measured(client: Client, target: str, asked: list[str], progress: show.Spinner) -> StorageView:
    try:
        view = client.check_storage(StorageRequest(target=target, nodes=asked))
    except ShoalError as error:
        if error.status == NOT_FOUND:
            for name in asked:
                cluster.require_node(client, name)
        raise
    turns = min(ALONE_MAX, len(view.nodes)) + 1
    limit_s = turns * max(0, view.until_ms - view.begun_ms) / 1000 + ANSWER_S_MORE
    began = time.monotonic()
    while view.ended_ms is None:
        progress(f"{target}: {view.doing}")
        try:
            view = client.storage_check(view.id, wait_s=WAIT_S)
        except ShoalError as error:
            if error.status != NOT_FOUND:
                raise
            raise Failure(
                "the controller restarted during the check, which is lost; measure again"
            ) from None
        if time.monotonic() - began > limit_s:
            raise Failure("the check has not ended in time; see: shoal nodes")
    return view


def print_storage(view: StorageView) -> None:
    alone = {one.node: one for one in view.alone}
    rows: list[list[str | Cell]] = []
    several = len(view.nodes) > 1
    for one in view.together[:NODES_SHOWN]:
        cells = _cells(alone.get(one.node)) if several else []
        name = f"{one.node} *" if one.busy else one.node
        rows.append([name, *cells, *_cells(one)])
    titles = ["NODE", *(["WRITE", "READ", "SMALL/S"] if several else [])]
    titles += ["ALL-WRITE", "ALL-READ", "ALL-SMALL/S"] if several else ["WRITE", "READ", "SMALL/S"]
    show.table([Column(title, right=number > 0) for number, title in enumerate(titles)], rows)
    if (more := len(view.together) - NODES_SHOWN) > 0:
        show.line(f"and {more} more nodes; --json shows all", "dim")
    if any(one.busy for one in view.together):
        show.line("*: jobs ran there meanwhile", "dim")
    if text := summary(view):
        show.line(text, "bold")
    by_text: dict[str, list[str]] = {}
    for one in view.together:
        for text in one.notes:
            by_text.setdefault(text, []).append(one.node)
    for text, nodes in list(by_text.items())[:NOTES_SHOWN]:
        where = "" if len(nodes) == len(view.together) else f"{listed(nodes)}: "
        show.line(f"note: {where}{text}", "dim")
    for text in view.notes:
        show.line(f"note: {text}", "dim")


def _cells(one: Rates | None) -> list[str | Cell]:
    if one is None or one.problem:
        return ["", "", ""]
    return [rate_text(one.write_mbs), rate_text(one.read_mbs), str(one.small_per_s)]
