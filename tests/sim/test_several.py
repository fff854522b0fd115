"""A replay over several clusters: every job ends once, the accounts agree, and one cluster alone is
the plain replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.core.policies import SHIPPED
from shoal.core.state.events.neighbors import JobReturned
from shoal.forms.clusters import parse, read
from shoal.forms.failure import BadField
from shoal.ledger.report import Tariff
from shoal.model.durations import HOUR_MS
from shoal.model.job import JobSpec
from shoal.model.ledger import By, PriceList
from shoal.model.neighbor import Neighbor
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy, Tenant
from shoal.sim.replay.clusters import Cause, Conditions, Failures, alike, gangs_for
from shoal.sim.replay.metrics import summarize
from shoal.sim.replay.readers import read_trace
from shoal.sim.replay.replay import replay
from shoal.sim.replay.several import Several, Sites, SiteSpec, divided
from shoal.sim.replay.spilling import clusters_of, spilled
from shoal.sim.replay.traces import Arrival, Trace, TraceError, stretch
from tests.sim.test_sim_cli import PLAIN, Sim, sim

__all__ = ["sim"]  # the fixture

WORLD = Conditions(start_up_ms=0, stop_ms=0, restart_cost_ms=0)
ROUGH = Conditions(failures=Failures(10_000, repair_ms=600_000, causes=(Cause("power", 1),)))


def site(name: str, others: str, nodes: list[NodeSpec], **more: Any) -> SiteSpec:
    to = tuple(Neighbor(name=other, after_ms=60_000) for other in others.split())
    return SiteSpec(name=name, nodes=nodes, neighbors=to, **more)


def arrival(row: int, submit_s: float, work_s: int, cluster: str = "a", gpus: int = 1) -> Arrival:
    spec = JobSpec(command=("replayed",), gpus=gpus, cpu_milli=0)
    return Arrival(round(submit_s * 1000), work_s * 1000, spec, row, cluster=cluster)


def several(sites: Sites, arrivals: list[Arrival], policy: Policy | None = None) -> Several:
    parts = divided(Trace("few", arrivals), sites, 0)
    return Several(sites, parts, policy or SHIPPED["fair"], WORLD)


def ends_s(one: Several) -> dict[int, float]:
    found = {}
    for its in one.sites:
        records = its.outcome.records
        for row, finished_ms in zip(records.row, records.finished_ms, strict=True):
            assert row not in found, f"row {row} ended twice"
            found[row] = finished_ms / 1000
    return found


def numbered(trace: Trace) -> Trace:
    """A trace that is played several times has each row as often."""
    rows = [msgspec.structs.replace(one, row=row) for row, one in enumerate(trace.arrivals, 1)]
    return msgspec.structs.replace(trace, arrivals=rows)


def figures(one: Several) -> dict[str, Any]:
    found = msgspec.to_builtins(summarize(one.run()))
    return {name: value for name, value in found.items() if not name.startswith("step_")}


@pytest.fixture(scope="module")
def mixed() -> Several:
    """Three clusters, of which one has far too much to do, and nodes that break."""
    trace = read_trace(Path(PLAIN), gangs_for(alike(2, gpus=8)))
    trace = numbered(stretch(trace, jobs=60, load=1.5))
    sites = Sites(
        sites=(
            site("a", "b c", alike(2, gpus=8), price=2_500_000, share=4.0),
            site("b", "a", alike(2, gpus=8), price=2_000_000, share=1.0, shift_ms=HOUR_MS),
            site("c", "a b", alike(2, gpus=8), price=1_000_000, share=1.0, shift_ms=2 * HOUR_MS),
        ),
        currency="EUR",
        round_trip_ms=80,
    )
    parts = divided(trace, sites, 0)
    one = Several(sites, parts, SHIPPED["fair"], ROUGH, name="fair + spill")
    summary = summarize(one.run(check_every=7))
    assert summary.jobs == sum(len(part.arrivals) for part in parts) == 60
    return one


def test_one_cluster_is_the_plain_replay() -> None:
    nodes = alike(2, gpus=8)
    trace = stretch(read_trace(Path(PLAIN), gangs_for(nodes)), jobs=60, load=2)
    alone = Sites(sites=(SiteSpec(name="a", nodes=nodes, shift_ms=HOUR_MS),))
    one = Several(alone, divided(trace, alone, 3), SHIPPED["fair"], ROUGH, seed=3)
    plain = msgspec.to_builtins(summarize(replay(trace, nodes, SHIPPED["fair"], ROUGH, seed=3)))
    assert figures(one) == {
        name: value for name, value in plain.items() if not name.startswith("step_")
    }


def test_a_job_that_waits_runs_where_there_is_room() -> None:
    """It is asked about after a minute, and starts in the next round. Home hears of its end in a
    round, too."""
    nodes = alike(1, gpus=1)
    sites = Sites(sites=(site("a", "b", nodes), site("b", "", nodes)), round_trip_ms=400)
    few = [arrival(1, 0, 1000), arrival(2, 0, 1000)]
    one = several(sites, few)
    summary = summarize(one.run(check_every=1))
    # Asked at 60 s, offered at 60.4 s, sent 200 ms later, there at 60.8 s; until 1,060.8 s.
    assert ends_s(one) == {1: 1000.0, 2: 1062.4}
    assert summary.wait.mean_s == 30.4
    (owed,) = clusters_of(one).owed
    assert (owed.cluster, owed.to, owed.jobs, owed.money) == ("a", "b", 1, None)
    assert owed.gpu_hours * 3600 == 1000
    alone = several(sites.alone(), few)
    without = summarize(alone.run())
    assert ends_s(alone) == {1: 1000.0, 2: 2000.0}
    said = spilled("fair", without, summary, clusters_of(one))
    assert said.text.startswith(
        "fair with spilling: 1 hand-over (0.3 GPU-hours). Jobs wait 30s instead of 8m 20s on "
        "average (94 % less), p99 1m 01s instead of 16m 40s. Work lost: 0.0 GPU-hours instead of "
    )


def test_a_bound_of_the_policy_keeps_jobs_at_home() -> None:
    nodes = alike(1, gpus=2)
    few = [arrival(row, 0, 1000) for row in range(1, 5)]
    bound = Neighbor(name="b", after_ms=60_000, gpus_max=1)
    sites = Sites(sites=(SiteSpec(name="a", nodes=nodes, neighbors=(bound,)), site("b", "", nodes)))
    one = several(sites, few, SHIPPED["fifo"])
    one.run(check_every=1)
    assert list(ends_s(one).values()) == [1000, 1000, 1062, 2000]


def test_a_host_that_refuses_gets_nothing_and_the_job_is_not_lost() -> None:
    nodes = alike(1, gpus=1)
    sites = Sites(sites=(site("a", "b", nodes), site("b", "", nodes)))
    closed = msgspec.structs.replace(
        SHIPPED["fair"], tenants=(Tenant(name="from-a", gpus_max=1, jobs_max=1),)
    )
    few = [arrival(1, 0, 1000), arrival(2, 0, 3000), arrival(3, 0, 3000)]
    one = several(sites, few, closed)
    one.run(check_every=1)
    assert len(ends_s(one)) == 3
    assert one.sites[0].owes["b"].jobs == 2  # one after the other


def test_every_job_ends_once_and_nothing_is_left(mixed: Several) -> None:
    assert len(ends_s(mixed)) == 60
    for one in mixed.sites:
        assert not (one.guests or one.state.away or one.state.strays or one.jobs)
        assert one.levels.held == one.levels.waiting == one.levels.live == 0
    assert sum(debt.jobs for one in mixed.sites for debt in one.owes.values()) > 10
    assert mixed.sites[1].owes.keys() <= {"a"}  # as its neighbors are


def test_the_accounts_of_all_clusters_agree(mixed: Several) -> None:
    """What each home owes is what its host has counted, and what the ledgers of both have."""
    for home in mixed.sites:
        for to, debt in home.owes.items():
            host = mixed.site(to)
            assert debt == host.earned[home.spec.name]
            hours = host.ledger._book.cluster.now_ms // HOUR_MS + 1
            tariff = Tariff(PriceList(), host.ledger._store.machines())
            sums = host.ledger._store.sums(By.TENANT, 0, hours, tariff.of_machine)
            held = sum(one.gpu_us for one in sums if one.key == home.tenant)
            assert held == 1000 * debt.gpu_ms
            owed = home.ledger._store.owed(0, hours)
            assert sum(one.gpu_ms for of, one in owed if of[0] == to) == debt.gpu_ms
    found = clusters_of(mixed)
    balances = [one.balance for one in found.clusters]
    assert sum(one or 0 for one in balances) == pytest.approx(0, abs=1e-9)
    assert sum(one.handed_over_gpu_hours for one in found.clusters) == pytest.approx(
        sum(one.taken_gpu_hours for one in found.clusters)
    )
    for one in found.owed:  # each job is rounded to millionths
        assert one.money == pytest.approx(one.gpu_hours * price_at(one.to), abs=1e-4)


def price_at(name: str) -> float:
    return {"a": 2.5, "b": 2.0, "c": 1.0}[name]


def test_the_same_seed_gives_the_same_figures() -> None:
    nodes = alike(1, gpus=8)
    trace = stretch(read_trace(Path(PLAIN), gangs_for(nodes)), jobs=24, load=2)
    trace = msgspec.structs.replace(
        trace, arrivals=[one for one in trace.arrivals if one.spec.members == 1]
    )
    sites = Sites(sites=(site("a", "b", nodes), site("b", "a", nodes)))

    def played(seed: int) -> dict[str, Any]:
        return figures(Several(sites, divided(trace, sites, seed), Policy(), ROUGH, seed=seed))

    assert played(1) == played(1) != played(2)


def test_jobs_belong_to_the_cluster_that_the_trace_names() -> None:
    few = [arrival(1, 5, 10, "a"), arrival(2, 6, 10, "b")]
    nodes = alike(1, gpus=1)
    sites = Sites(sites=(site("a", "b", nodes), site("b", "", nodes, shift_ms=HOUR_MS)))
    parts = divided(Trace("few", few), sites, 0)
    assert [[one.submit_ms for one in part.arrivals] for part in parts] == [[5000], [3_606_000]]
    few[1] = arrival(2, 6, 10, "x")
    with pytest.raises(TraceError, match=r"few: row 2: cluster: 'x' is not one .* \(a, b\)"):
        divided(Trace("few", few), sites, 0)
    shares = [
        msgspec.structs.replace(one, share=share)
        for one, share in zip(sites.sites, (1, 3), strict=True)
    ]
    parts = divided(Trace("few", few * 200), Sites(sites=tuple(shares)), 0)
    assert 80 < len(parts[0].arrivals) < 120  # of 400


GOOD = """
currency: EUR
round_trip: 80ms
after: 5m
clusters:
  east: {nodes: 2, price: 2.50}
  west: {nodes: 2, price: 2, shift: 8h, neighbors: {east: {after: 10m, gpus_max: 8}}}
  asia: {nodes: 3, gpus: 4, price: 1.20, shift: 16h, neighbors: []}
