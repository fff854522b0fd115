"""Two people at the same moment: whatever comes first, what both were told is true afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.model.identity import Role
from shoal.model.policy import Policy, Tenant
from tests.api.server import OPERATORS, Reply, Server, serving

CLIENTS = 8
JOB = {"command": ["true"], "gpus": 4}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    policy = Policy(tenants=(Tenant(name="capped", jobs_max=5),))
    path: Path = tmp_path_factory.mktemp("people") / "home"
    with serving(path, policy) as made:
        for tenant in ("red", "blue", "capped"):
            made.tenant(tenant)
        yield made


def at_once(*calls: Callable[[], Reply]) -> list[Reply]:
    gate = threading.Barrier(len(calls))

    def one(call: Callable[[], Reply]) -> Reply:
        gate.wait(60)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


def decoded(reply: Reply) -> Any:
    return msgspec.json.decode(reply.body)


def test_one_key_of_two_tenants_is_two_jobs(server: Server) -> None:
    tokens = {name: server.token(f"key-{name}", name) for name in ("red", "blue")}
    body = {"spec": JOB, "key": "the same"}
    calls = [
        lambda token=token: server.call(token, "POST", "/v1/jobs", body)
        for token in tokens.values()
        for _ in range(4)
    ]
    replies = at_once(*calls)
    red, blue = ({decoded(reply)["id"] for reply in half} for half in (replies[:4], replies[4:]))
    assert (len(red), len(blue)) == (1, 1)
    assert red != blue
    for mine, other in ((tokens["red"], blue), (tokens["blue"], red)):
        assert server.call(mine, "GET", f"/v1/jobs/{next(iter(other))}").status == 404


def test_a_cap_holds_however_many_submit_at_once(server: Server) -> None:
    token = server.token("cap", "capped")
    submit = lambda: server.call(token, "POST", "/v1/jobs", {"spec": JOB})  # noqa: E731
    statuses = [reply.status for reply in at_once(*[submit] * 12)]
    assert (statuses.count(201), statuses.count(429)) == (5, 7)


def test_an_old_secret_is_void_when_its_rotation_is_answered(server: Server) -> None:
    token = server.token("rotating", "red")
    path = f"/v1/tokens/{token.split('_')[1]}/rotate"
    over = threading.Event()
    seen: list[int] = []

    def use() -> None:
        while not over.is_set():
            seen.append(server.call(token, "GET", "/v1/jobs").status)

    users = [threading.Thread(target=use) for _ in range(3)]
    for user in users:
        user.start()
    rotated = server.call(OPERATORS, "POST", path, {})
    after = server.call(token, "GET", "/v1/jobs").status
    over.set()
    for user in users:
        user.join(60)
    assert (rotated.status, after) == (200, 401), rotated.body
    assert set(seen) <= {200, 401}
    assert server.call(decoded(rotated)["secret"], "GET", "/v1/jobs").status == 200


def test_of_two_rotations_one_secret_is_right(server: Server) -> None:
    path = f"/v1/tokens/{server.token('twice', 'red').split('_')[1]}/rotate"
    replies = at_once(*[lambda: server.call(OPERATORS, "POST", path, {})] * 4)
    secrets = [decoded(reply)["secret"] for reply in replies if reply.status == 200]
    right = [server.call(secret, "GET", "/v1/jobs").status for secret in secrets]
    assert (right.count(200), right.count(401)) == (1, len(secrets) - 1)


def test_of_two_admins_who_add_the_same_user_one_is_refused(server: Server) -> None:
    calls = [
        lambda role=role: server.call(
            OPERATORS, "POST", "/v1/users", {"name": "both", "roles": {"red": role}}
        )
        for role in ("member", "viewer")
    ]
    statuses = sorted(reply.status for reply in at_once(*calls))
    assert statuses[0] == 201
    assert 400 <= statuses[1] < 500


def test_a_tenant_that_is_removed_has_no_job_and_one_with_jobs_is_not_removed(
    server: Server,
) -> None:
    for number in range(6):
        name = f"passing{number}"
        server.tenant(name)
        token = server.token(f"user{number}", name)
        submit = lambda token=token: server.call(token, "POST", "/v1/jobs", {"spec": JOB})  # noqa: E731
        remove = lambda name=name: server.call(OPERATORS, "DELETE", f"/v1/tenants/{name}")  # noqa: E731
        calls = [remove, submit, remove, submit] if number % 2 else [submit, remove, submit]
        replies = at_once(*calls)
        assert {reply.status for reply in replies} <= {200, 201, 401, 403, 404, 422}
        accepted = [decoded(reply)["id"] for reply in replies if reply.status == 201]
        gone = name not in server.loop.tick.state.identity.tenants
        if gone:
            assert accepted == [], "a job of a tenant that is gone would run as the agent's user"
            assert server.call(token, "POST", "/v1/jobs", {"spec": JOB}).status in (401, 403, 404)
        for job in accepted:
            assert server.call(token, "GET", f"/v1/jobs/{job}").status == 200
            server.call(OPERATORS, "POST", f"/v1/jobs/{job}/cancel")


def test_the_policy_of_two_admins_is_one_of_theirs(server: Server) -> None:
    ann = server.token("admin-ann", "*", Role.ADMIN)
    bob = server.token("admin-bob", "*", Role.ADMIN)
    wanted = [{"name": f"policy{n}", "spares": n} for n in range(CLIENTS)]
    calls = [
        lambda token=token, policy=policy: server.call(token, "PUT", "/v1/policy", policy)
        for token, policy in zip([ann, bob] * 4, wanted, strict=True)
    ]
    assert {reply.status for reply in at_once(*calls)} == {200}
    now = decoded(server.call(OPERATORS, "GET", "/v1/policy"))
    assert {"name": now["name"], "spares": now["spares"]} in wanted
    assert server.call(OPERATORS, "PUT", "/v1/policy", {}).status == 200
