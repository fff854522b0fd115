"""A private cluster for `bench/sleep.py`: one GPU, and jobs whose progress is in files."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from shoal.cli.up.hardware import detect, this_machine
from shoal.client import Client
from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import bring_up, take_down
from shoal.core.state.events.sleep import JobAsleep, JobAwake
from shoal.model.job import JobSpec, Restart
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.views import JobView

ROOT = Path(__file__).parent.parent
WORK = Path(__file__).parent / "sleep_work.py"
WAIT_S = 120.0  # two turns, and what falling asleep and waking may take
POLL_S = 0.02
# A job may be interrupted at once, and sleeps whatever its restart would cost.
POLICY = Policy(run_ms_min=0, entry_penalty_ms=0)


class Mark(NamedTuple):
    at: float
    pid: int
    what: str


class Job:
    """One job of the bench, and the file that it writes."""

    def __init__(self, cluster: Cluster, view: JobView, marks: Path, at: float) -> None:
        self._cluster = cluster
        self.id = view.id
        self._file = marks
        self.submitted = at

    def marks(self) -> list[Mark]:
        if not self._file.exists():
            return []
        lines = (line.split(" ", 2) for line in self._file.read_text().splitlines())
        return [Mark(float(at), int(pid), what) for at, pid, what in lines]

    def steps(self) -> list[Mark]:
        return [mark for mark in self.marks() if mark.what.isdigit()]

    def seen(self, what: str) -> Mark:
        """Waits for it."""
        self._cluster.wait(lambda: what in {mark.what for mark in self.marks()}, what, self)
        return next(mark for mark in self.marks() if mark.what == what)

    def stepped(self, more: int, since: float = 0.0) -> list[Mark]:
        """Waits until it has done so many steps since then; returns these."""

        def found() -> list[Mark]:
            return [mark for mark in self.steps() if mark.at >= since]

        self._cluster.wait(lambda: len(found()) >= more, f"{more} steps", self)
        return found()

    def reached(self, step: int) -> None:
        self._cluster.wait(
            lambda: any(int(mark.what) >= step for mark in self.steps()), f"step {step}", self
        )

    def phase(self) -> str:
        return self._cluster.client.job(self.id).state

    def why(self) -> str:
        return self._cluster.client.why(self.id).why

    def until(self, *phases: str) -> None:
        self._cluster.wait(lambda: self.phase() in phases, f"{phases}", self)

    def end(self) -> None:
        self._cluster.client.cancel(self.id)
        while self._cluster.client.job(self.id, wait_for="finished", wait_s=10).finished_ms is None:
            pass


class Cluster:
    def __init__(self, *, virtual: bool) -> None:
        self.virtual = virtual
        self.directory = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
        self._home = Home(self.directory / "home")
        self._made = 0

    def __enter__(self) -> Self:
        nodes = this_machine(detect())
        if self.virtual:
            nodes = (NodeSpec(id="n1", gpus=1, cpu_milli=8_000, memory_mb=8_000),)
        bring_up(self._home, ClusterConfig(nodes=nodes, port=0), lambda _: None)
        self.client = Client.at_home(self._home.path)
        self.client.set_policy(POLICY)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        take_down(self._home, lambda _: None)
        shutil.rmtree(self.directory, ignore_errors=True)

    def policy(self, **fields: Any) -> None:
        self.client.set_policy(msgspec.structs.replace(POLICY, **fields))

    def run(self, kind: str, *words: object, cold: bool = False, **fields: Any) -> Job:
        """`cold`: with an option that changes nothing, but for which no interpreter is warm."""
        self._made += 1
        options = ("-W", "ignore::ResourceWarning") if cold else ()
        marks = self.directory / f"{self._made}-{kind}"
        path = (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))
        env = {"PYTHONPATH": ":".join(filter(None, path))}
        if self.virtual:
            env["BENCH_VIRTUAL"] = "1"
        spec = JobSpec(
            command=(sys.executable, *options, str(WORK), kind, str(marks), *map(str, words)),
            gpus=1,
            env=env,
            preemptible=fields.pop("preemptible", True),
            restart=Restart.ON_NODE_LOSS,
            stop_grace_ms=2_000,
            **fields,
        )
        at = time.time()
        return Job(self, self.client.submit(spec), marks, at)

    def wait(self, found: Callable[[], bool], what: str, job: Job) -> None:
        deadline = time.monotonic() + WAIT_S
        while not found():
            if time.monotonic() > deadline:
                output = self.client.logs(job.id).data.decode()[-2_000:]
                raise TimeoutError(
                    f"{job.id}, {what}: not after {WAIT_S:.0f} s\n{job.why()}\n{output}"
                )
            time.sleep(POLL_S)

    def wait_until_warm(self, job: Job) -> None:
        """The node keeps an interpreter that has torch ready for the next start."""
        if not self.virtual:
            logs = list(self._home.nodes.glob("*/agent.log"))
            self.wait(lambda: any("is warm after" in log.read_text() for log in logs), "warm", job)

    def log(self) -> str:
        """The last lines of the agent, for a part that failed."""
        logs = self._home.nodes.glob("*/agent.log")
        return "\n".join("\n".join(log.read_text().splitlines()[-30:]) for log in logs)

    def sleeps(self, job: Job) -> dict[str, Any]:
        """The newest sleep of the job, as its events have it."""
        found: dict[str, Any] = {}
        for recorded in self.client.events(job=job.id).events:
            event = recorded.event
            if isinstance(event, JobAsleep):
                found |= {"sleep_ms": event.took_ms, "moved_mb": event.memory_mb}
            elif isinstance(event, JobAwake):
                found["wake_ms"] = event.took_ms
        return found
