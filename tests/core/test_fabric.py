"""Tours: nodes measure the network between them, and the state keeps what follows from it."""

from __future__ import annotations

import msgspec

from shoal.core.answers.why import explain
from shoal.core.features.fabric.links import weak_links
from shoal.core.nodebook import PAIRS_TOLD_MAX
from shoal.core.state.apply import apply
from shoal.core.state.events.nodes import FabricMeasured, NodeChecked
from shoal.core.state.heard import Touring
from shoal.core.state.load import restore
from shoal.model.commands import Check
from shoal.model.fabric import Fabric, Pair, Weak
from shoal.model.health import CheckResult, Standing
from shoal.model.job import Within
from shoal.model.node import RDMA_ROOT
from shoal.model.policy import Places, Policy, Rdma
from shoal.model.reason import render
from shoal.model.report import Accepted, AddTenant, CheckNetwork, Refused
from tests.core.build import Cluster

RACKS = {"a": 0, "b": 0, "c": 1, "d": 1}


def cluster(*names: str) -> Cluster:
    made = Cluster(Policy(silent_after_ms=10**9, grace_ms=10**9))
    for name in names:
        made.join(name, gpus=1)
    return made


def measured(made: Cluster, tour: str, near: int = 10_000, far: int = 2_000) -> None:
    """All nodes answer: fast within a rack, slower between racks."""
    names = list(made.state.nodes)
    for number, name in enumerate(names):
        pairs = []
        for peer in names[:number]:
            mbs = near if RACKS[name] == RACKS[peer] else far
            pairs.append(Pair(peer, 20, mbs, mbs))
        made.books[name].measured(CheckResult(id=tour, pairs=tuple(pairs)))
    made.hear(*names)


def test_all_nodes_of_a_tour_are_told_at_once_and_get_the_same_list() -> None:
    made = cluster("a", "b", "c")
    answer = made.ask(CheckNetwork())
    assert isinstance(answer, Accepted)
    told = [command for command in made.last.commands if isinstance(command, Check)]
    assert [one.node for one in told] == ["a", "b", "c"]
    assert {one.id for one in told} == {answer.id}
    assert [one.tour.own for one in told if one.tour] == [0, 1, 2]
    assert len({(one.tour.hosts, one.tour.key) for one in told if one.tour}) == 1
    assert len({host.port for host in told[0].tour.hosts}) == 3  # type: ignore[union-attr]


def test_hosts_of_one_tour_share_a_key_that_follows_from_nothing_that_is_stored() -> None:
    keys: list[str] = []
    made = cluster("a", "b", "c")
    for seed in (7, 7, 8):  # the second tour differs by its name only
        made.draw(seed)
        made.wait(1)
        answer = made.ask(CheckNetwork())
        assert isinstance(answer, Accepted)
        made.draw(99)
        made.wait(20_000)
        made.hear("a")  # it has not answered, and is asked again
        again = [one.tour.key for one in made.last.commands if isinstance(one, Check) and one.tour]
        asked = {made.state.heard.tours[answer.id].key, *again}
        assert len(again) == 1
        assert len(asked) == 1
        assert len(again[0]) == 64
        keys += asked
        measured(made, answer.id)
        assert made.state.heard.tours[answer.id].key == "", "it is over"
    assert len(set(keys)) == 3


def test_when_all_have_answered_the_state_knows_who_is_near_whom() -> None:
    made = cluster("a", "b", "c", "d")
    answer = made.ask(CheckNetwork())
    assert isinstance(answer, Accepted)
    measured(made, answer.id)
    found = [event for event in made.last.events if isinstance(event, FabricMeasured)]
    assert len(found) == 1
    places = made.state.fabric.places
    assert places["a"] == places["b"] != places["c"] == places["d"]


def test_a_tour_ends_without_the_nodes_that_do_not_answer() -> None:
    made = cluster("a", "b", "c")
    answer = made.ask(CheckNetwork())
    assert isinstance(answer, Accepted)
    made.books["b"].measured(CheckResult(id=answer.id, pairs=(Pair("a", 20, 900, 900),)))
    made.hear("b")
    assert made.state.heard.tours[answer.id].ended_ms is None
    made.wait(made.state.heard.tours[answer.id].until_ms)
    made.step()
    assert made.state.heard.tours[answer.id].ended_ms is not None
    assert made.state.fabric.id == answer.id


