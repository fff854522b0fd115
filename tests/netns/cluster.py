"""A cluster over hosts of their own: one is the head, and the others have joined it over TLS."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec
from harness.hosts import Host, Net
from harness.waiting import WAIT_S, until

from shoal.client import Client
from shoal.model.job import JobSpec
from shoal.model.policy import Policy
from shoal.model.views import JobView, NodeView

T = TypeVar("T")

SHOAL = (sys.executable, "-m", "shoal.main")
# Quick to give a silent node up, so that the tests need not wait for a minute.
POLICY = Policy(silent_after_ms=3_000, grace_ms=8_000)


class Cluster:
    """Every host is a node with one GPU: n1 on the head, the others under their names. Calls are
    made as on the head."""

    def __init__(
        self,
        net: Net,
        names: tuple[str, ...],
        *more: str,
        env: dict[str, str] | None = None,
        prepare: Callable[[Host], None] = lambda _: None,
    ) -> None:
        """`more`: flags of `shoal up`. `env`: of the nodes that join. `prepare`: each host is given
        to it before anything runs there."""
        self.net = net
        self.env = env or {}
        self.head = net.add("head")
        prepare(self.head)
        self.hosts = {"n1": self.head}
        self.shared = net.scratch / "shared"  # members write here what they want us to see
        self.shared.mkdir(exist_ok=True)
        flags = ("--nodes", "1", "--gpus", "1", "--host", self.head.address, *more)
        self.shoal(self.head, "up", *flags)
        self.url = f"https://{self.head.address}:7700"
        self.token = (self.head.home / ".shoal" / "join-token").read_text().strip()
        self.client = Client.at_home(self.head.home / ".shoal", patience_s=60)
        self.ask(lambda client: client.set_policy(POLICY))
        hosts = [net.add(name) for name in names]
        for host in hosts:
            prepare(host)
        self.join(*hosts)
        self.until(lambda: self.ready() == {"n1", *names}, "not all of them joined")

    def join(
        self, *hosts: Host, url: str = "", token: str = "", flags: tuple[str, ...] = ()
    ) -> None:
        """All at once, as nodes with the hosts' names."""
        joining = []
        for host in hosts:
            self.hosts[host.name] = host
            words = ("join", url or self.url, "--name", host.name, "--gpus", "1", *flags)
            env = {**self.env, "SHOAL_JOIN_TOKEN": token or self.token}
            joining.append(host.start(*SHOAL, *words, env=env))
        for host, process in zip(hosts, joining, strict=True):
            log = self.net.scratch / f"{host.name}.log"
            assert process.wait(WAIT_S) == 0, f"{host.name} cannot join: {log.read_text()}"

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
        until(fact, complaint, self.story, look_s=0.1)

    def story(self) -> str:
        """What happened, for whoever reads a test that failed."""
        events = self.ask(lambda client: client.events(after=-40)).events
        return "\n".join(
            [
                *(one.event.sentence() for one in events),
                *(f"{n.id} {n.state}" for n in self.nodes()),
            ]
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
