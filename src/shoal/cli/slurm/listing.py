"""squeue and sacct: jobs as scripts and tools for Slurm read them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from shoal.cli.slurm.options import job_id, slurm_id
from shoal.forms.failure import USAGE, Failure
from shoal.model.finding import JobFilter
from shoal.model.ids import in_order
from shoal.model.views import JobRow
from shoal.sdk.client import Client

STATES = {
    "waiting": ("PD", "PENDING"),
    "starting": ("CF", "CONFIGURING"),
    "running": ("R", "RUNNING"),
    "stopping": ("CG", "COMPLETING"),
    "succeeded": ("CD", "COMPLETED"),
    "failed": ("F", "FAILED"),
    "cancelled": ("CA", "CANCELLED"),
    "timed-out": ("TO", "TIMEOUT"),
}
ASLEEP = ("S", "SUSPENDED")
FORMAT = "%.18i %.9P %.24j %.8u %.2t %.10M %.6D %R"
FIELDS = "jobid,jobname,partition,account,alloccpus,state,exitcode"
VALUED = {"-o": "format", "--format": "format", "-j": "jobs", "--job": "jobs", "--jobs": "jobs",
          "-u": "user", "--user": "user", "-t": "states", "--state": "states",
          "--states": "states", "-S": "start", "--starttime": "start", "-E": "end",
          "--endtime": "end", "-n": "name", "--name": "name", "-p": "partition",
          "--partition": "partition", "-M": "clusters", "--clusters": "clusters"}  # fmt: skip


class Asked(NamedTuple):
    values: dict[str, str]
    switches: set[str]


def squeue(words: list[str]) -> int:
    """Jobs that wait or run; with `-t all`, those that ended lately, too."""
    asked = _parse(words, {**VALUED}, {"-h", "--noheader", "--me", "-a", "--all", "-r", "--array"})
    ended = "states" in asked.values
    rows = _rows(asked, ended=ended)
    states = {one.upper() for one in asked.values.get("states", "all").split(",")}
    if "ALL" not in states:
        rows = [row for row in rows if states & {short_state(row.state), long_state(row.state)}]
    shown = asked.values.get("format", FORMAT).strip("\"'")
    if not asked.switches & {"-h", "--noheader"}:
        print(_formatted(shown, lambda key: COLUMNS.get(key, ("N/A", None))[0]))
    for row in rows:
        print(_formatted(shown, lambda key, row=row: _cell(key, row)))  # type: ignore[misc]
    return 0


def sacct(words: list[str]) -> int:
    """Jobs that ended, and those that wait or run, one line each: there are no steps."""
    valued = {key: name for key, name in VALUED.items() if key != "-n"}
    switches = {"-n", "--noheader", "-X", "--allocations", "-P", "--parsable2", "-p", "--parsable"}
    asked = _parse(words, {**valued, "-s": "states"}, switches | {"-a", "--allusers", "-D", "-b"})
    names = [one.partition("%")[0] for one in asked.values.get("format", FIELDS).split(",")]
    parsable = bool(asked.switches & {"-P", "--parsable2", "-p", "--parsable"})
    end = "|" if asked.switches & {"-p", "--parsable"} else ""
    table = [] if asked.switches & {"-n", "--noheader"} else [names]
    table += [[_field(name.lower(), row) for name in names] for row in _rows(asked, ended=True)]
    if not parsable and table and names == table[0]:
        table.insert(1, ["-" * 10 for _ in names])
    for line in table:
        print("|".join(line) + end if parsable else " ".join(f"{one:>12}" for one in line))
    return 0


def _parse(words: list[str], valued: dict[str, str], switches: set[str]) -> Asked:
    values: dict[str, str] = {}
    found: set[str] = set()
    todo = list(words)
    while todo:
        word = todo.pop(0)
        key, equals, value = word.partition("=")
        if not word.startswith("--") and word[:2] in valued and len(word) > 2:
            key, equals, value = word[:2], "=", word[2:]
        if key in valued:
            if not equals and not todo:
                raise Failure(f"{key} needs a value", USAGE)
            values[valued[key]] = value if equals else todo.pop(0)
        elif word in switches:
            found.add(word)
        else:
            raise Failure(f"Shoal does not know the option {key}", USAGE)
    return Asked(values, found)


def _rows(asked: Asked, *, ended: bool) -> list[JobRow]:
    wanted = [job_id(one) for one in asked.values.get("jobs", "").split(",") if one]
    with Client() as client:
        if wanted:
            rows: Iterable[JobRow] = _by_id(client, wanted)
        else:
            rows = client.jobs(finished=ended)
    name = asked.values.get("name", "")
    return sorted(
        (row for row in rows if not name or row.name == name), key=lambda row: in_order(row.id)
    )


def _by_id(client: Client, wanted: list[str]) -> list[JobRow]:
    from shoal.client import ShoalError

    found: list[JobRow] = []
    for one in wanted:
        try:
            view = client.job(one)
        except ShoalError as error:
            if error.status == 404:
                continue  # as Slurm does for jobs that it has forgotten
            raise
        if view.array is None:
            found.append(view)
        else:
            found += client.jobs(finished=True, limit=1000, wanted=JobFilter(array=one))
    return found


def short_state(state: str) -> str:
    return STATES.get(state, ASLEEP)[0]


def long_state(state: str) -> str:
    return STATES.get(state, ASLEEP)[1]


def _formatted(text: str, cell: Callable[[str], str]) -> str:
    def replaced(found: re.Match[str]) -> str:
        right, width, key = found[1], int(found[2] or 0), found[3]
        value = cell(key)
        if not width:
            return value
        return f"{value:>{width}}"[-width:] if right else f"{value:<{width}}"[:width]

    return re.sub(r"%(\.?)(\d*)([a-zA-Z])", replaced, text).rstrip()


COLUMNS: dict[str, tuple[str, Callable[[JobRow], str] | None]] = {
    "i": ("JOBID", lambda row: slurm_id(row.id)),
    "A": ("JOBID", lambda row: slurm_id(row.id)),
    "F": ("ARRAY_JOB_ID", lambda row: slurm_id(row.id).partition("_")[0]),
    "K": ("ARRAY_TASK_ID", lambda row: slurm_id(row.id).partition("_")[2] or "N/A"),
    "P": ("PARTITION", lambda row: "shoal"),  # noqa: ARG005
    "j": ("NAME", lambda row: _name(row)),
    "u": ("USER", lambda row: row.user or row.tenant),
    "a": ("ACCOUNT", lambda row: row.labels.get("account", row.tenant)),
    "t": ("ST", lambda row: short_state(row.state)),
    "T": ("STATE", lambda row: long_state(row.state)),
    "M": ("TIME", lambda row: _elapsed(row)),
    "D": ("NODES", lambda row: str(len(row.nodes) or row.members)),
    "C": ("CPUS", lambda row: str(row.members)),
    "N": ("NODELIST", lambda row: ",".join(row.nodes)),
    "R": ("NODELIST(REASON)", lambda row: ",".join(row.nodes) or f"({row.why})"),
    "r": ("REASON", lambda row: row.why or "None"),
}


def _cell(key: str, row: JobRow) -> str:
    make = COLUMNS.get(key, ("", None))[1]
    return make(row) if make else "N/A"


def _field(name: str, row: JobRow) -> str:
    code = row.code or 0
    status = f"0:{code - 128}" if code > 128 else f"{code}:0"
    values = {
        "jobid": slurm_id(row.id),
        "jobidraw": slurm_id(row.id),
        "jobname": _name(row),
        "partition": "shoal",
        "account": row.labels.get("account", row.tenant),
        "user": row.user,
        "alloccpus": str(row.members),
        "nnodes": str(len(row.nodes) or row.members),
        "nodelist": ",".join(row.nodes) or "None assigned",
        "state": long_state(row.state),
        "exitcode": status if row.finished_ms else "0:0",
        "elapsed": _elapsed(row),
        "submit": _moment(row.submitted_ms),
        "start": _moment(row.running_ms),
        "end": _moment(row.finished_ms),
        "reason": row.why,
    }
    return values.get(name, "")


def _name(row: JobRow) -> str:
    return row.name or (row.command.split() or ["job"])[0].rpartition("/")[2]


def _moment(at_ms: int | None) -> str:
    if not at_ms:
        return "Unknown"
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at_ms / 1000))


def _elapsed(row: JobRow) -> str:
    if row.running_ms is None:
        return "0:00"
    until_ms = row.finished_ms or int(time.time() * 1000)
    minutes, seconds = divmod(max(0, until_ms - row.running_ms) // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if not days and not hours:
        return f"{minutes}:{seconds:02}"
    return (f"{days}-" if days else "") + f"{hours:02}:{minutes:02}:{seconds:02}"
