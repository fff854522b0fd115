"""Nodes, and what people do with them: cordon, drain, uncordon, label, note, taint, ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shoal.cli.command import Argument, Option, flag, job_word, verb
from shoal.forms import units
from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.cli.screen.show import Cell
    from shoal.client import Client
    from shoal.model.node import LabelChange
    from shoal.model.views import Done, NodeView


# A time that is still to come, as `--at` and `--in` take it.


AT = Option("--at", metavar="TIME", help="Local time: 18:30, or 2026-11-20T08:00.")
IN = Option("--in", "in_", metavar="T", help="This much time from now, e.g. 2m or 8h.")
LATEST_MS: Final = 366 * 86_400_000


def ms_from_now(at: str | None, in_: str | None, now: datetime | None = None) -> int | None:
    """How far away that moment is; None if neither was given."""
    if at is not None and in_ is not None:
        raise Failure("--at and --in: give one of them", USAGE)
    if in_ is not None:
        flag, ms = "--in", _duration(in_)
    elif at is not None:
        flag, ms = "--at", _until(at, now or datetime.now().astimezone())
    else:
        return None
    if ms > LATEST_MS:
        raise Failure(f"{flag}: is more than a year away; give an earlier time", USAGE)
    return ms


def _duration(text: str) -> int:
    try:
        return units.duration_ms(text)
    except units.BadAmount as error:
        raise Failure(f"--in: {error}", USAGE) from None


def _until(text: str, now: datetime) -> int:
    word = text.strip()
    try:
        if len(word) == len("18:30"):  # the next time that the clock shows this
            when = _today(time.fromisoformat(word), now)
            if when <= now:
                when = _today(time.fromisoformat(word), now + timedelta(days=1))
        else:
            when = datetime.fromisoformat(word).astimezone(now.tzinfo)
    except (ValueError, OverflowError, OSError):
        fix = "write 18:30, 2026-11-20T08:00, or 2026-11-20T08:00+01:00"
        raise Failure(f"--at: {units.quoted(text)} is not a time; {fix}", USAGE) from None
    if when <= now:
        raise Failure(f"--at: {when:%Y-%m-%d %H:%M} is in the past; give a later time", USAGE)
    return int((when - now).total_seconds() * 1000)


def _today(at: time, now: datetime) -> datetime:
    """In local time, which may change between summer and winter before then."""
    return datetime.combine(now.date(), at).astimezone()


NODES = Argument("nodes", "NODE...", "Node ids, e.g. n1 n2.", nargs=-1, required=True)
WHY = Option("--why", metavar="TEXT", help="A reason, for the node's history.")
UNPROTECTED = (
    "not encrypted between nodes: what members of a gang send each other without "
    "--encrypt-network, and requests to replicas (commands, output, code, secrets and copies of "
    "files are, by TLS)"
)


@verb(
    Argument("node", "[NODE]", "For --tree: the node to draw.", required=False),
    Option(
        "--where",
        metavar="CONDITION",
        multiple=True,
        help="Only nodes whose labels meet this, e.g. pool=a100,zone!=b.",
    ),
    flag("--labels", help="Show labels and taints, too. A taint begins with !."),
    flag("--tree", help="Draw how the GPUs, CPUs and cards of one node are joined."),
)
def nodes(
    node: str | None, where: tuple[str, ...], labels: bool, tree: bool, json: bool, home: Path
) -> None:
    """List nodes and what is in use on them.

    GPUS, CPUS and MEMORY show used/total. 1.5 GPUs in use may be half of each
    of three GPUs. NOTES says why a node is not ready, suspect or quarantined,
    and when it ends, if that is known. SOURCE is the supply that brought the
    node; VERSION appears during an upgrade. The last lines name limits that a
    node cannot enforce, and nodes whose jobs cannot be suspended.

    A narrow terminal shows fewer columns; pipes and --json get all of them.

    Examples:
      shoal nodes
      shoal nodes --where pool=a100,zone!=b --labels
      shoal nodes n3 --tree
      shoal nodes --json | jq '[.[] | .gpus_free] | add'
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    if tree or node is not None:
        from shoal.cli.screen.tree import print_tree

        print_tree(node, tree, json, home)
        return
    conditions = _conditions(where)
    with cluster.connect(home) as client:
        known = sorted(client.nodes(), key=natural)
    views = [view for view in known if _meets(view, conditions)]
    if json:
        show.as_json(views)
    elif views:
        print_nodes(views, labels)
    elif known:
        show.note(f"no node has {' and '.join(conditions)}; see: shoal nodes --labels")
    else:
        show.note("no node has joined yet")


def _conditions(where: tuple[str, ...]) -> tuple[str, ...]:
    from shoal.forms import readers
    from shoal.forms.failure import USAGE, BadField, Failure

    try:
        return tuple(readers.conditions("where", list(where))) if where else ()
    except BadField as error:
        raise Failure(str(error), USAGE) from None


