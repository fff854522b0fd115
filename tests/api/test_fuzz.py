"""Whatever is sent to the API, it never fails by itself: generated from its own schema."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from shoal.forms.fields import JOB, SERVICE
from shoal.model.identity import Role
from shoal.model.people import NewToken
from shoal.model.policy import Policy
from tests.live.cluster import Live, live_cluster

CANARY = "canary-of-blue"  # what only blue may see
ROLES = {"viewer": Role.VIEWER, "member": Role.MEMBER, "admin": Role.ADMIN}
# How many requests to each route. Of two, one is random: the first is the simplest there is.
EXAMPLES = {"operator": 2, "member": 1, "viewer": 1}
MORE = {"operator": 12, "admin": 6, "member": 9, "viewer": 6}
OWN = ("/v1/me", "/v1/tokens", "/v1/session")  # a viewer's own tokens and sessions


@pytest.fixture(scope="module")
def target() -> Iterator[Live]:
    with live_cluster(nodes=2, gpus=2) as live:
        for tenant in ("red", "blue"):
            live.client.add_tenant(tenant)
        live.run(f"echo {CANARY}; exit 3", name=CANARY, tenant="blue", env={"CANARY": CANARY})
        yield live


def bearer(target: Live, who: str) -> str:
    if who == "operator":
        return target.home.read_token()
    tenant = "*" if who == "admin" else "red"
    target.client.add_user(who, {tenant: ROLES[who]})
    return target.client.add_token(NewToken(user=who, tenant=tenant)).secret


@pytest.mark.parametrize(
    ("who", "examples"),
    [*EXAMPLES.items(), *(pytest.param(*more, marks=pytest.mark.soak) for more in MORE.items())],
)
def test_no_request_makes_the_controller_fail_or_talk(
    target: Live, who: str, examples: int
) -> None:
    """Nor does a viewer change anything, or another tenant's job show in any answer."""
    import schemathesis  # it takes seconds
    from schemathesis.checks import not_a_server_error

    headers = {"Authorization": f"Bearer {bearer(target, who)}"}
    schema = schemathesis.openapi.from_url(f"{target.client.url}/schema/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]  # type: ignore[union-attr]
    assert len(operations) >= 9
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        def hold(case: Any) -> None:
            if case.query and "wait_s" in case.query:
                case.query["wait_s"] = 0  # it is tested elsewhere that waiting ends
            answer = case.call_and_validate(headers=headers, checks=[not_a_server_error])
            if who in ("viewer", "member"):
                assert CANARY not in answer.text
            if who == "viewer" and case.method != "GET" and not case.path.startswith(OWN):
                assert answer.status_code >= 400, (case.method, case.path)

        hold()
    target.client.set_policy(Policy())  # one that was accepted may keep all nodes as spares
    assert target.wait(target.run("true", cpu_milli=0)) == "succeeded", "it still works"
    assert CANARY in {row.name for row in target.client.jobs(finished=True, limit=1000)}


def test_the_schema_describes_the_fields_of_jobs_and_services(target: Live) -> None:
    with urllib.request.urlopen(f"{target.client.url}/schema/openapi.json") as answer:
        schemas = json.load(answer)["components"]["schemas"]
    described = schemas["JobSpec"]["properties"]["time_limit_ms"]["description"]
    assert described == f"`time_limit` in a file: {JOB['time_limit'].help}"
    described = schemas["Scale"]["properties"]["idle_ms"]["description"]
    assert described == f"`idle` in a file: {SERVICE['idle'].help}"


def test_nothing_is_answered_without_the_token(target: Live) -> None:
    from shoal.client import Client, ShoalError

    with Client(target.client.url, "wrong") as stranger:
        for call in (stranger.status, stranger.nodes, stranger.jobs, stranger.events):
            with pytest.raises(ShoalError, match="token is missing or wrong") as caught:
                call()
            assert caught.value.status == 401
