"""Answers to good and bad requests: whoever is refused reads what earlier versions said.

`python -m tests.api.test_answers` writes the file again; read its changes before you keep them.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from harness.waiting import until

from shoal.model.identity import Role
from shoal.model.job import JobSpec, Phase
from shoal.model.report import Submit
from tests.api.server import OPERATORS, Server, serving

GOLDEN = Path(__file__).parent / "golden" / "answers.json"
SHOWN = ("content-type", "allow", "location", "cache-control", "x-frame-options", "retry-after")
JOB = {"command": ["true"], "gpus": 1}
DEEP = b'{"spec":' + b"[" * 20_000
JSON = "application/json"


class Ask(NamedTuple):
    who: str
    method: str
    path: str
    body: Any = None
    headers: dict[str, str] = {}
    whole: bool = True  # the body of its answer is compared


def reads() -> Iterator[Ask]:
    for who in ("operator", "member", "other", "viewer", "wrong", "nobody"):
        for path in ("/v1/jobs/j1", "/v1/jobs?finished=true", "/v1/nodes", "/v1/jobs/j1/why"):
            yield Ask(who, "GET", path)
        yield Ask(who, "GET", "/v1/status", whole=False)
        yield Ask(who, "POST", "/v1/jobs/j99/cancel")
        yield Ask(who, "PUT", "/v1/policy", {})
        yield Ask(who, "POST", "/v1/join", {})
    for path in (
        *("/v1/jobs/j99", "/v1/jobs/j1/", "/v1//jobs", "/v1/jobs/j1//why", "/nope", "/V1/jobs"),
        *("/v1/jobs/%6a1", "/v1/jobs/a%2Fb", "/v1/jobs/%00", "/v1/jobs/%ff"),
        *("/v1/policy/history/abc", "/v1/policy/history/99", "/v1/policy/history/-1"),
        *("/v1/moment", "/v1/moment?at_ms=x", "/v1/jobs/j1/files/part"),
        *("/v1/jobs/j1/files?folder=bogus", "/v1/ledger?by=bogus", "/v1/certificate", "/v1/link"),
        *("/v1/oidc/begin", "/v1/oidc/callback?state=x", "/web/nope", "/favicon.ico", "/v1/me"),
    ):
        yield Ask("operator", "GET", path)
    for query in (
        *("wait_for=running", "wait_for=bogus", "wait_s=31", "wait_s=x", "wait_s=-1", "wait_s="),
        *("wait_s=nan", "wait_s=0&wait_s=31", "unknown=1", "wait_s=%ff", "&&", "wait_s", "=1"),
        "wait_for=bogus&wait_s=x",
    ):
        yield Ask("operator", "GET", f"/v1/jobs/j1?{query}")
    for query in (
        *("limit=0", "limit=10001", "limit=1.5", "limit=", "limit=1&limit=2", "count=maybe"),
        *("finished=1", "finished=no", "label=a&label=b%3D", "label=%21%21", "state=bogus"),
        *("since_ms=-1", "q=" + "x" * 5000, "sort=bogus", "sort=name&cursor=x", "array=j1"),
        *("user=" + "x" * 129, "state=running,failed&limit=x", "state=bogus&limit=x"),
        *("limit=+5", "limit=%205", "limit=1e3", "limit=null", "since_ms=true", "name=a+b"),
    ):
        yield Ask("operator", "GET", f"/v1/jobs?{query}")
    for query in ("member=null", "member=", "member=x", "share=2", "line=" + "x" * 200):
        yield Ask("operator", "GET", f"/v1/jobs/j1/logs/part?{query}")
    for path in ("/", "/web/app.js", "/metrics", "/schema", "/schema/openapi.json", "/schema/x"):
        yield Ask("operator", "GET", path, whole=False)
        yield Ask("nobody", "GET", path, whole=False)
    for method in ("HEAD", "OPTIONS", "PATCH", "DELETE", "TRACE"):
        for path in ("/v1/jobs", "/v1/status", "/v1/jobs/j1", "/v1/nodes/n1/labels", "/nope", "/"):
            yield Ask("operator", method, path)
        yield Ask("nobody", method, "/v1/jobs")
    yield Ask("operator", "GET", "/v1/me", headers={"Host": "evil.example"})
    yield Ask("nobody", "GET", "/v1/me", headers={"Cookie": "shoal-00000000=a.b.c.d; other=x"})
    yield Ask("nobody", "GET", "/v1/me", headers={"Authorization": "Basic eDp5"})


def writes() -> Iterator[Ask]:
    for who in ("operator", "member", "other", "viewer", "wrong", "nobody"):
        yield Ask(who, "POST", "/v1/jobs", {"spec": JOB, "key": f"of-{who}"})
        yield Ask(who, "POST", "/v1/jobs", {"spec": {**JOB, "tenant": "red"}})
        yield Ask(who, "PUT", "/v1/secrets/name", b"value", whole=False)
    for body in (
        *(None, b"", b"{", b"null", b"[]", b'"x"', b"{}", b'{"spec":1}', b'{"spec":{}}'),
        *(b'{"spec":null}', b"\xff\xfe", b'{"spec":{"command":["\xff"]}}', DEEP),
        {"spec": JOB, "more": 1},
        {"spec": {**JOB, "more": 1}},
        {"spec": {**JOB, "gpus": "1"}},
        {"spec": {**JOB, "gpus": "x"}},
        {"spec": {**JOB, "gpus": -1}},
        {"spec": {**JOB, "gpus": 99}},
        {"spec": {**JOB, "command": "true"}},
        {"spec": {**JOB, "command": [1]}},
        {"spec": {**JOB, "command": []}},
        {"spec": {**JOB, "env": {"A": 1}}},
        {"spec": {**JOB, "package": "0" * 64}},
        {"spec": {**JOB, "secrets": ["nope"]}},
        {"spec": {**JOB, "after": ["j99"]}},
        {"spec": JOB, "key": "x" * 129},
        {"spec": JOB, "key": 1},
        {"spec": JOB, "key": "again"},
        {"spec": JOB, "key": "again"},
    ):
        yield Ask("operator", "POST", "/v1/jobs", body)
    good = msgspec.json.encode({"spec": JOB})
    for kind in (JSON, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        yield Ask("operator", "POST", "/v1/jobs", good, {"Content-Type": kind})
    yield Ask("operator", "POST", "/v1/jobs", [good[:9], good[9:]])
    yield Ask("operator", "POST", "/v1/jobs/j1/labels", {"labels": {"a": 1}})
    yield Ask("operator", "POST", "/v1/jobs/j1/labels", {"labels": {"a": "b"}})
    yield Ask("operator", "POST", "/v1/nodes/n1/bogus")
    yield Ask("operator", "POST", "/v1/nodes/n1/cordon?in_ms=5")
    yield Ask("operator", "POST", "/v1/nodes/n1/drain?in_ms=-5")
    yield Ask("operator", "POST", "/v1/nodes/n1/drain?in_ms=null&why=" + "x" * 161)
    yield Ask("operator", "POST", "/v1/jobs/j1/requeue?key=" + "x" * 129)
    yield Ask("operator", "PUT", "/v1/secrets/name", b"")
    yield Ask("operator", "PUT", "/v1/secrets/name", b"x" * (64 * 1024 + 2))
    yield Ask("operator", "PUT", "/v1/packages/" + "0" * 64, b"x")
    yield Ask("nobody", "POST", "/v1/session", {"token": "wrong"})
    yield Ask("nobody", "POST", "/v1/session", {"token": "x" * 513})
    yield Ask("nobody", "POST", "/v1/session", b"x" * 20_000)
    yield Ask("nobody", "POST", "/v1/session", [b"x" * 10_000, b"x" * 10_000])
    yield Ask("nobody", "POST", "/v1/session", {"token": OPERATORS}, whole=False)
    yield Ask("operator", "POST", "/v1/session/end")
    yield Ask("nobody", "GET", "/v1/session")
    yield Ask("operator", "GET", "/v1/audit?limit=1000")


def answer(server: Server, tokens: dict[str, str], ask: Ask) -> dict[str, Any]:
    headers = dict(ask.headers)
    if ask.who in tokens:
        headers.setdefault("Authorization", f"Bearer {tokens[ask.who]}")
    body = ask.body
    if isinstance(body, dict):
        body, headers = msgspec.json.encode(body), {"Content-Type": JSON, **headers}
    connection = server.connect()
    chunks = iter(body) if isinstance(body, list) else None
    try:
        connection.request(ask.method, ask.path, chunks or body, headers)
        reply = connection.getresponse()
        text = reply.read().decode("utf-8", "replace")
    finally:
        connection.close()
    known = {name: reply.headers[name] for name in SHOWN if name in reply.headers}
    if "set-cookie" in reply.headers:
        known["set-cookie"] = re.sub(
            r"=[^;]*; HttpOnly", "=; HttpOnly", reply.headers["set-cookie"]
        )
    return {"status": reply.status, **known, "body": text if ask.whole else len(text) > 0}


def shown(text: str | bool) -> object:
    """What it says is for other tests: here it counts whose job it is, and how many there are."""
    if not isinstance(text, str) or text[:1] not in ("{", "["):
        return bool(text)
    value = msgspec.json.decode(text)
    if isinstance(value, list):
        return len(value)
    return {name: value[name] for name in ("id", "state", "tenant", "user") if name in value}


def name_of(ask: Ask) -> str:
    body = b"".join(ask.body) if isinstance(ask.body, list) else ask.body
    body = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
    text = body[:80].decode("utf-8", "replace") + (f" {len(body)}" if len(body) > 80 else "")
    how = " chunked" if isinstance(ask.body, list) else ""
    more = "".join(f" {name}: {value}" for name, value in ask.headers.items())
    return f"{ask.who}: {ask.method} {ask.path[:120]}{how}{more} {text}".strip()


def answers(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with serving(path) as server:
        tokens = {"operator": OPERATORS, "wrong": "shoal_00000000_wrong"}
        for tenant, user, role in (
            ("red", "member", Role.MEMBER),
            ("blue", "other", Role.MEMBER),
            ("red", "viewer", Role.VIEWER),
        ):
            if tenant not in server.loop.tick.state.identity.tenants:
                server.tenant(tenant)
            tokens[user] = server.token(user, tenant, role)
        server.ask(Submit(JobSpec(command=("true",), gpus=1, tenant="red", user="member")))
        until(lambda: server.loop.tick.state.jobs["j1"].phase is Phase.RUNNING)
        for ask in (*reads(), *writes()):
            name = name_of(ask)
            while name in found:
                name += " again"
            given = answer(server, tokens, ask)
            text = given["body"]
            if given["status"] < 300 and "/v1/audit" not in ask.path and text:
                given["body"] = shown(text)
            elif isinstance(text, str):
                for user, token in tokens.items():
                    if "_" in token:
                        text = text.replace(token.split("_")[1], f"TOKEN-OF-{user}")
                text = re.sub(r'"(tag|hash|head|boot|cluster)":"[^"]*"', r'"\1":""', text)
                given["body"] = text.replace(f"127.0.0.1:{server.port}", "HOST")
            found[name] = given
    return found


def test_answers_are_what_they_were(tmp_path: Path) -> None:
    known: dict[str, Any] = msgspec.json.decode(GOLDEN.read_bytes())
    found = answers(tmp_path / "home")
    assert list(found) == list(known)
    for name, given in found.items():
        assert given == known[name], name


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        given = answers(Path(folder) / "home")
    text = msgspec.json.format(msgspec.json.encode(given), indent=1)
    Path(sys.argv[1] if sys.argv[1:] else GOLDEN).write_bytes(text + b"\n")
