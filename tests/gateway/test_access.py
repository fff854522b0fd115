"""Who may call a service: the proxy itself asks, with a real HAProxy and real requests."""

from __future__ import annotations

import hashlib
import json
import time

import pytest
from harness.waiting import until

from shoal.gateway import guard
from shoal.gateway.gateway import Gateway
from shoal.model.access import EVERY_SERVICE, Caller
from shoal.model.service import GatewayEntry, Route, Served, Wanted
from tests.gateway.world import Answer, World, raw, read_until

SECRETS = {
    "k-chat": "A" * 20 + "_with-under_scores_" + "B" * 20,
    "k-all": "all" * 14,
    "k-other": "other" * 9,
    "k-old": "old" * 14,
    "t-lab": "lab" * 14,
    "t-art": "art" * 14,
}


def text_of(who: str) -> str:
    return f"shoalkey_0123456789ab_{SECRETS[who]}"


def caller(who: str, **fields: object) -> Caller:
    hash_ = hashlib.sha256(SECRETS[who].encode()).hexdigest()
    return Caller(id=who, hash=hash_, **{"tenant": "lab", **fields})  # type: ignore[arg-type]


ALL = (
    caller("k-chat", services=("chat", "code")),
    caller("k-all", services=(EVERY_SERVICE,)),
    caller("k-other", services=("chat", EVERY_SERVICE), tenant="art"),
    caller("k-old", services=("chat",), until_ms=1),
    caller("t-lab"),
    caller("t-art", tenant="art"),
)


def serve(world: World, access: tuple[str, ...], callers: tuple[Caller, ...] = ALL) -> None:
    replica = world.replica("one") if "one" in world.ports else world.start("one")[0]
    served = tuple(
        Served(
            route=Route(service=name, access=access if name == "chat" else ()),
            tenant="lab",
            replicas=(replica,),
        )
        for name in ("chat", "open")
    )
    wanted = Wanted(entry=GatewayEntry(port=world.port), services=served, callers=callers)
    world.gateway.apply(wanted)


def ask(world: World, who: str = "", path: str = "/chat/", **headers: str) -> Answer:
    if who:
        headers["authorization"] = f"Bearer {text_of(who)}"
    return world.get(path, headers=headers)


def test_a_key_is_for_services_of_its_tenant_and_a_token_for_the_cluster(world: World) -> None:
    serve(world, ("cluster",))
    good = {who: ask(world, who).status for who in SECRETS}
    assert good == {
        "k-chat": 200,
        "k-all": 200,
        "k-other": 403,
        "k-old": 401,
        "t-lab": 200,
        "t-art": 200,
    }
    assert ask(world, "k-chat", "/open/").status == ask(world, "", "/open/").status == 200


def test_a_service_that_names_tenants_is_for_their_users_and_its_own_keys(world: World) -> None:
    serve(world, ("red",))
    assert {who for who in SECRETS if ask(world, who).status == 200} == {"k-chat", "k-all", "t-lab"}
    serve(world, ("art",))
    assert ask(world, "t-art").status == 200
    assert ask(world, "k-other").status == 403, "a key is for services of its own tenant"
    every = (*ALL[:-1], caller("t-art", tenant="*"))
    serve(world, ("red",), every)
    assert ask(world, "t-art").status == 200, "an admin's"


def test_the_proxy_and_we_agree_who_may_call(world: World) -> None:
    for access in (("cluster",), ("red",), ("art",), ("open",)):
        serve(world, access)
        for one in ALL:
            if one.id != "k-old":
                may = one.may_call("chat", access, "lab")
                assert (ask(world, one.id).status == 200) == may, (access, one)


def test_a_refusal_is_as_clients_of_openai_expect_it(world: World) -> None:
    serve(world, ("cluster",))
    missing = ask(world)
    assert (missing.status, missing.headers["www-authenticate"]) == (401, 'Bearer realm="shoal"')
    error = json.loads(missing.body)["error"]
    assert error["code"] == "invalid_api_key" and "Authorization: Bearer KEY" in error["message"]
    assert json.loads(ask(world, "k-other").body)["error"]["code"] == "permission_denied"