def _meets(view: NodeView, conditions: tuple[str, ...]) -> bool:
    from shoal.model.labels import NODE, meets, words_of

    words = words_of({**view.labels, NODE: view.id})
    return all(meets(condition, words) for condition in conditions)


@verb(NODES, WHY)
def cordon(nodes: tuple[str, ...], why: str | None, json: bool, home: Path) -> int:
    """Start nothing new on nodes; running jobs continue.

    Use it before you work on a node. Open the node again with `shoal uncordon`.

    Examples:
      shoal cordon n3
      shoal cordon n3 n4 --why "a fan is loud"
    """
    return _intend(nodes, "cordoned", json, home, why or "")


@verb(NODES, AT, IN, WHY)
def drain(
    nodes: tuple[str, ...],
    at: str | None,
    in_: str | None,
    why: str | None,
    json: bool,
    home: Path,
) -> int:
    """Move jobs off nodes, and start nothing new on them.

    Jobs that may restart are stopped and queued for other nodes. Jobs with
    `restart: never` keep running until they finish. Open the node again with
    `shoal uncordon`.

    With --at or --in, the nodes are free at that time: until then only jobs
    start there that are expected to be done by then or save their work, and
    the others move just before. `shoal uncordon` takes it back.

    Examples:
      shoal drain n3 --why "new memory"
      shoal drain n3 n4 --at 18:30
      shoal drain n3 --in 8h
    """
    from shoal.cli import cluster
    from shoal.model.durations import duration_text

    in_ms = ms_from_now(at, in_)
    if not in_ms:
        if not json:
            names = [cluster.node_id(node) for node in nodes]
            with cluster.connect(home) as client:
                cluster.print_preview(client, "drain", names)
        return _intend(nodes, "draining", json, home, why or "")
    done = f"will be drained in {duration_text(in_ms)}"
    said = why or ""
    return _on_each(
        nodes, lambda client, node: client.drain_in(node, in_ms, said), done, json, home
    )


@verb(NODES)
def uncordon(nodes: tuple[str, ...], json: bool, home: Path) -> int:
    """Make nodes available again.

    This undoes `shoal cordon` and `shoal drain`, also one that is planned, and
    ends a quarantine.

    Examples:
      shoal uncordon n3
      shoal uncordon n1 n2 n3 n4
    """
    return _intend(nodes, "open", json, home)


def _intend(texts: tuple[str, ...], intent: str, json: bool, home: Path, why: str = "") -> int:
    from shoal.model.node import NodeIntent

    wish = NodeIntent(intent)
    done = f"is {intent}"
    return _on_each(
        texts, lambda client, node: client.set_intent(node, wish, why), done, json, home
    )


def _on_each(
    texts: tuple[str, ...],
    act: Callable[[Client, str], Done],
    done: str,
    json: bool,
    home: Path,
) -> int:
    from shoal.cli import cluster
    from shoal.cli.cluster import each

    asked = list(dict.fromkeys(cluster.node_id(text) for text in texts))
    with cluster.connect(home) as client:
        return each(
            asked,
            lambda node: cluster.on_node(client, node, lambda client: act(client, node)),
            done,
            json,
        )


