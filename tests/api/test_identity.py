"""Tenants, users and tokens over HTTP: admins manage all, others their own tokens and no more."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from harness.waiting import until

from shoal.client import Client, ShoalError
from shoal.model.identity import Role
from shoal.model.people import NewToken, SecretTokenView
from tests.live.cluster import Live, live_cluster

HOUR_MS = 3_600_000
HASH = re.compile(r"\b[0-9a-f]{64}\b")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=1, gpus=1) as made:
        for tenant in ("lab", "art"):
            made.client.add_tenant(tenant)
        made.client.add_user("ann", {"lab": Role.MEMBER, "art": Role.VIEWER})
        made.client.add_user("bob", {"lab": Role.VIEWER})
        made.client.add_user("eve", {"*": Role.ADMIN})
        yield made


class Signed(NamedTuple):
    """A client with a token of its own."""

    client: Client
    made: SecretTokenView


@pytest.fixture
def sign(live: Live) -> Iterator[Callable[..., Signed]]:
    opened: list[Signed] = []

    def make(user: str, tenant: str | None = None, **rest: object) -> Signed:
        wanted = NewToken(user=user, tenant=tenant, **rest)  # type: ignore[arg-type]
        made = live.client.add_token(wanted)
        opened.append(Signed(Client(live.client.url, made.secret), made))
        return opened[-1]

    yield make
    for one in opened:
        one.client.close()
    for view in live.client.tokens():
        live.client.remove_token(view.id)


def refused(act: Callable[[], object]) -> tuple[int, str]:
    with pytest.raises(ShoalError) as caught:
        act()
    return caught.value.status, str(caught.value)


def test_everyone_is_told_who_they_are(live: Live, sign: Callable[..., Signed]) -> None:
    me = live.client.me()
    assert (me.user, me.tenant, me.role, me.token) == ("operator", "*", Role.ADMIN, "")
    ann = sign("ann", "lab", lifetime_ms=HOUR_MS)
    me = ann.client.me()
    assert (me.user, me.tenant, me.role) == ("ann", "lab", Role.MEMBER)
    assert (me.token, me.until_ms) == (ann.made.token.id, ann.made.token.until_ms)
    assert 0 < me.until_ms - ann.made.token.since_ms <= HOUR_MS


def test_no_answer_ever_contains_a_hash_or_a_secret_again(
    live: Live, sign: Callable[..., Signed]
) -> None:
    made = sign("ann", "lab").made
    secret = made.secret.split("_", 2)[2]
    for path in ("me", "tenants", "users", "tokens", "events", "status"):
        told = str(live.client.request("GET", f"/v1/{path}", dict | list))  # type: ignore[arg-type]
        assert secret not in told
        assert set(HASH.findall(told)) <= {"0" * 64}, path


@pytest.mark.parametrize("user", ["ann", "bob"])
def test_only_admins_manage_tenants_and_users(
    user: str, live: Live, sign: Callable[..., Signed]
) -> None:
    client = sign(user, "lab").client
    acts: list[Callable[[], object]] = [
        client.tenants,
        client.users,
        lambda: client.add_tenant("mine"),
        lambda: client.remove_tenant("art"),
        lambda: client.add_user("x", {}),
        lambda: client.set_user(user, {"*": Role.ADMIN}),
        lambda: client.remove_user("eve"),
    ]
    assert [refused(act)[0] for act in acts] == [403] * len(acts)
    assert [view.name for view in live.client.tenants()] == ["art", "lab"]


def test_an_admin_with_a_token_manages_all(live: Live, sign: Callable[..., Signed]) -> None:
    eve = sign("eve").client
    assert eve.add_tenant("new", uid=4242).uid == 4242
    eve.add_user("zoe", {"new": Role.VIEWER})
    assert eve.set_user("zoe", {"new": Role.MEMBER}).roles == {"new": Role.MEMBER}
    assert eve.add_token(NewToken(user="zoe")).token.tenant == "new"
    assert next(view for view in eve.tenants() if view.name == "new").users == 1
    eve.remove_user("zoe")
    eve.remove_tenant("new")
    events = [type(record.event).__name__ for record in live.client.events(after=-7).events]
    assert events[-2:] == ["UserRemoved", "TenantRemoved"]
    assert live.client.events(after=-1).events[0].event.who == "eve"  # type: ignore[attr-defined]


def test_a_user_manages_only_their_own_tokens(live: Live, sign: Callable[..., Signed]) -> None:
    ann, bob = sign("ann", "lab"), sign("bob")
    mine = ann.client.add_token(NewToken(note="laptop"))
    assert (mine.token.user, mine.token.role, mine.token.note) == ("ann", Role.MEMBER, "laptop")
    assert {view.id for view in ann.client.tokens()} == {ann.made.token.id, mine.token.id}
    for act in (bob.client.remove_token, bob.client.rotate_token):
        status, foreign = refused(lambda act=act: act(mine.token.id))  # type: ignore[misc]
        _, unknown = refused(lambda act=act: act("zzzzzzzz"))  # type: ignore[misc]
        assert (status, foreign) == (404, unknown.replace("zzzzzzzz", mine.token.id))
    rotated = ann.client.rotate_token(mine.token.id)
    assert rotated.secret != mine.secret
    with (
        Client(live.client.url, mine.secret) as old,
        Client(live.client.url, rotated.secret) as new,
    ):
        assert refused(old.me)[0] == 401
        assert new.me().token == mine.token.id
        ann.client.remove_token(mine.token.id)
        assert refused(new.me)[0] == 401


def test_a_token_cannot_make_more_of_itself_than_it_is(
    live: Live, sign: Callable[..., Signed]
) -> None:
    viewer = sign("ann", "lab", role=Role.VIEWER, lifetime_ms=HOUR_MS)
    made = viewer.client.add_token(NewToken()).token
    assert (made.role, made.tenant) == (Role.VIEWER, "lab")
    assert made.until_ms == viewer.made.token.until_ms  # it ends with the token that made it
    assert refused(lambda: viewer.client.add_token(NewToken(role=Role.MEMBER)))[0] == 403
    assert refused(lambda: viewer.client.add_token(NewToken(tenant="art")))[0] == 403
    assert refused(lambda: viewer.client.add_token(NewToken(tenant="*")))[0] == 403
    assert refused(lambda: viewer.client.add_token(NewToken(user="eve")))[0] == 404
    stronger = sign("ann", "lab").made.token.id
    elsewhere = sign("ann", "art").made.token.id
    assert refused(lambda: viewer.client.rotate_token(stronger))[0] == 403
    assert refused(lambda: viewer.client.rotate_token(elsewhere))[0] == 404
    longer = viewer.client.rotate_token(made.id, lifetime_ms=99 * HOUR_MS).token
    assert longer.until_ms == viewer.made.token.until_ms
    assert live.client.add_token(NewToken(user="bob")).token.until_ms == 0


def test_a_token_ends_with_its_time_its_role_or_its_user(
    live: Live, sign: Callable[..., Signed]
) -> None:
    live.client.add_user("tim", {"lab": Role.MEMBER})
    tim = sign("tim")
    live.client.set_user("tim", {"lab": Role.VIEWER})
    assert tim.client.me().role is Role.VIEWER
    live.client.set_user("tim", {"art": Role.MEMBER})
    assert refused(tim.client.me)[0] == 401
    void = {view.id: view.void for view in live.client.tokens()}
    assert void[tim.made.token.id] == "tim has no role in lab"
    short = sign("tim", "art", lifetime_ms=1_000).made.token.id

    def void_now() -> bool:
        return {view.id: view.void for view in live.client.tokens()}[short] == "expired"

    until(void_now)
    other = sign("tim", "art")
    live.client.remove_user("tim")
    assert refused(other.client.me)[0] == 401


def test_what_is_asked_wrongly_is_refused_with_the_field(live: Live) -> None:
    client = live.client
    cases: list[tuple[Callable[[], object], int, str]] = [
        (lambda: client.add_tenant("lab"), 422, "tenant: there is a tenant lab already"),
        (lambda: client.remove_tenant("no"), 404, "tenant: there is no tenant no"),
        (lambda: client.set_user("no", {}), 404, "user: there is no user no"),
        (lambda: client.add_token(NewToken(user="no")), 404, "user: there is no user no"),
        (lambda: client.add_token(NewToken()), 404, "operator is not a user; name one"),
        (lambda: client.add_token(NewToken(user="ann")), 422, "has roles in art, lab; name one"),
        (lambda: client.add_token(NewToken(user="bob", role=Role.MEMBER)), 422, "bob is viewer"),
        (lambda: client.rotate_token("zzzzzzzz"), 404, "there is no token zzzzzzzz"),
        (lambda: client.add_tenant("../x"), 400, "name"),
        (lambda: client.add_user("a\nb", {}), 400, "name"),
    ]
    for act, status, words in cases:
        found, message = refused(act)
        assert (found, words in message) == (status, True), message
    for tenant in ("lab", "art"):
        assert tenant in {view.name for view in client.tenants()}


def test_a_token_is_known_also_while_a_step_is_being_stored(
    live: Live, sign: Callable[..., Signed]
) -> None:
    ann, over = sign("ann", "lab"), threading.Event()

    def change() -> None:
        with Client.at_home(live.home.path) as admin:
            while not over.is_set():
                for role in (Role.VIEWER, Role.MEMBER):
                    admin.set_user("bob", {"lab": role})

    changing = threading.Thread(target=change)
    changing.start()
    try:
        assert {ann.client.me().user for _ in range(150)} == {"ann"}
    finally:
        over.set()
        changing.join()
    live.client.set_user("bob", {"lab": Role.VIEWER})


def test_reasons_name_the_user_who_acted(live: Live, sign: Callable[..., Signed]) -> None:
    ann = sign("ann", "lab").client
    job = ann.submit(live.spec("sleep", "600")).id
    ann.cancel(job)
    until(lambda: ann.job(job).state == "cancelled")
    assert "by ann" in ann.job(job).why
    assert any("by ann" in str(record.event) for record in ann.events(job=job).events)
    assert all(record.text.startswith(f"{job} ") for record in ann.events(job=job).events)
