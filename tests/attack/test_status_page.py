"""The public status page: as if it were not there until it is switched on, and then no more than
the operator said, whatever tenants call their things and however often it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from shoal.api import status_page
from tests.api.server import OPERATORS, serving
from tests.api.world import OURS, POLICY, World

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with serving(tmp_path_factory.mktemp("status") / "home", POLICY) as server:
        yield World(server)


def test_a_stranger_sees_what_the_operator_lists_and_nothing_else(world: World) -> None:
    server = world.server

    def seen(path: str = "/status") -> tuple[int, dict[str, str], bytes]:
        reply = server.call("", "GET", path)
        kept = {k: v for k, v in reply.headers.items() if k not in ("date", "content-length")}
        return reply.status, kept, reply.body

    assert seen() == seen("/nothing-here")  # off: as any unknown path
    page = {
        "on": True,
        "title": f"Lab {EVIL}",
        "services": ["ourservice", EVIL, "gone"],
        "incidents": [{"at_ms": 1_000_000, "text": f"fans {EVIL}", "over": True}],
    }
    assert server.call(world.tokens["member"], "PUT", "/v1/status-page", page).status == 403
    assert seen()[0] == 404
    assert server.call(OPERATORS, "PUT", "/v1/status-page", page).status == 200
    status, headers, body = seen()
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert "script-src" in headers["content-security-policy"]
    text = body.decode()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "<td>ourservice</td>" in text
    assert "<td>gone</td><td>Down</td>" in text
    assert "resolved" in text
    state = server.run(lambda: server.loop.state)
    names = {*state.nodes, *state.identity.users, *state.identity.tenants, *state.jobs}
    names |= {job.spec.name or job.id for job in state.jobs.values()} - {OURS}
    assert not [name for name in names - {"ourservice", OURS} if f">{name}<" in text]
    assert not world.leaks(body)

    with mock.patch.object(status_page, "_page", side_effect=AssertionError("made again")):
        assert {seen()[0] for _ in range(20)} == {200}  # what was made is shown for 10 s
    off = {**page, "on": False}
    assert server.call(OPERATORS, "PUT", "/v1/status-page", off).status == 200
    assert seen() == seen("/nothing-here")
    audit = server.call(OPERATORS, "GET", "/v1/audit?verb=statuspages").body.decode()
    assert "fans" not in audit
