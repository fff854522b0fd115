"""Each tenant has and sees its own: jobs, keys, packages, reasons, streams."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from shoal.model.identity import Role
from shoal.model.job import Phase
from shoal.model.policy import Others
from shoal.model.report import RemoveToken
from tests.api.server import serving
from tests.api.world import LOG, OURS, PACKAGE, POLICY, THEIRS, World

JOB = {"command": ["true"], "cpu_milli": 100}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with serving(tmp_path_factory.mktemp("own") / "home", POLICY) as server:
        yield World(server)


def test_tenant_and_user_of_a_job_come_from_the_token(world: World) -> None:
    for other in (THEIRS, "nosuchtenant"):
        spec = {**JOB, "tenant": other}
        reply = world.server.call(world.tokens["member"], "POST", "/v1/jobs", {"spec": spec})
        problem = msgspec.json.decode(reply.body)
        assert (reply.status, problem["field"]) == (403, "tenant")
        assert problem["message"].startswith("your token is for the tenant ours;")
    for tenant in ("default", OURS):
        spec = {**JOB, "tenant": tenant, "user": "somebody"}
        made = world.ask("member", "POST", "/v1/jobs", {"spec": spec})["spec"]
        assert (made["tenant"], made["user"]) == (OURS, "anna")
    spec = {**JOB, "tenant": THEIRS, "user": "zebrauser"}
    made = world.ask("admin", "POST", "/v1/jobs", {"spec": spec})["spec"]
    assert (made["tenant"], made["user"]) == (THEIRS, "zebrauser")
    assert world.ask("operator", "POST", "/v1/jobs", {"spec": JOB})["spec"]["tenant"] == "default"


def test_a_submission_key_is_its_tenants_own(world: World) -> None:
    def submitted(who: str) -> str:
        return str(world.ask(who, "POST", "/v1/jobs", {"spec": JOB, "key": "same"})["id"])

    theirs, ours = submitted("them"), submitted("member")
    assert ours != theirs
    assert (submitted("them"), submitted("member")) == (theirs, ours)


def test_whoever_knows_the_hash_of_a_package_does_not_have_the_package(world: World) -> None:
    name, token = world.theirs["package"], world.tokens["member"]
    spec = {**JOB, "package": name}
    assert world.server.call(token, "GET", f"/v1/packages/{name}").status == 404
    assert world.server.call(token, "POST", "/v1/jobs", {"spec": spec}).status == 422
    world.ask("member", "PUT", f"/v1/packages/{name}", PACKAGE)
    assert world.ask("member", "POST", "/v1/jobs", {"spec": spec})["spec"]["package"] == name


def test_totals_of_all_tenants_are_shown_only_to_those_who_see_all(world: World) -> None:
    def totals(who: str) -> list[int | None]:
        status = world.ask(who, "GET", "/v1/status")
        return [status["submitted"], status["finished"]]

    assert totals("member") == [None, None]
    assert all(isinstance(total, int) for total in totals("operator") + totals("admin"))


def test_a_reason_names_jobs_of_others_only_as_far_as_the_policy_says(world: World) -> None:
    mine = world.submit("member", "ourpreempted", gpus=1, preemptible=True)
    world.until(mine, Phase.RUNNING)
    theirs = world.submit("them", "zebrafirst", gpus=1, priority=100)
    world.until(mine, Phase.STOPPING)

    def reason(who: str) -> str:
        return str(world.ask(who, "GET", f"/v1/jobs/{mine}/why")["why"])

    assert f"to make room for {theirs} (zebrafirst) (priority 100, tenant {THEIRS});" in reason(
        "operator"
    )
    assert "is preempted to make room for another tenant's job;" in reason("member")
    named = msgspec.structs.replace(POLICY, others=Others.TENANTS)
    world.ask("admin", "PUT", "/v1/policy", msgspec.to_builtins(named))
    assert f"is preempted to make room for a job of tenant {THEIRS};" in reason("member")
    assert f"jobs of {THEIRS}" in str(
        world.ask("member", "GET", f"/v1/jobs/{world.ours['waiting']}/why")["why"]
    )
    world.ask("admin", "PUT", "/v1/policy", msgspec.to_builtins(POLICY))


def test_a_stream_shows_its_tenants_changes_alone_and_ends_with_its_token(world: World) -> None:
    token = world.server.token("anna", OURS)
    connection = world.server.connect()
    connection.request("GET", "/v1/stream", headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    theirs = world.submit("them", "zebrasecond")
    world.until(theirs, Phase.RUNNING)
    world.ask("them", "POST", f"/v1/jobs/{theirs}/cancel")
    mine = world.submit("member", "oursecond")
    got = b""
    while f'"id":"{mine}"'.encode() not in got:
        got += answer.read1()
    assert not world.leaks(got)
    assert f'"{theirs}"'.encode() not in got
    world.server.ask(RemoveToken(token.split("_")[1]))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and answer.read1():
        pass
    assert time.monotonic() < deadline, "the stream goes on without its token"
    connection.close()


def test_a_call_that_waits_ends_with_its_token(world: World) -> None:
    token = world.server.token("anna", OURS)
    mine = world.submit("member", "ourlast")
    world.until(mine, Phase.RUNNING)
    connection = world.server.connect()
    path = f"/v1/jobs/{mine}/logs?wait_s=30"
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
    world.server.ask(RemoveToken(token.split("_")[1]))
    answer = connection.getresponse()
    assert answer.status == 401, "and not what there is after the wait"
    connection.close()


def test_a_viewer_of_every_tenant_sees_all_and_changes_nothing(world: World) -> None:
    token = world.tokens["viewer of all"]
    reply = world.server.call(token, "GET", f"/v1/jobs/{world.theirs['job']}/logs")
    assert msgspec.json.decode(reply.body, type=dict[str, Any])["next_offset"] == len(LOG)
    reply = world.server.call(token, "POST", f"/v1/jobs/{world.theirs['job']}/cancel")
    assert (reply.status, reply.message) == (
        403,
        "this needs more than the role viewer; ask an admin",
    )
    events = world.server.call(token, "GET", "/v1/events?limit=10000").body
    assert b"JobSubmitted" in events
    assert b"TokenSet" not in events


def test_a_role_that_was_taken_away_is_gone_at_once(world: World) -> None:
    token = world.server.token("gert", OURS)
    world.ask("admin", "PUT", "/v1/users/gert", {"roles": {OURS: Role.VIEWER.value}})
    assert world.server.call(token, "POST", "/v1/jobs", {"spec": JOB}).status == 403
    assert world.server.call(token, "GET", "/v1/jobs").status == 200
    world.ask("admin", "PUT", "/v1/users/gert", {"roles": {}})
    assert world.server.call(token, "GET", "/v1/jobs").status == 401