def test_one_node_is_no_network_and_a_second_request_joins_the_first() -> None:
    made = cluster("a")
    assert made.ask(CheckNetwork()) == Refused(
        "nodes", "a network is measured between two or more; here is 1 ready node"
    )
    made.join("b", gpus=1)
    first = made.ask(CheckNetwork())
    second = made.ask(CheckNetwork(("a", "b")))
    assert isinstance(first, Accepted)
    assert isinstance(second, Accepted)
    assert first.id == second.id


def answered(made: Cluster, tour: str, slow: dict[str, int], among: list[str]) -> None:
    """All nodes of a tour answer; links of `slow` nodes have that rate."""
    for number, name in enumerate(among):
        pairs = []
        for peer in among[:number]:
            mbs = min(slow.get(name, 10_000), slow.get(peer, 10_000))
            pairs.append(Pair(peer, 20, mbs, mbs))
        made.books[name].measured(CheckResult(id=tour, pairs=tuple(pairs)))
    made.hear(*among)


def standing(made: Cluster, name: str) -> Standing:
    return made.state.nodes[name].record.standing


def running(made: Cluster) -> Touring:
    return next(tour for tour in made.state.heard.tours.values() if tour.ended_ms is None)


def checked(made: Cluster, slow: dict[str, int]) -> Touring:
    """The small tour that checks the links of a suspect runs to its end."""
    tour = running(made)
    answered(made, tour.id, slow, [host.node for host in tour.hosts])
    return tour


def test_a_node_with_weak_links_is_checked_by_a_small_tour_quarantined_and_comes_back() -> None:
    made = cluster("a", "b", "c", "d", "e", "f")
    answer = made.ask(CheckNetwork())
    assert isinstance(answer, Accepted)
    answered(made, answer.id, {"c": 900}, list("abcdef"))
    node = made.state.nodes["c"]
    assert node.record.network
    assert list(made.state.troubled) == ["c"]
    tour = checked(made, {"c": 900})
    assert tour.about == "c"
    assert [host.node for host in tour.hosts] == ["c", "a", "b", "d"]
    assert standing(made, "c") is Standing.QUARANTINED
    assert "its 3 links are slow" in node.record.why
    assert made.state.heard.tours[answer.id].ended_ms is not None  # a user may still ask for it
    made.wait(node.record.retest_ms)
    made.step()
    checked(made, {})
    assert standing(made, "c") is Standing.OK
    assert not node.record.network
    assert made.state.fabric.weak == ()
    assert not any(isinstance(event, NodeChecked) for event in made.last.events)


def test_a_check_of_links_that_shows_nothing_ends_and_a_user_waits_for_it() -> None:
    made = cluster("a", "b", "c", "d")
    answer = made.ask(CheckNetwork())
    assert isinstance(answer, Accepted)
    answered(made, answer.id, {"c": 900}, list("abcd"))
    check = running(made)
    asked = made.ask(CheckNetwork())
    assert isinstance(asked, Accepted)
    assert asked.id != check.id
    again = made.ask(CheckNetwork())
    assert isinstance(again, Accepted)
    assert again.id == asked.id
    made.wait(check.until_ms)
    made.step()
    record = made.state.nodes["c"].record
    assert record.standing is Standing.OK
    assert record.why == "check not answered: it did not answer"
    assert running(made).id == asked.id
    assert len(made.state.heard.tours) <= 3


def test_a_weak_link_between_two_nodes_that_are_well_blames_neither() -> None:
    made = cluster("a", "b", "c", "d", "e")
    answer = made.ask(CheckNetwork())
    assert isinstance(answer, Accepted)
    names = list("abcde")
    for number, name in enumerate(names):
        pairs = [
            Pair(peer, 20, *((700, 700) if {name, peer} == {"b", "d"} else (9_000, 9_000)))
            for peer in names[:number]
        ]
        made.books[name].measured(CheckResult(id=answer.id, pairs=tuple(pairs)))
    made.hear(*names)
    assert [(weak.node, weak.peer) for weak in made.state.fabric.weak] == [("b", "d")]
    assert not made.state.troubled


def near_ones() -> Cluster:
    """Two groups of two nodes, a and c, b and d, which people have typed in the other way."""
    made = Cluster(Policy(silent_after_ms=10**9, grace_ms=10**9, place=Places.MEASURED))
    for name, place in (("a", "x/1"), ("b", "x/1"), ("c", "x/2"), ("d", "x/2"), ("e", "y/1")):
        made.join(name, gpus=1, place=place)
    answer = made.ask(CheckNetwork(tuple("abcd")))
    assert isinstance(answer, Accepted)
    for number, name in enumerate("abcd"):
        pairs = []
        for peer in "abcd"[:number]:
            mbs = 9_000 if {name, peer} in ({"a", "c"}, {"b", "d"}) else 1_000
            pairs.append(Pair(peer, 20, mbs, mbs))
        made.books[name].measured(CheckResult(id=answer.id, pairs=tuple(pairs)))
    made.hear("a", "b", "c", "d")
    return made


