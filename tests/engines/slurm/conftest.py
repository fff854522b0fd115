"""A real Slurm for each file of tests: it starts in a second, and a restarted slurmctld is slow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.slurm import Slurm, available, slurm

CONF = (
    "SlurmdTimeout=5",
    "MessageTimeout=5",
    "KillWait=5",
    "MinJobAge=300",
    "SchedulerParameters=batch_sched_delay=0,sched_min_interval=10000,sched_interval=2,bf_interval=2",
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=short Nodes=ALL MaxTime=5 State=UP",
    "PartitionName=closed Nodes=ALL AllowGroups=nogroup State=UP",
    "PartitionName=urgent Nodes=n4 PriorityTier=10 State=UP",
)


@pytest.fixture(scope="module")
def real() -> Iterator[Slurm]:
    reason = available()
    if reason is not None:
        pytest.skip(reason)
    with slurm(CONF) as cluster:
        yield cluster
