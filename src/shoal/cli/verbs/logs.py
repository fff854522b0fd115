"""`shoal logs`: the output of a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.command import (
    Argument,
    Option,
    filter_of,
    finding_flags,
    flag,
    job_word,
    moment_ms,
    number,
    verb,
)

if TYPE_CHECKING:
    from shoal.cli.cluster import Retry
    from shoal.cli.screen.follow import Chosen, Reader
    from shoal.cli.screen.output import Output
    from shoal.client import Client
    from shoal.model.finding import JobFilter
    from shoal.model.views import JobRow, JobView

TAIL_MAX = 1_000_000


@verb(
    Argument("jobs", "[JOB...]", "Ids or names of jobs or services.", type=job_word, nargs=-1),
    flag("--follow", "-f", help="Keep printing new output."),
    Option("--member", "-m", metavar="M", type=number(0), help="Only this member."),
    Option("--attempt", metavar="N", type=number(1), help="This attempt. [the newest]"),
    Option(
        "--tail",
        metavar="N",
        type=number(0, TAIL_MAX),
        help="Only the last N lines of each member.",
    ),
    Option("--grep", metavar="TEXT", default="", help="Only lines that contain this text."),
    Option("--since", metavar="T", help="Only what was written in the last 10m, 2h ..."),
    Option("--output", "-o", metavar="PATH", help="Write to this file, or a folder for several."),
    *finding_flags("since"),
)
def logs(
    jobs: tuple[str, ...],
    follow: bool,
    member: int | None,
    attempt: int | None,
    tail: int | None,
    grep: str,
    since: str | None,
    output: str | None,
    json: bool,
    home: Path,
    **given: Any,
) -> None:
    """Print the output of jobs, or of a service's newest replica.

    By default it prints all members. If there are several, each line starts
    with the member's number, e.g. "[3] ", and for several jobs also with the
    job's id. Flags that choose jobs print those that match, at most 200.

    With --follow it continues across attempts until the jobs end; Ctrl-C stops
    the printing, not the jobs. With flags that choose jobs it goes on for jobs
    that match later. A pipe gets the bytes as the job wrote them. A terminal gets
    them without control sequences that would garble it.

    Examples:
      shoal logs j7
      shoal logs -f j7
      shoal logs j7 -m 0 --tail 20
      shoal logs j7 --attempt 1 > first-try.log
      shoal logs -f chat
      shoal logs j7 j8.1 --grep loss --since 10m
      shoal logs --label run=a -f
      shoal logs --name 'train-*' --state failed --output logs/
    """
    from shoal.cli import cluster
    from shoal.cli.screen.follow import pick_members

    wanted, since_ms = filter_of(given), moment_ms(since)
    _check(jobs, wanted, tail, since, output)
    if len(jobs) != 1 or "." in jobs[0] or grep or since or output:
        chosen = (member, attempt, tail, grep, since_ms)
        _many(jobs, wanted, chosen, follow, output, json, home)
        return
    job = jobs[0]
    with cluster.Retry(home, retry_s=cluster.RETRY_S if follow else 0) as retry:
        asked = retry(lambda client: cluster.job_id(client, _meant(client, job)))
        view = retry(lambda client: cluster.on_job(client, asked, lambda c: c.job(asked)))
        if attempt is not None and attempt > view.attempt:
            _refuse_attempt(view)
        if view.array is not None:
            _refuse_array(view)
        members = pick_members(member, max(view.members, view.members_max))
        out = make_output(prefixed=len(members) > 1, json=json)
        if follow and attempt is None:
            _follow(retry, asked, members, out, tail)
        else:
            _read(retry, view, attempt or view.attempt, members, out, tail, follow)


def _check(
    jobs: tuple[str, ...],
    wanted: JobFilter,
    tail: int | None,
    since: str | None,
    output: str | None,
) -> None:
    from shoal.forms.failure import USAGE, Failure

    if not jobs and not wanted.given:
        raise Failure("JOB: name a job, or choose some, e.g. --label run=a; see --help", USAGE)
    if jobs and wanted.given:
        raise Failure("JOB: name jobs, or choose them by flags; both together is too much", USAGE)
    if tail is not None and since:
        raise Failure("--tail: cannot be combined with --since; give one of them", USAGE)
    if output == "":
        raise Failure("--output: is empty; name a file or folder", USAGE)


def _many(
    jobs: tuple[str, ...],
    wanted: JobFilter,
    chosen: tuple[int | None, int | None, int | None, str, int],
    follow: bool,
    output: str | None,
    json: bool,
    home: Path,
) -> None:
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.cli.screen.follow import JOBS_MAX, Chosen, download, follow_all, print_all
    from shoal.forms.failure import USAGE, Failure

    parts = Chosen(*chosen)
    if follow and (output or parts.attempt):
        flag_ = "--output" if output else "--attempt"
        raise Failure(f"{flag_}: cannot be combined with --follow here", USAGE)
    with cluster.Retry(home, retry_s=cluster.RETRY_S if follow else 0) as retry:
        names, parts = _named(retry, jobs, parts)

        def look() -> list[JobRow]:
            if not names:
                return retry(lambda c: _matching(c, wanted, JOBS_MAX))
            return [
                retry(lambda c, name=name: cluster.on_job(c, name, lambda d: d.job(name)))  # type: ignore[misc]
                for name in names
            ]

        if follow:
            follow_all(retry, look, parts, json=json, go_on=not names)
            return
        rows = look()
        if not rows:
            raise Failure("no jobs match; see: shoal ps -a")
        views = [retry(lambda c, row=row: c.job(row.id)) for row in rows]  # type: ignore[misc]
        for view in views:
            if view.array is not None:
                _refuse_array(view)
        if output:
            for path in download(retry, views, parts, Path(output)):
                show.line(str(path))
        else:
            print_all(retry, views, parts, json=json)


def _matching(client: Client, wanted: JobFilter, limit: int) -> list[JobRow]:
    """An array has no output of its own, so its elements stand for it."""
    import msgspec

    found: list[JobRow] = []
    for row in client.jobs(finished=True, limit=limit, wanted=wanted):
        if row.array is None:
            found.append(row)
        elif len(found) < limit:
            inside = msgspec.structs.replace(wanted, array=row.id)
            found += client.jobs(finished=True, limit=limit - len(found), wanted=inside)
    return found[:limit]


def _meant(client: Client, word: str) -> str:
    """As naming.py reads it, with an id for the name of a service or job."""
    from shoal.cli import cluster

    if cluster.is_service(client, word):
        return cluster.replica_of(client, word.strip())
    return cluster.spelled(client, word, what="job or service")


def _named(retry: Retry, jobs: tuple[str, ...], parts: Chosen) -> tuple[list[str], Chosen]:
    """What the words mean: jobs, elements, members or services."""
    from shoal.cli import cluster
    from shoal.cli.cluster import named
    from shoal.forms.failure import USAGE, Failure

    names: list[str] = []
    members: set[int | None] = set()
    for word in dict.fromkeys(jobs):
        found = named(
            retry(lambda c, word=word: _meant(c, word)),  # type: ignore[misc]
            lambda job: retry(lambda c: cluster.on_job(c, job, lambda d: d.job(job))),
        )
        names.append(found.job)
        members.add(found.member)
    if len(members) > 1:
        raise Failure("JOB: name members of each job, or of none", USAGE)
    one = next(iter(members), None)
    parts = parts._replace(alone=len(names) == 1)
    return names, parts._replace(member=one) if one is not None else parts


def make_output(*, prefixed: bool, json: bool) -> Output:
    from shoal.cli.screen.output import JsonOutput, TextOutput
    from shoal.cli.screen.show import at_terminal

    return JsonOutput() if json else TextOutput(prefixed=prefixed, terminal=at_terminal())


def _follow(retry: Retry, job: str, members: list[int], out: Output, tail: int | None) -> None:
    from shoal.cli.screen.follow import follow

    follow(retry, job, members, out, tail=tail)


def _read(
    retry: Retry,
    view: JobView,
    attempt: int,
    members: list[int],
    out: Output,
    tail: int | None,
    follow: bool,
) -> None:
    from shoal.cli.screen.follow import Reader, follow_attempt
    from shoal.cli.screen.show import note

    if not attempt:
        note(f"{view.id} has not started: {view.why}")
        return
    reader: Reader = Reader(retry, view.id, attempt, members, out)
    if tail is not None:
        reader.skip_to_tail(tail)
    if follow:
        follow_attempt(reader, retry, view.id, out)
    else:
        reader.read_in_turn()
        out.end()


def _refuse_array(view: JobView) -> None:
    from shoal.forms.failure import Failure

    raise Failure(f"{view.id} is an array; name an element, e.g. shoal logs {view.id}.0")


def _refuse_attempt(view: JobView) -> None:
    from shoal.forms.failure import Failure

    had = f"has had {view.attempt}" if view.attempt else f"has not started: {view.why}"
    raise Failure(f"--attempt: {view.id} {had}")
