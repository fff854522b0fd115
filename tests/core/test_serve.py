"""Services: as many ready replicas as wanted, of the version wanted, and no request is lost."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations
from typing import Any

import msgspec
import pytest

from shoal.core.answers.why import explain
from shoal.core.features.service.rollout import stalled
from shoal.core.features.service.serve import DOWN_MS, TRIES_MAX
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.services import ReplicaDraining, ServiceSet, ServiceStopped
from shoal.core.state.load import restore
from shoal.model.commands import Launch
from shoal.model.job import Job, MemberRef, Outcome, Phase
from shoal.model.node import NodeIntent
from shoal.model.reason import render
from shoal.model.report import Accepted, Refused, SetEnd, SetIntent
from tests.core.serving import LOOK_MS, Serving

THREE: dict[str, Any] = {"scale": {"least": 3, "most": 3}}
SLEEPS: dict[str, Any] = {
    "scale": {"least": 0, "most": 4, "target": 2, "idle_ms": 10_000, "down_after_ms": 5_000}
}


def test_replicas_are_started_and_get_requests_when_their_probe_has_answered() -> None:
    cluster = Serving()
    cluster.broken = {"v1"}
    cluster.served(**THREE)
    assert (len(cluster.replicas()), cluster.ready()) == (3, [])
    cluster.broken = set()
    cluster.tick()
    assert len(cluster.ready()) == 3
    assert cluster.service().proven
    assert all(job.spec.service == "chat" for job in cluster.replicas())


@pytest.mark.parametrize("wanted", [1, 3, 8])
def test_a_roll_out_keeps_as_many_ready_as_are_wanted_and_few_more(wanted: int) -> None:
    cluster = Serving()
    cluster.served(scale={"least": wanted, "most": wanted})
    cluster.serve(scale={"least": wanted, "most": wanted}, version=2)
    for _ in range(20 * wanted):
        staying = [j for j in cluster.replicas() if j.id not in cluster.service().draining]
        assert len(cluster.ready()) >= wanted
        assert len(staying) <= wanted + max(1, wanted // 4)
        cluster.tick()
    assert cluster.versions() == [2] * wanted
    assert len(cluster.replicas()) == wanted


def test_a_drained_replica_ends_when_nothing_is_in_flight_there() -> None:
    cluster = Serving()
    cluster.served(drain_ms=60_000)
    (old,) = cluster.ready()
    cluster.work = {old: 1}  # a long stream
    cluster.serve(version=2, drain_ms=60_000)
    cluster.tick(40)
    assert cluster.versions() == [2]
    assert cluster.job(old).phase is Phase.RUNNING
    cluster.work = {}
    cluster.tick(2)
    assert cluster.finished[old].why == "drained"


def test_a_drain_is_over_when_its_time_is() -> None:
    cluster = Serving()
    cluster.served(drain_ms=20_000)
    (old,) = cluster.ready()
    cluster.work = {old: 1}
    cluster.serve(version=2, drain_ms=20_000)
    cluster.tick(6)
    cluster.silent = True  # also if the gateway is gone
    assert cluster.last.wake_ms is not None
    cluster.tick(2 * 20)
    assert cluster.finished[old].why == "its time to drain is over"


@pytest.mark.parametrize("how", ["silent", "trouble", "restarted"])
def test_who_drains_is_not_cut_off_because_nothing_is_known_of_it(how: str) -> None:
    cluster = Serving()
    cluster.served()
    (old,) = cluster.ready()
    cluster.work = {old: 1}
    cluster.serve(version=2)
    cluster.tick(8)
    assert old in cluster.service().draining
    if how == "restarted":
        cluster.state = restore(cluster.state.snapshot())
    cluster.silent, cluster.trouble = how != "trouble", "the gateway is down"
    cluster.tick(10)
    assert cluster.job(old).phase is Phase.RUNNING


@pytest.mark.parametrize("fault", ["broken", "crashing"])
def test_a_version_that_does_not_get_ready_goes_back_and_the_old_replicas_are_untouched(
    fault: str,
) -> None:
    cluster = Serving()
    probe = {"start_ms": 5_000}
    cluster.served(**THREE, probe=probe)
    before = cluster.ready()
    setattr(cluster, fault, {"v2"})
    cluster.serve(**THREE, probe=probe, version=2)
    cluster.tick(100)
    service = cluster.service()
    assert cluster.ready() == before
    assert (service.version, service.newest, service.before) == (1, 2, None)
    assert f"version 2 failed {TRIES_MAX} times before it was ready" in service.why
    # Who is stopped for not answering is replaced while it still stops.
    tried = len([e for e in cluster.log if isinstance(e, JobSubmitted)]) - 3
    assert tried == TRIES_MAX + (fault == "broken")
    assert not [e for e in cluster.log if isinstance(e, ReplicaDraining)]
    cluster.crashing = cluster.broken = set()
    cluster.served(**THREE, version=2)  # asked for again: it is a new version, not a known one
    cluster.tick(20)
    assert cluster.versions() == [3, 3, 3]


def test_a_replica_that_is_stopped_for_not_answering_has_failed_even_if_it_ends_well() -> None:
    cluster = Serving()
    cluster.broken = {"v1"}
    cluster.serve(probe={"start_ms": 2_000})
    cluster.tick(8)
    first = cluster.finished["j1"]
    assert first.outcome is Outcome.FAILED
    assert "did not answer within 2s" in first.why
    assert "did not answer" in cluster.service().why


def test_a_replica_that_ends_is_replaced_and_each_time_a_little_later() -> None:
    cluster = Serving()
    cluster.served()
    cluster.crashing = {"v1"}
    cluster.crash(cluster.ready()[0], code=0)  # a server that ends has failed, whatever it says
    cluster.tick(121)
    begun = [e.at_ms for e in cluster.log if isinstance(e, JobSubmitted)][1:]
    waits = [later - before for before, later in pairwise(begun)]
    assert len(waits) == 4
    assert waits == sorted(waits)
    assert waits[-1] > 2 * waits[0]
    assert cluster.service().version == 1
    cluster.crashing = set()
    cluster.tick(130)
    assert len(cluster.ready()) == 1
    assert cluster.service().failures == 0


def test_a_replica_lost_with_its_node_comes_up_elsewhere() -> None:
    cluster = Serving()
    cluster.served(**THREE)
    lost = [job.id for job in cluster.replicas() if job.members[0].slice.node == "a"]
    assert lost
    cluster.lose_node("a")
    assert not set(lost) & set(cluster.ready())
    cluster.tick(3)
    assert len(cluster.ready()) == 3
    assert {job.members[0].slice.node for job in cluster.replicas()} == {"b"}
    assert cluster.service().failures == 0


def test_a_drained_replica_lost_with_its_node_does_not_come_up_again() -> None:
    cluster = Serving()
    cluster.served()
    (old,) = cluster.ready()
    cluster.work = {old: 1}
    cluster.serve(version=2)
    cluster.tick(4)
    (new,) = cluster.ready()
    node = cluster.job(old).members[0].slice.node
    cluster.lose_node(node)
    cluster.tick(4)
    assert cluster.finished[old].outcome is Outcome.CANCELLED
    assert cluster.versions() == [2]
    assert len(cluster.replicas()) == 1, new


@pytest.mark.parametrize("wanted", [1, 4])
def test_a_node_is_drained_without_a_request_losing_its_replica(wanted: int) -> None:
    cluster = Serving()
    cluster.served(scale={"least": wanted, "most": wanted})
    before = cluster.ready()
    node = cluster.job(before[0]).members[0].slice.node
    here = [j for j in before if cluster.job(j).members[0].slice.node == node]
    cluster.work = {here[0]: 1}
    cluster.ask(SetIntent(node, NodeIntent.DRAINING))
    for _ in range(20 * wanted):
        assert len(cluster.ready()) >= wanted
        cluster.tick()
    assert not {j.members[0].slice.node for j in cluster.replicas() if j.id not in here} & {node}
    assert cluster.job(here[0]).phase is Phase.RUNNING  # it still answers somebody
    cluster.work = {}
    cluster.tick(4)
    assert [cluster.finished[job].why for job in here] == ["drained"] * len(here)
    assert not cluster.state.placed[node]
    assert len(cluster.replicas()) == wanted


@pytest.mark.parametrize("hindrance", ["no room", "broken"])
def test_a_drained_node_is_empty_in_the_end_even_if_nothing_takes_the_place(hindrance: str) -> None:
    cluster = Serving(nodes=1 if hindrance == "no room" else 2)
    cluster.served(probe={"start_ms": 5_000})
    (old,) = cluster.ready()
    node = cluster.job(old).members[0].slice.node
    if hindrance == "broken":
        cluster.broken = {"v1"}
    cluster.ask(SetIntent(node, NodeIntent.DRAINING))
    cluster.tick(200)
    assert not cluster.state.placed[node]
    if hindrance == "no room":
        (job,) = cluster.replicas()
        assert job.phase is Phase.WAITING
        cluster.ask(SetIntent(node, NodeIntent.OPEN))
        cluster.tick(6)
        assert len(cluster.ready()) == 1


def test_the_only_replica_leaves_a_node_when_it_has_answered_its_requests() -> None:
    cluster = Serving(nodes=1)
    cluster.served()
    (old,) = cluster.ready()
    cluster.work = {old: 1}
    cluster.ask(SetIntent(cluster.job(old).members[0].slice.node, NodeIntent.DRAINING))
    cluster.tick(20)
    assert cluster.job(old).phase is Phase.RUNNING
    cluster.work = {}
    cluster.tick(4)
    assert cluster.finished[old].why == "drained"


def test_a_replica_that_the_gateway_does_not_reach_is_replaced() -> None:
    cluster = Serving()
    cluster.served()
    (old,) = cluster.ready()
    cluster.down = {old}
    cluster.tick(DOWN_MS // LOOK_MS - 2)
    assert cluster.ready() == [old]
    cluster.silent = True  # what was heard long ago is no reason
    cluster.tick(20)
    assert cluster.ready() == [old]
    cluster.silent = False
    cluster.tick(20)
    assert len(cluster.ready()) == 1
    assert cluster.ready() != [old]
    assert not cluster.state.heard.down_ms


def test_stopping_drains_first_and_leaves_nothing() -> None:
    cluster = Serving()
    cluster.served(**THREE)
    busy, *_ = cluster.ready()
    cluster.work = {busy: 2}
    assert isinstance(cluster.stop(), Accepted)
    again = cluster.serve(version=2)
    assert isinstance(again, Refused)
    assert "is stopping" in again.message
    cluster.tick(10)
    assert [job.id for job in cluster.replicas()] == [busy]
    cluster.work = {}
    cluster.tick(2)
    state = cluster.state
    assert not (
        state.services
        or state.replicas
        or state.heard.loads
        or state.heard.recent_work
        or state.jobs
    )
    assert isinstance(cluster.log[-1], ServiceStopped)
    assert isinstance(cluster.stop(), Refused)


def test_a_service_that_never_got_ready_can_be_stopped() -> None:
    cluster = Serving()
    cluster.broken = {"v1"}
    cluster.served(**THREE)
    cluster.stop()
    cluster.tick(2)
    assert not cluster.state.services


@pytest.mark.parametrize("change", [{"scale": {"least": 5, "most": 5}}, {"drain_ms": 1_000}])
def test_a_change_around_the_replicas_restarts_none(change: dict[str, Any]) -> None:
    cluster = Serving()
    cluster.served(**THREE)
    before = cluster.ready()
    cluster.served(**{**THREE, **change})
    assert cluster.service().version == 1
    assert set(before) <= set(cluster.ready())
    cluster.served(**THREE)
    assert cluster.ready() == before


def test_the_same_again_changes_nothing() -> None:
    cluster = Serving()
    cluster.served(**THREE)
    answer = cluster.serve(**THREE)
    assert isinstance(answer, Accepted)
    assert answer.note
    assert len([event for event in cluster.log if isinstance(event, ServiceSet)]) == 1


@pytest.mark.parametrize(
    ("field", "route"),
    [
        ("port", {"service": "two", "port": 9000}),
        ("path", {"service": "two", "path": "/chat"}),
        ("host", {"service": "two", "host": "Chat.Example"}),
    ],
)
def test_an_address_that_another_service_has_is_refused(field: str, route: dict[str, Any]) -> None:
    cluster = Serving()
    cluster.served(route={"service": "chat", "port": 9000, "host": "chat.example"})
    answer = cluster.serve("two", route=route)
    assert isinstance(answer, Refused)
    assert answer.field == field
    assert "is already used by service chat" in answer.message
    assert "two" not in cluster.state.services


def test_an_address_is_kept_for_a_service_that_may_yet_go_back_to_it() -> None:
    cluster = Serving()
    cluster.served(route={"service": "chat", "port": 9000})
    cluster.broken = {"v2"}
    cluster.serve(route={"service": "chat", "port": 9001}, version=2)
    two = {"service": "two", "port": 9000}
    assert isinstance(cluster.serve("two", route=two), Refused)
    cluster.broken = set()
    cluster.tick(4)
    cluster.serve(route={"service": "chat", "port": 9001}, version=3)
    assert isinstance(cluster.serve("two", route={"service": "two", "port": 9000}), Accepted)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"scale": {"least": 4, "most": 2}}, "replicas"),
        ({"replica": {"members": 2, "members_max": 4}}, "members"),
        ({"probe": {"path": "health"}}, "probe"),
        ({"route": {"service": "other"}}, "route"),
        ({"replica": {"gpus": 1}}, "gpus"),
        ({"name": "127"}, "name"),
        ({"name": "0x7f"}, "name"),
        ({"route": {"service": "chat", "host": "127.0.0.1"}}, "host"),
        ({"route": {"service": "chat", "host": "10.1"}}, "host"),
        ({"route": {"service": "chat", "host": "::1"}}, "host"),
        ({"route": {"service": "chat", "host": "LocalHost"}}, "host"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(fields: dict[str, Any], field: str) -> None:
    cluster = Serving()
    answer = cluster.serve(**fields)
    assert isinstance(answer, Refused)
    assert answer.field == field
    assert not cluster.state.services


def test_it_shows_that_it_works_then_sleeps_and_is_woken_by_who_waits() -> None:
    cluster = Serving()
    cluster.served(**SLEEPS)
    assert len(cluster.ready()) == 1
    cluster.tick(30)
    assert (cluster.service().wanted, cluster.replicas()) == (0, [])
    cluster.held = 5
    cluster.tick(3)
    assert len(cluster.ready()) == 3
    cluster.held = 0
    cluster.tick(60)
    assert (cluster.service().wanted, cluster.replicas()) == (0, [])


def test_a_new_version_shows_that_it_works_even_if_nobody_asks() -> None:
    cluster = Serving()
    cluster.served(**SLEEPS)
    cluster.tick(30)
    cluster.crashing = {"v2"}
    cluster.served(**SLEEPS, version=2)
    cluster.tick(30)
    assert cluster.service().version == 1
    assert "version 2 failed" in str([e.why for e in cluster.log if isinstance(e, ServiceSet)])


def test_the_last_ten_versions_that_were_ready_are_kept_to_go_back_to() -> None:
    cluster = Serving()
    cluster.served(**THREE)
    for version in range(2, 14):
        cluster.served(**THREE, version=version)
    service = cluster.service()
    assert [past.version for past in service.earlier] == list(range(12, 2, -1))
    assert all(past.at_ms and past.spec.replica != service.spec.replica for past in service.past)
    cluster.crashing = {"v14"}
    cluster.serve(**THREE, version=14)
    cluster.tick(100)
    service = cluster.service()
    assert service.version == 13, "one that never was ready is no version to go back to"
    assert [past.version for past in service.earlier] == list(range(12, 3, -1))
    cluster.served(**THREE, version=12)  # as version 12 was: what runs is not offered
    assert [past.version for past in cluster.service().earlier][:2] == [13, 11]


def test_who_takes_long_to_start_is_not_sent_to_sleep_before_it_is_ready() -> None:
    cluster = Serving()
    cluster.broken = {"v1"}
    cluster.served(**SLEEPS)
    cluster.tick(60)
    cluster.broken = set()
    cluster.tick()
    assert [job.id for job in cluster.replicas()] == cluster.ready() == ["j1"]


def test_a_restart_of_the_controller_neither_wakes_nor_shrinks_a_service() -> None:
    cluster = Serving()
    cluster.served(**SLEEPS)
    cluster.held = 8
    cluster.tick(3)
    cluster.held = 0
    cluster.work = dict.fromkeys(cluster.ready(), 2)
    cluster.served("asleep", **SLEEPS)
    cluster.work.update(dict.fromkeys(cluster.ready(), 2))
    cluster.tick(30)
    before = cluster.ready()
    assert len(before) == 4
    encoded = msgspec.msgpack.encode(cluster.state.snapshot())
    kind = type(cluster.state.snapshot())
    cluster.state = restore(msgspec.msgpack.decode(encoded, type=kind))
    cluster.step()
    cluster.tick(4)
    assert cluster.ready() == before
    assert cluster.service("asleep").wanted == 0


def test_while_nothing_is_known_of_the_gateway_nobody_is_scaled() -> None:
    cluster = Serving()
    cluster.served(**SLEEPS)
    cluster.held = 8
    cluster.tick(3)
    before = cluster.ready()
    assert len(before) == 4
    cluster.held, cluster.trouble = 0, "cannot be reached"
    cluster.tick(100)
    assert cluster.ready() == before


# -- replicas that hang ------------------------------------------------------------------------


def test_a_replica_that_does_not_answer_its_probe_any_more_is_replaced() -> None:
    cluster = Serving()
    cluster.served(**THREE)
    hung, *well = cluster.ready()
    cluster.unanswered = {hung: 5}
    cluster.tick()
    assert hung in cluster.ready()
    cluster.unanswered = {hung: 6}
    cluster.tick()
    assert cluster.finished[hung].why == "its probe / had no answer 6 times in a row: it hangs"
    assert cluster.finished[hung].outcome is Outcome.FAILED
    cluster.tick(6)
    assert len(cluster.ready()) == 3
    assert set(well) < set(cluster.ready())


def test_replicas_that_all_hang_are_replaced_one_after_the_other() -> None:
    """What they have in common may be the cause: if no new one gets ready, the rest is left."""
    cluster = Serving()
    cluster.served(**THREE)
    cluster.unanswered = dict.fromkeys(cluster.ready(), 9)
    cluster.broken = {"v1"}
    cluster.tick(40)
    assert len(cluster.ready()) == 2
    cluster.broken = set()
    cluster.tick(120)
    assert not set(cluster.unanswered) & set(cluster.ready())
    assert len(cluster.ready()) == 3


def test_one_that_answers_requests_or_is_on_a_silent_node_is_not_said_to_hang() -> None:
    cluster = Serving()
    cluster.served()
    (job_id,) = cluster.ready()
    cluster.unanswered = {job_id: 9}
    cluster.answers_per_ks = {job_id: 1}
    cluster.tick(4)
    assert cluster.ready() == [job_id]
    cluster.answers_per_ks = {}
    node = cluster.job(job_id).members[0].slice.node
    book = cluster.books.pop(node)
    cluster.wait(cluster.policy.silent_after_ms)
    cluster.tick(2)
    assert cluster.ready() == [job_id]
    cluster.books[node] = book
    cluster.tick()
    assert job_id not in cluster.ready()


# -- where they go -----------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "nodes"), [(3, 3), (5, 3), (8, 2)])
def test_replicas_are_spread_over_the_nodes(wanted: int, nodes: int) -> None:
    cluster = Serving(nodes=nodes)
    cluster.served(scale={"least": wanted, "most": wanted})
    here = Counter(job.members[0].slice.node for job in cluster.replicas())
    assert len(here) == nodes
    assert max(here.values()) - min(here.values()) <= 1


def racks_of(cluster: Serving, jobs: list[Job]) -> list[str]:
    nodes = [job.members[0].slice.node for job in jobs]
    return sorted(cluster.state.nodes[node].spec.place for node in nodes)


def test_four_replicas_are_on_four_nodes_of_two_racks_and_stay_so_after_a_roll_out() -> None:
    cluster = Serving(nodes=0)
    for name, place in (("a", "b/r1"), ("b", "b/r1"), ("c", "b/r1"), ("d", "b/r2"), ("e", "b/r2")):
        cluster.join(name, cpus=8, place=place)
    four: dict[str, Any] = {"scale": {"least": 4, "most": 4}}
    cluster.served(**four)
    assert len({job.members[0].slice.node for job in cluster.replicas()}) == 4
    assert racks_of(cluster, cluster.replicas()) == ["b/r1", "b/r1", "b/r2", "b/r2"]
    cluster.serve(**four, version=2)
    cluster.tick(80)
    assert cluster.versions() == [2] * 4
    assert len({job.members[0].slice.node for job in cluster.replicas()}) == 4
    assert racks_of(cluster, cluster.replicas()) == ["b/r1", "b/r1", "b/r2", "b/r2"]
    before = cluster.ready()
    for node in ("d", "e"):  # a rack is gone
        cluster.lose_node(node)
    assert len([job_id for job_id in cluster.ready() if job_id in before]) == 2
    cluster.tick(20)
    assert len(cluster.ready()) == 4
    assert len({job.members[0].slice.node for job in cluster.replicas()}) == 3  # as many as live


def test_two_replicas_are_in_two_racks_even_if_the_first_has_more_nodes() -> None:
    cluster = Serving(nodes=0)
    for name, place in (("a", "b/r1"), ("b", "b/r1"), ("c", "b/r1"), ("d", "b/r2")):
        cluster.join(name, cpus=8, place=place)
    cluster.served(scale={"least": 2, "most": 2})
    assert racks_of(cluster, cluster.replicas()) == ["b/r1", "b/r2"]


def test_a_gang_stays_together_rather_than_away_from_the_other_replicas() -> None:
    cluster = Serving(nodes=0)
    for name, place in (("a", "b/r1"), ("b", "b/r1"), ("c", "b/r1"), ("d", "b/r2"), ("e", "b/r3")):
        cluster.join(name, cpus=2, place=place)
    cluster.run(cpu_milli=2_000)  # on a
    cluster.served(replica={"members": 2, "members_per_node": 1}, scale={"least": 2, "most": 2})
    for job in cluster.replicas():
        nodes = [member.slice.node for member in job.members]
        assert nodes in (["b", "c"], ["c", "b"])


# -- a replica may be a gang -------------------------------------------------------------------

GANG: dict[str, Any] = {"members": 2, "members_per_node": 1}


def test_a_gang_answers_at_member_0_and_meets_at_another_port() -> None:
    cluster = Serving(nodes=2)
    cluster.serve(replica=GANG)
    launches = {
        order.ref.member: order.env for order in cluster.orders if isinstance(order, Launch)
    }
    assert launches[0]["PORT"] != launches[0]["MASTER_PORT"] == launches[1]["MASTER_PORT"]
    assert "PORT" not in launches[1]
    assert [launches[rank]["RANK"] for rank in (0, 1)] == ["0", "1"]
    (job,) = cluster.replicas()
    assert job.serves_at.rpartition(":")[2] == launches[0]["PORT"]
    assert {job.serves_at, job.master} <= cluster.state.masters
    cluster.tick(4)
    cluster.stop()
    cluster.tick(8)
    assert not cluster.state.masters


@pytest.mark.parametrize("code", [0, 1])
def test_a_member_that_ends_takes_its_replica_down_and_it_is_replaced_as_one(code: int) -> None:
    cluster = Serving(nodes=4)
    cluster.served(replica=GANG, scale={"least": 2, "most": 2})
    first, second = cluster.ready()
    job = cluster.job(first)
    cluster.books[job.members[1].slice.node].exited(MemberRef(first, job.attempt, 1), code)
    cluster.tick()
    assert cluster.ready() == [second]
    cluster.tick(10)
    assert cluster.finished[first].outcome is Outcome.FAILED
    assert "member 1 on" in cluster.finished[first].why
    assert len(cluster.ready()) == 2
    assert first not in cluster.ready()


def test_a_gang_that_loses_a_node_is_ready_again_only_as_a_whole() -> None:
    cluster = Serving(nodes=3)
    cluster.served(replica=GANG)
    (job_id,) = cluster.ready()
    stayed = cluster.job(job_id).members[0].slice.node
    cluster.lose_node(cluster.job(job_id).members[1].slice.node)
    assert cluster.ready() == []
    cluster.tick(6)
    assert cluster.ready() == [job_id]
    assert cluster.job(job_id).attempt == 2
    assert stayed in {member.slice.node for member in cluster.job(job_id).members}


def test_a_gang_scales_to_zero_and_is_woken_as_one() -> None:
    cluster = Serving(nodes=2)
    cluster.served(replica=GANG, **SLEEPS)
    cluster.tick(60)
    assert cluster.replicas() == []
    cluster.held = 1
    cluster.tick(4)
    (job,) = cluster.replicas()
    assert (len(job.members), cluster.ready()) == (2, [job.id])


# -- a roll-out on a full cluster --------------------------------------------------------------

FULL: dict[str, Any] = {"scale": {"least": 4, "most": 4}, "replica": {"cpu_milli": 2_000}}


def why_stalled(cluster: Serving) -> str:
    state, policy, now_ms = cluster.state, cluster.policy, cluster.now_ms
    why = stalled(state, cluster.service(), now_ms, lambda job: explain(state, job, policy, now_ms))
    return render(why)


def test_a_surge_that_has_no_room_keeps_the_old_version_and_says_what_would_help() -> None:
    cluster = Serving(nodes=2, cpus=4)
    cluster.served(**FULL)
    before = cluster.ready()
    cluster.serve(**FULL, version=2)
    cluster.tick(40)
    assert cluster.ready() == before
    assert "waits for room beside version 1" in why_stalled(cluster)
    assert "--rollout replace" in why_stalled(cluster)
    cluster.serve(**FULL, version=2, rollout="replace")  # the same version goes on, another way
    cluster.tick(60)
    assert cluster.versions() == [2] * 4
    assert why_stalled(cluster) == ""


@pytest.mark.parametrize("many", [1, 2])
@pytest.mark.parametrize("gang", [False, True])
def test_replacing_drains_no_more_than_it_may_and_ends_with_the_new_version(
    many: int, gang: bool
) -> None:
    cluster = Serving(nodes=4, cpus=2)
    replica = {"cpu_milli": 2_000, **(GANG if gang else {})}
    wanted = 2 if gang else 4
    wish: dict[str, Any] = {
        "scale": {"least": wanted, "most": wanted},
        "replica": replica,
        "rollout": "replace",
        "at_a_time": many,
    }
    cluster.served(**wish)
    assert len(cluster.ready()) == wanted
    cluster.serve(**wish, version=2)
    fewest = wanted
    for _ in range(80):
        fewest = min(fewest, len(cluster.ready()))
        cluster.tick()
    assert fewest == wanted - many
    assert cluster.versions() == [2] * wanted
    assert len(cluster.replicas()) == wanted


RACKS = {"a": "b/r1", "b": "b/r1", "c": "b/r2", "d": "b/r2"}


def two_full_racks() -> Serving:
    """Four replicas on four nodes, and two gangs that are to take their places."""
    cluster = Serving(nodes=0)
    for name, place in RACKS.items():
        cluster.join(name, cpus=2, place=place)
    wish: dict[str, Any] = {"rollout": "replace", "at_a_time": 2, "drain_ms": 10_000}
    cluster.served(**FULL, **wish)
    gangs: dict[str, Any] = {
        "scale": {"least": 2, "most": 2},
        "replica": {"cpu_milli": 2_000, **GANG},
    }
    cluster.serve(**gangs, **wish, version=2)
    return cluster


def racks_of_gangs(cluster: Serving) -> list[list[str]]:
    return sorted(
        sorted({RACKS[member.slice.node] for member in job.members}) for job in cluster.replicas()
    )


@pytest.mark.parametrize("order", list(permutations(RACKS)))
def test_gangs_are_each_in_one_rack_in_whatever_order_old_replicas_end(
    order: tuple[str, ...],
) -> None:
    cluster = two_full_racks()
    cluster.work = {job.id: 1 for job in cluster.replicas()}
    cluster.tick(8)  # all drain
    cluster.work, cluster.one_by_one = {}, order
    cluster.tick(20)
    assert cluster.versions() == [2, 2]
    assert racks_of_gangs(cluster) == [["b/r1"], ["b/r2"]]


@pytest.mark.parametrize("busy", list(permutations(RACKS, 2)))
def test_a_drained_replica_waits_for_its_neighbor_before_its_room_is_given_away(
    busy: tuple[str, str],
) -> None:
    cluster = two_full_racks()
    at = {job.members[0].slice.node: job.id for job in cluster.replicas() if job.members}
    first, second = busy
    cluster.work = {at[first]: 1, at[second]: 1}
    cluster.tick(10)
    cluster.work = {at[second]: 1}
    cluster.tick(3)
    cluster.work = {}
    cluster.tick(20)
    assert cluster.versions() == [2, 2]
    assert racks_of_gangs(cluster) == [["b/r1"], ["b/r2"]]


def test_neighbors_are_waited_for_no_longer_than_the_time_to_drain() -> None:
    cluster = two_full_racks()
    at = {job.members[0].slice.node: job.id for job in cluster.replicas() if job.members}
    cluster.work = {at["b"]: 1, at["d"]: 1}
    cluster.tick(10)
    assert len(cluster.replicas()) == 6, "four that drain, and two that wait for their room"
    cluster.tick(20)
    assert cluster.versions() == [2, 2]


def test_replacing_starts_the_new_one_first_where_there_is_room() -> None:
    cluster = Serving(nodes=2)
    cluster.served(**THREE, rollout="replace")
    cluster.serve(**THREE, rollout="replace", version=2)
    for _ in range(30):
        assert len(cluster.ready()) >= 3
        cluster.tick()
    assert cluster.versions() == [2] * 3


def test_no_old_replica_leaves_for_a_new_one_that_would_not_fit_either() -> None:
    cluster = Serving(nodes=2, cpus=4)
    cluster.join("big", cpus=8)
    cluster.run(cpu_milli=8_000)  # on big
    cluster.served(**FULL, rollout="replace")
    before = cluster.ready()
    more = {**FULL, "replica": {"cpu_milli": 6_000}}
    cluster.serve(**more, rollout="replace", version=2)
    cluster.tick(40)
    assert cluster.ready() == before
    assert "does not fit in place of an old replica" in why_stalled(cluster)


def test_the_only_replica_is_not_drained_for_another_on_the_same_node_that_ends() -> None:
    """Found by the storm: an ending node has room again once its replica has left."""
    cluster = Serving(nodes=1, cpus=2)
    cluster.served(replica={"cpu_milli": 2_000}, rollout="replace", drain_ms=10_000)
    cluster.ask(SetEnd("a", cluster.now_ms + 60_000))
    cluster.tick(100)
    assert len([e for e in cluster.log if isinstance(e, JobSubmitted)]) == 2  # another is wanted
    assert not [e for e in cluster.log if isinstance(e, ReplicaDraining)]


def test_a_replacement_that_never_gets_ready_goes_back_and_fills_the_gap() -> None:
    cluster = Serving(nodes=2, cpus=4)
    wish = {**FULL, "rollout": "replace", "probe": {"start_ms": 2_000}}
    cluster.served(**wish)
    cluster.broken = {"v2"}
    cluster.serve(**wish, version=2)
    fewest = 4
    for _ in range(100):
        fewest = min(fewest, len(cluster.ready()))
        cluster.tick()
    assert fewest == 3
    assert cluster.versions() == [1] * 4
    assert cluster.service().version == 1


def test_replicas_share_a_node_rather_than_wait() -> None:
    cluster = Serving(nodes=1)
    cluster.join("b", cpus=1)
    cluster.run(cpu_milli=1_000)
    cluster.served(scale={"least": 5, "most": 5})
    assert len(cluster.ready()) == 5


def test_a_path_that_was_asked_for_is_in_the_environment_of_replicas() -> None:
    cluster = Serving()

    def env(**route: Any) -> dict[str, str]:
        cluster.served(route={"service": "chat", **route}, replica={"env": {"A": "1"}})
        cluster.tick(20)
        (job,) = (job for job in cluster.replicas() if job.spec.version == version())
        return dict(job.spec.env)

    def version() -> int:
        return cluster.service().version

    assert env(queue_max=5) == {"A": "1"}
    assert env(queue_max=6) == {"A": "1"} and version() == 1
    paths = {"GRADIO_ROOT_PATH": "/of/chat", "UVICORN_ROOT_PATH": "/of/chat"}
    assert env(path="/of/chat") == {**paths, "A": "1"}
    assert version() == 2, "a program reads its environment once"
    assert env(path="/of/chat", queue_max=7) == {**paths, "A": "1"} and version() == 2
    assert env(path="/of/chat", host="chat.example.com") == {"A": "1"}


def test_what_the_user_sets_in_the_environment_wins() -> None:
    cluster = Serving()
    mine = {"UVICORN_ROOT_PATH": "/mine"}
    cluster.served(route={"service": "chat", "path": "/of"}, replica={"env": mine})
    (job,) = cluster.replicas()
    assert job.spec.env == {"GRADIO_ROOT_PATH": "/of", **mine}
