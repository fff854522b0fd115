"""Which secrets a node gets: those of the members that it is to start, and no others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.control.secretstore import REFUSED, SecretStore, choose, tenant_since_ms
from shoal.model.identity import Identity, TenantRecord
from shoal.model.job import MemberRef
from tests.core.build import Cluster


@pytest.fixture
def store(tmp_path: Path) -> SecretStore:
    made = SecretStore(tmp_path / "secrets")
    for tenant in ("default", "other"):
        for name in ("token", "key", "registry-ghcr.io"):
            made.put(tenant, 0, name, f"{tenant}:{name}".encode(), by="ada", now_ms=1)
    return made


def placed(**fields: object) -> tuple[Cluster, str, int, MemberRef]:
    """A cluster of two nodes with a job, its node, that node's life, and the job's member."""
    cluster = Cluster()
    cluster.join("a")
    cluster.join("b")
    job_id = cluster.submit(**{"secrets": ("token=VAR", "key"), **fields})
    job = cluster.state.jobs[job_id]
    node = job.members[0].slice.node
    return cluster, node, cluster.state.nodes[node].incarnation, MemberRef(job_id, job.attempt, 0)


def test_the_node_of_a_member_gets_what_the_job_named_and_nothing_else(store: SecretStore) -> None:
    cluster, node, life, ref = placed()
    found = choose(store, cluster.state, node, life, ref)
    assert [(one.name, one.variable, one.value) for one in found.values] == [
        ("token", "VAR", b"default:token"),
        ("key", "", b"default:key"),
    ]
    assert (found.registry, found.problem) == (b"", "")


def test_others_get_nothing(store: SecretStore) -> None:
    """Another node, another life of this one, another attempt or member, a job that stops."""
    cluster, node, life, ref = placed()
    other = "b" if node == "a" else "a"
    state = cluster.state
    asked = [
        (other, state.nodes[other].incarnation, ref),
        ("nowhere", life, ref),
        (node, life - 1, ref),
        (node, life + 1, ref),
        (node, life, MemberRef(ref.job, ref.attempt + 1, 0)),
        (node, life, MemberRef(ref.job, ref.attempt, 1)),
        (node, life, MemberRef("j99", 1, 0)),
    ]
    for who, when, what in asked:
        found = choose(store, state, who, when, what)
        assert (found.values, found.registry, found.problem) == ((), b"", REFUSED)
    cluster.cancel(ref.job)
    assert choose(store, cluster.state, node, life, ref).values == ()


def test_the_credentials_of_a_registry_go_to_the_node_and_not_to_the_member(
    store: SecretStore,
) -> None:
    cluster, node, life, ref = placed()
    job = cluster.state.jobs[ref.job]
    job.spec = msgspec.structs.replace(job.spec, image="ghcr.io/team/app", secrets=("token",))
    found = choose(store, cluster.state, node, life, ref)
    assert [one.name for one in found.values] == ["token"]
    assert found.registry == b"default:registry-ghcr.io"
    job.spec = msgspec.structs.replace(job.spec, image="quay.io/team/app")
    assert choose(store, cluster.state, node, life, ref).registry == b""


def test_a_secret_that_was_removed_is_a_reason(store: SecretStore) -> None:
    cluster, node, life, ref = placed()
    store.remove("default", 0, "key")
    found = choose(store, cluster.state, node, life, ref)
    assert found.values == ()
    assert found.problem == "default has no secret key; set it with: shoal secret set"
    assert choose(None, cluster.state, node, life, ref).problem


def test_secrets_belong_to_the_tenant_as_it_is_now(store: SecretStore) -> None:
    """The operator's tenant `other` is added later: the operator's secrets are not its own."""
    identity = Identity(tenants={"other": TenantRecord(name="other", uid=61_000, since_ms=5)})
    assert tenant_since_ms(identity, "other") == 5
    assert tenant_since_ms(identity, "default") == 0
    assert store.find("other", tenant_since_ms(identity, "other"), "token") is None


def test_the_members_of_an_attempt_share_a_key_that_no_other_attempt_has(tmp_path: Path) -> None:
    """It is the same after a restart of the controller, and no secret has to be set for it."""
    fields = {"secrets": (), "launcher": True, "members": 2, "members_per_node": 1}
    cluster, node, life, ref = placed(**fields)
    first = choose(SecretStore(tmp_path / "s"), cluster.state, node, life, ref).values
    assert [(one.name, one.variable) for one in first] == [("launch", "SHOAL_LAUNCH_KEY")]
    again = SecretStore(tmp_path / "s")
    other = cluster.state.jobs[ref.job].members[1].slice.node
    life = cluster.state.nodes[other].incarnation
    assert choose(again, cluster.state, other, life, ref._replace(member=1)).values == first
    later = again.derived(f"launch {ref.job} {ref.attempt + 1}")
    assert len(later) == 64 and later != first[0].value
