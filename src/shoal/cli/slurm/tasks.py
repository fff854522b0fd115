"""srun inside a job: starts its tasks in the members and passes their output and codes on."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from typing import IO

from shoal.cli.slurm import options
from shoal.forms.failure import USAGE, Failure


def run_tasks(words: list[str]) -> int:
    given, command = options.parse(words, "srun")
    if not command:
        raise Failure("srun: name a command", USAGE)
    job, hosts = os.environ, _hosts()
    whole = {"nodes": str(len(hosts)), "ntasks": job.get("SLURM_NTASKS", str(len(hosts)))}
    if "ntasks-per-node" in given or "nodes" in given:
        whole.pop("ntasks")
    asked = options.shape({**whole, **given})
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
