"""Which nodes a gang with an encrypted network gets, and who learns whose key."""

from __future__ import annotations

from ipaddress import IPv6Address, IPv6Network

import msgspec
import pytest

from shoal.control.tunnels import Tunnels, network_of
from shoal.core.answers.why import explain
from shoal.model.commands import Launch
from shoal.model.job import MemberRef
from shoal.model.labels import WIREGUARD
from shoal.model.node import LabelChange
from shoal.model.policy import Rdma
from shoal.model.report import Refused, SetLabels, Submit
from shoal.model.tunnel import Tunnel, TunnelEnd
from tests.core.build import Cluster, job_spec

KEYS = [letter * 43 + "=" for letter in "ABC"]


def cluster_of(*able: bool) -> Cluster:
    cluster = Cluster()
    for number, can in enumerate(able, 1):
        labels = {WIREGUARD: "program"} if can else {}
        cluster.join(f"n{number}", gpus=2, labels=labels)
    return cluster


class Head:
    """What nodes say to it, and what each of them hears."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.tunnels = Tunnels(lambda: cluster.state)
        self.heard: dict[str, list[Tunnel]] = {}

    def joins(self, node: str, ref: MemberRef, key: str = KEYS[0]) -> None:
        self.tunnels.joins(TunnelEnd(ref, key, 4000), node, self.heard.setdefault(node, []).append)


def test_nodes_hear_of_each_other_when_all_have_a_key() -> None:
    cluster = cluster_of(True, True)
    job = cluster.job(cluster.run(members=2, gpus=2, encrypt_network=True))
    head, refs = Head(cluster), [MemberRef(job.id, 1, number) for number in (0, 1)]
    nodes = [member.slice.node for member in job.members]
    head.joins(nodes[0], refs[0], KEYS[0])
    assert head.heard[nodes[0]] == []
    head.joins(nodes[1], refs[1], KEYS[1])
    (tunnel,) = head.heard[nodes[0]]
    assert head.heard[nodes[1]] == [tunnel]
    assert [(end.node, end.public) for end in tunnel.ends] == list(zip(nodes, KEYS, strict=False))
    assert [end.host for end in tunnel.ends] == [f"{node}.test" for node in nodes]
    network = IPv6Network(tunnel.network)
    assert network.subnet_of(IPv6Network("fd00::/8"))
    assert all(IPv6Address(end.address) in network for end in tunnel.ends)


def test_a_key_that_changes_and_a_head_that_starts_again_are_told_to_all() -> None:
    cluster = cluster_of(True, True)
    job = cluster.job(cluster.run(members=2, gpus=2, encrypt_network=True))
    ends = [(m.slice.node, MemberRef(job.id, 1, n)) for n, m in enumerate(job.members)]
    before, after = Head(cluster), Head(cluster)
    for head in (before, after):
        for node, ref in ends:
            head.joins(node, ref)
    assert before.heard == after.heard, "addresses changed with a restart"
    after.joins(*ends[0], KEYS[2])
    assert [tunnel.ends[0].public for tunnel in after.heard[ends[1][0]]] == [KEYS[0], KEYS[2]]


def test_a_node_is_not_heard_about_a_gang_that_is_not_its_own() -> None:
    cluster = cluster_of(True, True, True)
    job = cluster.job(cluster.run(members=2, gpus=2, encrypt_network=True))
    plain = cluster.run(gpus=1)
    head, own = Head(cluster), {member.slice.node for member in job.members}
    (stranger,) = {"n1", "n2", "n3"} - own
    head.joins(stranger, MemberRef(job.id, 1, 0))
    head.joins(stranger, MemberRef(plain, 1, 0))
    for number, member in enumerate(job.members):
        head.joins(member.slice.node, MemberRef(job.id, 2, number))  # an attempt that is not there
    assert not any(head.heard.values())
    assert not head.tunnels._attempts


def test_an_attempt_that_is_over_is_forgotten() -> None:
    cluster = cluster_of(True, True)
    head = Head(cluster)
    for _ in range(3):
        job = cluster.job(cluster.run(members=2, gpus=2, encrypt_network=True))
        for number, member in enumerate(job.members):
            head.joins(member.slice.node, MemberRef(job.id, 1, number))
            assert len(head.tunnels._attempts) == 1
        for number in range(2):
            cluster.end(job.id, member=number)


def test_nobody_but_the_agent_says_that_its_node_can() -> None:
    change = LabelChange(labels={WIREGUARD: "program"})
    answer = cluster_of(False).ask(SetLabels("n1", change))
    assert isinstance(answer, Refused)
    assert WIREGUARD in answer.message


def test_a_network_is_never_used_twice() -> None:
    cluster = cluster_of(True, True)
    job = cluster.job(cluster.run(members=2, gpus=2, encrypt_network=True))
    later = msgspec.structs.replace(job, attempt=2)
    other = msgspec.structs.replace(job, submitted_ms=job.submitted_ms + 1)  # of another cluster
    assert len({network_of(one) for one in (job, later, other)}) == 3


def test_only_nodes_that_can_encrypt_it_run_such_a_gang() -> None:
    cluster = cluster_of(True, False, True)
    job = cluster.job(cluster.run(members=2, gpus=2, encrypt_network=True))
    assert {member.slice.node for member in job.members} == {"n1", "n3"}
    waits = cluster.submit(members=2, gpus=2, encrypt_network=True)
    said = explain(cluster.state, cluster.job(waits), cluster.policy, cluster.now_ms)
    assert "n2 cannot encrypt a gang's network" in said, said
    alone = cluster.job(cluster.run(gpus=2, encrypt_network=True))
    assert alone.members[0].slice.node == "n2", "it has nobody to talk to"


def test_without_such_nodes_it_is_refused_and_the_line_says_what_they_need() -> None:
    answer = cluster_of(False, False).ask(Submit(job_spec(members=2, gpus=2, encrypt_network=True)))
    assert isinstance(answer, Refused)
    assert answer.field == "encrypt_network"
    assert "wireguard-go" in answer.message


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"members": 600}, "at most 512"),
        ({"members": 2, "launcher": True, "members_per_node": 1}, "launcher"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(fields: dict[str, int], why: str) -> None:
    spec = job_spec(encrypt_network=True, **fields)
    answer = cluster_of(True, True).ask(Submit(spec))
    assert isinstance(answer, Refused)
    assert answer.field == "encrypt_network"
    assert why in answer.message


def test_members_on_one_node_get_no_tunnel_and_members_on_two_get_no_cards() -> None:
    cluster = cluster_of(True, True)
    cluster.policy = msgspec.structs.replace(cluster.policy, rdma=Rdma.EVERYONE)
    for gpus, several in ((1, False), (2, True)):
        job = cluster.submit(members=2, gpus=gpus, encrypt_network=True)
        launches = [one for one in cluster.deliver() if isinstance(one, Launch)]
        assert [one.encrypt_network for one in launches] == [several, several]
        assert not any(one.limits.rdma for one in launches)
        cluster.hear("n1", "n2")
        for number in range(2):
            cluster.end(job, member=number)
