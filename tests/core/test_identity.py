"""Tenants, users and tokens: who may be added, what a token may do, and what a removal takes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.core.invariants import Violation, verify
from shoal.core.state.apply import replay
from shoal.core.state.load import restore
from shoal.core.state.state import Snapshot, State
from shoal.model.commands import Launch
from shoal.model.identity import (
    ENDED_EACH_MAX,
    TENANT_UIDS,
    TENANTS_MAX,
    TOKENS_PER_USER_MAX,
    USERS_MAX,
    Identity,
    Role,
    TenantRecord,
    Token,
    User,
)
from shoal.model.job import JobSpec
from shoal.model.policy import Tenant
from shoal.model.report import (
    Accepted,
    AddTenant,
    Answer,
    EndSignIn,
    Refused,
    RemoveTenant,
    RemoveToken,
    RemoveUser,
    Request,
    SetService,
    SetToken,
    SetUser,
    Submit,
)
from shoal.model.service import ServiceSpec
from tests.core.build import Cluster

HASH, OTHER_HASH = "a" * 64, "b" * 64


def token(**fields: Any) -> Token:
    given = {"id": "abcd1234", "user": "ann", "tenant": "lab", "role": "member", "hash": HASH}
    return msgspec.convert({**given, **fields}, Token)


def user(name: str = "ann", **roles: str) -> User:
    return msgspec.convert({"name": name, "roles": roles}, User)


ANN = SetUser(user(lab="member"), add=True)
ADMIN = SetUser(User(name="root", roles={"*": Role.ADMIN}), add=True)


def peopled(*more: Request) -> Cluster:
    cluster = Cluster()
    for request in (AddTenant("lab"), ANN, SetToken(token()), *more):
        answer = cluster.ask(request)
        assert isinstance(answer, Accepted), answer
    return cluster


def identity(cluster: Cluster) -> Identity:
    return cluster.state.identity


def refusal(answer: Answer) -> Refused:
    assert isinstance(answer, Refused), answer
    return answer


def test_tenants_get_unix_users_of_their_own_and_a_removed_ones_is_not_given_again() -> None:
    cluster = Cluster()
    for name in ("a", "b"):
        cluster.ask(AddTenant(name))
    assert [record.uid for record in identity(cluster).tenants.values()] == [61_000, 61_001]
    cluster.ask(RemoveTenant("b"))
    cluster.state = restored(cluster)
    cluster.ask(AddTenant("c"))
    assert identity(cluster).tenants["c"].uid == 61_002


def test_a_unix_user_is_never_given_again_to_another_tenant() -> None:
    cluster = Cluster()
    for name in ("first", "second"):
        cluster.ask(AddTenant(name))
    cluster.ask(RemoveTenant("second"))
    cluster.ask(AddTenant("last", uid=TENANT_UIDS[-1]))
    cluster.ask(AddTenant("next"))
    assert identity(cluster).tenants["next"].uid == TENANT_UIDS[2]
    identity(cluster).spent.extend(TENANT_UIDS[3:])
    assert "were all given out" in refusal(cluster.ask(AddTenant("more"))).message


def test_a_tenant_that_is_added_again_is_another_one() -> None:
    """Whatever the clock says, and however often."""
    cluster = peopled()
    first = identity(cluster).tenants["lab"]
    assert (first.key, first.first_job) == ("lab", 0)
    keys = {first.key}
    cluster.join("n1", gpus=1)
    job = cluster.run(tenant="lab")
    cluster.end(job)
    used = cluster.state.accounts.sums["lab"].usage
    for _ in range(3):
        cluster.ask(RemoveTenant("lab"))
        cluster.now_ms -= 500
        cluster.ask(AddTenant("lab"))
        record = identity(cluster).tenants["lab"]
        assert record.key not in keys
        keys.add(record.key)
        assert record.first_job == cluster.state.next_job
        assert identity(cluster).is_earlier("lab", job)
    assert identity(cluster).tenants.keys() == {"lab"} and "lab" not in identity(cluster).removed
    assert used > 0 and "lab" not in cluster.state.accounts.sums
    assert not identity(cluster).is_earlier("lab", cluster.run(tenant="lab"))
    assert restored(cluster).identity == identity(cluster)


def test_a_name_that_was_forgotten_counts_as_one_that_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("core.features.identity", "core.state.events.identity"):
        monkeypatch.setattr(f"shoal.{module}.REMOVED_MAX", 2)
    cluster = Cluster()
    for name in ("a", "b", "c"):
        cluster.ask(AddTenant(name))
        cluster.ask(RemoveTenant(name))
    assert list(identity(cluster).removed) == ["b", "c"]
    cluster.ask(AddTenant("a"))
    assert identity(cluster).tenants["a"].first_job == cluster.state.next_job


def test_a_unix_user_can_be_named() -> None:
    cluster = Cluster()
    cluster.ask(AddTenant("lab", uid=1500))
    assert identity(cluster).tenants["lab"].uid == 1500
    refused = refusal(cluster.ask(AddTenant("other", uid=1500)))
    assert (refused.field, refused.message) == ("uid", "1500 is the Unix user of lab")


REFUSALS = [
    (AddTenant("default"), "tenant", "is the operator's own"),
    (AddTenant("*"), "tenant", "is the operator's own"),
    (AddTenant("lab"), "tenant", "there is a tenant lab already"),
    (RemoveTenant("none"), "tenant", "there is no tenant none"),
    (SetUser(user("operator"), add=True), "user", "the person who started the cluster"),
    (ANN, "user", "there is a user ann already"),
    (SetUser(user("bob")), "user", "there is no user bob"),
    (SetUser(user("bob", lab="admin"), add=True), "role", "an admin is one for every tenant"),
    (SetUser(user("bob", **{"*": "member"}), add=True), "role", "a member belongs to a tenant"),
    (SetUser(user("bob", none="member"), add=True), "tenant", "there is no tenant none"),
    (RemoveUser("bob"), "user", "there is no user bob"),
    (SetToken(token()), "token", "there is a token abcd1234 already"),
    (SetToken(token(id="efgh5678", user="bob")), "user", "there is no user bob"),
    (SetToken(token(id="efgh5678", role="admin")), "role", "ann is member in lab, so not admin"),
    (SetToken(token(id="efgh5678", tenant="x")), "role", "ann has no role in x, so not member"),
    (SetToken(token(id="efgh5678", tenant="*")), "role", "ann has no role in every tenant"),
    (SetToken(token(id="efgh5678", until_ms=1)), "expires", "is in the past"),
    (SetToken(token(id="efgh5678"), rotate=True), "token", "there is no token efgh5678"),
    (SetToken(token(until_ms=1), rotate=True), "expires", "is in the past"),
    (RemoveToken("efgh5678"), "token", "there is no token efgh5678"),
]


@pytest.mark.parametrize(("request_", "field", "words"), REFUSALS)
def test_a_request_that_cannot_be_is_refused_and_changes_nothing(
    request_: Request, field: str, words: str
) -> None:
    cluster = peopled()
    before = msgspec.json.encode(cluster.state.snapshot())
    refused = refusal(cluster.ask(request_))
    assert (refused.field, words in refused.message) == (field, True), refused
    assert refused.missing == ("there is no" in words)
    assert msgspec.json.encode(cluster.state.snapshot()) == before
    assert cluster.last.events == []


def test_the_numbers_of_tenants_users_and_tokens_are_bounded() -> None:
    cluster = peopled()
    for number in range(TOKENS_PER_USER_MAX - 1):
        assert isinstance(cluster.ask(SetToken(token(id=f"tok{number:05}"))), Accepted)
    assert "remove one" in refusal(cluster.ask(SetToken(token(id="onemore1")))).message
    people = identity(cluster)
    for number in range(TENANTS_MAX - 1):
        people.tenants[f"t{number}"] = TenantRecord(name=f"t{number}", uid=100_000 + number)
    for number in range(USERS_MAX - 1):
        people.users[f"u{number}"] = user(f"u{number}")
    assert "the maximum" in refusal(cluster.ask(AddTenant("more"))).message
    assert "the maximum" in refusal(cluster.ask(SetUser(user("more"), add=True))).message


def test_a_token_may_do_what_its_user_may_at_that_moment() -> None:
    cluster = peopled()

    def role() -> Role | None:
        return identity(cluster).role(identity(cluster).tokens["abcd1234"])

    assert role() is Role.MEMBER
    cluster.ask(SetUser(user(lab="viewer")))
    assert role() is Role.VIEWER
    cluster.ask(SetUser(user()))
    assert role() is None
    cluster.ask(SetUser(User(name="ann", roles={"*": Role.ADMIN})))
    assert role() is Role.MEMBER  # what the token was made for is the most it ever gets


def test_a_role_in_every_tenant_is_one_in_each() -> None:
    cluster = peopled(SetUser(User(name="ann", roles={"*": Role.ADMIN, "lab": Role.VIEWER})))
    made = cluster.ask(SetToken(token(id="efgh5678", tenant="lab", role="admin")))
    assert isinstance(made, Accepted)
    assert identity(cluster).role(identity(cluster).tokens["efgh5678"]) is Role.ADMIN


def test_a_rotated_token_keeps_all_but_its_secret_and_its_end() -> None:
    cluster = peopled()
    changed = token(hash=OTHER_HASH, user="eve", tenant="*", role="admin", until_ms=9_000)
    cluster.ask(SetToken(changed, rotate=True))
    now = identity(cluster).tokens["abcd1234"]
    assert now == token(hash=OTHER_HASH, until_ms=9_000, since_ms=1_000)


def test_a_removed_user_leaves_no_token_behind_for_a_new_user_of_the_same_name() -> None:
    cluster = peopled(RemoveUser("ann"), ANN)
    assert identity(cluster).tokens == {}


def test_a_removed_tenant_takes_its_tokens_and_roles_and_leaves_those_of_others() -> None:
    cluster = peopled(
        AddTenant("art"),
        SetUser(user(lab="member", art="viewer")),
        SetToken(token(id="efgh5678", tenant="art", role="viewer")),
        RemoveTenant("lab"),
        AddTenant("lab"),
    )
    assert list(identity(cluster).tokens) == ["efgh5678"]
    assert identity(cluster).users["ann"].roles == {"art": Role.VIEWER}


def test_a_tenant_is_not_removed_while_it_has_jobs() -> None:
    cluster = peopled()
    cluster.join("n1", gpus=1)
    job = cluster.run(tenant="lab")
    assert f"has the job {job}" in refusal(cluster.ask(RemoveTenant("lab"))).message
    cluster.end(job)
    assert isinstance(cluster.ask(RemoveTenant("lab")), Accepted)


def test_a_tenant_is_not_removed_while_it_has_a_service() -> None:
    cluster = peopled()
    served = ServiceSpec(name="chat", replica=JobSpec(command=("serve",), tenant="lab"))
    cluster.ask(SetService(served))
    assert "shoal service chat --stop" in refusal(cluster.ask(RemoveTenant("lab"))).message


def test_members_of_an_added_tenant_run_as_its_unix_user_and_others_as_the_agent() -> None:
    cluster = peopled()
    cluster.join("n1", gpus=4)
    named = (Tenant(name="named-in-a-policy"),)
    cluster.policy = msgspec.structs.replace(cluster.policy, tenants=named)
    cluster.step()
    uids = {}
    for tenant in ("lab", "default", "named-in-a-policy"):
        cluster.submit(tenant=tenant)
        (launch,) = [one for one in cluster.last.commands if isinstance(one, Launch)]
        uids[launch.tenant] = launch.uid
    assert uids == {"lab": 61_000, "default": 0, "named-in-a-policy": 0}


def test_a_job_for_a_tenant_that_is_not_there_never_runs_as_the_agent() -> None:
    """Not even one of the operator's: its name may be misspelt, or just removed."""
    cluster = peopled()
    misspelt, named = JobSpec(command=("true",), tenant="lba"), Tenant(name="guests")
    refused = refusal(cluster.ask(Submit(misspelt)))
    assert refused.field == "tenant"
    assert "no tenant lba" in refused.message and "shoal tenant add lba" in refused.message
    service = ServiceSpec(name="web", replica=misspelt)
    assert refusal(cluster.ask(SetService(service))).field == "tenant"
    cluster.policy = msgspec.structs.replace(cluster.policy, tenants=(named,))
    cluster.step()
    for tenant in ("default", "lab", "guests"):
        cluster.submit(tenant=tenant)


