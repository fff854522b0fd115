"""`shoal explain`, `shoal why` and `shoal events`: what happened, and why it is as it is."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.command import (
    Argument,
    Option,
    filter_of,
    finding_flags,
    flag,
    job_word,
    number,
    verb,
)

if TYPE_CHECKING:
    from shoal.calls.lines import EventLine, EventLines, WhyLines
    from shoal.cli.cluster import Retry
    from shoal.client import Client
    from shoal.model.finding import JobFilter
    from shoal.model.ledger import CostView
    from shoal.model.views import Remedy


@verb(Argument("job", "JOB", "A job's id or name; it may have ended long ago.", type=job_word))
def explain(job: str, json: bool, home: Path) -> None:
    """Show what happened to a job, on one page.

    The page lists each attempt with its nodes and times, and how it ended: the
    job's own error, out of memory, hardware, node lost, hang, time limit,
    preempted or cancelled. It shows what limited the steps of a job that
    trained, the last lines of the member that failed first, what was learned
    about the nodes, and the cost from the ledger (as in `shoal report --by
    job`). If a cause is only likely, the page says so and why.

    The page is made from the log of events, so it is there as long as the job
    is known. For why a job waits now, use `shoal why`.

    Examples:
      shoal explain j7
      shoal explain j7 --json | jq '.attempts[] | {cause, evidence}'
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        asked = cluster.job_id(client, job)
        explanation = cluster.on_job(client, asked, lambda c: c.explanation(asked))
        cost = _cost(client, asked)
    if json:
        import msgspec

        show.as_json({**msgspec.structs.asdict(explanation), "cost": cost})
        return
    from shoal.cli.screen.explanation import page

    for place, text in enumerate(page(explanation, cost=cost)):
        show.line(text, "bold" if not place or _is_heading(text) else "")


def _cost(client: Client, job: str) -> CostView | None:
    """None if the cluster keeps no ledger."""
    from shoal.client import ShoalError

    try:
        return client.cost(job)
    except ShoalError:
        return None


def _is_heading(text: str) -> bool:
    return text.startswith(("Attempt ", "What "))


# `shoal why`: why a job or service is in its present state, and its history.


@verb(Argument("job", "NAME", "A job, service, node, user or tenant.", type=job_word))
def why(job: str, json: bool, home: Path) -> None:
    """Show why a job, node or service is in its state, or a user waits.

    The first lines describe this moment: what a waiting job waits for, and when
    it will probably start, or what limits the steps of a job that trains:
    compute, network, storage, input, or members that differ. Below is the
    history, oldest first. The scheduler stores the reason of every decision.

    A name is looked for in this order: job id, service, node, job name, user,
    tenant.

    Examples:
      shoal why j7
      shoal why n6
      shoal why ada
      shoal why j7 --json | jq -r .why
      shoal why j7 --json | jq .progress.bound.shares
      shoal why chat
    """
    from shoal.calls.lines import WhyLines
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        if cluster.is_service(client, job):
            from shoal.cli.verbs.services import show_service

            show_service(job.strip(), home, json)
            return
        named = _node_or_person(client, job.strip())
        if named is not None:
            show.as_json(named) if json else _print_named(named)
            return
        asked = cluster.job_id(client, job, what="job, service, node, user or tenant")
        view = cluster.on_job(
            client, asked, lambda c: cluster.read_as(WhyLines, c.why, job_id=asked)
        )
    if json:
        show.as_json(view)
    else:
        _print(view, int(time.time() * 1000))


def _node_or_person(client: Client, word: str) -> dict[str, Any] | None:
    """What is known of a node, or of a user or tenant if no job has that name."""
    from shoal.cli import cluster
    from shoal.cli.screen.words import node_lines, waiting_lines
    from shoal.model.finding import JobFilter
    from shoal.model.job import JOB_NAME_PATTERN
    from shoal.model.preview import Action

    if cluster.JOB_ID.fullmatch(word) or not re.fullmatch(JOB_NAME_PATTERN, word):
        return None
    node = next((view for view in client.nodes() if view.id == word), None)
    if node is not None:
        closed = client.preview(Action.UNCORDON, [word]).lines
        return {"kind": "node", "name": word, "state": node.state, "why": node_lines(node, closed)}
    if client.jobs(finished=True, limit=1, wanted=JobFilter(name=word)):
        return None
    for kind, wanted in (("user", JobFilter(user=word)), ("tenant", JobFilter(tenant=word))):
        rows = client.jobs(limit=PEOPLE_ROWS_MAX, wanted=wanted)
        if rows or client.jobs(finished=True, limit=1, wanted=wanted):
            return {"kind": kind, "name": word, "why": waiting_lines(rows)}
    return None


def _print_named(named: dict[str, Any]) -> None:
    from shoal.cli.screen.show import STATE_STYLES, line

    state = named.get("state", "")
    style = f"{STATE_STYLES.get(state, '')} bold"
    line(f"{named['kind']} {named['name']}{f' is {state}' if state else ''}", style)
    for text in named["why"]:
        line(f"  {text}")


