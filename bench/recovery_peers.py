"""The contenders of `bench/recovery.py`: each runs the same script, and its parts can be killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal.client import Client
from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import bring_up, take_down
from shoal.model.job import JobSpec, Restart
from shoal.model.node import NodeSpec

ROOT = Path(__file__).parent.parent
SCRIPT = Path(__file__).parent / "recovery_train.py"
WAIT_S = 120.0


class Mark(NamedTuple):
    """One line of the script's progress."""

    at: float
    rank: int
    pid: int
    node: str
    what: str


class Peer:
    """One run of one contender, in a directory of its own."""

    name = ""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
        self._file = self.directory / "marks"
        self._file.touch()
        checkpoints = self.directory / "checkpoints"
        checkpoints.mkdir()
        self.env = {
            "OMP_NUM_THREADS": "1",
            "BENCH_MARKS": str(self._file),
            "SHOAL_CHECKPOINT_DIR": str(checkpoints),
            # No empty entry: it would mean the current directory, another for each member, and
            # no interpreter is warm for that.
            "PYTHONPATH": ":".join(
                filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")))
            ),
        }

    def start(self) -> float:
        """Start training; returns the time."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until the run is in the state of one that is a minute old."""

    def kill_member(self) -> float:
        at = time.time()
        os.kill(self.newest(1).pid, signal.SIGKILL)
        return at

    def kill_node(self) -> float:
        raise NotImplementedError

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def marks(self) -> list[Mark]:
        found = []
        for line in self._file.read_text().splitlines():
            at, rank, pid, node, what = line.split()
            found.append(Mark(float(at), int(rank), int(pid), node, what))
        return found

    def newest(self, rank: int) -> Mark:
        return [mark for mark in self.marks() if mark.rank == rank and mark.what.isdigit()][-1]

    def wait(self, found: Callable[[list[Mark]], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not found(self.marks()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: nothing for {WAIT_S:.0f} s\n{self.told()}")
            time.sleep(0.02)

    def told(self) -> str:
        """What may explain why it does not continue."""
        return ""


class Shoal(Peer):
    """Three virtual nodes with room for one member each: two train, one is spare."""

    name = "shoal"
    nodes = tuple(
        NodeSpec(id=f"n{number}", gpus=0, cpu_milli=1000, memory_mb=8000) for number in (1, 2, 3)
    )

    def __init__(self) -> None:
        super().__init__()
        self.home = Home(self.directory / "home")
        bring_up(self.home, ClusterConfig(nodes=self.nodes, port=0), lambda _: None)
        self.client = Client.at_home(self.home.path)
        self.job = ""

    def start(self) -> float:
        spec = JobSpec(
            command=(sys.executable, str(SCRIPT)),
            members=2,
            cpu_milli=1000,
            env=self.env,
            restart=Restart.ON_FAILURE,
            retries=10,
        )
        at = time.time()
        self.job = self.client.submit(spec).id
        return at

    def settle(self) -> None:
        self.wait(lambda _: all(self._is_warm(node.id) for node in self.nodes))

    def kill_node(self) -> float:
        node = self.newest(1).node
        info = msgspec.json.decode((self.home.node(node) / "agent.json").read_bytes())
        at = time.time()
        for pid in (info["keeper"], info["pid"]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return at

    def start_again(self) -> float:
        """Another run of the same script where it has run before."""
        self.settle()
        self.client.cancel(self.job)
        while self.client.job(self.job, wait_for="finished", wait_s=10).finished_ms is None:
            pass
        shutil.rmtree(self.env["SHOAL_CHECKPOINT_DIR"])
        os.mkdir(self.env["SHOAL_CHECKPOINT_DIR"])
        return self.start()

    def told(self) -> str:
        return self.client.why(self.job).why

    def close(self) -> None:
        self.client.close()
        take_down(self.home, lambda _: None)
        super().close()

    def _is_warm(self, node: str) -> bool:
        """In the agent's present life."""
        log = (self.home.node(node) / "agent.log").read_text()
        return "is warm after" in log.rpartition("is up as")[2]


class Torchrun(Peer):
    """One agent with two workers, which is fastest: it need not agree with another agent."""

    name = "torchrun"
    agents = 1

    def __init__(self) -> None:
        super().__init__()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._agents: list[subprocess.Popen[bytes]] = []

    def start(self) -> float:
        at = time.time()
        for number in range(self.agents):
            output = (self.directory / f"agent{number}.log").open("wb")
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{self.agents}"),
                *("--nproc-per-node", str(2 // self.agents), "--max-restarts", "10"),
                *("--rdzv-backend", "c10d"),
                *("--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "bench"),
                *("--rdzv-conf", f"is_host={number == 0}"),  # the one that is not killed
                str(SCRIPT),
            ]
            self._agents.append(
                subprocess.Popen(
                    command,
                    env=self.whole_env(number),
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
        return at

    def whole_env(self, number: int) -> dict[str, str]:
        # With one store for agents and workers, restarted workers over gloo waited in
        # init_process_group for a minute and more (torch 2.13): that is not what is compared here.
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return {**os.environ, **self.env, **own_store, "SHOAL_NODE": str(number)}

    def kill_node(self) -> float:
        """The agent that does not hold the rendezvous, and its worker."""
        mark = next(mark for mark in reversed(self.marks()) if mark.node == "1")
        at = time.time()
        for pid in (self._agents[1].pid, mark.pid):
            os.kill(pid, signal.SIGKILL)
        return at

    def told(self) -> str:
        return (self.directory / "agent0.log").read_text()[-2000:]

    def close(self) -> None:
        pids = {mark.pid for mark in self.marks()} | {agent.pid for agent in self._agents}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for agent in self._agents:
            agent.wait()
        super().close()


class TorchrunNodes(Torchrun):
    """Two agents with one worker each; training may continue with one of them."""

    agents = 2


class RayTrain(Peer):
    """Three nodes of one CPU each on this machine: two workers, one node spare."""

    name = "ray train"
    python = sys.executable

    def __init__(self) -> None:
        super().__init__()
        self._log = (self.directory / "ray.log").open("wb")
        self._process = subprocess.Popen(
            [self.python, "-m", "bench.recovery_ray"],
            env={**os.environ, **self.env, "RAY_TRAIN_V2_ENABLED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise TimeoutError(f"Ray does not start\n{self.told()}")

    def start(self) -> float:
        at = time.time()
        self._say("go")
        return at

    def kill_node(self) -> float:
        at = time.time()
        self._say(self.newest(1).node)
        return at

    def told(self) -> str:
        return (self.directory / "ray.log").read_text(errors="replace")[-2000:]

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        super().close()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
