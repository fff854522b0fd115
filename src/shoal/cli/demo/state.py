"""What the demo knows of its cluster, from the events alone."""

from __future__ import annotations

import msgspec

from shoal.model.events import (
    Event,
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobRunning,
    JobSubmitted,
    MemberExited,
    MemberLost,
    NodeJoined,
    NodeLost,
    NodeReady,
)
from shoal.model.job import Outcome, StopCause
from shoal.model.resources import Slice


class DemoJob(msgspec.Struct):
    name: str
    state: str = "waiting"
    attempt: int = 0
    slices: tuple[Slice, ...] = ()
    outcome: Outcome | None = None
    hit: bool = False  # it lost a member on the killed node
    healed_ms: int | None = None  # when it ran again
    wants_gpus: bool = False
    replica: bool = False  # of a service: it ends with the service


class DemoNode(msgspec.Struct):
    """`cells` holds the job on each GPU, or an empty string."""

    state: str
    place: str
    cells: list[str]


class Kill(msgspec.Struct):
    """A node that was killed, by the demo or by the one who watches it."""

    node: str
    at_ms: int
    noticed_ms: int | None = None
    back_ms: int | None = None


class DemoState(msgspec.Struct):
    nodes: dict[str, DemoNode] = {}
    jobs: dict[str, DemoJob] = {}
    kills: list[Kill] = []
    retried: int = 0  # attempts after a failure

    def kill(self, node: str, now_ms: int) -> None:
        self.kills.append(Kill(node, now_ms))

    def may_kill(self, node: str) -> bool:
        known = self.nodes.get(node)
        return known is not None and known.state == "ready" and not self._open(node)

    def _open(self, node: str) -> list[Kill]:
        return [kill for kill in self.kills if kill.node == node and kill.back_ms is None]

    @property
    def all_back(self) -> bool:
        return all(kill.back_ms is not None for kill in self.kills)

    def take(self, event: Event) -> None:
        match event:
            case NodeJoined():
                cells = [""] * event.spec.gpus
                self.nodes[event.node] = DemoNode("joining", event.spec.place, cells)
            case NodeReady():
                self.nodes[event.node].state = "ready"
                for kill in self._open(event.node):
                    if kill.noticed_ms is not None:
                        kill.back_ms = event.at_ms
            case NodeLost():
                self.nodes[event.node].state = "lost"
                for kill in self._open(event.node):
                    kill.noticed_ms = kill.noticed_ms or event.at_ms
            case JobSubmitted():
                name = event.spec.name or event.job
                replica = bool(event.spec.service)
                wants_gpus = event.spec.gpus > 0
                self.jobs[event.job] = DemoJob(name, wants_gpus=wants_gpus, replica=replica)
            case _:
                self._take_job(event)

    def _take_job(self, event: Event) -> None:
        match event:
            case JobPlaced():
                job = self.jobs[event.job]
                job.state, job.attempt, job.slices = "starting", event.attempt, event.slices
                for slice_ in event.slices:
                    self._fill(slice_, event.job)
            case JobRunning():
                job = self.jobs[event.job]
                job.state = "running"
                if job.hit and job.healed_ms is None:
                    job.healed_ms = event.at_ms
            case MemberExited() | MemberLost():
                self._fill(self.jobs[event.job].slices[event.member], "")
                self.jobs[event.job].hit |= isinstance(event, MemberLost)
            case JobRequeued():
                self.jobs[event.job].hit |= event.cause is StopCause.NODE_LOSS
                self.retried += event.cause is StopCause.FAILURE
                self._leave(event.job, "waiting")
            case JobFinished():
                self.jobs[event.job].outcome = event.outcome
                self._leave(event.job, event.outcome.value)
            case _:
                pass

    @property
    def submitted(self) -> list[DemoJob]:
        return [job for job in self.jobs.values() if not job.replica]

    def counts(self) -> dict[str, int]:
        """How many jobs run, wait and are finished."""
        states = [job.state for job in self.submitted]
        over = sum(job.outcome is not None for job in self.submitted)
        waiting = states.count("waiting")
        return {"running": len(states) - over - waiting, "waiting": waiting, "finished": over}

    def all_finished(self, submitted: int) -> bool:
        return self.counts()["finished"] == submitted

    def job_named(self, name: str) -> str:
        return next((job_id for job_id, job in self.jobs.items() if job.name == name), "")

    def victim(self, job_id: str) -> str:
        """The node under this job whose loss hits most others, too; empty: it does not run."""
        job = self.jobs.get(job_id)
        if job is None or job.state != "running":
            return ""
        many = dict.fromkeys(sorted({slice_.node for slice_ in job.slices}), 0)
        for other in self.jobs.values():
            if other.state == "running":
                for node in {slice_.node for slice_ in other.slices} & many.keys():
                    many[node] += 1
        return max(many, key=lambda node: many[node])

    def _leave(self, job_id: str, state: str) -> None:
        job = self.jobs[job_id]
        for slice_ in job.slices:
            self._fill(slice_, "", only=job_id)
        job.state, job.slices = state, ()

    def _fill(self, slice_: Slice, job_id: str, only: str = "") -> None:
        cells = self.nodes[slice_.node].cells
        for gpu in slice_.gpus:
            if not only or cells[gpu] == only:
                cells[gpu] = job_id
