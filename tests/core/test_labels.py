"""Labels and taints of nodes: what jobs ask for, what they get, and what they are told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from shoal.core.answers.advice import advise
from shoal.core.answers.why import waiting_reason
from shoal.core.invariants import Violation, verify
from shoal.core.phases.admit import impossible
from shoal.core.state import queue, sizes
from shoal.core.state.load import restore
from shoal.core.state.state import Snapshot
from shoal.model.job import JobSpec, Phase
from shoal.model.labels import contradiction
from shoal.model.node import LabelChange, NodeIntent
from shoal.model.reason import render
from shoal.model.report import Accepted, Answer, Refused, SetLabels, SetService, Submit
from shoal.model.resources import Demand
from shoal.model.service import Scale, ServiceSpec
from shoal.model.supply import Supply
from tests.core.build import POLICY, Cluster, job_spec

ZONES = {"a": "x", "b": "x", "c": "y", "d": "y"}


def cluster_of(**labels: dict[str, str]) -> Cluster:
    """A node with 2 GPUs for each keyword."""
    cluster = Cluster(msgspec.structs.replace(POLICY, run_ms_min=0))
    for name, own in labels.items():
        cluster.join(name, gpus=2, labels=own)
    return cluster


def zoned() -> Cluster:
    return cluster_of(**{name: {"zone": zone} for name, zone in ZONES.items()})


def nodes_of(cluster: Cluster, job_id: str) -> list[str]:
    return [member.slice.node for member in cluster.job(job_id).members]


def change(cluster: Cluster, node: str, **changes: dict[str, str | None]) -> Answer:
    return cluster.ask(SetLabels(node, LabelChange(**changes), "ann"))


def refused(cluster: Cluster, **fields: Any) -> Refused:
    answer = cluster.ask(Submit(job_spec(**fields)))
    assert isinstance(answer, Refused), answer
    return answer


def why(cluster: Cluster, job_id: str) -> str:
    state = cluster.state
    return render(waiting_reason(state, state.jobs[job_id], cluster.policy, cluster.now_ms))


def settle(cluster: Cluster) -> None:
    """Commands arrive and nodes report until nothing changes."""
    for _ in range(4):
        cluster.deliver()
        cluster.hear(*cluster.books)


class Counted(list[Any]):
    """Counts how often somebody walks it."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        self.walks += 1
        return super().__iter__()


def test_a_job_that_says_nothing_about_labels_is_admitted_without_a_look_at_each_node() -> None:
    cluster = zoned()
    order = cluster.state.order = Counted(cluster.state.order)
    assert impossible(cluster.state, job_spec(gpus=2, members=4)) is None
    assert order.walks == 0
    assert impossible(cluster.state, job_spec(where=("zone=x",))) is None
    assert order.walks  # or this counts nothing


# -- conditions -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "nodes"),
    [
        (["pool=a100"], "ab"),
        (["pool=a100|h100"], "abc"),
        (["pool!=a100"], "cde"),
        (["pool!=a100|h100"], "de"),
        (["pool"], "abcd"),
        (["!pool"], "e"),
        (["pool=a100", "zone!=y"], "a"),
        (["pool="], "d"),
        (["node=b"], "b"),
        (["node!=a|b|c|d"], "e"),
    ],
)
def test_a_job_runs_only_where_the_labels_meet_its_conditions(where: list[str], nodes: str) -> None:
    cluster = cluster_of(
        a={"pool": "a100", "zone": "x"},
        b={"pool": "a100", "zone": "y"},
        c={"pool": "h100", "zone": "x"},
        d={"pool": ""},
        e={},
    )
    jobs = [cluster.submit(gpus=2, where=where) for _ in range(5)]
    used = [node for job in jobs for node in nodes_of(cluster, job)]
    assert sorted(used) == list(nodes)
    assert all(why(cluster, job) for job in jobs[len(nodes) :])


