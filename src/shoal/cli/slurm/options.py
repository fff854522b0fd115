"""What a Slurm script asks for, as the fields of a job. Pure: no cluster is asked."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import IO, Any, NamedTuple

from shoal.forms.failure import USAGE, Failure

# Long name -> short name. All of these take a value.
VALUES = {
    "array": "a", "begin": "b", "chdir": "D", "constraint": "C", "cpus-per-task": "c",
    "dependency": "d", "error": "e", "export": "", "gpus": "G", "gpus-per-node": "",
    "gpus-per-task": "", "gres": "", "job-name": "J", "mem": "", "mem-per-cpu": "",
    "mem-per-gpu": "", "nodes": "N", "ntasks": "n", "ntasks-per-node": "", "output": "o",
    "partition": "p", "account": "A", "time": "t", "wrap": "",
}  # fmt: skip
SWITCHES = {
    "exclusive": "", "requeue": "", "no-requeue": "", "parsable": "", "wait": "W", "quiet": "Q",
    "label": "l", "hold": "H",
}  # fmt: skip
# Accepted and without effect here. A note says so if a job may rely on it.
RELIED_ON = {
    "licenses": "there are no licenses",
    "mail-type": "use shoal notify",
    "mail-user": "use shoal notify",
    "qos": "quotas and weights come from the tenant",
    "reservation": "there are no reservations",
    "signal": "a job gets SIGTERM before it is stopped",
    "nodelist": "use --constraint with labels of the nodes",
    "exclude": "use --constraint with labels of the nodes",
}
BARE = {"unbuffered", "overlap", "exact", "verbose", "spread-job", "oversubscribe", "pty"}
# With a value only as --name=value.
OPTIONAL = {"exclusive", "kill-on-bad-exit", "nice", "immediate", "propagate"}
WITHOUT_EFFECT = {
    *RELIED_ON, *BARE, *OPTIONAL, "cpu-bind", "cpus-per-gpu", "clusters", "comment", "core-spec",
    "deadline", "distribution", "gpu-bind", "gpu-freq", "hint", "input", "kill-on-invalid-dep",
    "mem-bind", "mpi", "ntasks-per-core", "ntasks-per-gpu", "open-mode", "profile", "switches",
    "threads-per-core", "time-min", "tmp", "wckey",
}  # fmt: skip
SHORT_WITHOUT_EFFECT = {
    "q": "qos", "w": "nodelist", "x": "exclude", "u": "unbuffered", "K": "kill-on-bad-exit",
    "m": "distribution", "M": "clusters", "i": "input", "s": "oversubscribe", "v": "verbose",
    "L": "licenses",
}  # fmt: skip
OPTIONAL = {
    "exclusive",
    "kill-on-bad-exit",
    "nice",
    "immediate",
    "propagate",
}  # only as --name=value
DIRECTIVE = re.compile(r"^#SBATCH\s+(.*)$")
TIME = re.compile(r"(?:(?P<d>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")


class Wishes(NamedTuple):
    """The options of a script or a command line, by their long names, and what follows them."""

    options: dict[str, str]
    rest: list[str]


def parse(words: Sequence[str], command: str) -> Wishes:
    """As Slurm reads them: options up to the first word that is none."""
    shorts = {short: name for name, short in (VALUES | SWITCHES).items() if short}
    shorts |= SHORT_WITHOUT_EFFECT
    found: dict[str, str] = {}
    todo = list(words)
    while todo and todo[0].startswith("-") and todo[0] != "-":
        word = todo.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, value = shorts.get(word[1], word), word[2:].removeprefix("=")
            equals = value
        if name not in {*VALUES, *SWITCHES, *WITHOUT_EFFECT}:
            raise Failure(f"{command}: Shoal does not know the option {word.split('=')[0]}", USAGE)
        bare = name in SWITCHES or name in BARE or name in OPTIONAL
        if not bare and not equals:
            if not todo:
                raise Failure(f"{command}: --{name} needs a value", USAGE)
            value = todo.pop(0)
        if bare and not word.startswith("--") and value:  # -Wl: several switches in one word
            todo.insert(0, f"-{value}")
        found[name] = value
    return Wishes(found, todo)


def directives(script: str, command: str = "sbatch") -> dict[str, str]:
    """The `#SBATCH` lines before the first command."""
    found: dict[str, str] = {}
    for line in script.splitlines():
        matched = DIRECTIVE.match(line)
        if matched:
            words = shlex.split(matched[1], comments=True)
            found |= parse(words, command).options
        elif line.strip() and not line.startswith("#"):
            break
    return found


def notes(options: Iterable[str]) -> list[str]:
    """What is not done, for people."""
    return [f"--{name} has no effect: {RELIED_ON[name]}" for name in options if name in RELIED_ON]


class Shape(NamedTuple):
    """Tasks and nodes of a Slurm job. A node of it is a member here."""

    tasks: int
    nodes: int
    cpus: int  # of a task

    @property
    def tasks_per_node(self) -> int:
        return -(-self.tasks // self.nodes)


def shape(options: dict[str, str]) -> Shape:
    nodes = _count(options, "nodes", options.get("nodes", "1").partition("-")[0])
    per_node = _count(options, "ntasks-per-node", options.get("ntasks-per-node", "0"), 0)
    tasks = _count(options, "ntasks", options.get("ntasks", str(max(1, per_node) * nodes)))
    if per_node and "nodes" not in options and "ntasks" in options:
        nodes = -(-tasks // per_node)
    if tasks < nodes:
        nodes = tasks  # as Slurm does, with a warning
    return Shape(tasks, nodes, _count(options, "cpus-per-task", options.get("cpus-per-task", "1")))


def fields(options: dict[str, str]) -> dict[str, Any]:
    """The fields of the job, except its command, its folder and its environment."""
    asked = shape(options)
    found: dict[str, Any] = {"cpus": asked.cpus * asked.tasks_per_node}
    if asked.nodes > 1:  # the script runs in member 0, and srun starts the tasks
        found |= {"members": asked.nodes, "per_node": 1, "launcher": True}
    model, gpus = _gpus(options, asked)
    if gpus:
        found["gpus"] = gpus
    if model:
        found["gpu_model"] = [model]
    memory_mb = _memory_mb(options, found["cpus"], gpus)
    if memory_mb:
        found["memory"] = f"{memory_mb}M"
    simple = {"job-name": "name", "array": "array", "begin": "begin"}
    found |= {field: options[name] for name, field in simple.items() if options.get(name)}
    if options.get("account"):
        found["label"] = {"account": options["account"]}
    if "exclusive" in options:
        found["whole_nodes"] = True
    if options.get("time"):
        seconds = seconds_of(options["time"])
        if seconds:
            found["time_limit"] = f"{seconds}s"
    if "no-requeue" in options:
        found["restart"] = "never"
    if options.get("constraint"):
        found["where"] = options["constraint"].split("&")
    if options.get("dependency"):
        found["after"] = _after(options["dependency"])
    return found


def job_id(text: str) -> str:
    """`7` is the job j7, and `7_3` the element j7.3; our own ids are fine, too."""
    matched = re.fullmatch(r"j?(\d{1,15})(?:[_.](\d{1,9}))?", text.strip())
    if not matched:
        raise Failure(f"{text!r} is not a job id like 7 or 7_3", USAGE)
    return f"j{matched[1]}" + (f".{matched[2]}" if matched[2] else "")


def slurm_id(id_: str) -> str:
    return id_.removeprefix("j").replace(".", "_")


def seconds_of(text: str) -> int:
    """Slurm's times: 30 (minutes), 5:30, 1:00:00, 2-12, 2-12:30. 0: without a limit."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return 0
    matched = TIME.fullmatch(text)
    if not matched:
        raise Failure(f"--time: {text!r} is not a time like 30, 1:00:00 or 2-12:00", USAGE)
    parts = [int(part) for part in matched["parts"].split(":")]
    if matched["d"]:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(matched["d"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def hostnames(text: str) -> list[str]:
    """`a,n[1-3,7]` -> a, n1, n2, n3, n7."""
    found: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?[^,\[]*", text):
        matched = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if not matched:
            found.append(part)
            continue
        for piece in matched[2].split(","):
            first, _, last = piece.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            found += [f"{matched[1]}{n:0{len(first)}}{matched[3]}" for n in numbers]
    return found


def _count(options: dict[str, str], name: str, text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise Failure(f"--{name}: {options.get(name)!r} is not a number from {least}", USAGE)
    return int(text)


def _gpus(options: dict[str, str], asked: Shape) -> tuple[str, int]:
    """The model, and how many on each node."""
    for name, share in (("gres", 1), ("gpus-per-node", 1), ("gpus-per-task", 0), ("gpus", -1)):
        text = options.get(name, "")
        if name == "gres":
            text = next((one[4:] or "1" for one in text.split(",") if one[:3] == "gpu"), "")
        if not text:
            continue
        *models, count = text.split(":")
        if not count.isdecimal():
            models, count = [count], "1"
        number = int(count)
        if share == 0:
            number *= asked.tasks_per_node
        elif share < 0:
            if number % asked.nodes:
                message = f"--gpus: {number} GPUs cannot be shared evenly by {asked.nodes} nodes"
                raise Failure(f"{message}; use --gpus-per-node", USAGE)
            number //= asked.nodes
        return (models[0] if models else ""), number
    return "", 0


UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


def _memory_mb(options: dict[str, str], cpus: int, gpus: int) -> int:
    """On each node; 0: nothing was asked, or all of it (`--mem=0`)."""
    for name, times in (("mem", 1), ("mem-per-cpu", cpus), ("mem-per-gpu", gpus)):
        text = options.get(name, "")
        if text:
            matched = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.upper())
            if not matched:
                raise Failure(f"--{name}: {text!r} is not a size like 4000M or 16G", USAGE)
            return round(float(matched[1]) * UNITS[matched[2] or "M"] * times)
    return 0


def _after(text: str) -> list[str]:
    kinds = {"afterok": "", "afterany": ":any", "afternotok": ":fail"}
    found = []
    for part in re.split(r"[,?]", text):
        kind, *ids = part.split(":")
        if kind not in kinds or not ids:
            named = ", ".join(kinds)
            raise Failure(f"--dependency: {part!r} is not one of {named}, with job ids", USAGE)
        found += [job_id(one) + kinds[kind] for one in ids]
    return found


# srun inside a job: starts its tasks in the members and passes their output and codes on.


def run_tasks(words: list[str]) -> int:
    given, command = parse(words, "srun")
    if not command:
        raise Failure("srun: name a command", USAGE)
    job, hosts = os.environ, _hosts()
    whole = {"nodes": str(len(hosts)), "ntasks": job.get("SLURM_NTASKS", str(len(hosts)))}
    if "ntasks-per-node" in given or "nodes" in given:
        whole.pop("ntasks")
    asked = shape({**whole, **given})
    if asked.nodes > len(hosts):
        raise Failure(f"srun: --nodes {asked.nodes}: the job has {len(hosts)}", USAGE)
    step = str(os.getpid())  # two steps may begin at the same moment, and leave nothing behind
    started: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    for rank in range(asked.tasks):
        number = rank // asked.tasks_per_node
        more = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % asked.tasks_per_node),
            "SLURM_NODEID": str(number),
            "SLURMD_NODENAME": hosts[number],
            "SLURM_NTASKS": str(asked.tasks),
            "SLURM_NPROCS": str(asked.tasks),
            "SLURM_NNODES": str(asked.nodes),
            "SLURM_STEP_ID": step,
            "SLURM_STEPID": step,
            "SLURM_STEP_NODELIST": ",".join(hosts[: asked.nodes]),
        }
        task = _start(command, hosts, number, more, asked.tasks > 1)
        started.append(task)
        readers += _readers(task, given, rank, step)
    signal.signal(signal.SIGTERM, lambda *_: _end(started))
    try:
        codes = [task.wait() for task in started]
    except KeyboardInterrupt:
        _end(started)
        raise
    for reader in readers:
        reader.join()
    worst = [code for code in codes if code]
    if len(codes) > 1:
        for rank, code in enumerate(codes):
            if code:
                print(f"srun: error: task {rank}: ended with {code}", file=sys.stderr)
    return max((128 - code if code < 0 else code for code in worst), default=0)


def _hosts() -> list[str]:
    """Not from SLURM_JOB_NODELIST: tools remove the variables of Slurm before a step."""
    places = os.environ.get("SHOAL_HOSTS") or os.environ["SHOAL_NODE"]
    return [place.partition(":")[0] for place in places.split(",")]


def _start(
    command: list[str], hosts: list[str], number: int, more: dict[str, str], many: bool
) -> subprocess.Popen[bytes]:
    """Here, or in another member through the ssh of its launcher."""
    stdin = subprocess.DEVNULL if many else None
    if number == 0:
        words, environment = command, {**os.environ, **more}
    else:
        kept = {name: text for name, text in os.environ.items() if name.startswith("SLURM")}
        settings = shlex.join(f"{name}={text}" for name, text in {**kept, **more}.items())
        line = f"cd {shlex.quote(os.getcwd())} && exec env {settings} {shlex.join(command)}"
        words, environment = ["ssh", hosts[number], line], dict(os.environ)
    try:
        return subprocess.Popen(
            words, env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise Failure(f"srun: {words[0]}: {error.strerror}") from None


def _readers(
    task: subprocess.Popen[bytes], given: dict[str, str], rank: int, step: str
) -> list[threading.Thread]:
    """Threads that pass its output on, whole lines at a time."""
    label = f"{rank}: ".encode() if "label" in given else b""
    found = []
    for name, pipe, usual in (
        ("output", task.stdout, sys.stdout.buffer),
        ("error", task.stderr, sys.stderr.buffer),
    ):
        assert pipe is not None
        pattern = given.get(name) or (given.get("output", "") if name == "error" else "")
        to: IO[bytes] = usual if not pattern else open(_named(pattern, rank, step), "ab")  # noqa: SIM115
        reader = threading.Thread(target=_pass_on, args=(pipe, to, label), daemon=True)
        reader.start()
        found.append(reader)
    return found


def _named(pattern: str, rank: int, step: str) -> str:
    job = os.environ["SLURM_JOB_ID"]
    values = {
        "%j": job, "%J": f"{job}.{step}", "%s": step, "%t": str(rank),
        "%A": os.environ.get("SLURM_ARRAY_JOB_ID", job),
        "%a": os.environ.get("SLURM_ARRAY_TASK_ID", "4294967294"),
        "%x": os.environ.get("SLURM_JOB_NAME", ""), "%u": os.environ.get("USER", ""),
        "%N": os.environ.get("SLURMD_NODENAME", ""), "%n": "0",
    }  # fmt: skip
    for key, value in values.items():
        pattern = pattern.replace(key, value)
    return pattern


def _pass_on(pipe: IO[bytes], to: IO[bytes], label: bytes) -> None:
    for line in pipe:
        to.write(label + line)
        to.flush()


def _end(tasks: list[subprocess.Popen[bytes]]) -> None:
    for task in tasks:
        if task.poll() is None:
            task.terminate()