def test_the_replica_sees_who_calls_and_not_the_key(world: World) -> None:
    serve(world, ("cluster",))
    lie = {"X-Shoal-Caller": "admin", "x-shoal-service": "x", "X-SHOAL-Other": "y"}
    seen = ask(world, "k-chat", "/chat/echo", **lie).body.lower()
    assert "x-shoal-caller: k-chat" in seen and "x-shoal-service: chat" in seen
    for word in ("authorization", SECRETS["k-chat"].lower(), "admin", "x-shoal-other"):
        assert word not in seen
    own = ask(world, "k-chat", "/open/echo").body
    assert SECRETS["k-chat"] in own, "a service that is open may have keys of its own"


@pytest.mark.parametrize("prefix", ["", "/chat/..", "//", "/./"])
def test_no_way_leads_around_the_guard(world: World, prefix: str) -> None:
    serve(world, ("cluster",))
    assert ask(world, "", f"{prefix}/chat/").status in (401, 404)
    host = {"host": "chat.localhost"}
    assert ask(world, "", f"{prefix}/open/", **host).status == 401
    absolute = f"GET http://chat.localhost:1{prefix}/ HTTP/1.1\nHost: open.localhost\n\n"
    with raw(world.port, absolute) as connection:
        assert b" 200 " not in read_until(connection, b"\r\n")


WRONG = (
    "Basic QTpC",
    "Bearer",
    "Bearer ",
    "Bearer shoalkey_0123456789ab_",
    f"Bearer {SECRETS['k-chat']}",
    f"Bearer shoalkey_{SECRETS['k-chat']}",
    f"Bearer x{text_of('k-chat')}y",
    f"Bearer {text_of('k-chat')}%00",
    "Bearer a_b_'\"%[var(txn.row)]",
    f"Bearer a_b_{'x' * 10_000}",
)


@pytest.mark.parametrize("value", WRONG)
def test_what_is_not_exactly_a_key_is_none(world: World, value: str) -> None:
    serve(world, ("cluster",))
    assert ask(world, authorization=value).status == 401


def test_a_header_that_is_sent_twice_is_refused(world: World) -> None:
    serve(world, ("cluster",))
    good = f"Authorization: Bearer {text_of('k-chat')}"
    assert ask(world, authorization=f"Bearer {text_of('k-chat')}, Bearer x").status == 400
    for other in (good, "authorization: Bearer x", "AUTHORIZATION:", "Authorization: Basic x"):
        for lines in ((good, other), (other, good)):
            text = "\n".join(("GET /chat/ HTTP/1.1", "Host: x", *lines, "", ""))
            with raw(world.port, text) as connection:
                assert b" 400 " in read_until(connection, b"\r\n"), lines


@pytest.mark.parametrize("bad", ["\0", "\x01", "\x7f", " x: y\nX-Evil: 1"])
def test_a_header_that_is_none_is_not_passed_on(world: World, bad: str) -> None:
    serve(world, ("cluster",))
    text = f"GET /chat/echo HTTP/1.1\nHost: x\nAuthorization: Bearer {text_of('k-chat')}{bad}\n\n"
    with raw(world.port, text) as connection:
        assert b" 200 " not in read_until(connection, b"\r\n")


def test_a_key_in_a_url_is_refused_and_never_logged(world: World) -> None:
    serve(world, ("cluster",))
    key = text_of("k-chat")
    for path in (f"/chat/?api_key={key}", f"/chat/?x={key}", f"/chat/{key}", "/chat/?API-KEY=1"):
        assert ask(world, "k-chat", path).status == 400, path
    ask(world, "k-chat", "/chat/?api%5Fkey=" + "secret" * 3)
    ask(world, "k-chat", "/chat/last")
    until(lambda: "last" in world.logged(), "the log")
    logged = world.logged()
    for word in ("secret", "?", "Bearer", SECRETS["k-chat"]):
        assert word not in logged