def _print(view: WhyLines, now_ms: int) -> None:
    from shoal.cli.screen.explanation import annotation_lines
    from shoal.cli.screen.show import STATE_STYLES, Cell, Column, line, table
    from shoal.cli.screen.words import bound_lines, state_text
    from shoal.forms.units import duration_text
    from shoal.model.columns import progress_text

    line(f"{view.id} {state_text(view.state)}", STATE_STYLES.get(view.state, "") + " bold")
    if view.why:
        line(f"  {view.why}")
    if view.progress is not None:
        line(f"  {progress_text(view.progress)}")
        for text in bound_lines(view.progress.bound):
            line(f"  {text}")
    if view.start:
        line(f"  {view.start}")
    for text in remedy_lines(view.remedies):
        line(f"  {text}")
    for text in annotation_lines(view.labels, view.notes):
        line(f"  {text}", "dim")
    if not view.events:
        return
    line("")
    rows: list[list[str | Cell]] = [
        [Cell(f"{duration_text(now_ms - record.facts.at_ms)} ago", "dim"), record.text]
        for record in view.events
    ]
    table([Column("WHEN", right=True), Column("WHAT", wraps=True)], rows)


PEOPLE_ROWS_MAX = 1000


def remedy_lines(remedies: Sequence[Remedy]) -> list[str]:
    lines = ["what would help:"] if remedies else []
    for one in remedies:
        lines.append(f"- {one.text}{f' ({one.cost})' if one.cost else ''}")
        if one.nodes:
            lines.append(f"    shoal uncordon {' '.join(one.nodes)}")
    return lines


# `shoal events`: the cluster's log as sentences.


LAST = 50
LAST_MAX = 10_000
PAGE = 1000
FOLLOW_WAIT_S = 20.0


@verb(
    flag("--follow", "-f", help="Keep printing new events."),
    Option(
        "--last",
        "-n",
        metavar="N",
        type=number(0, LAST_MAX),
        help="Start with the last N events. [50, or all since --since]",
    ),
    Option("--job", metavar="JOB", type=job_word, help="Only events of this job."),
    Option("--node", metavar="NODE", default="", help="Only events of this node."),
    *finding_flags("node"),
)
def events(
    follow: bool, last: int | None, job: str, node: str, json: bool, home: Path, **given: Any
) -> None:
    """Show what happened, one line per event.

    Events are printed oldest first. With --follow it continues until Ctrl-C,
    also while the controller restarts. --json prints one object per line.
    With flags that choose jobs, only events of the jobs that match are shown.

    Examples:
      shoal events
      shoal events -f
      shoal events --job j7 -n 1000
      shoal events --since 2h --user ada --name 'train-*'
      shoal events -f --json | jq -c 'select(.event.event == "NodeLost")'
    """
    from shoal.cli import cluster

    node = cluster.node_id(node) if node else ""
    wanted = filter_of(given)
    with cluster.Retry(home, retry_s=cluster.RETRY_S if follow else 0) as retry:
        job = retry(lambda client: cluster.job_id(client, job)) if job else ""
        _require(retry, job, node)
        last = last if last is not None else 0 if wanted.since_ms else LAST
        after = 0 if wanted.since_ms and not last else -last
        if not last and not wanted.since_ms:
            after = retry(lambda client: client.status()).last_seq
        while True:
            view = _page(retry, after, max(PAGE, last), job, node, follow, wanted)
            for record in view.events:
                print_event(record, json)
            if not follow and (last or view.next_after <= after):
                return
            after = view.next_after


def _require(retry: Retry, job: str, node: str) -> None:
    """Events of a job or node that does not exist would never come."""
    from shoal.cli.cluster import on_job, require_node

    if job:
        retry(lambda client: on_job(client, job, lambda c: c.job(job)))
    if node:
        retry(lambda client: require_node(client, node))


def _page(
    retry: Retry, after: int, limit: int, job: str, node: str, follow: bool, wanted: JobFilter
) -> EventLines:
    from shoal.calls.lines import EventLines
    from shoal.cli.cluster import read_as

    wait_s = FOLLOW_WAIT_S if follow else 0
    asked = {"job": job, "node": node, "wait_s": wait_s, "wanted": wanted}
    return retry(
        lambda client: read_as(EventLines, client.events, after=after, limit=limit, **asked)
    )


def print_event(record: EventLine, json: bool, fit: bool = False) -> None:
    """`fit`: cut it to one line of the terminal."""
    from shoal.cli.screen import show

    if json:
        show.as_json(record, lines=True)
        return
    facts = record.facts
    moment = datetime.datetime.fromtimestamp(facts.at_ms / 1000).astimezone()
    if show.at_terminal():
        style = event_style(facts.event, facts.outcome, facts.code)
        _print_styled(f"{moment:%H:%M:%S}", record.text, style, fit)
    else:
        stamp = moment.isoformat(timespec="milliseconds")
        print(f"{stamp}  {record.seq:>6}  {record.text}", flush=True)


def _print_styled(clock: str, sentence: str, style: str, fit: bool) -> None:
    from rich.text import Text

    from shoal.cli.screen import show

    whole = f"{clock}  {sentence}"
    for at, part in enumerate([show.fitted(whole)] if fit else show.lines_of(whole)):
        text = Text(part, style=style)
        if not at:
            text.stylize("dim", 0, len(clock))
        show.console().print(text, soft_wrap=True)


def event_style(kind: str, outcome: str = "", code: int = 0) -> str:
    """Red for a loss, green for a success, yellow for what needs attention."""
    match kind:
        case "NodeLost" | "MemberLost":
            return "red"
        case (
            "NodeSilent"
            | "JobRequeued"
            | "JobStopping"
            | "NodeIntended"
            | "NodeEnding"
            | "ServiceStopping"
        ):
            return "yellow"
        case "JobRunning" | "NodeReady" | "JobAdopted" | "ReplicaReady":
            return "green"
        case "JobFinished":
            return "green" if outcome == "succeeded" else "red"
        case "MemberExited":
            return "" if code == 0 else "red"
        case _:
            return ""
