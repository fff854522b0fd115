"""Whoever is sent away keeps nothing open: no stream, no session, no request that is half sent."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness.waiting import WAIT_S, until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from shoal.api.access import new_token
from shoal.api.forwarded import ACCESS
from shoal.api.http import Stream
from shoal.api.routing import App
from shoal.api.try_service import Tries
from shoal.api.watcher import ENDED
from shoal.calls.call import WEBSOCKET
from shoal.engines.linked.engine import LinkedEngine
from shoal.link.meeting import KEY_HEADER, key_hash
from shoal.model.fabric import FabricView
from shoal.model.identity import EVERY_TENANT, NodeKey, Role, User
from shoal.model.job import JobSpec
from shoal.model.report import (
    CheckNode,
    RemoveKey,
    RemoveTenant,
    RemoveToken,
    RemoveUser,
    SetKey,
    SetService,
    SetUser,
    Submit,
)
from shoal.model.service import ServiceSpec
from shoal.model.storage import StorageView
from tests.api.server import OPERATORS, Server, serving
from tests.api.test_forwarding import standby

JOB = JobSpec(command=("true",), gpus=4, tenant="red")
_numbers, _open = count(1), ExitStack()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path: Path = tmp_path_factory.mktemp("void") / "home"
    linked = LinkedEngine()
    with serving(path, linked=linked) as made:
        asyncio.run_coroutine_threadsafe(linked.start(made.loop), made.asyncio).result(WAIT_S)
        made.tenant("red")
        made.ask(Submit(JOB))
        made.ask(SetService(ServiceSpec(name="talk", replica=JOB)))
        made.ask(CheckNode("n1"))
        yield made
        asyncio.run_coroutine_threadsafe(linked.close(), made.asyncio).result(WAIT_S)


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    with _open:
        yield


def newcomer(server: Server, role: Role = Role.MEMBER) -> tuple[str, str]:
    """A user whom nobody else uses, and the user's token."""
    name = f"user{next(_numbers)}"
    return name, server.token(name, EVERY_TENANT if role is Role.ADMIN else "red", role)


def open_streams(server: Server) -> set[str]:
    """Whose streams the watcher knows of."""
    watcher = server.app.state[ACCESS].watcher
    entries = server.run(lambda: list(watcher.entries))
    return {one.proof.who.user for one in entries if one.stream}


def socket_of(server: Server, path: str, token: str, **headers: str) -> ClientConnection:
    more = {"Authorization": f"Bearer {token}"} if token else {}
    return _open.enter_context(
        connect(
            f"ws://127.0.0.1:{server.port}{path}",
            additional_headers={**more, **headers},
            compression=None,
            open_timeout=WAIT_S,
            close_timeout=1,
            proxy=None,
        )
    )


def closed(channel: ClientConnection) -> None:
    def read() -> None:
        while True:
            channel.recv(WAIT_S)

    with pytest.raises(ConnectionClosed):
        read()


class Meeting:
    """Opened by a token, with one guest inside."""

    def __init__(self, server: Server, token: str) -> None:
        self.path, key = f"/v1/meetings/{secrets.token_hex(16)}", secrets.token_hex(16)
        self.host = socket_of(server, f"{self.path}/host", token, **{KEY_HEADER: key_hash(key)})
        self.host.recv(WAIT_S)  # where the head is
        self.guest = socket_of(server, f"{self.path}/enter", "", **{KEY_HEADER: key})
        number = msgspec.json.decode(self.host.recv(WAIT_S))["guest"]
        self.end = socket_of(server, f"{self.path}/guests/{number}", token)
        self.guest.send(b"hello")
        assert self.end.recv(WAIT_S) == b"hello"


@pytest.mark.parametrize("how", ["token", "user", "viewer", "tenant"])
def test_a_removed_user_who_closed_the_host_keeps_no_session(server: Server, how: str) -> None:
    """The host's own connection is gone, so only the session's own can be looked at."""
    server.tenant(f"of-{how}")
    token = server.token(f"by-{how}", f"of-{how}")
    meeting = Meeting(server, token)
    meeting.host.close(code=4000)
    meeting.end.send(b"whoami")
    assert meeting.guest.recv(WAIT_S) == b"whoami", "the session goes on without its host"
    if how == "token":
        server.ask(RemoveToken(token.split("_")[1]))
    elif how == "user":
        server.ask(RemoveUser(f"by-{how}"))
    elif how == "viewer":
        server.ask(SetUser(User(name=f"by-{how}", roles={f"of-{how}": Role.VIEWER})))
    else:
        server.ask(RemoveTenant(f"of-{how}"))
    closed(meeting.end)
    closed(meeting.guest)


# -- every route that streams ----------------------------------------------------------------------