@pytest.mark.parametrize(
    ("tolerates", "nodes"),
    [
        ([], "a"),
        (["old"], "ab"),
        (["old", "owner"], "abcd"),
        (["owner=red"], "ac"),
        (["owner=blue"], "a"),
        (["*"], "abcd"),
    ],
)
def test_a_taint_keeps_away_jobs_that_do_not_tolerate_it(tolerates: list[str], nodes: str) -> None:
    cluster = Cluster()
    for name, taints in {
        "a": (),
        "b": ("old",),
        "c": ("owner=red",),
        "d": ("old", "owner=x"),
    }.items():
        cluster.join(name, gpus=2, taints=taints)
    jobs = [cluster.submit(gpus=2, tolerates=tolerates) for _ in range(4)]
    assert sorted(n for job in jobs for n in nodes_of(cluster, job)) == list(nodes)


@pytest.mark.parametrize(
    ("where", "both"),
    [
        (["pool=a", "pool=b"], "pool=a and pool=b"),
        (["pool", "!pool"], "pool and !pool"),
        (["pool=a", "zone=x", "pool!=a"], "pool=a and pool!=a"),
        (["!pool", "pool=a|b"], "!pool and pool=a|b"),
        (["pool=a|b", "pool=b|c", "pool!=a", "pool", "zone"], ""),
    ],
)
def test_conditions_that_contradict_each_other_are_refused(where: list[str], both: str) -> None:
    assert contradiction(where) == both
    if both:
        assert refused(zoned(), where=where).field == "where"