def test_with_place_measured_a_gang_goes_where_the_network_is_fast() -> None:
    made = near_ones()
    job = made.job(made.submit(members=2, gpus=1, within=Within.RACK, within_required=True))
    assert {member.slice.node for member in job.members} in ({"a", "c"}, {"b", "d"})
    assert "measured rack" in job.why
    assert made.state.rooms[4].domains == ("y", "y/1")  # never measured


def test_the_policy_says_which_places_count_and_a_snapshot_keeps_them() -> None:
    made = near_ones()
    assert made.state.rooms[0].domains == made.state.rooms[2].domains
    again = restore(made.state.snapshot())
    assert [room.domains for room in again.rooms] == [room.domains for room in made.state.rooms]
    made.policy = msgspec.structs.replace(made.policy, place=Places.TYPED)
    made.step()
    assert made.state.rooms[0].domains == made.state.rooms[1].domains == ("x", "x/1")


def test_a_gang_keeps_off_a_weak_link_where_it_can() -> None:
    made = cluster("a", "b", "c")
    weak_between(made, "ab")
    job = made.job(made.submit(members=2, gpus=1))
    assert {member.slice.node for member in job.members} == {"a", "c"}
    assert "off the weak link between a and b" in job.why


def weak_between(made: Cluster, *pairs: str) -> None:
    weak = tuple(Weak(node=pair[0], peer=pair[1], mbs=10, usual_mbs=900) for pair in pairs)
    fabric = Fabric(id="t1", weak=weak)
    apply(made.state, FabricMeasured(at_ms=0, id="t1", nodes=(), fabric=fabric))


def suspected(made: Cluster, name: str) -> None:
    answer = made.ask(CheckNetwork())
    assert isinstance(answer, Accepted)
    answered(made, answer.id, {name: 900}, list(made.state.nodes))
    assert standing(made, name) is Standing.SUSPECT


def nodes_of(made: Cluster, job_id: str) -> set[str]:
    return {member.slice.node for member in made.job(job_id).members}


def test_a_gang_keeps_off_a_node_that_is_being_checked_where_it_can() -> None:
    made = cluster(*"abcdef")
    suspected(made, "b")
    gang = made.submit(members=5, gpus=1)
    assert nodes_of(made, gang) == set("acdef")
    assert "off b, which is being checked" in made.job(gang).why
    assert nodes_of(made, made.submit(gpus=1)) == {"b"}, "one process may use it"


def test_a_gang_that_needs_the_node_gets_it_although_it_is_being_checked() -> None:
    made = cluster(*"abcdef")
    suspected(made, "b")
    gang = made.submit(members=6, gpus=1)
    assert nodes_of(made, gang) == set("abcdef")
    assert "checked" not in made.job(gang).why


def test_a_replacement_has_no_weak_link_to_the_members_that_stay() -> None:
    made = cluster(*"abcd")
    gang = made.run(members=2, gpus=1)
    assert nodes_of(made, gang) == {"a", "b"}
    made.join("e", gpus=2)  # a fresh gang would go there, and meet no weak link
    weak_between(made, "ac")
    made.learn_gone("b")
    made.deliver()
    made.end(gang, code=143)
    job = made.job(gang)
    assert [member.slice.node for member in job.members] == ["a", "d"]
    assert "off the weak link between a and c" in job.why


def test_an_elastic_gang_does_not_grow_over_a_weak_link_or_to_a_suspect() -> None:
    elastic = {"gpus": 1, "members": 1, "members_max": 8, "checkpoint_ms": 1_000}
    made = cluster(*"abcdefg")
    weak_between(made, "ab", "cd")
    first = made.run(**elastic)
    assert nodes_of(made, first) == set("acefg"), "as large as it gets without both ends of a link"
    made = cluster("a")
    made.policy = msgspec.structs.replace(made.policy, run_ms_min=1_000, move_cost_ms=10**9)
    gang = made.run(**elastic)
    for name in "bcdef":
        made.join(name, gpus=1)
    suspected(made, "f")
    weak = (*made.state.fabric.weak, Weak(node="a", peer="b", mbs=10, usual_mbs=900))
    fabric = Fabric(id="t2", weak=weak)
    apply(made.state, FabricMeasured(at_ms=0, id="t2", nodes=(), fabric=fabric))
    made.wait(1_000)
    made.step()
    assert {slice_.node for slice_ in made.state.claims[gang]} == set("acde")