class Poll:
    """A request that waits, or a response in pieces."""

    def __init__(
        self, server: Server, token: str, method: str, path: str, body: Any = None
    ) -> None:
        self.connection = HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        _open.callback(self.connection.close)
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self.connection.request(method, path, body, headers)

    def ended(self) -> None:
        answer = self.connection.getresponse()
        said = answer.read()
        assert answer.status in (200, 401), said
        if answer.status == 401:
            assert msgspec.json.decode(said)["message"] == ENDED


def polled(path: str, method: str = "GET", body: Any = None) -> Callable[[Server, str], Any]:
    return lambda server, token: Poll(server, token, method, path, body).ended


def host_of(server: Server, token: str) -> Any:
    meeting = Meeting(server, token)
    return lambda: closed(meeting.host)


def end_of(server: Server, token: str) -> Any:
    meeting = Meeting(server, token)
    return lambda: closed(meeting.end)


def guest_of(server: Server, token: str) -> Any:
    meeting = Meeting(server, token)
    return lambda: closed(meeting.guest)


# How each route that streams is opened, and what is true of it once it was ended.
OPENINGS: dict[tuple[str, str], Callable[[Server, str], Any]] = {
    ("GET", "/v1/nodes/{node}/checks/{check}"): polled("/v1/nodes/n1/checks/CHECK?wait_s=30"),
    ("GET", "/v1/events"): polled("/v1/events?after=1000000&wait_s=30"),
    ("GET", "/v1/jobs/{job_id}"): polled("/v1/jobs/j1?wait_for=finished&wait_s=30"),
    ("GET", "/v1/jobs/{job_id}/logs"): polled("/v1/jobs/j1/logs?wait_s=30"),
    ("GET", "/v1/jobs/{job_id}/logs/part"): polled("/v1/jobs/j1/logs/part?wait_s=30"),
    ("POST", "/v1/services/{name}/try"): polled("/v1/services/talk/try", "POST", b"{}"),
    ("GET", "/v1/fabric/tours/{tour}"): polled("/v1/fabric/tours/t1?wait_s=30"),
    ("GET", "/v1/storage/checks/{check}"): polled("/v1/storage/checks/s1?wait_s=30"),
    ("GET", "/v1/stream"): polled("/v1/stream"),
    ("", "/v1/meetings/{meeting}/host"): host_of,
    ("", "/v1/meetings/{meeting}/guests/{guest:int}"): end_of,
    ("", "/v1/meetings/{meeting}/enter"): guest_of,
}
LINK = ("", "/v1/link")  # of a node, with a key: see below


def streaming(app: App) -> set[tuple[str, str]]:
    """All routes that may answer for long, as the app itself has them."""
    found = set()
    for handler in app.handlers:
        call, hints = handler.call, handler.hints
        assert call is not None
        if call.streams or "wait_s" in hints or hints["return"] is Stream:
            found.add(("" if call.method == WEBSOCKET else call.method, call.path))
    return found


@pytest.fixture
def waiting(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the routes wait for does not come. The id of a node's check."""

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Tries, "send", never)
    monkeypatch.setattr("shoal.api.fabric._heard", lambda *_: FabricView(id="t1"))
    monkeypatch.setattr("shoal.api.fabric._view", lambda *_: StorageView(id="s1"))
    return str(server.run(lambda: server.loop.state.heard.asked["n1"]))


def test_every_route_that_streams_is_known_here(server: Server) -> None:
    assert streaming(server.app) == {*OPENINGS, LINK}, "say how it is opened, in OPENINGS"


@pytest.mark.parametrize(("method", "path"), OPENINGS)
def test_a_stream_ends_with_its_user(server: Server, waiting: str, method: str, path: str) -> None:
    asking = OPENINGS[method, path]
    role = Role.ADMIN if "/fabric/" in path or "/storage/" in path else Role.MEMBER
    name, token = newcomer(server, role)
    if "checks/{check" in path and "/nodes/" in path:
        asking = polled(f"/v1/nodes/n1/checks/{waiting}?wait_s=30")
    ended = asking(server, token)
    until(lambda: name in open_streams(server))
    other, others_token = newcomer(server)
    stays = polled("/v1/jobs/j1?wait_for=finished&wait_s=30")(server, others_token)
    until(lambda: other in open_streams(server))
    server.ask(RemoveUser(name))
    ended()
    assert other in open_streams(server), "nobody else's was ended"
    server.ask(RemoveUser(other))
    stays()


def test_a_nodes_link_ends_with_its_key(server: Server) -> None:
    key_id, text, hash_ = new_token()
    server.ask(SetKey(NodeKey(id=key_id, hash=hash_, node="far")))
    link = socket_of(server, "/v1/link", text)
    linked = server.linked
    assert linked is not None
    until(lambda: "far" in linked)
    server.ask(RemoveKey(key_id))
    closed(link)
    until(lambda: "far" not in linked)


