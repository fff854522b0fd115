"""sbatch, srun, scancel and scontrol outside of a job, and the lists of squeue, sinfo and sacct."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from shoal.cli.slurm import options
from shoal.cli.slurm.options import job_id, slurm_id
from shoal.forms.failure import REFUSED, USAGE, Failure
from shoal.model.finding import JobFilter
from shoal.model.ids import in_order
from shoal.model.views import JobRow, JobView
from shoal.sdk.client import Client

# squeue and sacct: jobs as scripts and tools for Slurm read them.


STATES = {
    "waiting": ("PD", "PENDING"),
    "starting": ("CF", "CONFIGURING"),
    "running": ("R", "RUNNING"),
    "away": ("R", "RUNNING"),
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


BATCH = Path(__file__).with_name("batch.sh")
SCRIPT_BYTES_MAX = 120 * 1024  # it travels in a variable, which the kernel bounds


def sbatch(words: list[str]) -> int:
    """Submits a script with its `#SBATCH` lines; options of the command line override them."""
    given, rest = options.parse(words, "sbatch")
    script = _script(given, rest)
    name = os.path.basename(rest[0]) if rest else "wrap"
    wanted = {"job-name": name, **options.directives(script), **given}
    _print_notes(wanted)
    with Client() as client:
        view = _submit(client, script, rest[1:], wanted)
        number = slurm_id(view.id)
        if "parsable" in given:
            print(number)
        elif "quiet" not in given:
            print(f"Submitted batch job {number}")
        if "wait" not in wanted:
            return 0
        sys.stdout.flush()
        return _code(client.wait(view.id))


def _script(given: dict[str, str], rest: list[str]) -> str:
    if "wrap" in given:
        if rest:
            raise Failure("sbatch: --wrap and a script cannot be given together", USAGE)
        return f"#!/bin/sh\n{given['wrap']}\n"
    if not rest and sys.stdin.isatty():
        raise Failure("sbatch: name a script, or use --wrap COMMAND", USAGE)
    try:
        raw = Path(rest[0]).read_bytes() if rest else sys.stdin.buffer.read(SCRIPT_BYTES_MAX + 1)
        script = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(
            f"sbatch: the script {rest[0] if rest else ''} cannot be read: {error}", REFUSED
        ) from None
    if not script.startswith("#!"):
        raise Failure("sbatch: the script must begin with a line like #!/bin/bash", REFUSED)
    if len(raw) > SCRIPT_BYTES_MAX or "\0" in script:
        message = f"sbatch: a script is text of at most {SCRIPT_BYTES_MAX // 1024} KiB"
        raise Failure(f"{message}; call a longer one from a short one", REFUSED)
    return script


def _submit(client: Client, script: str, arguments: list[str], wanted: dict[str, str]) -> JobView:
    asked = options.shape(wanted)
    fields = options.fields(wanted)
    folder = os.path.abspath(wanted.get("chdir") or os.getcwd())
    name = wanted["job-name"]
    default = "slurm-%A_%a.out" if "array" in wanted else "slurm-%j.out"
    files = [
        _file(wanted.get(key, kept), folder, name)
        for key, kept in (("output", default), ("error", ""))
    ]
    if "array" in wanted:  # there, braces in the command name the element's values
        files, arguments = ([_braced(one) for one in texts] for texts in (files, arguments))
    spread = f"(x{asked.nodes})" if asked.nodes > 1 else ""
    environment = _exported(wanted.get("export", "")) | {
        "SBATCH_SCRIPT": script,
        "SLURM_JOB_NAME": name,
        "SLURM_SUBMIT_DIR": os.getcwd(),
        "SLURM_SUBMIT_HOST": socket.gethostname(),
        "SLURM_CLUSTER_NAME": "shoal",
        "SLURM_CPUS_PER_TASK": str(asked.cpus),
        "SLURM_CPUS_ON_NODE": str(asked.cpus * asked.tasks_per_node),
        **{key: str(asked.tasks) for key in ("SLURM_NTASKS", "SLURM_NPROCS")},
        **{key: str(asked.nodes) for key in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")},
        "SLURM_NTASKS_PER_NODE": str(asked.tasks_per_node),
        "SLURM_TASKS_PER_NODE": f"{asked.tasks_per_node}{spread}",
    }  # fmt: skip
    fields["where"] = [*fields.get("where", []), *_partition(client, wanted.get("partition", ""))]
    command = ["/bin/sh", "-c", BATCH.read_text(), "sbatch", *files, *arguments]
    return client.run(command, workdir=folder, env=environment, **fields)


def _file(pattern: str, folder: str, name: str) -> str:
    """What is known now of the names in it; the job knows the rest."""
    for key, value in (("%x", name), ("%u", os.environ.get("USER", "root")), ("%%", "%")):
        pattern = pattern.replace(key, value)
    return os.path.join(folder, pattern) if pattern.strip("-") else pattern


def _braced(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _exported(text: str) -> dict[str, str]:
    """Slurm sends the whole environment. Here it is stored with the job, and a shell holds tokens
    and keys: only what --export names goes along, and all of it only if that says ALL."""
    found: dict[str, str] = {}
    for word in filter(None, text.split(",")):
        name, equals, value = word.partition("=")
        if name == "ALL":
            own = ("SHOAL_", "SLURM_", "SBATCH_")
            found |= {key: one for key, one in os.environ.items() if not key.startswith(own)}
        elif equals:
            found[name] = value
        elif name in os.environ:
            found[name] = os.environ[name]
    return found


def _partition(client: Client, name: str) -> list[str]:
    """Nodes may have a label `partition`. Where none has one, all nodes are one partition."""
    if not name:
        return []
    known = {node.labels["partition"] for node in client.nodes() if "partition" in node.labels}
    asked = [one for one in name.split(",") if one in known]
    if known and not asked:
        raise Failure(f"--partition: no node has the label partition={name}", REFUSED)
    if not known:
        print("note: --partition has no effect: no node has a label partition", file=sys.stderr)
    return [f"partition={'|'.join(asked)}"] if asked else []


def srun(words: list[str]) -> int:
    """In a job, starts its tasks. Outside of one, submits the command and shows its output."""
    if os.environ.get("SLURM_JOB_ID") and os.environ.get("SHOAL_JOB_ID"):
        from shoal.cli.slurm.options import run_tasks

        return run_tasks(words)
    given, command = options.parse(words, "srun")
    if not command:
        raise Failure("srun: name a command", USAGE)
    _print_notes(given)
    inner = [word for word in ("label",) if word in given]
    step = ["srun", *(f"--{name}" for name in inner), *command]
    script = f"#!/bin/sh\nexec {shlex.join(step)}\n"
    kept = {"job-name": os.path.basename(command[0]), "output": "-"}
    with Client() as client:
        view = _submit(client, script, [], {**kept, **given, "error": ""})
        try:
            for line in client.follow(view.id):
                print(line, flush=True)
            return _code(client.wait(view.id))
        except KeyboardInterrupt:
            client.cancel(view.id)
            raise


def _code(view: JobView) -> int:
    code = view.code if view.code is not None else 1
    if view.state == "succeeded":
        return 0
    print(f"job {slurm_id(view.id)} {view.state}: {view.why}", file=sys.stderr)
    return code if 0 < code < 256 else 1


def scancel(words: list[str]) -> int:
    """Ends jobs by id, by name (--name), or all of yours (--me, -u)."""
    chosen: list[str] = []
    name, mine, todo = "", False, list(words)
    while todo:
        word = todo.pop(0)
        key, _, value = word.partition("=")
        if key in ("-n", "--name", "--jobname"):
            name = value or (todo.pop(0) if todo else "")
        elif key in ("-u", "--user"):
            mine = bool(value or todo.pop(0)) or mine
        elif key == "--me":
            mine = True
        elif key in ("-s", "--signal", "-t", "--state"):
            raise Failure(f"scancel: Shoal does not know the option {key}", USAGE)
        elif not word.startswith("-"):
            chosen += [job_id(one) for one in word.split(",")]
    if not chosen and not name and not mine:
        raise Failure("scancel: name a job, e.g. 7 or 7_3", USAGE)
    with Client() as client:
        if name or mine:
            chosen += [row.id for row in client.jobs() if not name or row.name == name]
        for one in dict.fromkeys(chosen):
            client.cancel(one)
    return 0


def scontrol(words: list[str]) -> int:
    """`show hostnames`, `show job` and `requeue`: what scripts call."""
    if words[:2] == ["show", "hostnames"]:
        text = words[2] if len(words) > 2 else os.environ.get("SLURM_JOB_NODELIST", "")
        print("\n".join(options.hostnames(text)))
        return 0
    if words[:1] == ["requeue"] and len(words) == 2:
        with Client() as client:
            client.requeue(job_id(words[1]))
        return 0
    if words[:2] in (["show", "job"], ["show", "jobid"]) and len(words) == 3:
        with Client() as client:
            view = client.job(job_id(words[2]))
        print(f"JobId={slurm_id(view.id)} JobName={view.name or view.command.split()[0]}")
        print(f"   JobState={long_state(view.state)} Reason={view.why.replace(' ', '_') or 'None'}")
        print(f"   NodeList={','.join(view.nodes)} WorkDir={view.spec.workdir}")
        return 0
    raise Failure("scontrol: Shoal knows show hostnames, show job ID and requeue ID", USAGE)


COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "sbatch": sbatch,
    "srun": srun,
    "squeue": squeue,
    "scancel": scancel,
    "sacct": sacct,
    "scontrol": scontrol,
}


def _print_notes(wanted: dict[str, str]) -> None:
    for line in options.notes(wanted):
        print(f"note: {line}", file=sys.stderr)


def main(words: list[str]) -> int:
    from shoal.cli.errors import exit_code_of

    if not words or words[0] not in COMMANDS:
        print(f"error: name one of {', '.join(COMMANDS)}", file=sys.stderr)
        return USAGE
    if words[1:] in (["--version"], ["-V"]):
        from shoal import __version__

        print(f"slurm-wlm 22.05.8 (commands of shoal {__version__})")
        return 0
    return exit_code_of(lambda: COMMANDS[words[0]](words[1:]))