def natural(view: NodeView) -> list[tuple[int, str]]:
    """n2 before n10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", view.id)
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def print_nodes(views: list[NodeView], labels: bool = False) -> None:
    from shoal.cli.screen import node_cells as cells
    from shoal.cli.screen.show import Cell, Column, state_cell, table

    told = {view.id: _notes(view) for view in views}
    versions = {view.version for view in views if view.health == "ready"}
    wanted: list[tuple[Column, Callable[[NodeView], str | Cell], bool]] = [
        (Column("ID"), lambda view: Cell(view.id, "bold"), True),
        (Column("STATE", rank=2), lambda view: state_cell(view.state), True),
        (Column("VERSION"), lambda view: view.version or "before 0.6", len(versions) > 1),
        (Column("SOURCE", rank=-1), cells.source, any(view.origin for view in views)),
        (Column("PLACE"), lambda view: Cell(cells.place(view), "dim"), True),
        (Column("GPUS", rank=2), cells.gpus, True),
        (Column("MODEL"), lambda view: view.gpu_model, any(view.gpu_model for view in views)),
        (Column("CPUS", right=True), cells.cpus, True),
        (Column("MEMORY", right=True), cells.memory, True),
        (Column("LABELS", rank=1), labels_text, labels),
        (Column("JOBS", rank=1), lambda view: ",".join(view.jobs), True),
        (Column("NOTES", flexible=True, rank=1), lambda view: told[view.id], any(told.values())),
    ]
    needed = [(column, of) for column, of, known in wanted if known]
    rows = [[of(view) for _, of in needed] for view in views]
    table([column for column, _ in needed], rows)
    _print_unenforced(views)


def ends_text(in_ms: int, why: str) -> str:
    from shoal.model.durations import duration_text

    when = f"ends in {duration_text(in_ms)}" if in_ms > 0 else "ended"
    return f"{when}: {why}" if why else when


def sleepers_text(view: NodeView) -> str:
    from shoal.model.resources import memory_text

    held = f", {memory_text(view.sleepers_mb)} of memory for them" if view.sleepers_mb else ""
    return f"{view.sleepers} asleep{held}"


def labels_text(view: NodeView) -> str:
    """A taint is marked by an exclamation mark."""
    pairs = [f"{key}={value}" for key, value in sorted(view.labels.items())]
    return " ".join([*pairs, *(f"!{taint}" for taint in view.taints)])


def _print_unenforced(views: list[NodeView]) -> None:
    from shoal.cli.screen.show import line
    from shoal.model.node import unenforced_lines

    there = {view.id: view.unenforced for view in views if view.health != "lost"}
    for text in unenforced_lines(there):
        line(f"not enforced {text}", "dim")
    cannot = {view.id: [view.sleep_why] for view in views if view.gpus and view.sleep_why}
    for text in unenforced_lines({**dict.fromkeys(there, ()), **cannot}):
        line(f"jobs cannot sleep {text}", "dim")
    if len({view.address for view in views if view.health != "lost"}) > 1:
        line(UNPROTECTED, "dim")


def _notes(view: NodeView) -> str:
    """Why it is not ready, when it ends, and whatever else somebody should know of it."""
    notes = []
    if view.health == "ready" and view.standing == "suspect":
        notes.append(f"suspect: {view.why}")
    elif (view.health != "ready" or view.standing != "ok") and view.why:
        notes.append(view.why)
    if view.sleepers:
        notes.append(sleepers_text(view))
    if view.ends_in_ms is not None:
        notes.append(ends_text(view.ends_in_ms, view.ends_why))
    if view.hangs:
        notes.append(view.hangs)
    return "; ".join([*notes, *view.weak_links])


# `shoal label`, `shoal note` and `shoal taint`: what people say of nodes and jobs, and what keeps
# jobs away from nodes.


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
    """Set or remove labels on nodes or jobs.

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
    """Add a note to a job, or show its notes.

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
                show.line(f"{done.id}: notes removed" if remove else f"{done.id}: note added")
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
    from shoal.cli.cluster import each
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
            "is labeled",
            json,
        )


@verb(WORDS)
def taint(words: tuple[str, ...], json: bool, home: Path) -> int:
    """Keep jobs off nodes, unless they tolerate the taint.

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
    from shoal.cli.cluster import each
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


# `shoal ends`: on a node's own machine, say until when the node lives.


@verb(
    IN,
    AT,
    Option("--why", metavar="TEXT", default="", help="What ends it, e.g. 'spot notice'."),
    flag("--never", help="Take it back: no end is known."),
    Option("--node", metavar="N", help="One node of several here. [all of them]"),
    on_head=True,
)
def ends(
    in_: str | None,
    at: str | None,
    why: str,
    never: bool,
    node: str | None,
    json: bool,
    home: Path,
) -> None:
    """Set when this machine's node goes away.

    For scripts on a node: a cloud's spot notice, a batch script with a time
    limit, a hook of a pod that will be evicted. The scheduler then starts here
    only what is expected to be done in time or saves its work, and moves jobs
    away before the end. On other machines use `shoal drain NODE --in T`.

    Examples:
      shoal ends --in 2m --why "spot notice"
      shoal ends --at 18:30 --why "rented until then"
      shoal ends --never
    """
    import time

    from shoal.cli.screen import show
    from shoal.control.home import Home
    from shoal.forms.failure import USAGE, Failure
    from shoal.machine.ends import forget_end, write_end
    from shoal.model.durations import duration_text

    left_ms = ms_from_now(at, in_)
    if never is (left_ms is not None):
        raise Failure("give one of --in, --at and --never", USAGE)
    folders = _folders(Home(home).nodes, node)
    for folder in folders:
        if left_ms is None:
            forget_end(folder)
        else:
            write_end(folder, time.time() + left_ms / 1000, why)
    names = [folder.name for folder in folders]
    if json:
        show.as_json([{"node": name, "ends_in_ms": left_ms} for name in names])
    elif left_ms is None:
        show.line(f"no end time is set for {', '.join(names)}")
    else:
        show.line(f"{', '.join(names)} ends in {duration_text(left_ms)}")


def _folders(nodes: Path, wanted: str | None) -> list[Path]:
    from shoal.forms.failure import Failure
    from shoal.machine.files import SPEC

    found = sorted(path for path in nodes.glob("*") if (path / SPEC).exists())
    names = ", ".join(path.name for path in found)
    if not found:
        raise Failure(f"no node of a cluster is on this machine ({nodes}); add one: shoal join")
    if wanted is None:
        return found
    chosen = [path for path in found if path.name == wanted]
    if not chosen:
        raise Failure(f"--node: there is no {wanted[:63]!r} on this machine; there is {names}")
    return chosen
