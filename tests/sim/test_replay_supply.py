"""A policy for an elastic pool can be replayed before it is used."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.model.job import JobSpec
from shoal.model.policy import Policy
from shoal.model.supply import Supply
from shoal.sim.replay.clusters import Conditions, alike
from shoal.sim.replay.metrics import Outcome, check_options, summarize
from shoal.sim.replay.replay import replay, too_large
from shoal.sim.replay.traces import Arrival, Trace, TraceError

MINUTE_MS = 60_000
CLOUD = Supply(
    name="cloud",
    engine="slurm",
    gpus=8,
    cpu_milli=64_000,
    memory_mb=1000,
    most=4,
    idle_ms=10 * MINUTE_MS,
    price=12_000_000,
)


def played(supply: Supply | None, gpus: int = 8, jobs: int = 4) -> Outcome:
    """Jobs of an hour on one node of 8 GPUs of our own."""
    spec = JobSpec(command=("work",), gpus=gpus, tenant="lab")
    arrivals = [Arrival(n * 1000, 60 * MINUTE_MS, spec, row=n) for n in range(jobs)]
    policy = Policy(supply=() if supply is None else (supply,))
    trace = Trace("made up", arrivals)
    nodes = alike(1, gpus=8, cpu_milli=64_000, memory_mb=1000)
    return replay(trace, nodes, policy, Conditions(), check_every=1)


def cloud(**fields: Any) -> Supply:
    return msgspec.structs.replace(CLOUD, **fields)


def test_ordered_nodes_shorten_the_wait_and_their_hours_and_money_are_counted() -> None:
    alone, elastic = summarize(played(None)), summarize(played(CLOUD))
    assert alone.supply == []
    assert elastic.wait.p99_s < 2 * 60 < alone.wait.p99_s
    (use,) = elastic.supply
    assert (use.orders, use.refused, use.lost) == (3, 0, 0)
    assert use.node_hours == pytest.approx(3, rel=0.1)  # the last ones end with the trace
    assert use.cost == pytest.approx(use.node_hours * 12)


def test_a_delay_is_waited_for_and_refusals_and_losses_happen() -> None:
    slow = summarize(played(cloud(options={"sim_delay": "30m"})))
    assert 30 * 60 <= slow.wait.p99_s < 31 * 60
    refused = summarize(played(cloud(options={"sim_refuse": "1"})))
    (use,) = refused.supply
    assert use.refused == use.orders > 1
    assert use.node_hours == 0
    lost = summarize(played(cloud(options={"sim_loss": "20m"})))
    assert lost.supply[0].lost > 0
    assert lost.jobs == 4
    assert lost.failed == 0


def test_jobs_that_only_ordered_nodes_can_run_are_replayed() -> None:
    outcome = summarize(played(cloud(gpus=16), gpus=16))
    assert outcome.jobs == 4
    spec = JobSpec(command=("work",), gpus=16)
    trace = Trace("made up", [Arrival(0, 1000, spec, row=7)])
    nodes = alike(1, gpus=8)
    assert list(too_large(trace, nodes)) == [7]
    assert too_large(trace, nodes, Policy(supply=(cloud(gpus=16),))) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sim_delay": "soon"}, "sim_delay: 'soon' is not a time"),
        ({"sim_loss": "0.5"}, "sim_loss: '0.5' is not a time"),
        ({"sim_refuse": "2"}, "sim_refuse: '2' is not a share from 0 to 1"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        check_options(cloud(options=options))
