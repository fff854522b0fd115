"""Shoal's own rules: the live scheduler's code, replayed by the simulator on virtual time.

A job runs until a job of better rank needs its GPUs. A preempted job stops gracefully and loses
nothing; when it runs again it first pays for the restart. Only clairvoyant policies know how long
jobs run.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.queueing_outcome import Outcome
from bench.queueing_published import GPUS_PER_NODE, NODES
from bench.queueing_trace import TraceJob
from shoal.core.policies import SHIPPED
from shoal.sim.replay.clusters import Conditions, alike
from shoal.sim.replay.replay import replay
from shoal.sim.replay.traces import Arrival, Gangs, in_order

# By their names in the table, which set Shoal's default apart from the reference policies.
POLICIES = {
    "srtf": SHIPPED["srtf"],
    "srsf": SHIPPED["srsf"],
    "tiresias": SHIPPED["tiresias"],
    "fifo": SHIPPED["fifo"],
    "backfill": SHIPPED["backfill"],
    "shoal-default": SHIPPED["fair"],
}
CONDITIONS = Conditions(start_up_ms=0, stop_ms=1_000, checkpoint_ms=0, restart_cost_ms=10_000)


def simulate(jobs: Sequence[TraceJob], name: str) -> list[Outcome]:
    gangs = Gangs(GPUS_PER_NODE)
    trace = in_order(
        "trace",
        [
            Arrival(job.submitted_ms, job.work_ms, gangs.spec(job.gpus), row=index)
            for index, job in enumerate(jobs)
        ],
    )
    begin_ms = min(job.submitted_ms for job in jobs)
    done = replay(trace, alike(NODES, gpus=GPUS_PER_NODE), POLICIES[name], CONDITIONS).records
    return [
        Outcome(
            number=jobs[row].number,
            jct_ms=finished_ms - submit_ms,
            wait_ms=finished_ms - submit_ms - work_ms,
            end_ms=begin_ms + finished_ms,
            preemptions=attempts - 1,
        )
        for row, submit_ms, finished_ms, work_ms, attempts in zip(
            done.row, done.submit_ms, done.finished_ms, done.work_ms, done.attempts, strict=True
        )
    ]
