"""`shoal logs`: the output of a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, flag, number, verb

if TYPE_CHECKING:
    from shoal.cli.cluster import Retry
    from shoal.cli.screen.follow import Reader
    from shoal.cli.screen.output import Output
    from shoal.model.views import JobView

TAIL_MAX = 1_000_000


@verb(
    Argument("job", "JOB", "A job's id, or a service's name."),
    flag("--follow", "-f", help="Keep printing new output."),
    Option("--member", "-m", metavar="M", type=number(0), help="Only this member."),
    Option("--attempt", metavar="N", type=number(1), help="This attempt. [the newest]"),
    Option(
        "--tail",
        metavar="N",
        type=number(0, TAIL_MAX),
        help="Only the last N lines of each member.",
    ),
)
def logs(
    job: str,
    follow: bool,
    member: int | None,
    attempt: int | None,
    tail: int | None,
    json: bool,
    home: Path,
) -> None:
    """Print the output of a job, or of a service's newest replica.

    By default it prints all members. If there are several, each line starts
    with the member's number, e.g. "[3] ". With --follow it continues across
    attempts until the job ends; Ctrl-C stops the printing, not the job. A pipe
    gets the bytes as the job wrote them. A terminal gets them without control
    sequences that would garble it.

    Examples:
      shoal logs j7
      shoal logs -f j7
      shoal logs j7 -m 0 --tail 20
      shoal logs j7 --attempt 1 > first-try.log
      shoal logs -f chat
    """
    from shoal.cli import cluster
    from shoal.cli.screen.follow import pick_members

    asked = "" if cluster.is_service(job) else cluster.job_id(job)
    with cluster.Retry(home, retry_s=cluster.RETRY_S if follow else 0) as retry:
        asked = asked or retry(lambda client: cluster.replica_of(client, job.strip()))
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