def test_without_added_tenants_any_name_will_do() -> None:
    Cluster().submit(tenant="anyone")


def test_expired_tokens_make_room_for_the_next() -> None:
    cluster = peopled(SetToken(token(id="efgh5678", until_ms=5_000)))
    cluster.wait(10_000)
    cluster.ask(SetToken(token(id="ijkl9012")))
    assert list(identity(cluster).tokens) == ["abcd1234", "ijkl9012"]


def test_a_user_of_an_openid_provider_is_one_person_for_ever() -> None:
    cluster = peopled()
    person = User(name="tim", subject="https://id.test#1")
    cluster.ask(SetUser(person, add=True))
    stranger = SetUser(msgspec.structs.replace(person, subject="https://id.test#2"))
    assert "is somebody else" in refusal(cluster.ask(stranger)).message
    local = SetUser(user("ann"))
    taken = SetUser(msgspec.structs.replace(local.user, subject="https://id.test#1"))
    assert "is somebody else" in refusal(cluster.ask(taken)).message
    cluster.ask(SetUser(user("tim", lab="viewer")))  # an admin sets a role
    assert identity(cluster).users["tim"].subject == "https://id.test#1"


def test_an_unchanged_user_is_no_event() -> None:
    cluster = peopled()
    assert isinstance(cluster.ask(SetUser(user(lab="member"))), Accepted)
    assert cluster.last.events == []


