"""A whole Shoal cluster with two nodes from each engine, as a user would set it up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

from harness.kubernetes.kube import Kube
from harness.kubernetes.kubelet import Kubelet
from harness.ray import real_ray
from harness.slurm import available, slurm
from harness.waiting import WAIT_S, until
from shoal.client import Client
from shoal.machine.kernel import kill_marked

ENGINES = ("local", "linked", "slurm", "kubernetes", "ray")
NODES, GPUS, CPUS, MEMORY = 2, 2, 4, "3G"
FLAGS = ("--gpus", str(GPUS), "--cpus", str(CPUS), "--memory", MEMORY)
SLURM_CONF = (
    "SchedulerParameters=batch_sched_delay=0,sched_min_interval=10000,sched_interval=2,bf_interval=2",
    "MaxJobCount=100000",
    "MinJobAge=3600",
)


class Missing(Exception):
    """What this machine lacks for an engine, in one line."""


class On:
    """A cluster on one engine. `beneath` is the system that brings its nodes."""

    def __init__(self, engine: str, scratch: Path) -> None:
        self.engine = engine
        self.scratch = scratch
        self.home = scratch / "head"
        self.env: dict[str, str] = {}
        self.beneath: object = None
        self.folders: list[Path] = []  # of the nodes, where they are known

    def shoal(self, *words: str, cwd: Path | None = None, timeout_s: float = WAIT_S) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "shoal.main", *words],
            env={**os.environ, **self.env, "PATH": self._path(), "SHOAL_HOME": str(self.home)},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"shoal {' '.join(words)}: {done.stderr}{done.stdout}"
        return done.stdout

    def _path(self) -> str:
        """With this Python first, as in an activated environment."""
        here = str(Path(sys.executable).parent)
        return os.pathsep.join((here, self.env.get("PATH", os.environ.get("PATH", os.defpath))))

    @contextmanager
    def client(self) -> Iterator[Client]:
        with Client.at_home(self.home, patience_s=120) as made:
            yield made

    def set_supply(self, **words: object) -> None:
        amounts = {"gpus": GPUS, "cpus": CPUS, "memory": MEMORY, "least": NODES, "most": NODES}
        supply = {"name": "lent", "engine": self.engine, **amounts, **words}
        path = self.scratch / "policy.json"
        path.write_text(json.dumps({"supply": [supply]}))
        self.shoal("policy", "set", str(path))

    def until(self, fact: Callable[[], bool], what: str) -> None:
        until(fact, what, lambda: self.shoal("supply"), look_s=0.1)

    def until_ready(self) -> None:
        with self.client() as client:
            self.until(lambda: [n.state for n in client.nodes()] == ["ready"] * NODES, "nodes")

    def give_back(self) -> None:
        """All that was ordered."""
        self.shoal("policy", "set", "fair")
        with self.client() as client:
            self.until(lambda: not client.nodes(), "nodes that do not go")


@contextmanager
def cluster_on(engine: str) -> Iterator[On]:
    """Raises `Missing`, with a line, if the engine is not here."""
    with ExitStack() as stack:
        scratch = Path(tempfile.mkdtemp(prefix="shoal-on-", dir="/tmp"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        on = On(engine, scratch)
        if engine == "local":
            on.shoal("up", "--port", "0", "--nodes", str(NODES), *FLAGS)
            stack.callback(on.shoal, "down")
            on.folders = sorted(on.home.glob("nodes/*"))
        else:
            prepare = {"linked": _link, "slurm": _slurm, "kubernetes": _kubernetes, "ray": _ray}
            prepare[engine](on, stack)
        on.until_ready()
        yield on


def _up(on: On, stack: ExitStack) -> None:
    on.shoal("up", "--port", "0", "--nodes", "0")
    stack.callback(on.shoal, "down")


def _link(on: On, stack: ExitStack) -> None:
    _up(on, stack)
    url = json.loads((on.home / "controller.json").read_text())["url"]
    token = (on.home / "join-token").read_text().strip()
    for number in range(1, NODES + 1):
        home = on.scratch / f"n{number}"
        name = ("--name", f"n{number}", "--home", str(home))
        with (on.scratch / f"n{number}.log").open("wb") as log:
            joined = subprocess.Popen(
                [sys.executable, "-m", "shoal.main", "join", url, "--foreground", *name, *FLAGS],
                env={**os.environ, "SHOAL_JOIN_TOKEN": token},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        stack.callback(joined.wait, WAIT_S)
        stack.callback(joined.terminate)
        on.folders.append(home / "nodes" / f"n{number}")


def _slurm(on: On, stack: ExitStack) -> None:
    reason = available()
    if reason is not None:
        raise Missing(reason)
    real = stack.enter_context(slurm(SLURM_CONF))
    on.beneath, on.env = real, real.env
    _up(on, stack)
    on.set_supply(folder=str(on.scratch))


def _kubernetes(on: On, stack: ExitStack) -> None:
    kube = Kube(on.scratch)
    stack.callback(kube.end)
    if kube.real:
        raise Missing("a real API server has kubelets of its own")
    kubelet = Kubelet(kube, on.scratch / "pods")
    stack.callback(kubelet.end)
    for number in range(1, NODES + 1):
        kube.add_machine(f"k{number}", amounts={"nvidia.com/gpu": str(GPUS)})
    on.beneath = kube
    _up(on, stack)
    words = {"kubeconfig": kube.kubeconfig, "namespace": kube.namespace, "owner": "shoal-nodes"}
    on.set_supply(image="shoal", **words)


def _ray(on: On, stack: ExitStack) -> None:
    if find_spec("ray") is None:
        raise Missing("ray is not installed: pip install 'shoal[ray]'")
    ray = stack.enter_context(real_ray(gpus=NODES * GPUS))
    on.beneath = ray
    folder = on.scratch / "nodes"
    stack.callback(_end_marked, folder)
    _up(on, stack)
    on.set_supply(address=ray.address, token_file=str(ray.token_file), folder=str(folder))


def _end_marked(folder: Path) -> None:
    """Ray's own end leaves agents alive: that is its promise. They would wait for their head."""
    while kill_marked("SHOAL_HOME", lambda value: value.startswith(str(folder))):
        time.sleep(0.02)
