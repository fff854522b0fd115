"""A sleeper can wake on its own nodes only; if they stay full, it is restarted on others."""

from __future__ import annotations

from shoal.model.job import MemberRef, Phase
from shoal.model.policy import Policy
from tests.core.build import Cluster

CALM = Policy(run_ms_min=0, move_cost_ms=60_000, silent_after_ms=10**9, grace_ms=10**9)


def test_a_sleeper_waits_for_its_node_as_long_as_a_restart_costs_and_then_goes_elsewhere() -> None:
    made = Cluster(CALM)
    made.join("a", gpus=1, sleep="freeze")
    low = made.run(gpus=1, preemptible=True, checkpoint_ms=600_000)
    made.join("b", gpus=1, sleep="freeze")
    other = made.run(gpus=1, priority=20)
    made.wait(100_000)
    urgent = made.submit(gpus=1, priority=10)
    assert made.job(low).phase is Phase.DOZING
    made.deliver()
    made.books["a"].slept(MemberRef(low, 1, 0), 0, 100)
    made.hear("a")
    made.deliver()
    made.hear("a")
    assert made.job(urgent).members[0].slice.node == "a"
    made.end(other)
    assert made.job(low).phase is Phase.ASLEEP  # b is free, but a restart would cost 160 s
    made.wait(150_000)
    made.hear("a")
    assert made.job(low).phase is Phase.ASLEEP
    made.wait(20_000)
    made.hear("a")
    assert made.job(low).phase is Phase.STOPPING
    assert made.job(low).why == (
        "restarts on b, because its own nodes have had no room for it for 2m 50s; 1m 40s of work "
        "since its last checkpoint is lost"
    )
    made.deliver()
    made.books["a"].exited(MemberRef(low, 1, 0), 143)
    made.hear("a")
    assert made.job(low).attempt == 2 and made.job(low).members[0].slice.node == "b"
