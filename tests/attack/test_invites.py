"""An invite lets one person in, once, in time, with the role that an admin chose; and its code is
in nothing that is kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.model.identity import INVITE_MS_MAX, INVITES_MAX, Role, Token
from shoal.model.policy import Policy
from shoal.model.report import RemoveToken, SetToken
from tests.api.server import OPERATORS, Reply, Server, serving
from tests.attack.test_people_races import at_once

ACCEPT = "/v1/invites/accept"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("invites") / "home", Policy()) as made:
        made.tenant("lab")
        yield made


def invited(server: Server, user: str, **more: Any) -> str:
    reply = server.call(OPERATORS, "POST", "/v1/invites", {"user": user, "tenant": "lab", **more})
    assert reply.status == 201, reply
    return str(msgspec.json.decode(reply.body)["code"])


def accept(server: Server, code: str) -> Reply:
    server.run(lambda: setattr(server.loop.clock, "ms", server.loop.clock.now_ms() + 60_001))
    return server.call("", "POST", ACCEPT, {"code": code})


def me(server: Server, reply: Reply) -> dict[str, Any]:
    secret = msgspec.json.decode(reply.body)["secret"]
    return dict(msgspec.json.decode(server.call(secret, "GET", "/v1/me").body))


def test_one_of_eight_who_accept_at_the_same_moment_gets_in(server: Server) -> None:
    code = invited(server, "ann")
    replies = at_once(*[lambda: server.call("", "POST", ACCEPT, {"code": code})] * 8)
    assert sorted(reply.status for reply in replies) == [200, *[401] * 7]
    (got,) = (reply for reply in replies if reply.status == 200)
    known = me(server, got)
    assert (known["user"], known["tenant"], known["role"]) == ("ann", "lab", "member")
    assert accept(server, code).status == 401


def test_the_code_is_no_token_and_its_secret_is_none(server: Server) -> None:
    code = invited(server, "bob")
    _, invite_id, secret = code.split("_", 2)
    for token in (code, f"shoal_{invite_id}_{secret}", secret):
        assert server.call(token, "GET", "/v1/me").status == 401
    # nor can it be turned into one by rotating, or into one that lasts
    rotated = server.call(OPERATORS, "POST", f"/v1/tokens/{invite_id}/rotate", {})
    assert rotated.status == 422, rotated
    assert accept(server, f"invite_{invite_id}_wrong").status == 401
    assert accept(server, code).status == 200


def test_after_expiry_removal_or_with_its_user_gone_nobody_gets_in(server: Server) -> None:
    late, removed, gone = (invited(server, name, lifetime_ms=600_000) for name in ("c", "d", "e"))
    server.ask(RemoveToken(removed.split("_")[1]))
    assert accept(server, removed).status == 401
    assert server.call(OPERATORS, "DELETE", "/v1/users/e").status == 200
    assert accept(server, gone).status == 401
    clock = server.loop.clock
    server.run(lambda: setattr(clock, "ms", clock.now_ms() + 600_000))
    assert accept(server, late).status == 401


def test_it_gives_no_more_than_the_admin_chose_and_the_user_has_by_then(server: Server) -> None:
    member = server.token("member", "lab")
    wish = {"user": "member", "role": "admin"}
    assert server.call(member, "POST", "/v1/invites", wish).status == 403
    refused = server.call(OPERATORS, "POST", "/v1/invites", wish)  # the user is a member
    assert refused.status == 422, refused
    code = invited(server, "fay", role="member")
    server.call(OPERATORS, "PUT", "/v1/users/fay", {"roles": {"lab": "viewer"}})
    assert me(server, accept(server, code))["role"] == "viewer"


def test_a_restart_from_what_was_on_the_disk_does_not_bring_it_back(
    server: Server, tmp_path: Path
) -> None:
    """As after kill -9: the files are copied while the controller runs, once it has answered."""
    code, still_open = invited(server, "gus"), invited(server, "hal")
    accepted = accept(server, code)
    assert accepted.status == 200
    shutil.copytree(server.home.path, tmp_path / "home")
    with serving(tmp_path / "home", Policy()) as again:
        moved = server.loop.clock.now_ms()
        again.run(lambda: setattr(again.loop.clock, "ms", moved))
        assert accept(again, code).status == 401
        assert me(again, accepted)["user"] == "gus"
        assert accept(again, still_open).status == 200


def test_the_code_is_in_no_log_event_or_list(server: Server) -> None:
    code = invited(server, "ida")
    secret = code.rpartition("_")[2]
    server.call("", "POST", f"{ACCEPT}?code={code}", {"code": "invite_0000_wrong"})
    server.call(OPERATORS, "DELETE", f"/v1/tokens/{code}")
    assert accept(server, code).status == 200
    for path in ("/v1/audit", "/v1/events?limit=10000", "/v1/tokens"):
        assert secret not in server.call(OPERATORS, "GET", path).body.decode(), path
    audit = server.call(OPERATORS, "GET", "/v1/audit?verb=invites").body.decode()
    assert "invites.accept" in audit
    assert "ida" in audit
    for file in server.home.path.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes(), file


def test_they_are_bounded_in_number_and_time(server: Server) -> None:
    long = {"user": "jim", "tenant": "lab", "lifetime_ms": INVITE_MS_MAX + 1}
    assert server.call(OPERATORS, "POST", "/v1/invites", long).status in (400, 422)
    now_ms = server.loop.clock.now_ms()

    def fill() -> None:
        for number in range(INVITES_MAX):
            user = f"many{number // 40}"
            if not number % 40:
                server.token(user, "lab")
            server.ask(
                SetToken(
                    Token(
                        id=f"many{number:04}",
                        user=user,
                        tenant="lab",
                        role=Role.MEMBER,
                        hash="0" * 64,
                        until_ms=now_ms + 600_000,
                        invite=True,
                    )
                )
            )

    with pytest.raises(AssertionError, match="the maximum"):
        fill()
    refused = server.call(OPERATORS, "POST", "/v1/invites", {"user": "jim", "tenant": "lab"})
    assert refused.status == 422, refused
    server.run(lambda: setattr(server.loop.clock, "ms", now_ms + 700_000))
    invited(server, "jim")
