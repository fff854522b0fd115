"""The history of a real cluster, replayed under the policy that it ran with."""

from __future__ import annotations

import pytest

from shoal.core.policies import SHIPPED
from shoal.sim.replay.clusters import gangs_for
from shoal.sim.replay.metrics import as_it_was, summarize
from shoal.sim.replay.readers.history import read_history
from shoal.sim.replay.replay import replay
from tests.live.cluster import live_cluster

JOBS = 12


def test_a_live_history_is_replayed_as_it_was() -> None:
    """Counts, and that the replay's accounts are of the same order: nothing depends on speed."""
    with live_cluster(2, gpus=2) as live:
        jobs = [live.run("sleep 0.3", gpus=1) for _ in range(JOBS)]
        assert [live.wait(job) for job in jobs] == ["succeeded"] * JOBS
        page = live.client.events(after=0, limit=10_000).events
    history = read_history(lambda after, limit: page[after : after + limit], "live")
    trace = history.trace(gangs_for(history.nodes))
    was = as_it_was(trace.arrivals)
    assert was is not None and was.jobs == JOBS
    outcome = replay(trace, history.nodes, SHIPPED["fair"], name="fair")
    found = summarize(outcome)
    assert (found.jobs, found.failed) == (JOBS, 0)
    accounts = {one.account: one.gpu_us for one in found.accounts}
    work_us = sum(one.work_ms * one.spec.gpus for one in trace.arrivals) * 1000
    assert accounts["useful"] == pytest.approx(work_us, rel=0.05)
    assert found.completion.mean_s < 3 * was.completion.mean_s + 1
