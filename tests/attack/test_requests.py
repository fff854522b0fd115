"""Requests that mean two things, come from another site, or reach for what is not theirs.

Each attack names what stops it.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from shoal.model.identity import Role
from shoal.model.people import NewToken
from tests.live.cluster import Live, live_cluster

HOST = b"host: localhost\r\n"
CLOSE = b"connection: close\r\n"
NO_HTTP = "this is not an HTTP request"  # what stops most of it: the parser is strict


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=1, gpus=1) as cluster:
        cluster.client.add_tenant("red")
        cluster.client.add_user("ann", {"red": Role.MEMBER})
        yield cluster


@pytest.fixture(scope="module")
def auth(live: Live) -> bytes:
    return b"authorization: Bearer %s\r\n" % live.home.read_token().encode()


def exchange(live: Live, data: bytes) -> bytes:
    """All that is answered to these bytes, until the server closes."""
    where = urlsplit(live.client.url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=60) as link:
        link.sendall(data)
        answer = b""
        try:
            while piece := link.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
    return answer


def told(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), str(json.loads(body).get("message", "")) if body else ""


POST = b"POST /v1/session HTTP/1.1\r\n" + HOST + b"content-type: application/json\r\n"
HIDDEN = b"GET /v1/hidden HTTP/1.1\r\n" + HOST + b"\r\n"
SMUGGLED = {
    "length and chunks": b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": b"content-length: 4\r\ncontent-length: 5\r\n\r\nabcde",
    "the same length twice": b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}",
    "an unknown coding": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunks not last": b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a space before the colon": b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "a tab in the name": b"transfer-\tencoding: chunked\r\n\r\n0\r\n\r\n",
    "a folded header": b"x: a\r\n\ttransfer-encoding: chunked\r\n\r\n",
    "a bare line feed": b"x: a\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a bare carriage return": b"x: a\rtransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a zero byte": b"x: a\0b\r\n\r\n",
    "a negative length": b"content-length: -1\r\n\r\n",
    "a signed length": b"content-length: +2\r\n\r\n{}",
    "a quoted chunk extension": b'transfer-encoding: chunked\r\n\r\n2;a="\r\nx"\r\n{}\r\n0\r\n\r\n',
    "a chunk size that is none": b"transfer-encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("attack", SMUGGLED)
def test_no_request_is_hidden_in_another(live: Live, attack: str) -> None:
    """The parser refuses what has two readings, and the connection ends with it."""
    answer = exchange(live, POST + SMUGGLED[attack] + HIDDEN)
    assert answer.count(b"HTTP/1.1 ") == 1, "the hidden request was answered"
    assert told(answer) == (400, NO_HTTP)


DOUBTFUL = {
    "two hosts": (b"GET /v1/status HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n", "host"),
    "two tokens": (
        b"GET /v1/status HTTP/1.1\r\n" + HOST + b"authorization: Bearer guess\r\n",
        "authorization",
    ),
    "two cookies": (
        b"GET /v1/status HTTP/1.1\r\n" + HOST + b"cookie: a=b\r\nCookie: a=c\r\n",
        "cookie",
    ),
    "two origins": (
        b"GET /v1/status HTTP/1.1\r\n" + HOST + b"origin: null\r\norigin: http://localhost\r\n",
        "origin",
    ),
}


@pytest.mark.parametrize("attack", DOUBTFUL)
def test_a_header_that_decides_is_sent_once(live: Live, auth: bytes, attack: str) -> None:
    head, name = DOUBTFUL[attack]
    status, message = told(exchange(live, head + auth + CLOSE + b"\r\n"))
    assert (status, message) == (400, f"the header {name} may be sent only once")


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (b"GET http://evil.example/v1/status HTTP/1.1", 400),  # not a proxy
        (b"GET http://localhost/v1/status HTTP/1.1", 400),
        (b"CONNECT 127.0.0.1:22 HTTP/1.1", 400),
        (b"TRACE /v1/status HTTP/1.1", 405),  # it would show headers to scripts
        (b"PRI * HTTP/2.0", 400),
        (b"GET /v1/status HTTP/1.2", 400),
        (b"GET /v1/jobs/\xe2\x80\xae HTTP/1.1", 400),
        (b"\x00\x00\x00 / HTTP/1.1", 400),
    ],
)
def test_other_protocols_and_proxies_are_refused(
    live: Live, auth: bytes, first: bytes, status: int
) -> None:
    answer = exchange(live, first + b"\r\n" + HOST + auth + CLOSE + b"\r\n")
    assert (answer.count(b"HTTP/1.1 "), told(answer)[0]) == (1, status)


@pytest.mark.parametrize("what", [b"websocket", b"h2c"])
def test_an_upgrade_needs_the_token_all_the_same(live: Live, what: bytes) -> None:
    """Only one route speaks WebSocket; elsewhere an upgrade is refused or ignored."""
    head = b"GET /v1/status HTTP/1.1\r\n" + HOST + b"connection: upgrade, close\r\nupgrade: " + what
    head += b"\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
    assert exchange(live, head).split()[1] in (b"401", b"403")


@pytest.mark.parametrize(
    "host",
    [
        b"evil.example",
        b"localhost.evil.example",
        b"localhost@evil.example",
        b"2130706433",  # 127.0.0.1 as browsers would have read it once
        b"[::1",
        b"0.0.0.0",
    ],
)
def test_a_foreign_name_is_not_ours_even_with_the_token(
    live: Live, auth: bytes, host: bytes
) -> None:
    """DNS rebinding: a page of another site reaches us under its own name."""
    head = b"GET /v1/status HTTP/1.1\r\nhost: " + host + b"\r\n" + auth + CLOSE + b"\r\n"
    status, message = told(exchange(live, head))
    assert (status, "is not a name of this controller" in message) == (421, True)


@pytest.mark.parametrize(
    "header",
    [
        b"x-forwarded-for: 127.0.0.1",
        b"x-forwarded-host: localhost",
        b"forwarded: for=127.0.0.1;host=localhost",
        b"x-real-ip: 127.0.0.1",
        b"x-original-url: /",
        b"x-rewrite-url: /",
        b"x-http-method-override: GET",
        b"x-shoal-csrf: x",
        b"cookie: " + b"; ".join(b"a%d=b" % number for number in range(2500)),
        b"cookie: a=" + b"x" * 30_000,
    ],
    ids=lambda header: header.partition(b":")[0].decode() + str(len(header)),
)
def test_no_header_stands_in_for_the_token(live: Live, header: bytes) -> None:
    """Nothing that a proxy might add is believed, and guessing is counted for the true address."""
    head = b"GET /v1/status HTTP/1.1\r\n" + HOST + header + b"\r\n" + CLOSE + b"\r\n"
    assert told(exchange(live, head))[0] == 401


def test_a_token_in_the_address_is_not_read(live: Live) -> None:
    """Addresses end up in histories and logs."""
    token = live.home.read_token()
    for query in (f"token={token}", f"access_token={token}", f"authorization=Bearer%20{token}"):
        head = f"GET /v1/status?{query} HTTP/1.1\r\n".encode() + HOST + CLOSE + b"\r\n"
        assert told(exchange(live, head))[0] == 401
    assert token not in (live.home.path / "controller.log").read_text()


PATHS = (
    *("/v1/jobs/..%2f..%2ftoken/logs", "/v1/jobs/../../token", "/web/..%252f..%252ftoken"),
    *("/web/..%5c..%5ctoken", "/web/%2e%2e/%2e%2e/token", "/v1/packages/..%2f..%2ftoken"),
    *("/schema/../v1/status", "/schema%2f..%2fv1/status", "/V1/STATUS", "/v1/jobs/%00"),
    *("/v1/jobs/%e2%80%ae%ff", "/v1/secrets/..%2f..%2fsecrets.key", "/v1/nodes/%2e%2e/series"),
    *("/v1/jobs/j1%0d%0aset-cookie:%20a=b", "/v1/services/%0d%0aset-cookie:%20a=b"),
)


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leads_out(live: Live, auth: bytes, path: str) -> None:
    """Names are looked up in tables and folders' listings, never joined to a path unchecked; what
    is repeated in an answer is JSON in its body, never a header."""
    answer = exchange(live, f"GET {path} HTTP/1.1\r\n".encode() + HOST + auth + CLOSE + b"\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) in (404, 405)
    assert b"set-cookie" not in head
    assert live.home.read_token().encode() not in body
    assert b"\r" not in body and b"\n" not in body
    assert exchange(live, f"GET {path} HTTP/1.1\r\n".encode() + HOST + CLOSE + b"\r\n").split()[
        1
    ] in (b"401", b"404")


@pytest.mark.parametrize("path", ["/", "/v1/status", "/v1/nothing", "/web/app.js", "/v1/jobs/j0"])
def test_no_answer_is_framed_sniffed_or_shared(live: Live, auth: bytes, path: str) -> None:
    head = exchange(
        live, f"GET {path} HTTP/1.1\r\n".encode() + HOST + auth + CLOSE + b"\r\n"
    ).partition(b"\r\n\r\n")[0]
    lines = [line.lower() for line in head.split(b"\r\n")]
    assert b"x-content-type-options: nosniff" in lines
    assert b"x-frame-options: deny" in lines
    assert lines.count(b"x-frame-options: deny") == 1
    assert not any(line.startswith(b"access-control-") for line in lines), "no other site reads it"
    kept = (
        b"cache-control: no-cache" if path in ("/", "/web/app.js") else b"cache-control: no-store"
    )
    assert kept in lines


def test_another_site_learns_nothing_from_a_preflight(live: Live) -> None:
    asked = b"origin: http://evil.example\r\naccess-control-request-method: POST\r\n"
    head = b"OPTIONS /v1/jobs HTTP/1.1\r\n" + HOST + asked + CLOSE + b"\r\n"
    assert b"access-control-allow" not in exchange(live, head).lower()


def call(live: Live, method: str, path: str, body: object = None, **more: str) -> tuple[int, str]:
    """The status, and the cookie that is set."""
    where = urlsplit(live.client.url)
    link = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    headers = {name.replace("_", "-"): value for name, value in more.items()}
    data = None if body is None else json.dumps(body)
    if data is not None:
        headers["content-type"] = "application/json"
    link.request(method, path, data, headers)
    answer = link.getresponse()
    answer.read()
    link.close()
    return answer.status, (answer.headers["set-cookie"] or "").partition(";")[0]


def test_a_session_is_never_one_that_was_brought_along(live: Live) -> None:
    """Session fixation: signing in makes another name, whatever cookie the browser sent."""
    token = {"token": live.home.read_token()}
    first = call(live, "POST", "/v1/session", token)[1]
    second = call(live, "POST", "/v1/session", token, cookie=first)[1]
    assert first and second and first != second
    name = first.partition("=")[0]
    third = call(live, "POST", "/v1/session", token, cookie=f"{name}=mine.9999999999999.x")[1]
    assert third not in (first, second) and "mine" not in third


def test_another_site_cannot_sign_a_browser_in(live: Live) -> None:
    """Login CSRF: the victim would work in the attacker's session."""
    token = {"token": live.home.read_token()}
    for origin in ("null", "http://evil.example", "http://localhost:1", "https://localhost", "x"):
        assert call(live, "POST", "/v1/session", token, origin=origin)[0] == 403