@pytest.mark.parametrize(
    "where", ["", "=", "a=b=c", "ключ=1", "a b", "-a=1", "a=1,b=2", "!a=b", "a\n", "*", "a=b|c d"]
)
def test_absurd_conditions_are_no_part_of_a_spec(where: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        job_spec(where=[where])


def test_what_no_node_has_is_refused_with_what_there_is() -> None:
    cluster = zoned()
    answer = refused(cluster, where=["zone=z"])
    assert (answer.field, answer.message) == (
        "where",
        "no node has zone=z; there are: zone=x (2 nodes), zone=y (2 nodes)",
    )
    assert "no node has the label pool; the labels are: zone, node" in (
        refused(cluster, where=["pool=a"]).message
    )
    assert "each of them is met" in refused(cluster, where=["zone=x", "node=d"]).message
    assert refused(cluster, spread="pool").field == "spread"
    everywhere = refused(cluster, where=["zone!=x|y"])
    assert everywhere.message.startswith("no node has zone!=x|y; there are: zone=x (2 nodes)")
    many = refused(cluster, where=["zone=" + "|".join(f"z{number}" for number in range(300))])
    assert "maximum is 256" in many.message
    assert refused(cluster, together="pool").field == "together"
    assert refused(cluster, gpus=1, members=5, where=["zone=x"]).field == "members"
    assert refused(cluster, gpus=3, where=["zone=x"]).field == "gpus"
    assert refused(cluster, gpus=1, members=5, together="zone").message.endswith("at most 4")
    assert not cluster.state.asked  # a refusal leaves nothing behind
    change(cluster, "d", labels={"pool": "b"})
    cluster.intend("d", NodeIntent.REMOVED)
    assert refused(cluster, spread="pool").message == (
        "no node has the label pool; there are: zone, node"
    )


def test_a_taint_does_not_make_a_job_impossible_and_its_reason_names_it() -> None:
    cluster = cluster_of(a={}, b={})
    for node in "ab":
        assert change(cluster, node, taints={"maintenance": ""}) == Accepted(node)
    job = cluster.submit(gpus=1)
    assert why(cluster, job) == (
        "2 nodes with room are tainted maintenance; to run there, add --tolerates maintenance"
    )
    change(cluster, "b", taints={"maintenance": None})
    assert nodes_of(cluster, job) == ["b"]


def test_the_reason_names_the_condition_that_no_open_node_meets() -> None:
    cluster = zoned()
    for node in "cd":
        cluster.intend(node, NodeIntent.CORDONED)
    job = cluster.submit(gpus=1, where=["zone=y"])
    told = "only c, d could run it (zone=y), and the nodes are closed or lost"
    assert told in why(cluster, job)
    change(cluster, "a", labels={"zone": "y"})
    assert nodes_of(cluster, job) == ["a"]


def test_advice_names_the_condition_that_stands_in_the_way() -> None:
    cluster = zoned()
    for _ in range(2):
        cluster.submit(gpus=2, where=["zone=x"])
    job = cluster.submit(gpus=1, where=["zone=x"])
    told = advise(cluster.state, cluster.job(job), cluster.now_ms)
    assert "without --where zone=x, it would start now" in [one.text for one in told]


# -- changes at run time ---------------------------------------------------------------------


def test_what_people_set_goes_before_what_the_node_reports() -> None:
    cluster = cluster_of(a={"zone": "x", "pool": "p"})
    change(cluster, "a", labels={"zone": "y", "pool": None, "own": "1"}, taints={"old": "v"})
    assert cluster.node("a").labels == {"zone": "y", "own": "1", "node": "a"}
    assert cluster.node("a").taints == ("old=v",)
    assert "by ann" in cluster.log[-1].why  # type: ignore[attr-defined]
    cluster.reboot("a")
    cluster.hear("a")
    assert cluster.node("a").labels == {"zone": "y", "own": "1", "node": "a"}
    change(cluster, "a", labels={"zone": "x", "pool": "p", "own": None}, taints={"old": None})
    assert (cluster.node("a").labels_set, cluster.node("a").taints_set) == ({}, {})
    again = change(cluster, "a", labels={"zone": "x"})
    assert isinstance(again, Accepted) and again.note


def test_a_change_of_labels_is_kept_within_its_bounds() -> None:
    cluster = cluster_of(a={"zone": "x"})
    many = {f"k{number}": "v" for number in range(64)}
    answer = change(cluster, "a", labels=dict(many))
    assert isinstance(answer, Refused) and "at most 64" in answer.message
    assert isinstance(change(cluster, "a", labels={"node": "b"}), Refused)
    missing = change(cluster, "z", labels={"a": "b"})
    assert isinstance(missing, Refused) and missing.missing
    assert change(cluster, "a", labels={**many, "zone": None}) == Accepted("a")
    assert cluster.submit(gpus=1, where=[f"k{number}=v" for number in range(64)])


def test_a_running_job_stays_when_the_labels_change_and_its_next_attempt_obeys_them() -> None:
    cluster = zoned()
    job = cluster.submit(gpus=1, where=["zone=x"], restart="on-failure", retries=3, backoff_ms=0)
    settle(cluster)
    (node,) = nodes_of(cluster, job)
    change(cluster, node, labels={"zone": "y"})
    assert cluster.job(job).phase is Phase.RUNNING
    assert nodes_of(cluster, job) == [node]
    cluster.exit(job, 1)
    settle(cluster)
    assert cluster.job(job).attempt == 2
    assert nodes_of(cluster, job) == [{"a": "b", "b": "a"}[node]]


def test_a_claim_ends_when_the_labels_change_before_the_job_starts() -> None:
    cluster = cluster_of(a={"zone": "x"}, b={"zone": "y"})
    low = cluster.submit(gpus=2, preemptible=True, where=["zone=x"], stop_grace_ms=60_000)
    settle(cluster)
    cluster.wait(1_000)
    high = cluster.submit(gpus=2, priority=9, where=["zone=x"])
    assert high in cluster.state.claims
    assert cluster.job(low).phase is Phase.STOPPING
    change(cluster, "a", labels={"zone": "z"})
    cluster.step()
    assert high not in cluster.state.claims
    assert "no node has zone=x" in why(cluster, high)


def test_nodes_are_of_one_kind_until_a_job_asks_about_their_labels() -> None:
    cluster = Cluster()
    for number in range(20):
        labels = {"host": f"h{number}", "zone": f"z{number % 2}"}
        cluster.join(f"n{number}", gpus=1, labels=labels, taints=(f"t{number}",))
    assert len(cluster.state.capacity) == 1
    job = cluster.submit(gpus=1, where=["host=h3"], tolerates=["*"])
    assert nodes_of(cluster, job) == ["n3"]
    assert len(cluster.state.capacity) == 2
    cluster.submit(gpus=1, spread="zone", tolerates=["t5"])
    assert len(cluster.state.capacity) == 4  # h3 | zone z0 | zone z1 | t5
    restored = restore(_copy(cluster))
    assert restored.capacity == cluster.state.capacity


def _copy(cluster: Cluster) -> Snapshot:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(cluster.state.snapshot()), type=Snapshot)