def restored(cluster: Cluster) -> State:
    body = msgspec.json.encode(cluster.state.snapshot())
    return restore(msgspec.json.decode(body, type=Snapshot))


def test_the_log_and_a_snapshot_hold_all_of_it() -> None:
    cluster = peopled(ADMIN, AddTenant("art"), SetToken(token(hash=OTHER_HASH), rotate=True))
    cluster.ask(RemoveTenant("art"))
    assert replay(State(), cluster.log).identity == identity(cluster)
    assert restored(cluster).identity == identity(cluster)


def test_a_snapshot_from_before_there_were_users_is_read() -> None:
    stored = msgspec.json.decode(msgspec.json.encode(Cluster().state.snapshot()))
    del stored["identity"]
    assert restore(msgspec.convert(stored, Snapshot)).identity == Identity()


@pytest.mark.parametrize("spoiled", ["uid", "role", "user", "tenant"])
def test_what_is_left_of_something_removed_is_noticed(spoiled: str) -> None:
    cluster = peopled()
    people = identity(cluster)
    verify(cluster.state)
    if spoiled == "uid":
        people.tenants["art"] = TenantRecord(name="art", uid=61_000)
    elif spoiled == "role":
        people.users["eve"] = user("eve", gone="member")
    else:
        people.tokens["efgh5678"] = token(id="efgh5678", **{spoiled: "gone"})
    with pytest.raises(Violation):
        verify(cluster.state)


