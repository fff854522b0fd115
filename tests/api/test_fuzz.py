"""Whatever is sent to the API, it never fails by itself: generated from its own schema."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from shoal.forms.fields import JOB, SERVICE
from shoal.model.policy import Policy
from tests.live.cluster import Live, live_cluster


@pytest.fixture(scope="module")
def target() -> Iterator[Live]:
    with live_cluster(nodes=2, gpus=2) as live:
        yield live


def test_no_request_makes_the_controller_fail(target: Live) -> None:
    import schemathesis  # it takes seconds
    from schemathesis.checks import not_a_server_error

    token = target.home.token.read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    schema = schemathesis.openapi.from_url(f"{target.client.url}/schema/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]  # type: ignore[union-attr]
    assert len(operations) >= 9
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(
            max_examples=15,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        def hold(case: Any) -> None:
            if case.query and "wait_s" in case.query:
                case.query["wait_s"] = 0  # it is tested elsewhere that waiting ends
            case.call_and_validate(headers=headers, checks=[not_a_server_error])

        hold()
    target.client.set_policy(Policy())  # one that was accepted may keep all nodes as spares
    assert target.wait(target.run("true", cpu_milli=0)) == "succeeded", "it still works"


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
