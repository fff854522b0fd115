"""A service in a test's hands: replicas that get ready when the test says so, and loads."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.core.nodebook import Action
from shoal.model.commands import Launch, Sleep, Stop, Wake
from shoal.model.job import Job, MemberRef, Phase
from shoal.model.report import Accepted, Answer, SetService, StopService
from shoal.model.service import ReplicaLoad, Service, ServiceLoad, ServiceSpec
from tests.core.build import Cluster, job_spec

LOOK_MS = 500


def service_spec(name: str = "chat", **fields: Any) -> ServiceSpec:
    """`version` names another command; the rest is as it would come from outside."""
    version = fields.pop("version", 1)
    replica = {"command": ("serve", f"v{version}"), "cpu_milli": 1_000, **fields.pop("replica", {})}
    wish = {"name": name, "replica": msgspec.to_builtins(job_spec(**replica)), **fields}
    return msgspec.convert(wish, ServiceSpec)


class Serving(Cluster):
    """`tick` is half a second: orders are obeyed, nodes and the gateway speak."""

    def __init__(self, *, cpus: int = 8, nodes: int = 2, **rest: Any) -> None:
        super().__init__(**rest)
        self.work: dict[str, int] = {}  # in flight, by job
        self.held = 0
        self.broken: set[str] = set()  # versions, by their command, that never get ready
        self.crashing: set[str] = set()  # versions that end by themselves at once
        self.down: set[str] = set()  # jobs that the gateway does not reach
        self.unanswered: dict[str, int] = {}  # probes in a row, by job
        self.answers_per_ks: dict[str, int] = {}  # by job
        self.orders: list[Action] = []  # that nodes have obeyed
        self.silent = False  # nothing is heard of the gateway
        self.trouble = ""
        self.restless = ""  # why no node can put a job to sleep
        self.one_by_one: tuple[str, ...] = ()  # nodes that are heard in this order, not at once
        for name in "abcdef"[:nodes]:
            self.join(name, cpus=cpus, sleep="freeze")

    def serve(self, name: str = "chat", **fields: Any) -> Answer:
        answer = self.ask(SetService(service_spec(name, **fields)))
        self._obey()
        return answer

    def served(self, name: str = "chat", **fields: Any) -> None:
        """The service is accepted, and all its replicas answer."""
        assert isinstance(self.serve(name, **fields), Accepted)
        self.tick(6)

    def stop(self, name: str = "chat") -> Answer:
        answer = self.ask(StopService(name))
        self._obey()
        return answer

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.wait(LOOK_MS)
            loads = () if self.silent else tuple(map(self.load, self.state.services))
            nodes = tuple(book.report() for book in self.books.values())
            self.step(nodes=nodes, services=loads)
            self._obey()

    def load(self, name: str) -> ServiceLoad:
        service = self.service(name)
        ready = [
            job.id
            for job in self.replicas(name)
            if job.phase is Phase.RUNNING and job.spec.command[1] not in self.broken
        ]
        seen = {
            job_id: ReplicaLoad(
                up=job_id not in self.down,
                in_flight=self.work.get(job_id, 0),
                answers_per_ks=self.answers_per_ks.get(job_id, 0),
            )
            for job_id in (job.id for job in self.replicas(name))
            if job_id in service.ready or job_id in self.work
        }
        if self.trouble:
            return ServiceLoad(service=name, ready=tuple(ready), trouble=self.trouble)
        return ServiceLoad(
            service=name,
            in_flight=sum(load.in_flight for load in seen.values()),
            held=self.held,
            replicas=seen,
            ready=tuple(ready),
            unanswered={
                job_id: n for job_id, n in self.unanswered.items() if job_id in service.ready
            },
        )

    def _obey(self) -> None:
        acted = self._act()
        for _ in range(100):
            if not acted:
                return
            acted = False
            for names in [[name] for name in self.one_by_one] or [list(self.books)]:
                self.hear(*names)
                acted |= self._act()
        raise AssertionError("orders without end")

    def _act(self) -> bool:
        """Nodes do what the last step has ordered. False: it was nothing."""
        for order in self.deliver():
            self.orders.append(order)
            if isinstance(order, Launch) and order.argv[-1] in self.crashing:
                self.books[order.node].exited(order.ref, 1, "it crashed")
            elif isinstance(order, Stop):
                self.books[order.node].exited(order.ref, 0)
            elif isinstance(order, Sleep) and self.restless:
                self.books[order.node].refuses(order.ref, self.restless)
            elif isinstance(order, Sleep):
                self.books[order.node].slept(order.ref, 0, 100)
            elif isinstance(order, Wake):
                self.books[order.node].awoke(order.ref, 50)
        return bool(self.last.commands)

    def lose_node(self, name: str) -> None:
        """It is known to have died; it does not come back."""
        self.learn_gone(name)
        del self.books[name]
        self._obey()

    # -- what there is ---------------------------------------------------------------------

    def service(self, name: str = "chat") -> Service:
        return self.state.services[name]

    def replicas(self, name: str = "chat") -> list[Job]:
        return [self.state.jobs[job_id] for job_id in self.state.replicas.get(name, {})]

    def ready(self, name: str = "chat") -> list[str]:
        """Jobs that get requests."""
        service = self.service(name)
        return [job_id for job_id in service.ready if job_id not in service.draining]

    def versions(self, name: str = "chat") -> list[int]:
        return sorted(self.state.jobs[job_id].spec.version for job_id in self.ready(name))

    def crash(self, job_id: str, code: int = 1) -> None:
        job = self.job(job_id)
        self.books[job.members[0].slice.node].exited(MemberRef(job_id, job.attempt, 0), code)
