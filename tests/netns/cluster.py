"""A cluster over hosts of their own: one leads, the others have joined it through Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from harness.hosts import Host, Net

from shoal.cli.screen.words import sentence
from shoal.client import Client
from shoal.model.job import JobSpec
from shoal.model.policy import Policy
from shoal.model.views import JobView, NodeView

T = TypeVar("T")

WAIT_S = 120.0
SHOAL = (sys.executable, "-m", "shoal.main")
# Quick to give a silent node up, so that the tests need not wait for a minute.
POLICY = Policy(silent_after_ms=3_000, grace_ms=8_000)


class Cluster:
    """Every host is a node with one GPU. Calls are made as on the host that leads."""

    def __init__(self, net: Net, names: tuple[str, ...]) -> None:
        self.hosts = {name: net.add(name) for name in names}
        self.head = self.hosts[names[0]]
        self.shared = net.scratch / "shared"  # members write here what they want us to see
        self.shared.mkdir()
        self.shoal(self.head, "up", "--engine", "ray", "--gpus", "1", "--port", "0")
        self.address = json.loads((self.head.home / ".shoal" / "cluster.json").read_text())["reach"]
        self.token = (self.head.home / ".shoal" / "ray" / "token").read_text()
        self.client = Client.at_home(self.head.home / ".shoal", patience_s=60)
        self.ask(lambda client: client.set_policy(POLICY))
        joining = [self._start_join(name) for name in names[1:]]
        for process in joining:
            assert process.wait(WAIT_S) == 0, "a host cannot join: see its log"
        self.until(lambda: self.ready() == set(names), "not all of them joined")

    def _start_join(self, name: str) -> subprocess.Popen[bytes]:
        words = ("join", self.address, "--name", name, "--gpus", "1")
        return self.hosts[name].start(*SHOAL, *words, env={"SHOAL_JOIN_TOKEN": self.token})

    def shoal(self, host: Host, *words: str, env: dict[str, str] | None = None) -> str:
        done = host.run(*SHOAL, *words, env=env, timeout_s=WAIT_S)
        assert done.returncode == 0, f"{host.name}: shoal {' '.join(words)}: {done.stderr}"
        return done.stdout

    def close(self) -> None:
        self.client.close()

    # -- asking ----------------------------------------------------------------------------

    def ask(self, question: Callable[[Client], T]) -> T:
        with self.head.network():
            return question(self.client)

    def until(self, fact: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not fact():
            assert time.monotonic() < deadline, f"{complaint}\n{self.story()}"
            time.sleep(0.1)

    def story(self) -> str:
        """What happened, for whoever reads a test that failed."""
        events = self.ask(lambda client: client.events(after=-40)).events
        return "\n".join(
            [*(sentence(one.event) for one in events), *(f"{n.id} {n.state}" for n in self.nodes())]
        )

    def nodes(self) -> list[NodeView]:
        return self.ask(lambda client: client.nodes())

    def ready(self) -> set[str]:
        return {node.id for node in self.nodes() if node.state == "ready"}

    def job(self, job_id: str) -> JobView:
        return self.ask(lambda client: client.job(job_id))

    # -- jobs ------------------------------------------------------------------------------

    def submit(self, script: str, **fields: object) -> str:
        env = {"PATH": os.environ.get("PATH", os.defpath), "SHARED": str(self.shared)}
        spec = msgspec.convert({"command": ["sh", "-c", script], "env": env, **fields}, JobSpec)
        return self.ask(lambda client: client.submit(spec)).id

    def wait(self, job_id: str, goal: str = "finished") -> JobView:
        def there() -> bool:
            job = self.job(job_id)
            return job.finished_ms is not None or job.state == goal

        self.until(there, f"{job_id} is not {goal}")
        return self.job(job_id)

    def output(self, job_id: str, member: int, attempt: int = 0) -> bytes:
        kept = b""
        while True:
            view = self.ask(
                lambda client: client.logs(
                    job_id,
                    member=member,
                    attempt=attempt,
                    offset=len(kept),  # noqa: B023
                )
            )
            if not view.data:
                return kept
            kept += view.data

    def lines(self, name: str) -> list[list[str]]:
        """What members have written into this file of the shared directory, in words."""
        path = self.shared / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []
