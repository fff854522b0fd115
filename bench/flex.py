"""One pool against two: a day of training and serving on the same GPUs, by the real `core.step`.

    python bench/flex.py --jobs jobs.csv.gz --azure conv.csv.gz --servegen total_rates.csv.gz

The same nodes twice. Split: some serve, sized for the day's peak, the others train. One pool: a
service with priority 100 and the real autoscaler takes GPUs from elastic training that saves its
work every ten minutes, and gives them back. Training is a sample of philly-pollux, more than the
pool can do in the day, so what counts is GPU-hours of work done and kept. The last line is one JSON
object
{pool: {training_gpu_hours, serving_gpu_hours, began_in_2s, shrunk, grown, preempted}}.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.figures import machine, table
from bench.llm_load import Fleet, LoadError, Request, read_azure, read_day, work_over_time
from shoal.core.policies import SHIPPED
from shoal.core.state.events.runs import JobFinished, JobRequeued, JobStopping
from shoal.core.state.events.services import ReplicaDraining, ReplicaReady
from shoal.core.state.state import State
from shoal.model.job import Job, JobSpec, Phase, StopCause
from shoal.model.report import Request as AnyRequest
from shoal.model.report import SetService
from shoal.model.service import ReplicaLoad, Scale, ServiceLoad, ServiceSpec
from shoal.sim.replay.clusters import NEVER_MS, Conditions, alike
from shoal.sim.replay.replay import Replay
from shoal.sim.replay.traces import Arrival, Trace, in_order

NAME = "llm"
CONCURRENCY = 8
DAY_MS = 86_400_000
LOOK_MS = 5_000
READY_MS = 5_000  # in addition to the 40 s of every start
GPUS_PER_NODE = 8
CHECKPOINT_MS = 600_000
SHORTEST_MS, LONGEST_MS = 1_800_000, 8 * 3_600_000
# The cost of a restart comes before the work, so that checkpoints are where they are expected.
WORLD = Conditions(start_up_ms=40_000, restart_cost_ms=0, checkpoint_ms=CHECKPOINT_MS)
HEADER = (
    "pool",
    "training GPU-h",
    "GPU-h of replicas",
    "began within 2 s",
    "shrunk",
    "grown",
    "preempted",
)


class Result(msgspec.Struct, frozen=True):
    training_gpu_hours: float
    serving_gpu_hours: float
    began_in_2s: float
    shrunk: int
    grown: int
    preempted: int


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    try:
        requests = read_day(
            arguments.servegen, read_azure(arguments.azure), arguments.rps, "deepseek-r1"
        )
        jobs = read_training(arguments.jobs, arguments.nodes * GPUS_PER_NODE)
    except (LoadError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(machine())
    peak = -(-max(work_over_time(requests, 1_000)) // CONCURRENCY)
    serving = -(-peak // GPUS_PER_NODE)
    if serving >= arguments.nodes:
        print(f"error: the peak needs {serving} nodes; use more --nodes", file=sys.stderr)
        return 2
    nothing: list[Request] = []
    least = Scale(least=peak, most=peak, target=CONCURRENCY)
    most = Scale(least=1, most=serving * GPUS_PER_NODE, target=CONCURRENCY)
    trains = play(jobs, nothing, arguments.nodes - serving, None)
    serves = play([], requests, serving, least)
    one = play(jobs, requests, arguments.nodes, most)
    found = {
        f"split {arguments.nodes - serving}+{serving} nodes": msgspec.structs.replace(
            trains,
            serving_gpu_hours=serves.serving_gpu_hours,
            began_in_2s=serves.began_in_2s,
        ),
        f"one pool of {arguments.nodes} nodes": one,
    }
    print(table(HEADER, [_row(name, result) for name, result in found.items()]))
    print(msgspec.json.encode(found).decode())
    return 0


def _row(name: str, result: Result) -> tuple[object, ...]:
    return (
        name,
        f"{result.training_gpu_hours:.0f}",
        f"{result.serving_gpu_hours:.0f}",
        f"{100 * result.began_in_2s:.2f} %",
        result.shrunk,
        result.grown,
        result.preempted,
    )


def read_training(path: Path, gpus: int) -> list[Arrival]:
    """The trace's first jobs with 1 to 8 GPUs that take half an hour to eight hours, 10 % more than
    `gpus` can do in the day, arriving evenly. Each may run on up to four times its GPUs, and its
    speed is proportional to its GPUs."""
    found: list[tuple[int, int]] = []
    left_ms = 11 * gpus * DAY_MS // 10
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            members, work_ms = int(row["num_gpu"]), 1000 * int(float(row["duration_s"]))
            if 1 <= members <= 8 and SHORTEST_MS <= work_ms <= LONGEST_MS and left_ms > 0:
                found.append((members, work_ms))
                left_ms -= members * work_ms
    return [
        Arrival(
            submit_ms=DAY_MS * number // len(found),
            work_ms=work_ms,
            spec=JobSpec(
                command=("train",),
                members=members,
                members_max=4 * members,
                gpus=1,
                cpu_milli=0,
                preemptible=True,
                checkpoint_ms=CHECKPOINT_MS,
            ),
            row=number,
        )
        for number, (members, work_ms) in enumerate(found)
    ]


def play(
    jobs: Sequence[Arrival], requests: Sequence[Request], nodes: int, scale: Scale | None
) -> Result:
    trace = in_order("flex", jobs) if jobs else Trace("flex", [])
    return Flex(trace, nodes, requests, scale).day()


class FleetGateway:
    """The gateway of the one service: its replicas answer the day's requests."""

    def __init__(self, requests: Sequence[Request], scale: Scale | None) -> None:
        self.fleet = Fleet(requests, CONCURRENCY)
        self.service = service(scale) if scale is not None else None
        self.next_ms = 0
        self.until_ms = DAY_MS

    def requests(self, state: State, now_ms: int) -> list[AnyRequest]:
        self.fleet.advance(now_ms)
        wanted = self.service is not None and NAME not in state.services
        return [SetService(self.service)] if wanted and self.service is not None else []

    def loads(self, state: State, now_ms: int) -> list[ServiceLoad]:
        if now_ms < self.next_ms:
            return []
        self.next_ms = now_ms + LOOK_MS if self.service is not None else NEVER_MS
        return [self._load(state, now_ms)] if NAME in state.services else []

    def _load(self, state: State, now_ms: int) -> ServiceLoad:
        fleet = self.fleet
        serving = any(not replica.draining for replica in fleet.replicas.values())
        return ServiceLoad(
            service=NAME,
            in_flight=fleet.in_flight,
            queued=fleet.queued if serving else 0,
            held=0 if serving else fleet.queued,
            replicas={
                name: ReplicaLoad(up=True, in_flight=replica.in_flight)
                for name, replica in fleet.replicas.items()
            },
            ready=tuple(
                job_id
                for job_id in state.replicas.get(NAME, {})
                if _answers(state.jobs[job_id], now_ms)
            ),
        )