def test_the_pairs_of_a_tour_are_not_in_every_report_for_ever() -> None:
    made = cluster("a", "b")
    book = made.books["b"]
    book.measured(CheckResult(id="t1", pairs=(Pair("a", 20, 900, 900),)))
    assert book.report().checks[0].pairs
    for _ in range(PAIRS_TOLD_MAX):
        book.report()
    assert [check.id for check in book.report().checks] == ["t1"]
    assert not book.report().checks[0].pairs
    book.measured(CheckResult(id="t2", pairs=(Pair("a", 20, 900, 900),)))
    book.measured(CheckResult(id="h3"))
    assert not any(check.pairs for check in book.report().checks)


def test_a_node_shows_its_weak_links_in_words() -> None:
    weak = (Weak(node="a", peer="b", mbs=10, usual_mbs=9_000), Weak(node="c", usual_mbs=800))
    fabric = Fabric(id="t1", weak=weak)
    assert weak_links(fabric, "b") == ["weak link to a: 10 MB/s, usually 9,000"]
    assert weak_links(fabric, "c") == ["weak links: no traffic, usually 800"]
    assert weak_links(fabric, "d") == []


def test_a_node_that_restarts_in_the_middle_of_a_tour_has_no_broken_links() -> None:
    made = cluster("a", "b", "c")
    answer = made.ask(CheckNetwork())
    assert isinstance(answer, Accepted)
    tour = made.state.heard.tours[answer.id]
    made.learn_gone("c")
    made.reboot("c")
    made.hear("c")
    asked = [one.node for one in made.last.commands if isinstance(one, Check)]
    assert "c" not in asked, "its peers do not wait for it any more"
    hung_up = Pair("c", fault="it hung up")
    made.books["a"].measured(CheckResult(id=answer.id, pairs=(Pair("b", 20, 900, 900), hung_up)))
    made.books["b"].measured(CheckResult(id=answer.id, pairs=(hung_up,)))
    made.hear("a", "b")
    assert tour.ended_ms is not None, "nobody waits for it"
    assert tour.unmeasured == {"c": "it did not answer"}
    assert made.state.fabric.weak == ()


def test_virtual_nodes_of_one_machine_have_no_weak_links_and_are_one_group() -> None:
    made = Cluster(Policy(silent_after_ms=10**9, grace_ms=10**9))
    for name in "abcd":
        made.join(name, gpus=1, address="127.0.0.1")
    answer = made.ask(CheckNetwork())
    assert isinstance(answer, Accepted)
    answered(made, answer.id, {"d": 100}, list("abcd"))
    assert made.state.fabric.weak == (), "a machine that was busy is not a bad network"
    assert len({*made.state.fabric.places.values()}) == 1
    assert all(standing(made, name) is Standing.OK for name in "abcd")


def test_a_gang_that_falls_back_to_tcp_beside_infiniband_is_told_why() -> None:
    made = cluster()
    for name in "ab":
        made.join(name, gpus=1, rdma=RDMA_ROOT)
    made.join("c", gpus=1, rdma="there is no /dev/infiniband/uverbs0")

    def why(nodes: int, tenant: str, word: Rdma) -> str:
        made.policy = msgspec.structs.replace(made.policy, rdma=word)
        gang = made.run(gpus=1, members=nodes, tenant=tenant)
        told = render(explain(made.state, made.job(gang), made.policy, made.now_ms))
        for number in range(nodes):
            made.exit(gang, member=number)
        made.hear(*"abc")
        return told.partition("; its members ")[2]

    assert why(2, "ops", Rdma.OPERATOR) == ""
    assert "TCP although a, b have InfiniBand: the policy" in why(2, "ops", Rdma.NOBODY)
    assert "c has InfiniBand: there is no /dev/infiniband/uverbs0" in why(3, "ops", Rdma.EVERYONE)
    assert why(1, "ops", Rdma.NOBODY) == ""
    made.ask(AddTenant("physics"))
    assert "the policy does not let it (rdma: operator)" in why(2, "physics", Rdma.OPERATOR)
    assert "only root may open" in why(2, "physics", Rdma.EVERYONE)
