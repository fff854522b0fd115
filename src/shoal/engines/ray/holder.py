"""The holder: the actor that holds a node's GPUs in Ray's eyes, and starts the agent there.

It is sent to Ray by value and imports nothing of Shoal's, because the interpreter that runs Ray's
workers need not have Shoal. What it starts is not Ray's: a process of a session of its own, whose
parent is init, in the environment that Ray itself was started in. If Ray ends the holder, the agent
and its jobs run on, and the next holder finds them by a mark in their environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ASK = "ask.json"  # in a node's home: what Ray was asked for
MARK = "SHOAL_RAY_ORDER"  # in the environment of what a holder starts: CLUSTER/ORDER
LOOK_S = 0.5
# A holder whose agent has ended gives its GPUs back, whether or not anybody asked why it ended.
READ_WITHIN_S = 30.0
END_WITHIN_S = 120.0  # an agent gives its jobs time to save
STARTS_MAX = 5  # of one holder; an agent that keeps ending is an order that has ended
LOG_TAIL_BYTES = 4_000
REASON_CHARACTERS_MAX = 250
# A starter's last words, if it ended in order.
IN_ORDER = re.compile(rb"the head knows that this node has ended|not reported:")
STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")  # the time, before what a starter says
# Variables that Ray sets for its workers. An agent's jobs must not find them.
OF_RAY = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", MARK)
STARTER_WORDS = (b"join", b"shoal.agent.starter")


class Holder:
    """One order. `ask` is a `render.Ask` as plain data; its `plan` says what to start."""

    def __init__(self, ask: dict[str, Any]) -> None:
        self._ask = ask
        self._plan = ask["plan"]
        self._mark = f"{self._plan['cluster']}/{self._plan['order']}"
        self._home = Path(os.path.expanduser(self._plan["home"]))
        self._reason = ""
        self._failed = False
        self._released = threading.Event()
        self._ended = threading.Event()
        self._read = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def status(self) -> dict[str, Any]:
        if self._ended.is_set():
            self._read.set()
        return {"ended": self._ended.is_set(), "reason": self._reason, "failed": self._failed}

    def end(self) -> None:
        """Asked of the holder, because it alone knows whether its agent has yet to be started."""
        self._released.set()

    def _watch(self) -> None:
        try:
            self._keep_running()
        except Exception as error:
            self._reason, self._failed = one_line(f"{type(error).__name__}: {error}"), True
        self._ended.set()
        self._read.wait(READ_WITHIN_S)
        time.sleep(LOOK_S)  # the answer is on its way
        os._exit(0)

    def _keep_running(self) -> None:
        begun = not self._ask["again"] or bool(marked(self._mark))
        for _ in range(STARTS_MAX if begun else 0):
            found = top_of(self._mark)
            if found is None and self._released.is_set():
                self._end_what_is_left()
                break
            self._outlive(found if found is not None else self._start())
            # A starter that was killed leaves its agent behind. It is started again to look after
            # it; one that ended in order leaves nothing.
            if not marked(self._mark):
                break
        log = self._home / "join.log"
        self._reason = last_line(log)
        self._failed = not self._released.is_set() and not IN_ORDER.search(read(str(log)))
        if not self._failed:
            shutil.rmtree(self._home, ignore_errors=True)

    def _outlive(self, pid: int) -> None:
        told = False
        while alive(pid):
            if self._released.wait(LOOK_S):
                if not told:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGTERM)
                told = True
                time.sleep(LOOK_S)

    def _end_what_is_left(self) -> None:
        """A starter that was killed has left its agent."""
        end_order(self._plan["cluster"], self._plan["order"])
        deadline = time.monotonic() + END_WITHIN_S
        while marked(self._mark) and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    def _start(self) -> int:
        os.makedirs(self._home, mode=0o700, exist_ok=True)
        with open(
            os.open(self._home / ASK, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w"
        ) as f:
            json.dump(self._ask, f)  # for the next holder, if this one is lost
        python = self._plan["python"] or sys.executable
        argv = [python, *self._plan["arguments"], *label_flags(node_labels(), self._plan["labels"])]
        told = {name: os.path.expanduser(text) for name, text in self._plan["environment"].items()}
        env = {**clean_environment(), **told}
        env[MARK] = self._mark
        env["SHOAL_HOME"] = str(self._home)
        gpus = gpu_ids()
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return start_detached(argv, env, self._home / "join.log")


def gpu_ids() -> list[str]:
    """The GPUs that Ray has assigned to this actor, as its machine numbers them."""
    import ray

    found = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return [str(one) for one in found]


def node_labels() -> dict[str, str]:
    """The labels of this Ray node, and its custom resources as labels."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == here:
            return labels_of(node)
    return {}


