"""`shoal check --storage`: what nodes write and read at one place, and whether it feeds a job."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from shoal.cli import cluster
from shoal.cli.screen import show
from shoal.cli.screen.show import Cell, Column
from shoal.client.transport import ShoalError
from shoal.core.state.events.runs import JobCheckpointed
from shoal.forms.failure import USAGE, Failure
from shoal.forms.units import BadAmount, duration_ms
from shoal.model.durations import duration_text
from shoal.model.fabric import amount_text, rate_text
from shoal.model.kept import Kind
from shoal.model.resources import plural
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
        show.line("*: jobs were running there", "dim")
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


# Whether a storage feeds a job: its data, and its checkpoints.


WAIT_PERCENT_MAX = 5  # of a job's time may go into waiting for saves
WEAK_PART = 2  # a node with less than half of the median alone is weak
NODES_MIN = 3  # that a median is taken of
NAMED_MAX = 5
_AMOUNT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([kmgtp])i?b(/s)?", re.IGNORECASE)
_MB = {"k": 0.001, "m": 1.0, "g": 1_000.0, "t": 1e6, "p": 1e9}


class Needs(msgspec.Struct, kw_only=True):
    """What a job wants of its storage; 0: not known."""

    read_mbs: float = 0
    checkpoint_mb: float = 0
    every_ms: int = 0
    notes: list[str] = []


class Finding(msgspec.Struct, frozen=True):
    text: str
    ok: bool


def rate(flag: str, text: str) -> float:
    """In MB/s, from 2GB/s."""
    found = _AMOUNT.fullmatch(text.strip())
    if text and (found is None or not found[3] or not float(found[1])):
        raise Failure(f"{flag}: {text[:40]!r} is not a rate; write e.g. 500MB/s or 2GB/s", USAGE)
    return float(found[1]) * _MB[found[2].lower()] if found else 0


def size(flag: str, text: str) -> float:
    """In MB, from 500GB."""
    found = _AMOUNT.fullmatch(text.strip())
    if text and (found is None or found[3] or not float(found[1])):
        raise Failure(f"{flag}: {text[:40]!r} is not a size; write e.g. 500GB or 1.5TB", USAGE)
    return float(found[1]) * _MB[found[2].lower()] if found else 0


def interval(flag: str, text: str) -> int:
    try:
        found = duration_ms(text.replace("min", "m")) if text else 0
    except BadAmount as error:
        raise Failure(f"{flag}: {error}", USAGE) from None
    if text and not found:
        raise Failure(f"{flag}: must be more than 0", USAGE)
    return found


def findings(view: StorageView, needs: Needs) -> list[Finding]:
    """What does not work first, then what follows for a job."""
    by_problem: dict[str, list[str]] = {}
    for one in view.together or view.alone:
        if one.problem:
            by_problem.setdefault(one.problem, []).append(one.node)
    found = [
        Finding(f"{listed(nodes)}: {problem}", ok=False) for problem, nodes in by_problem.items()
    ]
    good = [one for one in view.together if not one.problem]
    if not good:
        return found
    found += _weak(view.alone, "alone") + _weak(good, "beside the others")
    write = sum(one.write_mbs for one in good)
    read = sum(one.read_mbs for one in good)
    who = f"together {len(good)} nodes" if len(good) > 1 else good[0].node
    verb = "" if len(good) > 1 else "s"
    if needs.read_mbs:
        found.append(_reading(f"{who} read{verb}", read, needs))
    if needs.checkpoint_mb:
        found.append(_saving(f"{who} write{verb}", write, needs))
    return found


def listed(nodes: Sequence[str]) -> str:
    """One sentence for all nodes that share it."""
    more = len(nodes) - NAMED_MAX
    names = ", ".join(nodes[:NAMED_MAX])
    return f"{names} and {more} more" if more > 0 else names


def _weak(rates: Sequence[Rates], how: str) -> list[Finding]:
    found = []
    good = [one for one in rates if not one.problem]
    if len(good) < NODES_MIN:
        return []
    for verb, field in (("writes", "write_mbs"), ("reads", "read_mbs")):
        usual = median(getattr(one, field) for one in good)
        found += [
            Finding(
                f"{one.node}: {verb} {rate_text(getattr(one, field))} {how}, where "
                f"{rate_text(usual)} is usual",
                ok=False,
            )
            for one in good
            if getattr(one, field) * WEAK_PART < usual
        ]
    return found


def _reading(who: str, read_mbs: int, needs: Needs) -> Finding:
    text = f"{who} {rate_text(read_mbs)}; the job needs {rate_text(needs.read_mbs)}"
    if read_mbs >= needs.read_mbs:
        return Finding(f"{text}: that is enough", ok=True)
    return Finding(f"{text}: it would run at {_percent(read_mbs / needs.read_mbs)}", ok=False)


def _saving(who: str, write_mbs: int, needs: Needs) -> Finding:
    """A job that waits for its saves loses the time of a save after each interval."""
    text, mb = f"{who} {rate_text(write_mbs)}", needs.checkpoint_mb
    if not write_mbs:
        return Finding(f"{text}: a checkpoint of {amount_text(mb)} would never end", ok=False)
    took_s = mb / write_mbs
    text += f": a checkpoint of {amount_text(mb)} takes {duration_text(round(took_s * 1000))}"
    if not needs.every_ms:
        return Finding(text, ok=True)
    every_s = needs.every_ms / 1000
    share = took_s / (took_s + every_s)
    text += (
        f"; with one every {duration_text(needs.every_ms)}, a job that waits for its saves "
        f"would wait {_percent(share)} of the time"
    )
    if share * 100 <= WAIT_PERCENT_MAX:
        return Finding(text, ok=True)
    part = WAIT_PERCENT_MAX / (100 - WAIT_PERCENT_MAX)
    text += f"; for {WAIT_PERCENT_MAX} %, {rate_text(mb / (every_s * part))} are needed"
    if took_s > every_s:
        text += f"; to save in the background, {rate_text(mb / every_s)}"
    return Finding(text, ok=False)


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %" if share >= 0.01 else "less than 1 %"


def summary(view: StorageView) -> str:
    good = [one for one in view.together if not one.problem]
    if len(good) < 2:
        return ""
    return (
        f"together {plural(len(good), 'node')} write {rate_text(sum(o.write_mbs for o in good))}, "
        f"read {rate_text(sum(o.read_mbs for o in good))}, and handle "
        f"{sum(o.small_per_s for o in good)} small files a second"
    )