def test_what_nobody_asks_about_any_more_is_forgotten_after_a_while() -> None:
    cluster = Cluster()
    for number in range(100):
        cluster.join(f"n{number}", gpus=1, labels={"host": f"h{number}"})
    for number in range(100):
        job = cluster.submit(gpus=1, where=[f"host=h{number}"])
        cluster.cancel(job)
        settle(cluster)
    assert not cluster.state.asking
    assert len(cluster.state.asked) <= 64
    assert len(cluster.state.capacity) == len(cluster.state.asked) + 1


# -- together and spread ----------------------------------------------------------------------


def test_members_stay_together_or_wait() -> None:
    cluster = zoned()
    blocker = cluster.submit(gpus=1, where=["node=a"])
    job = cluster.submit(gpus=1, members=4, together="zone")
    assert sorted(nodes_of(cluster, job)) == ["c", "c", "d", "d"]
    second = cluster.submit(gpus=1, members=4, together="zone")
    assert why(cluster, second) == (
        "needs 4 members with 1 GPU, 1 CPU each on nodes with zone in one zone; "
        "the best zone has room for 3"
    )
    third = cluster.submit(gpus=1, members=3, together="zone")
    assert set(nodes_of(cluster, third)) == {"a", "b"}
    cluster.cancel(blocker)


def test_together_and_within_hold_at_once() -> None:
    cluster = Cluster()
    places = {"a": ("b1/r1", "x"), "b": ("b1/r1", "y"), "c": ("b1/r2", "x"), "d": ("b1/r2", "x")}
    for name, (place, zone) in places.items():
        cluster.join(name, gpus=1, place=place, labels={"zone": zone})
    wish: dict[str, Any] = {
        "gpus": 1,
        "together": "zone",
        "within": "rack",
        "within_required": True,
    }
    job = cluster.submit(members=2, **wish)
    assert sorted(nodes_of(cluster, job)) == ["c", "d"]
    assert refused(cluster, members=3, **wish).field == "members"


def test_members_are_spread_evenly_over_the_values_of_a_label() -> None:
    cluster = cluster_of(a={"zone": "x"}, b={"zone": "x"}, c={"zone": "y"}, d={})
    job = cluster.submit(gpus=1, members=4, spread="zone")
    zones = Counter(cluster.node(node).labels["zone"] for node in nodes_of(cluster, job))
    assert zones == {"x": 2, "y": 2}
    more = cluster.submit(gpus=1, members=4, spread="zone")  # y is full: the rest fits anywhere
    assert len(nodes_of(cluster, more)) == 4
    assert "d" in nodes_of(cluster, more)