def test_a_sign_in_that_was_ended_is_known_until_it_would_have_expired() -> None:
    cluster = peopled()
    until_ms = cluster.now_ms + 1_000
    for _ in range(2):
        cluster.ask(EndSignIn("abcd1234", "one", until_ms))
    cluster.ask(EndSignIn("", "operators", until_ms))
    cluster.ask(EndSignIn("gone0000", "of a token that was removed", until_ms))
    for known in (identity(cluster), restored(cluster).identity):
        assert known.has_ended("abcd1234", "one", until_ms)
        assert known.has_ended("", "operators", until_ms)
        assert not known.has_ended("abcd1234", "another", until_ms)
        assert not known.has_ended("", "one", until_ms)
    assert sum(type(event).__name__ == "SignInEnded" for event in cluster.log) == 2
    cluster.now_ms = until_ms
    cluster.ask(EndSignIn("", "later", until_ms + 1_000))
    assert list(identity(cluster).ended) == [""]
    assert list(identity(cluster).ended[""].names) == ["later"]


def test_too_many_ended_sign_ins_of_one_token_end_more_of_its_own_and_nobody_elses() -> None:
    """What is forgotten must not come to life again, and one user must not make another's be."""
    cluster = peopled()
    first_ms = cluster.now_ms + 10_000
    cluster.ask(EndSignIn("", "operators", first_ms))
    for number in range(ENDED_EACH_MAX + 5):
        cluster.ask(EndSignIn("abcd1234", f"s{number}", first_ms + number))
    known = identity(cluster)
    assert len(known.ended["abcd1234"].names) == ENDED_EACH_MAX
    assert all(
        known.has_ended("abcd1234", f"s{number}", first_ms + number)
        for number in range(ENDED_EACH_MAX + 5)
    )
    assert known.has_ended("abcd1234", "unnamed", first_ms)
    assert not known.has_ended("abcd1234", "unnamed", first_ms + ENDED_EACH_MAX)
    assert list(known.ended[""].names) == ["operators"]
    verify(cluster.state)
    cluster.ask(RemoveUser("ann"))
    assert list(known.ended) == [""]
    verify(cluster.state)