def labels_of(node: dict[str, Any]) -> dict[str, str]:
    """As Shoal's labels. Ray's id of the node is left out: it changes with each start of Ray."""
    labels = {k: str(v) for k, v in node["Labels"].items() if v and k != "ray.io/node-id"}
    for name, amount in node["Resources"].items():
        if name in ("CPU", "GPU", "memory", "object_store_memory") or name.startswith("node:"):
            continue
        kind, _, value = name.partition(":")
        if value:  # such as accelerator_type:H100
            labels.setdefault(f"ray.io/{kind.replace('_', '-')}", value)
        else:
            labels.setdefault(f"ray.io/resource-{name}", f"{amount:g}")
    return labels


def label_flags(found: dict[str, str], given: dict[str, str]) -> list[str]:
    """What the policy says of a supply's nodes wins over what Ray says."""
    return [
        word
        for name, value in sorted({**found, **given}.items())
        for word in ("--label", f"{name}={value}")
    ]


def clean_environment() -> dict[str, str]:
    """The environment that Ray was started in. A worker's own holds what Ray has added to it."""
    env = dict(os.environ)
    with contextlib.suppress(OSError, ValueError):
        raylet = int(os.environ.get("RAY_RAYLET_PID", ""))
        env = environment_of(raylet) or env
    return {k: v for k, v in env.items() if not k.startswith("RAY_") and k not in OF_RAY}


def start_detached(argv: list[str], env: dict[str, str], log: Path) -> int:
    """Start a program that outlives this process: Ray ends a worker's children, and may end its
    process group. Returns its pid. A worker has threads, so another interpreter forks."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", DETACH, str(log), *argv],
        env=env,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
    )
    return int(done.stdout)


DETACH = """
import os, sys
log, *argv = sys.argv[1:]
os.setsid()
pid = os.fork()
if pid:
    print(pid)
    sys.exit(0)
output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
os.dup2(output, 1)
os.dup2(output, 2)
try:
    os.execv(argv[0], argv)
except OSError as error:
    print(f"error: cannot start {argv[0]}: {error.strerror}", flush=True)
    os._exit(127)
"""


# -- processes by their mark ---------------------------------------------------------------


def orders_here(cluster: str) -> dict[str, Any]:
    """The orders of a cluster whose agents live on this machine, with what was asked for each."""
    begin = f"{cluster}/"
    found = {}
    for mark, pid in marks():
        order = mark[len(begin) :]
        if mark.startswith(begin) and order not in found:
            with contextlib.suppress(OSError, ValueError, KeyError):
                home = Path(environment_of(pid)["SHOAL_HOME"])
                found[order] = json.loads((home / ASK).read_bytes())
    return found


def end_order(cluster: str, order: str) -> int:
    """Ask an order's starter that has no holder to end; it takes the agent and the jobs with it.
    Returns how many processes there are."""
    mark = f"{cluster}/{order}"
    found = marked(mark)
    top = top_of(mark)
    for pid in [top] if top is not None else found:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    return len(found)


def top_of(mark: str) -> int | None:
    """The starter of an order, which looks after its keeper and its agent."""
    for pid in marked(mark):
        words = read(f"/proc/{pid}/cmdline").split(b"\0")
        if any(word in STARTER_WORDS for word in words):
            return pid
    return None


def marked(mark: str) -> list[int]:
    return sorted(pid for found, pid in marks() if found == mark)


def marks() -> list[tuple[str, int]]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and alive(int(name)):
            mark = environment_of(int(name)).get(MARK)
            if mark:
                found.append((mark, int(name)))
    return found


def environment_of(pid: int) -> dict[str, str]:
    pairs = (word.partition(b"=") for word in read(f"/proc/{pid}/environ").split(b"\0"))
    return {os.fsdecode(k): os.fsdecode(v) for k, found, v in pairs if found}


def alive(pid: int) -> bool:
    stat = read(f"/proc/{pid}/stat")
    return bool(stat) and stat.rpartition(b")")[2].split()[0] not in b"ZX"


def read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it ended, or is another user's
        return b""


def last_line(log: Path) -> str:
    """What a program said last, in one line."""
    tail = read(str(log))[-LOG_TAIL_BYTES:].decode(errors="replace")
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return STAMP.sub("", one_line((errors or lines or [""])[-1]))


def one_line(text: str) -> str:
    return " ".join(text.split())[:REASON_CHARACTERS_MAX]
