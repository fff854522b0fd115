"""Keys for services: who may have one, and what ends it."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.core.features.access import callers_of
from shoal.core.invariants import verify
from shoal.core.state.load import restore
from shoal.core.state.state import Snapshot
from shoal.model.access import EVERY_SERVICE, Caller, access_of
from shoal.model.identity import API_KEYS_OF_TENANT_MAX, ApiKey, Role, Token, User
from shoal.model.job import JobSpec
from shoal.model.report import (
    Accepted,
    AddTenant,
    Refused,
    RemoveApiKey,
    RemoveTenant,
    RemoveUser,
    SetApiKey,
    SetService,
    SetToken,
    SetUser,
)
from shoal.model.service import ServiceSpec
from tests.core.build import Cluster


def key(**fields: Any) -> ApiKey:
    given = {"id": "0a1b2c3d4e5f", "hash": "a" * 64, "tenant": "lab", "user": "ann"}
    return msgspec.convert({**given, **fields}, ApiKey)


def lab() -> Cluster:
    cluster = Cluster()
    ann = User(name="ann", roles={"lab": Role.MEMBER})
    for wish in (AddTenant("lab"), AddTenant("art"), SetUser(ann, add=True)):
        assert isinstance(cluster.ask(wish), Accepted)
    spec = ServiceSpec(name="chat", replica=JobSpec(command=("serve",), tenant="lab"))
    assert isinstance(cluster.ask(SetService(spec)), Accepted)
    return cluster


def test_a_key_is_added_once_and_revoked_at_once() -> None:
    cluster = lab()
    made = SetApiKey(key(services=["chat"]), who="ann")
    assert cluster.ask(made) == cluster.ask(made) == Accepted("0a1b2c3d4e5f")
    (known,) = cluster.state.identity.api_keys.values()
    assert (known.who, known.services) == ("ann", ("chat",)) and known.since_ms
    other = cluster.ask(SetApiKey(key(hash="b" * 64)))
    assert isinstance(other, Refused) and "already" in other.message
    assert cluster.ask(RemoveApiKey(known.id)) == Accepted(known.id)
    assert not cluster.state.identity.api_keys
    gone = cluster.ask(RemoveApiKey(known.id))
    assert isinstance(gone, Refused) and gone.missing


def test_a_key_is_for_services_of_the_senders_tenant() -> None:
    cluster = lab()
    for wish, field in (
        (SetApiKey(key(tenant="art", services=["chat"])), "service"),
        (SetApiKey(key(services=["nothing"])), "service"),
        (SetApiKey(key(), scope="art"), "tenant"),
        (SetApiKey(key(until_ms=1)), "expires"),
    ):
        answer = cluster.ask(wish)
        assert isinstance(answer, Refused) and answer.field == field, answer
    assert isinstance(cluster.ask(SetApiKey(key(), scope="lab")), Accepted)
    answer = cluster.ask(RemoveApiKey("0a1b2c3d4e5f", scope="art"))
    assert isinstance(answer, Refused) and answer.missing, "others learn nothing of it"


def test_keys_go_with_their_user_and_their_tenant() -> None:
    cluster = lab()
    cluster.ask(SetApiKey(key()))
    cluster.ask(RemoveUser("ann"))
    assert not cluster.state.identity.api_keys
    cluster.ask(SetApiKey(key(tenant="art", user="a-partner")))
    assert cluster.state.identity.api_keys
    cluster.ask(RemoveTenant("art"))
    assert not cluster.state.identity.api_keys
    answer = cluster.ask(SetApiKey(key(tenant="art")))
    assert isinstance(answer, Refused) and answer.field == "tenant"


def test_a_tenant_that_is_added_does_not_get_keys_of_the_operator() -> None:
    cluster = Cluster()
    cluster.ask(SetApiKey(key(tenant="new")))
    assert cluster.state.identity.api_keys
    cluster.ask(AddTenant("new"))
    assert not cluster.state.identity.api_keys


def test_keys_of_a_tenant_are_bounded_and_expired_ones_make_room() -> None:
    cluster = lab()
    keys = cluster.state.identity.api_keys
    soon_ms = cluster.now_ms + 1_000
    for number in range(API_KEYS_OF_TENANT_MAX):
        one = key(id=f"{number:012}", hash=f"{number:064x}", until_ms=soon_ms)
        keys[one.id] = one
    answer = cluster.ask(SetApiKey(key()))
    assert isinstance(answer, Refused) and "revoke one" in answer.message
    assert isinstance(cluster.ask(SetApiKey(key(tenant="art"))), Accepted)
    cluster.now_ms = soon_ms
    assert isinstance(cluster.ask(SetApiKey(key(id="b" * 12))), Accepted)
    assert [one.id for one in keys.values() if one.tenant == "lab"] == ["b" * 12]


def test_the_gateway_knows_keys_and_tokens_that_are_not_void() -> None:
    cluster = lab()
    cluster.ask(SetApiKey(key(rpm=7, until_ms=cluster.now_ms + 1_000_000)))
    token = Token(id="abcd1234", user="ann", tenant="lab", role=Role.MEMBER, hash="c" * 64)
    cluster.ask(SetToken(token))
    invite = msgspec.structs.replace(
        token, id="abcd1235", hash="d" * 64, invite=True, until_ms=cluster.now_ms + 1_000_000
    )
    cluster.ask(SetToken(invite))
    user, owner = callers_of(cluster.state)
    assert (user.id, user.services, user.tenant) == ("abcd1234", (), "lab")
    assert (owner.services, owner.rpm) == ((EVERY_SERVICE,), 7) and owner.until_ms
    cluster.ask(SetUser(User(name="ann", roles={})))
    assert [one.id for one in callers_of(cluster.state)] == [owner.id], "ann has no role now"


def test_a_restart_keeps_keys() -> None:
    cluster = lab()
    cluster.ask(SetApiKey(key(tokens=1_000_000, per="month")))
    image = msgspec.json.encode(cluster.state.snapshot())
    again = restore(msgspec.json.decode(image, type=Snapshot))
    assert again.identity.api_keys == cluster.state.identity.api_keys
    verify(again)


def test_a_service_of_an_added_tenant_is_for_the_cluster() -> None:
    assert access_of((), "lab") == ("cluster",) and access_of((), "") == ("open",)
    assert access_of(("open",), "lab") == ("open",)
    stranger = Caller(id="x", hash="", tenant="art", services=("chat",))
    assert not stranger.may_call("chat", ("cluster",), "lab")
    assert stranger.may_call("chat", ("open",), "lab")
