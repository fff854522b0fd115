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


class DemoState(msgspec.Struct):
    nodes: dict[str, DemoNode] = {}
    jobs: dict[str, DemoJob] = {}
    killed_node: str = ""
    killed_ms: int | None = None
    noticed_ms: int | None = None
    back_ms: int | None = None
    retried: int = 0  # attempts after a failure

    def kill(self, node: str, now_ms: int) -> None:
        self.killed_node, self.killed_ms = node, now_ms

    def take(self, event: Event) -> None:
        match event:
            case NodeJoined():
                cells = [""] * event.spec.gpus
                self.nodes[event.node] = DemoNode("joining", event.spec.place, cells)
            case NodeReady():
                self.nodes[event.node].state = "ready"
                if event.node == self.killed_node and self.noticed_ms is not None:
                    self.back_ms = event.at_ms
            case NodeLost():
                self.nodes[event.node].state = "lost"
                if event.node == self.killed_node and self.noticed_ms is None:
                    self.noticed_ms = event.at_ms
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

    def victim(self) -> str:
        """The node whose loss hits most: it runs a part of a wide gang, and many jobs."""
        wider, many = dict.fromkeys(self.nodes, False), dict.fromkeys(self.nodes, 0)
        for job in self.jobs.values():
            if job.state == "running":
                there = {slice_.node for slice_ in job.slices}
                for node in there:
                    wider[node] = wider[node] or len(there) > 1
                    many[node] += 1
        return max(self.nodes, key=lambda node: (wider[node], many[node], node))

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