def test_an_elastic_gang_grows_evenly() -> None:
    cluster = zoned()
    cluster.submit(gpus=2, where=["node=d"])
    hold = cluster.submit(gpus=2, members=2, where=["node=b|c"])
    job = cluster.submit(
        gpus=1, members=1, members_max=4, spread="zone", checkpoint_ms=1000, preemptible=True
    )
    settle(cluster)
    assert nodes_of(cluster, job) == ["a", "a"]
    cluster.cancel(hold)
    cluster.deliver()
    for member in range(2):
        cluster.exit(hold, code=143, member=member)
    cluster.hear(*cluster.books)
    assert cluster.job(job).phase is Phase.STOPPING  # to grow
    cluster.deliver()
    for member in range(2):
        cluster.end(job, code=143, member=member)
    zones = Counter(cluster.node(node).labels["zone"] for node in nodes_of(cluster, job))
    assert zones == {"x": 2, "y": 2}


def test_replicas_of_a_service_are_spread_over_zones() -> None:
    cluster = cluster_of(a={"zone": "x"}, b={"zone": "x"}, c={"zone": "x"}, d={"zone": "y"})
    replica = JobSpec(command=("serve",), gpus=1, spread="zone")
    spec = ServiceSpec(name="chat", replica=replica, scale=Scale(least=4, most=4))
    assert isinstance(cluster.ask(SetService(spec)), Accepted)
    settle(cluster)
    used = [nodes_of(cluster, job) for job in cluster.state.replicas["chat"]]
    zones = Counter(cluster.node(node).labels["zone"] for (node,) in used)
    assert zones == {"x": 2, "y": 2}
    assert len({node for (node,) in used}) == 3


def test_a_label_with_too_many_values_cannot_be_spread_over() -> None:
    cluster = Cluster()
    for number in range(257):
        cluster.join(f"n{number}", labels={"host": f"h{number}"})
    answer = refused(cluster, spread="host")
    assert (answer.field, "257 values" in answer.message) == ("spread", True)
    assert refused(zoned(), spread="zone", together="zone").field == "spread"


# -- supplies -----------------------------------------------------------------------------------


def test_a_condition_is_possible_if_a_supply_brings_such_nodes() -> None:
    cluster = zoned()
    supply = Supply(
        name="spot", engine="slurm", gpus=2, most=2, labels={"zone": "z"}, taints=("spot",)
    )
    cluster.policy = msgspec.structs.replace(cluster.policy, supply=(supply,))
    cluster.step()
    assert refused(cluster, gpus=1, where=["zone=q"]).field == "where"
    assert refused(cluster, gpus=1, where=["zone=z"]).field == "where"  # it does not tolerate spot
    assert cluster.submit(gpus=1, where=["zone=z"], tolerates=["spot"])


# -- the invariants can fail ----------------------------------------------------------------------


def test_a_placement_against_a_taint_or_a_condition_is_a_violation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clusters = [cluster_of(a={"zone": "x"}, b={"zone": "y"}) for _ in range(2)]
    for cluster in clusters:
        cluster.submit(gpus=2, where=["zone=y"])
    change(clusters[0], "a", taints={"old": ""})
    monkeypatch.setattr(Demand, "suits", lambda *_: True)
    with pytest.raises(Violation, match="a is tainted old"):
        clusters[0].submit(gpus=2)
    with pytest.raises(Violation, match="a does not have zone=y"):
        clusters[1].submit(gpus=2, where=["zone=y"])


def test_a_gang_that_is_not_together_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = zoned()
    whole = queue.gang_of_spec
    for module in (queue, sizes):
        monkeypatch.setattr(module, "gang_of_spec", lambda spec: whole(spec)._replace(together=""))
    cluster.submit(gpus=1, where=["node=a"])
    cluster.submit(gpus=1, where=["node=c"])
    with pytest.raises(Violation, match="its nodes differ in zone"):
        cluster.submit(gpus=1, members=4, together="zone")


def test_a_kind_that_hides_what_a_job_asks_about_is_a_violation() -> None:
    cluster = zoned()
    cluster.submit(gpus=1, where=["zone=y"])
    room = cluster.state.rooms[0]
    room.kind = room.kind._replace(labels=("zone=y",))
    with pytest.raises(Violation, match="a counts as"):
        verify(cluster.state)
