"""Who gets in, how long, and what another site cannot make a browser do."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

import pytest

from shoal.api.access import SESSION_MS, TRIES_MAX, TRIES_MS
from shoal.model.identity import Role
from shoal.model.people import NewToken
from tests.live.cluster import Live

Headers = dict[str, str]


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def message(self) -> str:
        return str(json.loads(self.body)["message"])


def call(
    live: Live, method: str, path: str, headers: Headers | None = None, body: object = None
) -> Answer:
    where = urlsplit(live.client.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    data = None if body is None else json.dumps(body)
    sent = {"content-type": "application/json"} if data else {}
    connection.request(method, path, data, {**sent, **(headers or {})})
    try:
        return Answer(connection.getresponse())
    finally:
        connection.close()


def token(live: Live) -> str:
    return live.home.token.read_text().strip()


@pytest.fixture
def session(live: Live) -> Headers:
    """The headers that the page sends with whatever changes something."""
    answer = call(live, "POST", "/v1/session", body={"token": token(live)})
    assert answer.status == 200
    cookie = (answer.headers["set-cookie"] or "").partition(";")[0]
    csrf = json.loads(answer.body)["csrf"]
    return {"cookie": cookie, "x-shoal-csrf": csrf, "origin": live.client.url}


def test_the_page_is_served_with_a_strict_policy_and_known_again(live: Live) -> None:
    for path in ("/", "/web/app.js", "/web/style.css", "/web/icon.svg"):
        answer = call(live, "GET", path)
        assert answer.status == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = call(live, "GET", path, {"if-none-match": answer.headers["etag"]})
        assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize("name", ["..%2fmain.py", "nothing.js", "..", "%2fetc%2fpasswd"])
def test_only_the_pages_own_files_are_served(live: Live, name: str) -> None:
    assert call(live, "GET", f"/web/{name}").status == 404


def test_a_session_reads_and_writes_like_the_token(live: Live, session: Headers) -> None:
    assert call(live, "GET", "/v1/nodes", {"cookie": session["cookie"]}).status == 200
    job = live.run("sleep 600", cpu_milli=100)
    assert call(live, "POST", f"/v1/jobs/{job}/cancel", session).status == 200
    assert live.wait(job) == "cancelled"


def test_another_site_cannot_use_a_browsers_session(live: Live, session: Headers) -> None:
    path = "/v1/nodes/n1/drain"
    bare = {"cookie": session["cookie"], "origin": session["origin"]}
    for wrong in (
        bare,
        {**bare, "x-shoal-csrf": "guessed"},
        {**session, "origin": "http://evil.example"},
        {name: value for name, value in session.items() if name != "origin"},
    ):
        answer = call(live, "POST", path, wrong)
        assert answer.status == 403
        assert "\n" not in answer.message
        assert "another site" in answer.message or "x-shoal-csrf" in answer.message
    assert call(live, "GET", "/v1/session", bare).status == 200
    assert next(node for node in live.client.nodes() if node.id == "n1").intent == "open"


def test_a_session_that_ended_is_refused_and_a_forged_one_too(live: Live, session: Headers) -> None:
    name, _, value = session["cookie"].partition("=")
    forged = f"{name}={value[:-1]}{'0' if value[-1] != '0' else '1'}"
    later = f"{name}={value.split('.')[0]}.9999999999999.{value.split('.')[2]}"
    for cookie in (forged, later, f"{name}=x", f"{name}=..", f"{name}=a.b.c"):
        assert call(live, "GET", "/v1/nodes", {"cookie": cookie}).status == 401
    assert call(live, "POST", "/v1/session/end", session).status == 200
    assert call(live, "GET", "/v1/nodes", {"cookie": session["cookie"]}).status == 401


def test_a_code_signs_in_once_and_is_given_for_the_token_alone(
    live: Live, session: Headers
) -> None:
    refused = call(live, "POST", "/v1/session/code", session)
    assert refused.status == 403 and "shoal page" in refused.message
    code = live.client.page_link().partition("#code=")[2]
    assert call(live, "POST", "/v1/session", body={"code": code}).status == 200
    again = call(live, "POST", "/v1/session", body={"code": code})
    assert again.status == 401 and "shoal page" in again.message


def test_the_stream_begins_with_all_and_goes_on_from_where_it_was(live: Live) -> None:
    where = urlsplit(live.client.url)

    def listen(last: str = "") -> tuple[str, str, dict[str, object]]:
        """The first event: its id, its kind, and what it says."""
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
        headers = {"authorization": f"Bearer {token(live)}", "last-event-id": last}
        connection.request("GET", "/v1/stream", headers=headers)
        response = connection.getresponse()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines: dict[str, str] = {}
        while "data" not in lines:
            name, _, value = response.readline().decode().strip().partition(": ")
            lines[name] = value
        connection.close()
        return lines["id"], lines["event"], json.loads(lines["data"])

    seen, kind, told = listen()
    assert kind == "snapshot"
    assert len(told["nodes"]) == 4  # type: ignore[arg-type]
    job = live.run("sleep 600", gpus=1)
    live.wait(job, "running")
    _, kind, told = listen(seen)
    assert kind == "change", "what was missed, and not everything again"
    assert job in json.dumps(told)
    assert listen("of-another-controller")[1] == "snapshot"
    live.client.cancel(job)


def test_guessing_is_slowed_down_and_sessions_end() -> None:
    from shoal.api.access import Access
    from shoal.api.problems import Refusal

    now_ms = [1_000]
    access = Access("secret", lambda: now_ms[0])
    stranger = _Connection("9.9.9.9")
    for _ in range(TRIES_MAX):
        with pytest.raises(Refusal, match="missing or wrong"):
            access.sign_in(stranger, "wrong", "")  # type: ignore[arg-type]
    with pytest.raises(Refusal, match="too many wrong tokens"):
        access.sign_in(stranger, "wrong", "")  # type: ignore[arg-type]
    access.sign_in(stranger, "secret", "")  # type: ignore[arg-type]
    session, cookie = access.sign_in(_Connection("1.1.1.1"), "secret", "")  # type: ignore[arg-type]
    now_ms[0] += TRIES_MS
    access.sign_in(stranger, "secret", "")  # type: ignore[arg-type]
    bearer = _Connection("1.1.1.1", {access.cookie: cookie})
    assert access.session(bearer) == session  # type: ignore[arg-type]
    now_ms[0] += SESSION_MS
    assert access.session(bearer) is None  # type: ignore[arg-type]


def test_links_that_one_sender_asks_for_do_not_void_those_of_another() -> None:
    from shoal.api.access import Access
    from shoal.api.principal import THE_OPERATOR, Principal

    access = Access("secret", lambda: 1_000)
    code, _ = access.new_code(THE_OPERATOR)
    member = Principal(user="anna", tenant="lab", role=Role.MEMBER, token="abcdefgh")
    for _ in range(2_000):
        access.new_code(member)
    access.sign_in(_Connection("1.1.1.1"), "", code)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 421),
        ("evil.example:7700", 421),
        ("10.9.9.9", 421),
        ("localhost.evil.example", 421),
        ("[::1", 421),
        ("localhost:9999", 401),
        ("LOCALHOST.", 401),
        ("127.0.0.1", 401),
        ("[::1]:7700", 401),
    ],
)
def test_a_name_that_somebody_else_pointed_here_is_refused(
    live: Live, host: str, status: int
) -> None:
    answer = call(live, "GET", "/v1/status", {"host": host})
    assert answer.status == status
    assert "\n" not in answer.message
    page = call(live, "GET", "/", {"host": host})
    assert page.status == (421 if status == 421 else 200)


def test_a_sessions_cookie_is_for_the_api_of_one_host_alone(live: Live, session: Headers) -> None:
    answer = call(live, "POST", "/v1/session", body={"token": token(live)})
    given = answer.headers["set-cookie"].lower()
    assert "path=/v1;" in given + ";"
    assert "domain" not in given and "httponly" in given and "samesite=strict" in given
    elsewhere = {"cookie": session["cookie"], "host": "localhost:1"}
    assert call(live, "GET", "/v1/nodes", elsewhere).status == 401


def test_json_that_is_too_deep_is_refused_in_one_line(live: Live, session: Headers) -> None:
    deep = "[" * 100_000
    for method, path in (("POST", "/v1/session"), ("POST", "/v1/jobs"), ("PUT", "/v1/policy")):
        where = urlsplit(live.client.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
        size = 10_000 if path == "/v1/session" else 100_000
        bodies = (deep[:size], f'{{"unknown": {deep[:size]}', f'{{"spec": {{"x": {deep[:size]}')
        for body in bodies:
            connection.request(method, path, body, {**session, "content-type": "application/json"})
            answer = Answer(connection.getresponse())
            assert answer.status == 400, answer.body
            assert "\n" not in answer.message
        connection.close()


class _Connection:
    def __init__(self, host: str, cookies: dict[str, str] | None = None) -> None:
        self.client = self
        self.host = host
        self.cookies = cookies or {}
        self.headers: Headers = {}


def test_a_user_signs_in_with_their_own_token_and_is_nobody_else(live: Live) -> None:
    live.client.add_tenant("lab")
    live.client.add_user("ann", {"lab": Role.MEMBER})
    made = live.client.add_token(NewToken(user="ann", lifetime_ms=60_000))

    def begin(**body: str) -> Headers:
        answer = call(live, "POST", "/v1/session", body=body)
        assert answer.status == 200, answer.message
        assert json.loads(answer.body)["until_ms"] <= made.token.until_ms
        cookie = (answer.headers["set-cookie"] or "").partition(";")[0]
        csrf = json.loads(answer.body)["csrf"]
        return {"cookie": cookie, "x-shoal-csrf": csrf, "origin": live.client.url}

    def me(headers: Headers) -> object:
        answer = call(live, "GET", "/v1/me", headers)
        return json.loads(answer.body).get("user", answer.status)

    bearer = {"authorization": f"Bearer {made.secret}"}
    code = json.loads(call(live, "POST", "/v1/session/code", bearer).body)["code"]
    sessions = [begin(token=made.secret), begin(code=code)]
    assert [me(session) for session in sessions] == ["ann", "ann"]
    for session in sessions:
        assert call(live, "GET", "/v1/users", session).status == 403
        assert call(live, "POST", "/v1/nodes/n1/drain", session).status == 403
        name, _, value = session["cookie"].partition("=")
        session_name, until, token_id, signature = value.split(".")
        assert token_id == made.token.id
        for forged in (
            f"{session_name}.{until}..{signature}",  # the operator
            f"{session_name}.{until}.zzzzzzzz.{signature}",  # another token
            f"{session_name}.{int(until) + 1}.{token_id}.{signature}",  # longer
            f"{session_name}.{until}.{signature}",  # as before there were users
        ):
            assert call(live, "GET", "/v1/me", {"cookie": f"{name}={forged}"}).status == 401
    live.client.rotate_token(made.token.id)
    assert [call(live, "GET", "/v1/me", session).status for session in sessions] == [401, 401]
    assert json.loads(call(live, "GET", "/v1/session", sessions[0]).body)["csrf"] == ""
    live.client.remove_user("ann")
    live.client.remove_tenant("lab")
