"""`shoal neighbor invite` and `revoke`: another cluster as a tenant with a cap and a token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec
import pytest

from shoal.cli.verbs import token
from shoal.client import Address, Client, ShoalError
from shoal.engines.linked.joining import read_token
from shoal.model.policy import Tenant
from tests.cli.conftest import Shoal, assert_one_clear_line
from tests.live.cluster import Live


@pytest.fixture(autouse=True)
def as_before(cluster: Live) -> Iterator[None]:
    policy = cluster.client.policy()
    yield
    cluster.client.set_policy(policy)
    for user in cluster.client.users():
        cluster.client.remove_user(user.name)
    for tenant in cluster.client.tenants():
        cluster.client.remove_tenant(tenant.name)


def test_an_invite_makes_a_tenant_with_a_cap_and_prints_one_line_for_the_other_side(
    live_shoal: Shoal, cluster: Live
) -> None:
    made = live_shoal("neighbor", "invite", "east", "--gpus-max", "2")
    line = r"shoal neighbor add (http\S+) --token (shoal_[0-9a-f]{8}_[\w-]{43})(\.[0-9a-f:]+)?\n"
    found = re.fullmatch(line, made.out)
    assert found is not None, made.out
    assert "east may hold 2 GPUs at a time" in made.err and "shown only once" in made.err
    client = cluster.client
    assert client.policy().tenant("east").gpus_max == 2
    assert [(one.user, one.tenant, one.only) for one in client.tokens()] == [
        ("east", "east", "neighbor")
    ]
    with Client(found[1], found[2]) as neighbor:
        assert neighbor.offers([{"command": ["true"], "cpu_milli": 100}]).offers[0].start_ms == 0
        with pytest.raises(ShoalError, match="this token is for a neighboring cluster"):
            neighbor.me()
        gone = live_shoal("neighbor", "revoke", "east")
        assert gone.out == "revoked 1 token of east\n"
        assert "its jobs run on; see: shoal ps --tenant east" in gone.err
        with pytest.raises(ShoalError, match="the token is missing or wrong"):
            neighbor.jobs()
    verbs = {(one.verb, one.on.rpartition(" ")[2]) for one in client.audit().entries}
    assert {("tenants.add", "east"), ("users.add", "east"), ("tokens.add", "east")} <= verbs
    assert "tokens.remove" in {verb for verb, _ in verbs}
    assert_one_clear_line(live_shoal("neighbor", "revoke", "east"))


def test_the_token_names_the_certificate_so_that_it_goes_to_no_other_cluster(
    live_shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = "sha256:" + "ab" * 32
    address = Address(url="https://west.example.com:7700", pid=0, fingerprint=shown)
    monkeypatch.setattr(token, "login_from", lambda _: (address, "shoal login ..."))
    made = live_shoal("neighbor", "invite", "east", "--gpus-max", "2")
    line, _, given = made.out.strip().rpartition(" ")
    assert line == "shoal neighbor add https://west.example.com:7700 --token"
    assert read_token(given).fingerprint == shown
    assert "only this machine" not in made.err


def test_a_second_invite_changes_the_cap_or_leaves_it_and_keeps_the_rest_of_the_policy(
    live_shoal: Shoal, cluster: Live
) -> None:
    client = cluster.client
    tenants = (Tenant(name="lab", weight=3), Tenant(name="east", weight=2))
    client.set_policy(msgspec.structs.replace(client.policy(), tenants=tenants))
    for given, most in ((("--gpus-max", "2"), 2), ((), 2), (("--gpus-max", "3"), 3)):
        made = json.loads(live_shoal("neighbor", "invite", "east", *given, "--json").out)
        assert (made["name"], made["gpus_max"]) == ("east", most)
    assert client.policy().tenants == (
        Tenant(name="lab", weight=3),
        Tenant(name="east", weight=2, gpus_max=3),
    )
    assert len(client.tokens()) == 3
    assert live_shoal("neighbor", "revoke", "east").out == "revoked 3 tokens of east\n"


@pytest.mark.parametrize("name", ["lab", "LAB", "Ann"])
def test_a_name_that_others_have_is_not_given_to_a_neighbor(live_shoal: Shoal, name: str) -> None:
    live_shoal("tenant", "add", "lab")
    live_shoal("user", "add", "ann", "--tenant", "lab")
    refused = live_shoal("neighbor", "invite", name, "--gpus-max", "2")
    assert refused.code == 1
    assert re.search("NAME: there is a (tenant|user) (lab|ann); choose another name", refused.err)


def test_wrong_usage_is_one_line(live_shoal: Shoal) -> None:
    for words in (
        ("invite",),
        ("revoke", "east", "--gpus-max", "2"),
        ("greet", "east"),
        ("invite", "no/name"),
        ("invite", "east", "--gpus-max", "0"),
    ):
        assert_one_clear_line(live_shoal("neighbor", *words))