def test_a_stream_ends_when_its_token_expires(server: Server, monkeypatch: Any) -> None:
    monkeypatch.setattr("shoal.api.watcher.TIMER_S_MAX", 0.05)
    server.token("brief", "red")
    clock = server.loop.clock
    token = server.token("brief", "red", until_ms=clock.now_ms() + 60_000)
    ended = polled("/v1/stream")(server, token)
    until(lambda: "brief" in open_streams(server))
    clock.ms += 60_000  # type: ignore[attr-defined]
    ended()


def test_a_body_that_is_still_on_its_way_submits_nothing(server: Server) -> None:
    """A thousand submissions that wait for their last byte would outlive their user."""
    name, token = newcomer(server)
    body = msgspec.json.encode({"spec": {"command": ["true"], "cpu_milli": 1}})
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {token}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    before = server.run(lambda: server.loop.state.next_job)
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as line:
        line.sendall(head.encode() + body[:-1])
        watcher = server.app.state[ACCESS].watcher
        until(
            lambda: name in {one.proof.who.user for one in server.run(lambda: [*watcher.entries])}
        )
        server.ask(RemoveUser(name))
        line.sendall(body[-1:])
        assert line.recv(65536).startswith(b"HTTP/1.1 401 ")
    assert server.run(lambda: server.loop.state.next_job) == before


def test_whoever_removes_their_own_token_is_answered(server: Server) -> None:
    _, token = newcomer(server)
    path = f"/v1/tokens/{token.split('_')[1]}"
    assert server.call(token, "DELETE", path).status == 200
    assert server.call(token, "GET", "/v1/me").status == 401


# -- sign-ins --------------------------------------------------------------------------------------


class Browser:
    def __init__(self, server: Server, token: str) -> None:
        self.server = server
        answer = server.call("", "POST", "/v1/session", {"token": token})
        assert answer.status == 200, answer.body
        self.cookie = answer.headers["set-cookie"].partition(";")[0]
        self.csrf = msgspec.json.decode(answer.body)["csrf"]

    def call(self, method: str, path: str, server: Server | None = None) -> int:
        """At this server, or at another one under the same name."""
        at = server or self.server
        name = f"127.0.0.1:{self.server.port}"
        more = {"cookie": self.cookie, "x-shoal-csrf": self.csrf, "origin": f"http://{name}"}
        connection = at.connect()
        try:
            connection.request(method, path, headers={**more, "host": name})
            return connection.getresponse().status
        finally:
            connection.close()


def test_a_sign_out_holds_after_a_restart_and_ends_the_page(tmp_path: Path) -> None:
    with serving(tmp_path / "home") as first:
        first.tenant("red")
        token = first.token("ann", "red")
        out, stays = Browser(first, token), Browser(first, token)
        boss = Browser(first, OPERATORS)
        page = first.connect()
        page.request("GET", "/v1/stream", headers={"cookie": out.cookie})
        assert page.getresponse().status == 200
        until(lambda: "ann" in open_streams(first))
        assert (out.call("POST", "/v1/session/end"), boss.call("POST", "/v1/session/end")) == (
            200,
            200,
        )
        until(lambda: "ann" not in open_streams(first), "its page is over")
        page.close()
        assert (out.call("GET", "/v1/me"), boss.call("GET", "/v1/me")) == (401, 401)
        assert stays.call("GET", "/v1/me") == 200
    with serving(tmp_path / "home") as again:
        assert out.call("GET", "/v1/me", again) == 401
        assert boss.call("GET", "/v1/me", again) == 401
        assert stays.call("GET", "/v1/me", again) == 200


# -- through another head --------------------------------------------------------------------------


def test_what_passes_through_a_standby_ends_with_its_user(server: Server, tmp_path: Path) -> None:
    with standby(tmp_path / "b", f"http://127.0.0.1:{server.port}") as other:
        name, token = newcomer(server)
        out = Browser(other, token)
        meeting = Meeting(other, token)
        asked = [
            polled("/v1/stream")(other, token),
            polled("/v1/jobs/j1?wait_for=finished&wait_s=30")(other, token),
        ]
        watcher = server.app.state[ACCESS].watcher

        def streams() -> int:
            entries = server.run(lambda: [*watcher.entries])
            return sum(one.stream and one.proof.who.user == name for one in entries)

        until(lambda: streams() == 4, "the page, the call, and the host's two sockets")
        assert out.call("POST", "/v1/session/end") == 200
        assert (out.call("GET", "/v1/me"), out.call("GET", "/v1/me", server)) == (401, 401)
        server.ask(RemoveUser(name))
        for ended in asked:
            ended()
        for channel in (meeting.host, meeting.end, meeting.guest):
            closed(channel)
