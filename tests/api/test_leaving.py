"""A user who is removed: what is left is listed first, and becomes what the admin chose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from shoal.model.policy import Policy
from tests.api.server import OPERATORS, Server, serving

NIGHTLY = {
    "name": "nightly",
    "cron": "0 3 * * *",
    "jobs": [{"name": "a", "spec": {"command": ["true"], "cpu_milli": 100}}],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("leaving") / "home", Policy()) as made:
        made.tenant("lab")
        made.tenant("art")
        made.token("heir", "lab")
        made.token("outsider", "art")
        yield made


def ask(server: Server, token: str, method: str, path: str, body: Any = None) -> Any:
    reply = server.call(token, method, path, body)
    assert reply.status in (200, 201), (path, reply)
    return msgspec.json.decode(reply.body)


def filled(server: Server, user: str) -> str:
    """The id of a job; its user also has a service, a schedule, a secret and a rule."""
    token = server.token(user, "lab")
    job = {"command": ["sleep"], "name": "train", "gpus": 1}
    made = ask(server, token, "POST", "/v1/jobs", {"spec": job})["id"]
    service = {"name": f"{user}-chat", "replica": {"command": ["serve"], "cpu_milli": 100}}
    ask(server, token, "PUT", f"/v1/services/{user}-chat", service)
    ask(server, token, "PUT", f"/v1/schedules/{user}", {**NIGHTLY, "name": user})
    ask(server, token, "PUT", f"/v1/secrets/{user}key", b"value")
    ask(server, token, "POST", "/v1/rules", {"wish": "failed=mail:me@example.com"})
    return str(made)


def thens(view: Any) -> dict[str, str]:
    return {one["kind"]: one["then"] for one in view["left"]}


def test_by_default_what_runs_continues_and_schedules_pause(server: Server) -> None:
    job = filled(server, "ann")
    listed = ask(server, OPERATORS, "GET", "/v1/users/ann/leaving")
    assert thens(listed) == {
        "job": "continues",
        "service": "continues",
        "schedule": "is paused",
        "token": "is revoked",
        "notice": "is removed",
        "secret": "stays the tenant's",
    }
    assert next(one for one in listed["left"] if one["kind"] == "job")["id"] == job
    assert ask(server, OPERATORS, "DELETE", "/v1/users/ann") == listed
    assert ask(server, OPERATORS, "GET", f"/v1/jobs/{job}")["state"] != "cancelled"
    schedule = server.run(lambda: server.loop.state.schedules["lab/ann"])
    assert schedule.paused == "its user ann was removed"
    assert server.call(OPERATORS, "DELETE", "/v1/users/ann").status == 404


def test_jobs_and_services_end_and_an_heir_gets_the_schedules(server: Server) -> None:
    job = filled(server, "bob")
    for heir in ("outsider", "nobody", "bob"):  # in another tenant, not there, the one who leaves
        refused = server.call(OPERATORS, "DELETE", f"/v1/users/bob?end=true&heir={heir}")
        assert refused.status == 422, refused
        assert ask(server, OPERATORS, "GET", "/v1/users/bob/leaving")["left"]  # nothing was done
    done = ask(server, OPERATORS, "DELETE", "/v1/users/bob?end=true&heir=heir")
    assert thens(done) | {"secret": "", "notice": ""} == {
        "job": "is cancelled",
        "service": "is stopped",
        "schedule": "goes to heir",
        "token": "is revoked",
        "notice": "",
        "secret": "",
    }
    state = server.run(lambda: server.loop.state)
    assert job not in state.jobs or state.jobs[job].stop_cause is not None
    assert "bob-chat" not in state.services or state.services["bob-chat"].stopping
    schedule = state.schedules["lab/bob"]
    assert (schedule.owner, schedule.spec.user, schedule.paused) == ("heir", "heir", "")
    assert schedule.next_ms
    audit = ask(server, OPERATORS, "GET", "/v1/audit?verb=users.remove&limit=1")["entries"]
    assert (audit[0]["on"], audit[0]["status"]) == ("bob", 200)