"""


def test_a_file_of_clusters() -> None:
    sites = parse(GOOD, ".yaml")
    east, west, asia = sites.sites
    assert (sites.currency, sites.round_trip_ms) == ("EUR", 80)
    assert east.neighbors == tuple(Neighbor(name=to, after_ms=300_000) for to in ("west", "asia"))
    assert west.neighbors == (Neighbor(name="east", after_ms=600_000, gpus_max=8),)
    assert not asia.neighbors and [node.gpus for node in asia.nodes] == [4, 4, 4]
    assert (west.price, west.shift_ms, west.share) == (2_000_000, 8 * HOUR_MS, None)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("asia:", "west:", "'west' is given twice"),
        (GOOD, "currency: EUR", "clusters: must name 1 to 33 clusters"),
        (GOOD, "clusters: {}", "clusters: must name 1 to 33 clusters"),
        ("shift: 8h", "shfit: 8h", "clusters.west: there is no field 'shfit'; did you mean"),
        ("round_trip", "rond_trip", "there is no field 'rond_trip'; did you mean 'round_trip'?"),
        ("{east: {after", "{est: {after", "est is not another cluster; known: east, asia"),
        ("{east: {after", "{west: {after", "west is not another cluster; known: east, asia"),
        ("neighbors: []", "neighbors: [{name: east}, {name: east}]", "names one twice"),
        ("price: 2.50", "share: 1", "clusters.east.price: is missing; give it to all, or to none"),
        ("currency: EUR", "", "currency: must be the name of one"),
        ("price: 2,", "price: -2,", "clusters.west.price: "),
        ("nodes: 3", "nodes: 0", "clusters.asia.nodes: must be from 1"),
        ("nodes: 3, gpus: 4,", "gpus: 4,", "clusters.asia: must be a table with nodes"),
        ("nodes: 3,", "nodes: none.csv,", "clusters.asia.gpus: is in 'none.csv'; leave it out"),
        ("nodes: 3, gpus: 4", "nodes: none.csv", "'none.csv' is neither a number nor a file"),
        ("shift: 16h", "share: .nan", "clusters.asia.share: must be a number"),
        ("shift: 16h", "share: 0", "clusters.asia.share: must be more than 0"),
        ("after: 5m", "after: 0", "after: must be more than 0"),
        ("80ms", "2h", "round_trip: '2h' is too much"),
        ("  east:", "  'a b':", "clusters.a b: "),
    ],
)
def test_a_file_with_a_mistake_is_refused_in_one_line(before: str, after: str, said: str) -> None:
    with pytest.raises(BadField) as refused:
        parse(GOOD.replace(before, after, 1), ".yaml")
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_shoal_sim_compares_without_and_with_spilling(sim: Sim, tmp_path: Path) -> None:
    path = tmp_path / "clusters.yaml"
    path.write_text(
        "currency: EUR\nclusters:\n  east: {nodes: 2, price: 2.5, share: 5}\n"
        "  west: {nodes: 2, price: 2, share: 1, shift: 8h}\n"
    )
    assert len(read(str(path)).sites) == 2
    args = (PLAIN, "--clusters", str(path), "--jobs", "40", "--policy", "fair")
    result = sim(*args)
    assert result.code == 0, result.err
    assert result.out.splitlines()[0].split() == ["FIGURE", "fair", "fair", "+", "spill"]
    assert "east owes west" in result.out and "west: balance" in result.out
    assert "fair with spilling: " in result.err and "hand-overs" in result.err
    document = json.loads(sim(*args, "--json").out)
    (spilling,), (without, within) = document["spilling"], document["clusters"]
    alone, spilt = (one["wait"]["mean_s"] for one in document["policies"])
    assert spilt < alone and spilling["handed_over"] > 0
    assert not without["owed"] and within["owed"]
    assert [one["policy"] for one in document["policies"]] == ["fair", "fair + spill"]
    for flag in (("--nodes", "2"), ("--sleep",), ("--history",), ("--prices", "p.yaml")):
        refused = sim(*args, *flag)
        assert refused.code == 2 and f"{flag[0]}: does not go with --clusters" in refused.err
    assert "is missing: name a file of jobs" in sim("--clusters", str(path)).err
    path.write_text("clusters: {east: {nodes: 1, gpus: 4}, west: {nodes: 1, gpus: 4}}")
    assert ", cluster east: row " in sim(*args).err


def test_a_job_that_comes_to_be_late_comes_back_and_is_not_lost() -> None:
    """The host's node is taken by its own urgent job in the moment in which the offer travels."""
    nodes = alike(1, gpus=1)
    sites = Sites(sites=(site("a", "b", nodes), site("b", "", nodes)), round_trip_ms=400)
    few = [arrival(1, 0, 5000), arrival(2, 0, 5000), arrival(3, 60.5, 5000, "b")]
    one = several(sites, few, SHIPPED["fifo"])
    seen: list[JobReturned] = []
    home = one.sites[0]

    def returned(event: JobReturned) -> None:
        seen.append(event)
        home._job_returned(event)

    home._handlers[JobReturned] = returned
    one.run(check_every=1)
    assert [event.why for event in seen] == ["it has not begun there, long after it should have"]
    assert ends_s(one) == {1: 5000, 2: 10_000, 3: 5060.5}
    assert clusters_of(one).owed[0].gpu_hours == 0
