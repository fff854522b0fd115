"""A real cluster for tests: real controller, real agents, and a way to see what they leave."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from harness.waiting import WAIT_S, until

from shoal.client import Address, Client
from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import bring_up, take_down
from shoal.model.job import JobSpec
from shoal.model.node import NodeSpec

MARK = "TEST_CLUSTER_OF_SHOAL"


def virtual_nodes(count: int, gpus: int = 8) -> tuple[NodeSpec, ...]:
    return tuple(
        NodeSpec(id=f"n{number}", gpus=gpus, cpu_milli=16_000, memory_mb=4_000)
        for number in range(1, count + 1)
    )


class Live:
    """A cluster that is up. What its jobs start carries its mark in the environment."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.client = Client.at_home(home.path, patience_s=120)

    def restart(self, config: ClusterConfig | None = None) -> None:
        """Up again after a `down`, at another address perhaps."""
        self.client.close()
        bring_up(self.home, config, lambda _: None)
        self.client = Client.at_home(self.home.path, patience_s=120)

    def spec(self, *command: str, env: dict[str, str] | None = None, **fields: object) -> JobSpec:
        path = os.environ.get("PATH", os.defpath)
        env = {"PATH": path, MARK: str(self.home.path), **(env or {})}
        return msgspec.convert({"command": command, "env": env, **fields}, JobSpec)

    def run(self, script: str, **fields: object) -> str:
        """Submit a shell script; returns the job's id."""
        return self.client.submit(self.spec("sh", "-c", script, **fields)).id  # type: ignore[arg-type]

    def wait(self, job_id: str, goal: str = "finished", timeout_s: float = WAIT_S) -> str:
        """The job's state once it is there."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            job = self.client.job(job_id, wait_for=goal, wait_s=10)
            if job.finished_ms is not None or job.state == goal:
                return job.state
        raise AssertionError(f"{job_id} is {job.state} after {timeout_s} s: {job.why}")

    def output(self, job_id: str, member: int = 0, attempt: int = 0) -> str:
        return self.client.logs(job_id, member=member, attempt=attempt).data.decode()

    def controller_pid(self) -> int:
        return msgspec.json.decode(self.home.address.read_bytes(), type=Address).pid

    def agent_pid(self, node: str) -> int:
        info = msgspec.json.decode((self.home.node(node) / "agent.json").read_bytes())
        return int(info["pid"])

    def kill_controller(self) -> int:
        pid = self.controller_pid()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return pid

    def kill_agent(self, node: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.agent_pid(node), signal.SIGKILL)

    def processes(self) -> list[int]:
        """Every process of this cluster: by its home on the command line or its mark."""
        needle = os.fsencode(self.home.path)
        return [pid for pid in all_pids() if needle in _cmdline(pid) or _marked(pid, needle)]

    def member_processes(self) -> list[int]:
        """Of jobs. A warm interpreter has a job's variables, too, but is its node's."""
        needle = os.fsencode(self.home.path)
        marked = [pid for pid in all_pids() if _marked(pid, needle)]
        return [pid for pid in marked if b"/agent/warm/zygote.py" not in _cmdline(pid)]


@contextmanager
def live_cluster(
    nodes: int = 4, gpus: int = 8, config: ClusterConfig | None = None
) -> Iterator[Live]:
    """Comes up, is used, goes down; and whatever happens, nothing of it stays."""
    config = config or ClusterConfig(nodes=virtual_nodes(nodes, gpus), port=0)
    path = Path(tempfile.mkdtemp(prefix="shoal-test-"))
    home = Home(path)
    try:
        bring_up(home, config, lambda _: None)
        live = Live(home)
        try:
            yield live
        finally:
            live.client.close()
        take_down(home, lambda _: None)
        until(
            lambda: not live.processes(),
            "processes were left behind",
            lambda: _commands(live.processes()),
        )
        said = home.controller_log.read_text(errors="replace")
        assert "Traceback" not in said, said[said.index("Traceback") - 500 :][:5000]
    finally:
        take_down(home, lambda _: None)
        shutil.rmtree(path, ignore_errors=True)


def all_pids() -> list[int]:
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()
    ]


def _commands(pids: list[int]) -> list[list[bytes]]:
    return [_cmdline(pid).split(b"\0") for pid in pids]


def _cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _marked(pid: int, needle: bytes) -> bool:
    with contextlib.suppress(OSError):
        return MARK.encode() + b"=" + needle + b"\0" in Path(f"/proc/{pid}/environ").read_bytes()
    return False