def test_a_form_of_another_site_is_no_request(live: Live) -> None:
    """A form can send no JSON type and no header of ours; a cookie alone changes nothing."""
    token = {"token": live.home.read_token()}
    cookie = call(live, "POST", "/v1/session", token)[1]
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        where = urlsplit(live.client.url)
        link = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
        headers = {"cookie": cookie, "content-type": kind, "origin": "null"}
        link.request("POST", "/v1/jobs", '{"spec":{"command":["true"]}}', headers)
        assert link.getresponse().status == 403
        link.close()
    assert live.client.jobs(finished=True) == []


def test_the_cookie_of_another_cluster_on_the_same_host_is_nobody_here(live: Live) -> None:
    """Cookies are shared by all ports of a host: each cluster's has a name and a key of its own."""
    ours = call(live, "POST", "/v1/session", {"token": live.home.read_token()})[1]
    with live_cluster(nodes=1, gpus=0) as other:
        theirs = call(other, "POST", "/v1/session", {"token": other.home.read_token()})[1]
        assert ours.partition("=")[0] != theirs.partition("=")[0]
        forged = f"{ours.partition('=')[0]}={theirs.partition('=')[2]}"
        assert call(live, "GET", "/v1/nodes", cookie=forged)[0] == 401
        both = f"{theirs}; {ours}"
        assert call(live, "GET", "/v1/nodes", cookie=both)[0] == 200
        assert call(other, "GET", "/v1/nodes", cookie=both)[0] == 200


def test_a_members_token_is_no_link_to_the_operators_page(live: Live) -> None:
    made = live.client.add_token(NewToken(user="ann", tenant="red"))
    bearer = f"Bearer {made.secret}"
    for path in ("/v1/users", "/v1/tenants", "/v1/audit"):
        assert call(live, "GET", path, authorization=bearer)[0] in (403, 404)
    assert call(live, "PUT", "/v1/policy", {}, authorization=bearer)[0] == 403
    live.client.remove_token(made.token.id)
    assert call(live, "GET", "/v1/jobs", authorization=bearer)[0] == 401
