"""The flags by which `ps`, `events` and `logs` find jobs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shoal.cli.command import Option
from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.model.finding import JobFilter

HEADING = "Which jobs"


def finding_flags(*without: str) -> list[Option]:
    """One set for all verbs, so that what finds a job in one of them finds it in the others."""
    found = [
        Option("--user", metavar="USER", default="", help="Submitted by this user."),
        Option("--tenant", metavar="NAME", default="", help="Of this tenant."),
        Option("--name", metavar="PATTERN", default="", help="Its name, e.g. 'train-*'."),
        Option(
            "--state",
            metavar="STATE",
            default="",
            help="In this state, e.g. waiting or failed; several with commas.",
        ),
        Option(
            "--label",
            "-l",
            metavar="K=V",
            multiple=True,
            help="With this label: run=a, run=a|b, run!=a, run or !run.",
        ),
        Option("--since", metavar="T", help="Submitted, started or ended in the last 2h, 1d ..."),
        Option("--until", metavar="T", help="Submitted longer ago than 2h, 1d ..."),
        Option("--node", metavar="NODE", default="", help="Its newest attempt is or was there."),
        Option("--service", metavar="NAME", default="", help="A replica of this service."),
        Option(
            "--text",
            metavar="WORDS",
            default="",
            help="All of these words in its id, name, user, command or labels.",
        ),
    ]
    for one in found:
        one.heading = HEADING
    return [one for one in found if one.name not in without]


def filter_of(given: dict[str, Any]) -> JobFilter:
    """The flags that were given, as one filter."""
    from shoal.model.finding import JobFilter

    since_ms = moment_ms(given.get("since"))
    wanted = JobFilter(
        user=given.get("user", ""),
        tenant=given.get("tenant", ""),
        name=given.get("name", ""),
        states=tuple(one for one in given.get("state", "").split(",") if one),
        labels=tuple(given.get("label", ())),
        since_ms=since_ms,
        node=given.get("node", ""),
        text=given.get("text", ""),
        service=given.get("service", ""),
        until_ms=moment_ms(given.get("until"), "until"),
    )
    problem = wanted.problem()
    if problem is not None:
        raise Failure(f"--{problem[0]}: {problem[1]}", USAGE)
    return wanted


def moment_ms(since: str | None, flag: str = "since") -> int:
    """The time that long ago; 0: none was given."""
    from shoal.forms import units

    try:
        return int(time.time() * 1000) - units.duration_ms(since) if since else 0
    except units.BadAmount as error:
        raise Failure(f"--{flag}: {error}", USAGE) from None
