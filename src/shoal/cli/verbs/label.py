"""`shoal label`, `shoal note` and `shoal taint`: what people say of nodes and jobs, and what keeps
jobs away from nodes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, flag, job_word, verb

if TYPE_CHECKING:
    from shoal.model.node import LabelChange

JOB = re.compile(r"j[0-9]{1,15}(\.[0-9]{1,9})?")
WORDS = Argument(
    "words",
    "NODE... CHANGE...",
    "Node ids, then KEY=VALUE to set and KEY- to remove.",
    nargs=-1,
    required=True,
)


@verb(
    Argument(
        "words",
        "NODE|JOB... CHANGE...",
        "Ids of nodes or jobs, then KEY=VALUE to set and KEY- to remove.",
        nargs=-1,
        required=True,
    )
)
def label(words: tuple[str, ...], json: bool, home: Path) -> int:
    """Set or remove labels of nodes or jobs.

    Jobs choose nodes by their labels: `shoal run --where pool=a100`. What you
    set here stays when the node or the controller restarts, and goes before
    what the node reports of itself. Running jobs stay where they are.

    People find jobs by their labels: `shoal ps --label run=a`. A job gets them with
    `shoal run --label`, or here, also after it has ended.

    Examples:
      shoal label n1 pool=a100 zone=b
      shoal label n1 n2 zone-
      shoal nodes --labels
      shoal label j7 j8 run=a best-
      shoal ps -a --labels
    """
    named, changes = _sorted(words, bare=False)
    if named and all(JOB.fullmatch(name) for name in named):
        return _label_jobs(named, changes, json, home)
    return _change(words, json, home, taints=False)


@verb(
    Argument("job", "JOB", "The job's id or name.", type=job_word),
    Argument("text", "[TEXT...]", "The note. [show the notes]", nargs=-1),
    flag("--remove", help="Remove all notes of the job."),
)
def note(job: str, text: tuple[str, ...], remove: bool, json: bool, home: Path) -> None:
    """Write a note about a job, or show its notes.

    A job keeps its last 20 notes, also after it has ended. Everybody who sees the
    job sees them.

    Examples:
      shoal note j7 "loss explodes at step 900; lr was too high"
      shoal note j7
      shoal note j7 --remove
    """
    from datetime import datetime

    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.forms.failure import USAGE, Failure
    from shoal.model.phrases import printable

    words = " ".join(text).strip()
    if remove and words:
        raise Failure("--remove: removes all notes; leave the text out", USAGE)
    if text and not words:
        raise Failure("TEXT: is empty; to remove the notes: shoal note JOB --remove", USAGE)
    with cluster.connect(home) as client:
        asked = cluster.job_id(client, job, acts=bool(words or remove))
        if words or remove:
            done = cluster.on_job(client, asked, lambda c: c.note_job(asked, words))
            if json:
                show.as_json(done)
            else:
                show.line(f"{done.id} has no notes now" if remove else f"{done.id} is noted")
            return
        view = cluster.on_job(client, asked, lambda c: c.job(asked))
    if json:
        show.as_json(view.notes)
        return
    if not view.notes:
        show.note(f'{asked} has no notes; write one: shoal note {asked} "..."')
    for one in view.notes:
        when = datetime.fromtimestamp(one.at_ms / 1000).astimezone()
        show.line(f"{when:%Y-%m-%d %H:%M}  {one.who}: {printable(one.text)}")


def _label_jobs(named: list[str], changes: list[str], json: bool, home: Path) -> int:
    from shoal.cli import cluster
    from shoal.cli.each import each
    from shoal.forms import readers
    from shoal.forms.failure import USAGE, BadField, Failure

    if not changes:
        raise Failure("say what to change, e.g. shoal label j7 run=a", USAGE)
    try:
        change = readers.changes("CHANGE", changes, bare=False)
    except BadField as error:
        raise Failure(str(error), USAGE) from None
    with cluster.connect(home) as client:
        return each(
            list(dict.fromkeys(named)),
            lambda job: cluster.on_job(client, job, lambda c: c.label_job(job, change)),
            "is labelled",
            json,
        )


@verb(WORDS)
def taint(words: tuple[str, ...], json: bool, home: Path) -> int:
    """Keep jobs away from nodes, unless they tolerate it.

    A taint is a name, with a value if you like. A new job starts on the node
    only if it names the taint: `shoal run --tolerates maintenance`. Running
    jobs stay where they are; `shoal drain` moves them.

    Examples:
      shoal taint n1 maintenance
      shoal taint n1 n2 reserved=vision
      shoal taint n1 maintenance-
    """
    return _change(words, json, home, taints=True)


def _change(words: tuple[str, ...], json: bool, home: Path, *, taints: bool) -> int:
    from shoal.cli import cluster
    from shoal.cli.each import each
    from shoal.forms import readers
    from shoal.forms.failure import USAGE, BadField, Failure

    nodes, changes = _sorted(words, bare=taints)
    try:
        change = _change_of(readers.changes("CHANGE", changes, bare=taints), taints=taints)
    except BadField as error:
        raise Failure(str(error), USAGE) from None
    asked = list(dict.fromkeys(cluster.node_id(text) for text in nodes))
    if not asked or not changes:
        example = "shoal taint n1 maintenance" if taints else "shoal label n1 pool=a100"
        raise Failure(f"name a node, then what to change, e.g. {example}", USAGE)
    with cluster.connect(home) as client:
        return each(
            asked,
            lambda node: cluster.on_node(client, node, lambda c: c.set_labels(node, change)),
            "is changed",
            json,
        )


def _sorted(words: tuple[str, ...], *, bare: bool) -> tuple[list[str], list[str]]:
    """The nodes come first. A change has `=` or ends with `-`. A taint may also be a bare name:
    then only the last word is one."""
    count = 0
    for word in words:
        if "=" in word or word.endswith("-") or not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", word):
            break
        count += 1
    if bare and count == len(words):
        count -= 1
    return list(words[:count]), list(words[count:])


def _change_of(changes: dict[str, str | None], *, taints: bool) -> LabelChange:
    from shoal.model.node import LabelChange

    return LabelChange(taints=changes) if taints else LabelChange(labels=changes)
