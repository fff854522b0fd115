"""Every route x every kind of sender x what is theirs and what is another tenant's: who is let in,
and that no byte of the other tenant's is in any answer. A route that is not in the table fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from harness.waiting import until

from shoal.api.access import ONLY_NEIGHBOR
from shoal.calls.call import Needs
from tests.api.server import Reply, serving
from tests.api.world import OURS, POLICY, World

STRANGERS = ("nobody", "wrong", "expired", "revoked")
LIMITED = ("viewer", "member", "neighbor")  # they see one tenant
ALL_SEEING = ("viewer of all", "admin", "operator")  # in this order: the last may change anything
SENDERS = (*STRANGERS, *LIMITED, *ALL_SEEING)
WRITERS = ("member", "admin", "operator")
ADMINS = ("admin", "operator")
JOB = {"command": ["true"], "cpu_milli": 100}
SERVICE = {"replica": JOB}
SESSION = {"kind": "exec", "meeting": "0" * 32, "key": "k" * 32}


class Ask(NamedTuple):
    """A path with names of `World` in it, such as {job}: first ours, then theirs, then one that
    never was. `same`: for theirs and for none, the answer is the same."""

    path: str
    body: Any = None
    none: str = "j99999"
    same: bool = True


PART = {"path": "a", "offset": 0, "size": 1, "modified_ms": 1, "version": "", "data": "eA=="}
TABLE: dict[tuple[str, str], tuple[Ask, ...]] = {
    ("GET", "/v1/status"): (Ask("/v1/status"),),
    ("POST", "/v1/offers"): (
        Ask("/v1/offers", [JOB, {**JOB, "gpus": 4}, {**JOB, "tenant": "zebratenant"}]),
    ),
    ("GET", "/v1/nodes"): (Ask("/v1/nodes"),),
    ("POST", "/v1/nodes/{node}/{verb}"): (Ask("/v1/nodes/n1/uncordon"),),
    ("POST", "/v1/nodes/{node}/labels"): (Ask("/v1/nodes/n1/labels", {"labels": {"pool": "a"}}),),
    ("POST", "/v1/nodes/{node}/check"): (Ask("/v1/nodes/n1/check"),),
    ("GET", "/v1/nodes/{node}/checks/{check}"): (Ask("/v1/nodes/n1/checks/m1"),),
    ("GET", "/v1/fabric"): (Ask("/v1/fabric"),),
    ("POST", "/v1/fabric/check"): (Ask("/v1/fabric/check", {}),),
    ("GET", "/v1/fabric/tours/{tour}"): (Ask("/v1/fabric/tours/t1"),),
    ("POST", "/v1/storage/check"): (Ask("/v1/storage/check", {"target": "/data"}),),
    ("GET", "/v1/storage/checks/{check}"): (Ask("/v1/storage/checks/s1"),),
    ("GET", "/v1/nodes/{node}/tree"): (Ask("/v1/nodes/n1/tree"),),
    ("GET", "/v1/nodes/{node}/series"): (Ask("/v1/nodes/n1/series"),),
    ("GET", "/v1/samples"): (Ask("/v1/samples"),),
    ("GET", "/v1/policy"): (Ask("/v1/policy"),),
    ("PUT", "/v1/policy"): (Ask("/v1/policy", msgspec.to_builtins(POLICY)),),
    ("GET", "/v1/policy/form"): (Ask("/v1/policy/form"),),
    ("POST", "/v1/policy/draft"): (Ask("/v1/policy/draft", {"changes": {"patience": "5m"}}),),
    ("GET", "/v1/policy/history"): (Ask("/v1/policy/history"),),
    ("GET", "/v1/policy/diff"): (Ask("/v1/policy/diff?before=2"),),
    ("GET", "/v1/policy/history/{seq:int}"): (Ask("/v1/policy/history/2"),),
    ("GET", "/v1/preview/{action}"): (
        *(Ask(f"/v1/preview/{verb}?names=n1") for verb in ("drain", "cordon", "uncordon")),
        Ask("/v1/preview/cancel?names={job}"),
        Ask("/v1/preview/requeue?names={waiting}"),
        *(Ask(f"/v1/preview/{verb}?names={{service}}") for verb in ("stop", "rollback", "scale")),
    ),
    ("GET", "/v1/budgets"): (Ask("/v1/budgets"),),
    ("GET", "/v1/events"): (
        Ask("/v1/events?limit=10000"),
        Ask("/v1/events?after=-50"),
        Ask("/v1/events?notable=true"),
        Ask("/v1/events?node=n1"),
        Ask("/v1/events?name=*job&since_ms=1"),
        Ask("/v1/events?job={job}"),
        Ask("/v1/events?job={done}"),
    ),
    ("POST", "/v1/jobs"): (Ask("/v1/jobs", {"spec": JOB, "key": "one"}),),
    ("POST", "/v1/submissions"): (Ask("/v1/submissions", {"specs": [JOB], "key": "many"}),),
    ("GET", "/v1/fields"): (Ask("/v1/fields"),),
    ("GET", "/v1/form"): (
        Ask("/v1/form?like={job}"),
        Ask("/v1/form?like={done}"),
        Ask("/v1/form?like={waiting}&instead=true"),
    ),
    # That `like` is the sender's own is in test_forms.py.
    ("POST", "/v1/form"): (Ask("/v1/form", {"fields": {"command": "true"}}),),
    ("POST", "/v1/form/submit"): (
        Ask("/v1/form/submit", {"fields": {"command": "true"}, "key": "form"}),
    ),
    ("GET", "/v1/jobs"): (
        Ask("/v1/jobs?finished=true&limit=1000"),
        Ask("/v1/jobs?state=finished&name=*done*"),
        Ask("/v1/jobs?tenant=zebratenant&finished=true", same=False),
        Ask("/v1/jobs?sort=-submitted&limit=1000&count=true"),
        Ask("/v1/jobs?sort=user&q=e"),
    ),
    ("POST", "/v1/jobs/{job_id}/labels"): (
        Ask("/v1/jobs/{job}/labels", {"labels": {"run": "a"}}),
        Ask("/v1/jobs/{done}/labels", {"labels": {"run": "a"}}),
    ),
    ("POST", "/v1/jobs/{job_id}/notes"): (
        Ask("/v1/jobs/{job}/notes", {"text": "a note"}),
        Ask("/v1/jobs/{done}/notes", {"text": "a note"}),
    ),
    ("GET", "/v1/jobs/{job_id}"): (
        Ask("/v1/jobs/{job}"),
        Ask("/v1/jobs/{done}"),
        Ask("/v1/jobs/{waiting}"),
    ),
    ("POST", "/v1/jobs/{job_id}/sessions"): (
        Ask("/v1/jobs/{job}/sessions", SESSION),
        Ask("/v1/jobs/{done}/sessions", SESSION),
    ),
    ("POST", "/v1/jobs/{job_id}/cancel"): (Ask("/v1/jobs/{job}/cancel"),),
    ("POST", "/v1/jobs/{job_id}/lease"): (
        Ask("/v1/jobs/{job}/lease", {"until_ms": 1}),
        Ask("/v1/jobs/{done}/lease", {"until_ms": 1}),
    ),
    ("POST", "/v1/jobs/{job_id}/sleep"): (
        Ask("/v1/jobs/{job}/sleep"),
        Ask("/v1/jobs/{done}/sleep"),
        Ask("/v1/jobs/{waiting}/sleep"),
    ),
    ("POST", "/v1/jobs/{job_id}/wake"): (
        Ask("/v1/jobs/{job}/wake"),
        Ask("/v1/jobs/{done}/wake"),
    ),
    ("POST", "/v1/jobs/{job_id}/retry"): (Ask("/v1/jobs/{done}/retry"),),
    ("POST", "/v1/jobs/{job_id}/requeue"): (
        Ask("/v1/jobs/{done}/requeue?key=again"),
        Ask("/v1/jobs/{waiting}/requeue"),
    ),
    ("GET", "/v1/jobs/{job_id}/why"): (
        Ask("/v1/jobs/{job}/why"),
        Ask("/v1/jobs/{waiting}/why"),
    ),
    ("GET", "/v1/jobs/{job_id}/logs"): (Ask("/v1/jobs/{job}/logs"),),
    ("GET", "/v1/jobs/{job_id}/logs/part"): (
        Ask("/v1/jobs/{job}/logs/part"),
        Ask("/v1/jobs/{done}/logs/part?back=true&grep=of"),
    ),
    ("GET", "/v1/jobs/{job_id}/logs/find"): (Ask("/v1/jobs/{job}/logs/find?text=of"),),
    ("GET", "/v1/jobs/{job_id}/files"): (Ask("/v1/jobs/{job}/files"),),
    ("GET", "/v1/jobs/{job_id}/files/part"): (Ask("/v1/jobs/{job}/files/part?path=r"),),
    ("GET", "/v1/jobs/{job_id}/files/key"): (Ask("/v1/jobs/{job}/files/key"),),
    ("GET", "/v1/jobs/{job_id}/trials"): (Ask("/v1/jobs/{job}/trials"),),
    ("GET", "/v1/jobs/{job_id}/series"): (Ask("/v1/jobs/{job}/series"),),
    ("GET", "/v1/jobs/{job_id}/cost"): (Ask("/v1/jobs/{job}/cost"),),
    ("GET", "/v1/jobs/{job_id}/explanation"): (
        Ask("/v1/jobs/{job}/explanation"),
        Ask("/v1/jobs/{waiting}/explanation"),
    ),
    ("POST", "/v1/workflows"): (
        Ask("/v1/workflows", {"jobs": [{"name": "a", "spec": JOB}], "key": "flow"}),
    ),
    ("GET", "/v1/workflows/{workflow}"): (Ask("/v1/workflows/{job}"),),
    ("POST", "/v1/workflows/{workflow}/cancel"): (Ask("/v1/workflows/{job}/cancel"),),
    ("GET", "/v1/schedules"): (Ask("/v1/schedules"),),
    ("GET", "/v1/schedules/{name}"): (Ask("/v1/schedules/nightly"),),
    ("PUT", "/v1/schedules/{name}"): (
        Ask(
            "/v1/schedules/nightly",
            {"name": "nightly", "cron": "0 3 * * *", "jobs": [{"name": "a", "spec": JOB}]},
        ),
    ),
    ("POST", "/v1/schedules/{name}/pause"): (Ask("/v1/schedules/nightly/pause"),),
    ("POST", "/v1/schedules/{name}/resume"): (Ask("/v1/schedules/nightly/resume"),),
    ("POST", "/v1/schedules/{name}/run"): (Ask("/v1/schedules/nightly/run?key=k"),),
    ("DELETE", "/v1/schedules/{name}"): (Ask("/v1/schedules/nightly"),),
    ("GET", "/v1/services"): (Ask("/v1/services"),),
    ("GET", "/v1/services/{name}"): (Ask("/v1/services/{service}"),),
    ("GET", "/v1/services/{name}/series"): (Ask("/v1/services/{service}/series"),),
    # Names of services are addresses, which all tenants share: that one is taken can be seen.
    ("PUT", "/v1/services/{name}"): (Ask("/v1/services/{service}", SERVICE, same=False),),
    ("POST", "/v1/services/{name}/rollback"): (Ask("/v1/services/{service}/rollback"),),
    ("POST", "/v1/services/{name}/try"): (Ask("/v1/services/{service}/try", {"path": "/"}),),
    ("PUT", "/v1/services/{name}/sites"): (Ask("/v1/services/{service}/sites", []),),
    ("POST", "/v1/services/{name}/stop"): (Ask("/v1/services/{service}/stop"),),
    ("GET", "/v1/ledger/csv"): tuple(
        Ask(f"/v1/ledger/csv?by={by}{more}")
        for by in ("account", "tenant", "user", "job", "node", "day", "hour")
        for more in ("", "&user=")
    ),
    ("GET", "/v1/ledger"): tuple(
        Ask(f"/v1/ledger?by={by}")
        for by in ("account", "tenant", "user", "job", "node", "day", "hour")
    ),
    ("GET", "/v1/supply"): (Ask("/v1/supply"),),
    ("GET", "/v1/prices"): (Ask("/v1/prices"),),
    ("PUT", "/v1/prices"): (Ask("/v1/prices", {"currency": "EUR"}),),
    ("GET", "/v1/packages/{package}"): (Ask("/v1/packages/{package}", none="0" * 64),),
    ("PUT", "/v1/packages/{package}"): (
        Ask("/v1/packages/{package}", b"something else", none="0" * 64),
    ),
    # Whose it is follows from the sender: there is no name of another's.
    ("GET", "/v1/handed/{mark}"): (Ask("/v1/handed/0123abcd.j1.2"),),
    ("POST", "/v1/handed/{mark}/parts"): (Ask("/v1/handed/0123abcd.j1.2/parts", PART),),
    ("PUT", "/v1/handed/{mark}"): (Ask("/v1/handed/0123abcd.j1.2", {"files": []}),),
    ("GET", "/v1/secrets"): (Ask("/v1/secrets"),),
    ("PUT", "/v1/secrets/{name}"): (Ask("/v1/secrets/new", b"value"),),
    ("DELETE", "/v1/secrets/{name}"): (Ask("/v1/secrets/{secret}"),),
    ("GET", "/v1/rules"): (Ask("/v1/rules"),),
    ("POST", "/v1/rules"): (Ask("/v1/rules", {"wish": "failed=mail:me@example.com"}),),
    ("DELETE", "/v1/rules/{rule_id}"): (Ask("/v1/rules/{rule}", none="r99999"),),
    ("POST", "/v1/rules/test"): (Ask("/v1/rules/test", {"to": "mail:me@example.com"}),),
    ("GET", "/v1/rules/key"): (Ask("/v1/rules/key"),),
    ("GET", "/v1/rules/settings"): (Ask("/v1/rules/settings"),),
    ("PUT", "/v1/rules/settings"): (Ask("/v1/rules/settings", {"allow": ["127.0.0.1/32"]}),),
    ("GET", "/v1/me"): (Ask("/v1/me"),),
    ("GET", "/v1/tenants"): (Ask("/v1/tenants"),),
    ("POST", "/v1/tenants"): (Ask("/v1/tenants", {"name": "third"}),),
    ("DELETE", "/v1/tenants/{name}"): (Ask("/v1/tenants/third"),),
    ("GET", "/v1/users"): (Ask("/v1/users"),),
    ("POST", "/v1/users"): (Ask("/v1/users", {"name": "dora"}),),
    ("PUT", "/v1/users/{name}"): (Ask("/v1/users/dora", {"roles": {OURS: "viewer"}}),),
    ("DELETE", "/v1/users/{name}"): (Ask("/v1/users/dora"),),
    ("GET", "/v1/users/{name}/leaving"): (Ask("/v1/users/dora/leaving?end=true"),),
    ("POST", "/v1/invites"): (Ask("/v1/invites", {"user": "lea", "tenant": OURS}),),
    ("POST", "/v1/invites/accept"): (Ask("/v1/invites/accept", {"code": "invite_0_wrong"}),),
    ("GET", "/v1/api-keys"): (
        Ask("/v1/api-keys"),
        Ask("/v1/api-keys?service={service}", none="nosuch"),
    ),
    ("POST", "/v1/api-keys"): (Ask("/v1/api-keys", {"user": "bob"}),),
    ("DELETE", "/v1/api-keys/{key_id}"): (Ask("/v1/api-keys/{api_key}", none="aaaaaaaaaaaa"),),
    ("GET", "/v1/tokens"): (Ask("/v1/tokens"),),
    ("POST", "/v1/tokens"): (Ask("/v1/tokens", {"note": "another"}),),
    ("POST", "/v1/tokens/{token_id}/rotate"): (
        Ask("/v1/tokens/{token}/rotate", {}, none="aaaaaaaa"),
    ),
    ("DELETE", "/v1/tokens/{token_id}"): (Ask("/v1/tokens/{token}", none="aaaaaaaa"),),
    ("POST", "/v1/join"): (Ask("/v1/join", {}),),
    ("GET", "/v1/keys"): (Ask("/v1/keys"),),
    ("GET", "/v1/keys/join"): (Ask("/v1/keys/join"),),
    ("POST", "/v1/keys/join"): (Ask("/v1/keys/join"),),
    ("GET", "/v1/neighbors"): (Ask("/v1/neighbors"),),
    ("GET", "/v1/neighbors/shared"): (Ask("/v1/neighbors/shared"),),
    ("PUT", "/v1/neighbors/{name}"): (Ask("/v1/neighbors/west", {"url": "", "token": ""}),),
    ("GET", "/v1/neighbors/{name}/gone"): (Ask("/v1/neighbors/west/gone"),),
    ("DELETE", "/v1/neighbors/{name}"): (Ask("/v1/neighbors/west"),),
    ("GET", "/v1/heads"): (Ask("/v1/heads"),),
    ("DELETE", "/v1/heads/{name}"): (Ask("/v1/heads/other"),),
    ("DELETE", "/v1/keys/{key_id}"): (Ask("/v1/keys/aaaaaaaa"),),
    ("GET", "/v1/audit"): (Ask("/v1/audit"),),
    ("GET", "/metrics"): (Ask("/metrics"),),
    ("GET", "/v1/queue"): (Ask("/v1/queue?limit=500"),),
    ("GET", "/v1/timeline"): (
        Ask("/v1/timeline?from_ms=1"),
        Ask("/v1/timeline?from_ms=1&least_ms=100000000"),
        Ask("/v1/timeline?from_ms=1&job={job}", same=False),
        Ask("/v1/timeline?from_ms=1&job={done}", same=False),
    ),
    ("GET", "/v1/moment"): (
        Ask("/v1/moment?at_ms=9007199254740991"),
        Ask("/v1/moment?at_ms=1"),
    ),
    ("GET", "/v1/stream"): (Ask("/v1/stream"),),
    ("GET", "/v1/simulation"): (Ask("/v1/simulation"),),
    ("POST", "/v1/simulation"): (Ask("/v1/simulation", {"policies": ["no such policy"]}),),
    ("POST", "/v1/simulation/cancel"): (Ask("/v1/simulation/cancel"),),
    ("GET", "/v1/plan"): (Ask("/v1/plan"),),
    ("POST", "/v1/plan"): (Ask("/v1/plan", {"model": "no such model", "tokens": "1T"}),),
    ("GET", "/status"): (Ask("/status"),),
    ("GET", "/v1/status-page"): (Ask("/v1/status-page"),),
    ("PUT", "/v1/status-page"): (Ask("/v1/status-page", {"on": False}),),
    ("GET", "/v1/session"): (Ask("/v1/session"),),
    ("POST", "/v1/session"): (Ask("/v1/session", {"code": "wrong"}),),
    ("POST", "/v1/session/end"): (Ask("/v1/session/end"),),
    ("POST", "/v1/session/code"): (Ask("/v1/session/code"),),
    ("GET", "/v1/oidc"): (Ask("/v1/oidc"),),
    ("PUT", "/v1/oidc"): (Ask("/v1/oidc", {}),),
    ("DELETE", "/v1/oidc"): (Ask("/v1/oidc"),),
    ("GET", "/v1/oidc/begin"): (Ask("/v1/oidc/begin"),),
    ("GET", "/v1/oidc/callback"): (Ask("/v1/oidc/callback?code=c&state=s"),),
    ("POST", "/v1/oidc/device"): (Ask("/v1/oidc/device"),),
    ("POST", "/v1/oidc/device/{handle}"): (Ask("/v1/oidc/device/unknown"),),
    ("GET", "/v1/certificate"): (Ask("/v1/certificate"),),
    ("WEBSOCKET", "/v1/link"): (),
    ("WEBSOCKET", "/v1/meetings/{meeting}/enter"): (),
    ("WEBSOCKET", "/v1/meetings/{meeting}/host"): (),
    ("WEBSOCKET", "/v1/meetings/{meeting}/guests/{guest:int}"): (),
    ("GET", "/"): (Ask("/"),),
    ("GET", "/favicon.ico"): (Ask("/favicon.ico"),),
    ("GET", "/web/{name}"): (Ask("/web/app.js"),),
    ("GET", "/schema"): (Ask("/schema"),),
    ("GET", "/schema/openapi.json"): (Ask("/schema/openapi.json"),),
}
# A sign-in that fails is refused, like anything else that a stranger may try.
REFUSES_ALL = {
    ("POST", "/v1/session"),
    ("POST", "/v1/invites/accept"),
    ("GET", "/v1/oidc/callback"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with serving(tmp_path_factory.mktemp("roles") / "home", POLICY) as server:
        made = World(server)
        made.tokens["neighbor"] = server.token("nora", OURS, only="neighbor")
        yield made


class Route(NamedTuple):
    method: str
    path: str
    needs: Needs
    neighbor: bool = False


def routes(world: World) -> Iterator[Route]:
    """Websockets have the same guard; their own tests open them."""
    for handler in world.server.app.handlers:
        call = handler.call
        assert call is not None
        yield Route(call.method, call.path, call.may, call.neighbor)
    for path in ("/schema", "/schema/openapi.json"):
        yield Route("GET", path, Needs.OPEN)


def test_every_route_says_what_it_needs_and_is_in_the_table(world: World) -> None:
    assert {(route.method, route.path) for route in routes(world)} == set(TABLE)


def send(world: World, who: str, method: str, ask: Ask, ids: dict[str, str]) -> Reply:
    path = ask.path.format(**ids)
    body = ask.body
    if body is SERVICE:
        body = {**SERVICE, "name": path.rpartition("/")[2]}

    def once() -> Reply:
        if path == "/v1/stream":
            return first_piece(world, who)
        return world.server.call(world.tokens[who], method, path, body)

    reply = until(lambda: _unless_too_fast(once()))
    assert reply is not None
    return reply


def _unless_too_fast(reply: Reply) -> Reply | None:
    """Strangers share one address, and this test outruns what it may send in a second."""
    return None if reply.status == 429 and b"requests a second" in reply.body else reply


def first_piece(world: World, who: str) -> Reply:
    connection = world.server.connect()
    try:
        headers = {"Authorization": f"Bearer {world.tokens[who]}"}
        connection.request("GET", "/v1/stream", headers=headers)
        answer = connection.getresponse()
        if answer.status != 200:
            return Reply(answer.status, {}, answer.read())
        got = b""
        while b"event: snapshot" not in got or not got.endswith(b"\n\n"):
            got += answer.read1()
        return Reply(200, {k.lower(): v for k, v in answer.getheaders()}, got)
    finally:
        connection.close()


def may(who: str, route: Route) -> bool:
    needs = route.needs
    if who in STRANGERS:
        return needs is Needs.OPEN
    if who == "neighbor":
        return needs is Needs.OPEN or route.neighbor
    return {
        Needs.READ_ALL: who in ALL_SEEING,
        Needs.WRITE: who in WRITERS,
        Needs.ADMIN: who in ADMINS,
        Needs.NODE: False,
    }.get(needs, True)


def holds(world: World, who: str, route: Route, ask: Ask) -> None:
    """Asks for ours, and for theirs where a name is asked for; looks at everything that comes."""
    method, path, _, _ = route
    ours = send(world, who, method, ask, world.ours)
    where = f"{who}: {method} {ask.path}"
    answers = [(ours, "")]
    if not may(who, route):
        assert ours.status == (401 if who in STRANGERS else 403), where
        assert who != "neighbor" or ONLY_NEIGHBOR.encode() in ours.body, (where, ours)
    elif (method, path) not in REFUSES_ALL:
        assert ours.status not in (401, 403), (where, ours)
    name = ask.path.partition("{")[2].partition("}")[0]
    if name and who not in ADMINS:
        asked = world.theirs[name]
        theirs = send(world, who, method, ask, world.theirs)
        answers.append((theirs, asked))
        if may(who, route) and who in LIMITED and ask.same:
            never = send(world, who, method, ask, {**world.theirs, name: ask.none})
            assert theirs.status == never.status, where
            assert theirs.body.replace(asked.encode(), ask.none.encode()) == never.body, where
            if "?job=" not in ask.path and method != "PUT":
                assert theirs.status == 404, (where, theirs)
    if who not in ALL_SEEING:
        for reply, asked in answers:
            assert not world.leaks(reply.body + repr(reply.headers).encode(), asked), (
                where,
                reply,
            )


def test_nobody_gets_more_than_their_role_and_tenant_allow(world: World) -> None:
    """Readers first: what later senders change, earlier ones have seen whole."""
    known = sorted(routes(world), key=lambda route: route.method != "GET")
    for changes in (False, True):
        for who in SENDERS:
            for route in known:
                if (route.method != "GET") is changes:
                    for ask in TABLE[route.method, route.path]:
                        holds(world, who, route, ask)
    assert world.server.call(world.tokens["them"], "GET", "/v1/me").status == 200