class Flex(Replay):
    """A replay of one day in which one of the users has a service."""

    def __init__(
        self, trace: Trace, nodes: int, requests: Sequence[Request], scale: Scale | None
    ) -> None:
        gateway = FleetGateway(requests, scale)
        specs = alike(nodes, gpus=GPUS_PER_NODE)
        super().__init__(trace, specs, SHIPPED["fair"], WORLD, "flex", 0, gateway=gateway)
        self.fleet = gateway.fleet
        self.replica_ms = 0
        self.training_ms = 0
        self.causes: Counter[str] = Counter()
        for kind, handler in (
            (JobStopping, self._job_stopping),
            (ReplicaReady, self._replica_ready),
            (ReplicaDraining, self._replica_draining),
        ):
            self._handlers[kind] = handler

    def day(self) -> Result:
        while self.now_ms < DAY_MS:
            self.now_ms = min(DAY_MS, self._next_time())
            self._step()
        for job_id in list(self.jobs):
            self._count_replica(job_id)
        self._count_training()
        return Result(
            training_gpu_hours=round(self.training_ms / 3_600_000, 1),
            serving_gpu_hours=round(self.replica_ms / 3_600_000, 1),
            began_in_2s=round(self.fleet.kept(2_000), 5),
            shrunk=self.causes["shrinks"],
            grown=self.causes["grows"],
            preempted=self.causes["is preempted"],
        )

    def _count_training(self) -> None:
        """Work that was done and kept; of what runs at the end, what it has done so far."""
        self.cluster.now_ms = self.now_ms
        for attempt in self.cluster.attempts.values():
            if attempt.sim_job.arrival.row >= 0:
                self.cluster._halt(attempt)
        live = {job.arrival.row: job.done_ms for job in self.jobs.values()}
        for arrival in self.trace.arrivals[: self.next_arrival]:
            done_ms = live.get(arrival.row, arrival.work_ms)
            self.training_ms += done_ms * arrival.spec.members

    def _job_requeued(self, event: JobRequeued) -> None:
        self._count_replica(event.job)
        super()._job_requeued(event)

    def _job_stopping(self, event: JobStopping) -> None:
        if event.cause in (StopCause.RESIZE, StopCause.PREEMPT):
            words = ("shrinks", "grows", "is preempted")
            self.causes[next(word for word in words if event.why.startswith(word))] += 1
        if event.job in self.fleet.replicas:
            self.fleet.remove(event.job)

    def _job_finished(self, event: JobFinished) -> None:
        self._count_replica(event.job)
        super()._job_finished(event)

    def _count_replica(self, job_id: str) -> None:
        attempt = self.cluster.attempts.get(job_id)
        if attempt is not None and attempt.sim_job.arrival.row < 0:
            self.replica_ms += self.now_ms - attempt.placed_ms
        if job_id in self.fleet.replicas:
            self.fleet.remove(job_id)

    def _replica_ready(self, event: ReplicaReady) -> None:
        self.fleet.add(event.job, self.now_ms)

    def _replica_draining(self, event: ReplicaDraining) -> None:
        self.fleet.drain(event.job)


def service(scale: Scale) -> ServiceSpec:
    replica = JobSpec(command=("serve",), gpus=1, cpu_milli=0, priority=100)
    return ServiceSpec(name=NAME, replica=replica, scale=scale)


def _answers(job: Job, now_ms: int) -> bool:
    ran_ms = now_ms - (job.running_ms if job.running_ms is not None else now_ms)
    return job.phase is Phase.RUNNING and ran_ms >= READY_MS


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=Path, required=True, help="philly-pollux: jobs.csv.gz")
    parser.add_argument("--azure", type=Path, required=True, help="azure-llm-2023: conv.csv.gz")
    parser.add_argument("--servegen", type=Path, required=True, help="servegen: total_rates.csv.gz")
    parser.add_argument("--nodes", type=int, default=6, help="with 8 GPUs each (default 6)")
    parser.add_argument("--rps", type=float, default=4.0, help="mean of the day (default 4)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
