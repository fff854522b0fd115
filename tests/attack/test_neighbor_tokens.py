"""A stolen or lying neighbor: its token hands over jobs and follows them, and opens nothing else.
That no other call takes it is in tests/api/test_roles.py, which goes through the whole table."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from harness.waiting import WAIT_S
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from shoal.api.access import ONLY_NEIGHBOR
from shoal.calls.call import WEBSOCKET, Call, Needs
from shoal.calls.table import TABLE
from shoal.core.features.access import callers_of
from shoal.link.meeting import KEY_HEADER, key_hash
from shoal.model.report import RemoveToken
from shoal.model.views import JobView
from tests.api.server import OPERATORS, Reply, Server, serving

JOB: dict[str, Any] = {"command": ["true"], "cpu_milli": 100}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("neighbor") / "home") as made:
        made.tenant("east")
        made.tenant("zebra")
        yield made


@pytest.fixture(scope="module")
def east(server: Server) -> str:
    return server.token("east", "east", only="neighbor")


def submitted(server: Server, token: str, **fields: Any) -> Reply:
    return server.call(token, "POST", "/v1/jobs", {"spec": {**JOB, **fields}})


@pytest.mark.parametrize("name", ["zebra", "East", "EAST", "east ", "*", "e\u0430st"])
def test_another_tenants_name_gets_nothing(server: Server, east: str, name: str) -> None:
    assert submitted(server, east, tenant=name).status in (400, 403)
    secret = server.call(east, "PUT", "/v1/secrets/key?tenant=zebra", b"value")
    assert secret.status == 403, secret
    assert server.call(east, "GET", "/v1/jobs?tenant=zebra&finished=true").body == b"[]"


def test_a_user_of_another_name_is_not_believed(server: Server, east: str) -> None:
    reply = submitted(server, east, user="ada", tenant="east")
    assert reply.status == 201
    assert b'"user":"east"' in reply.body and b'"tenant":"east"' in reply.body


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/jobs/{job}"),
        ("GET", "/v1/jobs/{job}/logs"),
        ("GET", "/v1/jobs/{job}/why"),
        ("GET", "/v1/jobs/{job}/files"),
        ("POST", "/v1/jobs/{job}/cancel"),
    ],
)
def test_jobs_that_are_not_its_own_do_not_exist(
    server: Server, east: str, method: str, path: str
) -> None:
    made = submitted(server, server.token("zed", "zebra"))
    job = msgspec.json.decode(made.body, type=JobView).id
    assert server.call(east, method, path.format(job=job)).status == 404


def test_it_makes_no_other_token_and_no_session(server: Server, east: str) -> None:
    for path, body in (
        ("/v1/tokens", {}),
        (f"/v1/tokens/{east.split('_')[1]}/rotate", {}),
        ("/v1/session/code", None),
        ("/v1/api-keys", {"services": []}),
        ("/v1/rules", {"wish": "failed=https://example.com/hook"}),
    ):
        reply = server.call(east, "POST", path, body)
        assert (reply.status, reply.message) == (403, ONLY_NEIGHBOR), path
    assert server.call(east, "POST", "/v1/session", {"token": east}).status == 401


def test_the_gateway_does_not_let_it_call_services(server: Server, east: str) -> None:
    known = server.run(lambda: {one.id for one in callers_of(server.loop.state)})
    assert east.split("_")[1] not in known


def test_a_replayed_hand_over_is_the_same_job(server: Server, east: str) -> None:
    body = {"spec": JOB, "key": "home/j7/1"}
    one, two = (server.call(east, "POST", "/v1/jobs", body) for _ in range(2))
    assert msgspec.json.decode(one.body)["id"] == msgspec.json.decode(two.body)["id"]
    zed = server.call(server.token("zoe", "zebra"), "POST", "/v1/jobs", body)
    assert msgspec.json.decode(zed.body)["id"] != msgspec.json.decode(one.body)["id"]


def test_it_holds_meetings_for_sessions_and_opens_no_other_websocket(
    server: Server, east: str
) -> None:
    guarded = {one.name: one for one in TABLE if one.method == WEBSOCKET and not open_to_all(one)}
    marked = {name for name, one in guarded.items() if one.neighbor}
    assert marked == {"hold_meeting", "receive_guest"} == set(guarded) - {"link"}
    assert _opens(server, east, guarded["hold_meeting"].path.format(meeting="0" * 32))
    assert not _opens(server, east, guarded["link"].path)


def open_to_all(call: Call) -> bool:
    return call.may is Needs.OPEN


def _opens(server: Server, token: str, path: str) -> bool:
    """Whether its guard lets the sender in; what is behind it may send the sender away."""
    headers = {"Authorization": f"Bearer {token}", KEY_HEADER: key_hash("k" * 32)}
    where = f"ws://127.0.0.1:{server.port}{path}"
    try:
        with connect(where, additional_headers=headers, open_timeout=WAIT_S, proxy=None):
            return True
    except InvalidStatus as refused:
        return refused.response.status_code != 403


@pytest.mark.parametrize("wanted", [{"tenant": "*", "role": "viewer"}, {"role": "admin"}])
def test_no_such_token_is_for_every_tenant(server: Server, wanted: dict[str, Any]) -> None:
    ada = {"name": f"ada{len(wanted)}", "roles": {"*": "admin"}}
    server.call(OPERATORS, "POST", "/v1/users", ada)
    body = {"user": ada["name"], "only": "neighbor", **wanted}
    reply = server.call(OPERATORS, "POST", "/v1/tokens", body)
    assert (reply.status, reply.message) == (
        422,
        "a token for a neighbor acts for one tenant; name it",
    )


def test_a_token_that_is_rotated_stays_what_it_is(server: Server) -> None:
    before = server.token("south", "east", only="neighbor")
    path = f"/v1/tokens/{before.split('_')[1]}/rotate"
    made = msgspec.json.decode(server.call(OPERATORS, "POST", path, {}).body)
    assert made["token"]["only"] == "neighbor"
    assert server.call(made["secret"], "GET", "/v1/me").status == 403


def test_a_revoked_token_is_good_for_nothing_from_the_next_request_on(server: Server) -> None:
    token = server.token("west", "east", only="neighbor")
    connection = server.connect()
    assert _status(connection, token) == 200
    server.ask(RemoveToken(token.split("_")[1]))
    assert _status(connection, token) == 401
    connection.close()


def _status(connection: http.client.HTTPConnection, token: str) -> int:
    connection.request("GET", "/v1/jobs", headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    answer.read()
    return answer.status