def test_a_key_that_is_revoked_ends_on_open_connections_too(world: World) -> None:
    serve(world, ("cluster",))
    pid = world.gateway.pid()
    request = f"GET /chat/ HTTP/1.1\nHost: x\nAuthorization: Bearer {text_of('k-chat')}\n\n"
    with raw(world.port, request) as kept:
        assert b" 200 " in read_until(kept, b"one")
        serve(world, ("cluster",), ALL[1:])
        kept.sendall(request.replace("\n", "\r\n").encode())
        assert b" 401 " in read_until(kept, b"\r\n")
    assert world.gateway.pid() == pid
    serve(world, ("cluster",))
    assert ask(world, "k-chat").status == 200


def test_a_key_that_is_revoked_ends_in_workers_of_an_earlier_configuration(world: World) -> None:
    serve(world, ("cluster",))
    until(lambda: ask(world, "k-chat").status == 200, "the service")
    stream = "/chat/stream?n=10000&every_ms=20"
    head = f"Host: x\nAuthorization: Bearer {text_of('k-chat')}\n"
    with raw(world.port, f"GET {stream} HTTP/1.1\n{head}\n") as old:
        assert b" 200 " in read_until(old, b"one 0")
        serve(world, ("red",))  # a reload, which the stream survives
        olds = world.gateway._proxy.master.old_workers()
        assert len(olds) == 1
        serve(world, ("red",), ALL[1:])
        worker = world.gateway._proxy.master.worker(olds[0])
        left = guard.parse_map(worker.ask(f"show map {guard.CALLERS}"))
        assert left == guard.rows(ALL[1:])


def test_the_proxy_asks_for_keys_when_everything_else_is_gone(world: World) -> None:
    """It is started from what lies in its folder, as by a supervisor."""
    serve(world, ("cluster",))
    fresh = Gateway(world.directory)  # the next controller, which was told less
    callers = guard.parse_map(fresh._proxy.runtime.ask(f"show map {guard.CALLERS}"))
    assert callers == guard.rows(ALL)
    world.gateway = fresh
    serve(world, ("cluster",), ALL[1:])
    assert ask(world, "k-chat").status == 401 and ask(world, "k-all").status == 200
    in_file = dict(
        line.split() for line in (world.directory / guard.CALLERS).read_text().splitlines()
    )
    assert in_file == guard.rows(ALL[1:])
    assert (world.directory / guard.CALLERS).stat().st_mode & 0o77 == 0


def test_a_key_expires_without_anybodys_help(world: World) -> None:
    soon_ms = (int(time.time()) + 3) * 1000
    serve(world, ("cluster",), (caller("k-chat", services=("chat",), until_ms=soon_ms),))
    status = ask(world, "k-chat").status
    if time.time() * 1000 < soon_ms:  # a busy machine may have been too slow
        assert status == 200
    until(lambda: ask(world, "k-chat").status == 401, "its end")


def test_a_key_has_so_many_requests_a_minute(world: World) -> None:
    few = caller("k-chat", services=("chat",), rpm=3)
    serve(world, ("cluster",), (few, *ALL[1:]))
    answers = [ask(world, "k-chat") for _ in range(5)]
    assert [one.status for one in answers] == [200, 200, 200, 429, 429]
    assert int(answers[-1].headers["retry-after"]) == 21
    assert ask(world, "k-all").status == 200
    more = caller("k-chat", services=("chat",), rpm=100)
    serve(world, ("cluster",), (more, *ALL[1:]))
    assert ask(world, "k-chat").status == 200


def test_many_callers_come_and_go_at_once(world: World) -> None:
    many = tuple(
        Caller(
            id=f"k{number:010}",
            hash=hashlib.sha256(str(number).encode()).hexdigest(),
            tenant="lab",
            services=tuple(f"{'s' * 55}{place}" for place in range(16)),
        )
        for number in range(300)
    )
    serve(world, ("cluster",), ALL)
    serve(world, ("cluster",), (*ALL, *many))
    found = guard.parse_map(world.gateway._proxy.runtime.ask(f"show map {guard.CALLERS}"))
    assert found == guard.rows((*ALL, *many))
    serve(world, ("cluster",), ALL)
    assert len(guard.parse_map(world.gateway._proxy.runtime.ask("show map callers.map"))) == 6
