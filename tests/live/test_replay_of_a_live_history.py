"""The history of a real cluster, replayed under the policy that it ran with."""

from __future__ import annotations

import time

import msgspec
import pytest
from harness.waiting import until

from shoal.core.policies import SHIPPED
from shoal.model.service import Probe, Scale
from shoal.sim.replay.clusters import gangs_for
from shoal.sim.replay.metrics import as_it_was, summarize
from shoal.sim.replay.readers.history import read_history
from shoal.sim.replay.replay import replay
from tests.live.cluster import Live, live_cluster
from tests.live.serving import Serving, need_gateway, replica_ports
from tests.needs import need_program

JOBS, FAILED = 24, 3
SITE = "mkdir -p site; echo up >site/index.html; exec busybox httpd -f -p $PORT -h site"


@pytest.mark.parametrize(
    ("pace", "within"), [(0.3, 0.25), pytest.param(3.0, 0.05, marks=pytest.mark.soak)]
)
def test_a_mixed_history_is_replayed_as_it_was(pace: float, within: float) -> None:
    """A service, an array, gangs, jobs that fail and are tried again, with more than fits at once.
    How long jobs wait follows from who starts first, which a busy machine may change; what they
    used does not."""
    need_gateway()
    need_program("busybox")
    with live_cluster(2, gpus=4) as live:
        site = mixed_load(live, pace)
        live.client.stop_service("site")
        until(site.gone)
        page = live.client.events(after=0, limit=10_000).events
        ledger = live.client.request("GET", "/v1/ledger", dict)
    history = read_history(lambda after, limit: page[after : after + limit], "live")
    trace = history.trace(gangs_for(history.nodes))
    was = as_it_was(trace.arrivals)
    assert was is not None and was.jobs == JOBS
    found = summarize(replay(trace, history.nodes, SHIPPED["fair"], name="fair"))
    assert (found.jobs, found.failed) == (JOBS, FAILED)
    assert found.completion.mean_s == pytest.approx(was.completion.mean_s, rel=within)
    assert found.wait.mean_s == pytest.approx(was.wait.mean_s, rel=within)
    replayed = {one.account: one.gpu_us for one in found.accounts}
    lived = {one["account"]: one["gpu_us"] for one in ledger["accounts"]}
    for account, rel in (("useful", 0.05), ("recompute", 0.05), ("warm", within)):
        assert replayed[account] == pytest.approx(lived[account], rel=rel), (account, lived)
    figures = {"completion": (found.completion.mean_s, was.completion.mean_s)}
    figures["wait"] = (found.wait.mean_s, was.wait.mean_s)
    figures |= {one: (replayed[one] / 1e6, lived[one] / 1e6) for one in replayed if one in lived}
    print(figures)


def mixed_load(live: Live, pace: float) -> Serving:
    """Returns when every job has ended, with the service still up."""
    live.client.set_policy(msgspec.structs.replace(live.client.policy(), **replica_ports()))
    site = Serving(live, "site")
    replica = live.spec("sh", "-c", SITE, gpus=1, cpu_milli=0)
    site.put(replica, Scale(least=1, most=1), Probe(path="/index.html"))
    site.settles()

    # No two end at the same time: who comes first then would be left to chance.
    def job(seconds: float, then: str = "", **fields: object) -> str:
        return live.run(f"sleep {seconds * pace}{then}", **{"gpus": 1, "cpu_milli": 0, **fields})

    uneven = f'; sleep $(busybox awk "BEGIN {{print $SHOAL_ARRAY_INDEX * {0.13 * pace}}}")'
    jobs = [job(1.5, uneven, sweep={"ranges": [[0, 11, 1]]}), job(3, members=4)]
    time.sleep(pace)  # as people submit: one after the other
    again = {"restart": "on-failure", "retries": 1}
    failing = [job(1.3 + 0.2 * n, "; exit 3", **again) for n in range(FAILED)]
    jobs.append(job(4, members=7))
    time.sleep(2 * pace)
    jobs += [job(2.2 + 0.3 * n, gpus=2) for n in range(3)]
    jobs.append(job(2, "; [ $SHOAL_ATTEMPT = 2 ]", **again))
    time.sleep(2 * pace)
    jobs += [job(1 + 0.2 * n, members=2) for n in range(3)]
    assert [live.wait(one) for one in jobs] == ["succeeded"] * len(jobs)
    assert [live.wait(one) for one in failing] == ["failed"] * FAILED
    return site
