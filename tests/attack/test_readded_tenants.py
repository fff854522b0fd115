"""A tenant that is removed and added again is another one: nothing of the earlier is its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness.waiting import until

from shoal.model.job import MemberRef
from shoal.model.policy import Policy, Tenant
from shoal.model.report import LogChunk, RemoveTenant, RemoveUser
from tests.api.server import OPERATORS, Reply, Server, serving

SECRET = "the earlier tenant's own"
PACKAGE = b"what the earlier tenant packed"
NAME = hashlib.sha256(PACKAGE).hexdigest()
JOB = {
    "command": ["true", SECRET],
    "cpu_milli": 1,
    "env": {"KEY": SECRET},
    "name": "mine",
    "priority": 7,
    "begin_ms": 9_000_000_000_000,  # it waits, so that it ends when it is cancelled
}

PLAIN = {"command": ["true"], "cpu_milli": 1}


class Twice:
    """A tenant `lab` with jobs, removed, and another one of that name."""

    def __init__(self, server: Server) -> None:
        self.server = server
        server.tenant("lab")
        self.uid = self.record.uid
        self.old = server.token("ann", "lab")
        self.ended = self.submit(self.old, key="the same")
        array = {"ranges": [[0, 1, 1]]}
        self.array = self.submit(self.old, sweep=array)
        self.started_ms = server.loop.clock.now_ms()
        chunk = LogChunk(MemberRef(self.ended, 1, 0), 0, SECRET.encode())
        server.run(lambda: server.loop.log(chunk))
        put = server.call(self.old, "PUT", f"/v1/packages/{NAME}", PACKAGE)
        assert put.status == 200, put.body
        schedule = {"name": "nightly", "cron": "0 3 * * *", "jobs": [{"name": "a", "spec": PLAIN}]}
        assert server.call(self.old, "PUT", "/v1/schedules/nightly", schedule).status == 200
        secret = server.call(self.old, "PUT", "/v1/secrets/word", SECRET.encode())
        assert secret.status < 300, secret.body
        for job in (self.ended, self.array):
            assert server.call(self.old, "POST", f"/v1/jobs/{job}/cancel").status == 200
        until(lambda: not server.run(lambda: dict(server.loop.state.jobs)))
        assert self.sees(self.old, f"/v1/jobs/{self.ended}"), "the earlier tenant sees it"
        server.loop.clock.ms += 60_000  # type: ignore[attr-defined]
        server.ask(RemoveTenant("lab"))
        server.ask(RemoveUser("ann"))
        server.tenant("lab")
        self.new = server.token("ann", "lab")
        self.own = self.submit(self.new)

    @property
    def record(self) -> Any:
        return self.server.run(lambda: self.server.loop.state.identity.tenants["lab"])

    def submit(self, token: str, key: str = "", **fields: Any) -> str:
        body = {"spec": {**JOB, **fields}, "key": key}
        answer = self.server.call(token, "POST", "/v1/jobs", body)
        assert answer.status == 201, answer.body
        return str(msgspec.json.decode(answer.body)["id"])

    def get(self, path: str, token: str = "") -> Reply:
        return self.server.call(token or self.new, "GET", path)

    def sees(self, token: str, path: str) -> bool:
        return self.get(path, token).status == 200


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twice]:
    policy = Policy(tenants=(Tenant(name="lab"),))
    with serving(tmp_path_factory.mktemp("twice") / "home", policy) as server:
        yield Twice(server)


PATHS = (
    "/v1/jobs/JOB",
    "/v1/jobs/JOB/why",
    "/v1/jobs/JOB/logs",
    "/v1/jobs/JOB/logs/part",
    "/v1/jobs/JOB/logs/find",
    "/v1/jobs/JOB/explanation",
    "/v1/jobs/JOB/cost",
    "/v1/jobs/JOB/series",
    "/v1/jobs/JOB/files",
    "/v1/workflows/JOB",
)


@pytest.mark.parametrize("path", PATHS)
def test_a_job_of_the_earlier_one_is_not_there(twice: Twice, path: str) -> None:
    for job in (twice.ended, twice.array):
        answer = twice.get(path.replace("JOB", job))
        assert answer.status == 404, (path, answer.body)
    if twice.get(path.replace("JOB", twice.ended), OPERATORS).status == 200:
        assert twice.get(path.replace("JOB", twice.own)).status == 200, "its own is"


LISTS = (
    "/v1/jobs?finished=true&limit=100",
    "/v1/jobs?finished=true&limit=100&sort=-submitted",
    "/v1/jobs?finished=true&limit=100&sort=name&count=true",
    "/v1/jobs?finished=true&q=earlier",
    "/v1/events?after=-1000",
    "/v1/events?after=0",
    "/v1/timeline?from_ms=0&to_ms=9000000000000",
    "/v1/schedules",
    "/v1/secrets",
    "/v1/notices",
    "/v1/ledger?by=job",
    "/v1/ledger?by=user",
)


@pytest.mark.parametrize("path", LISTS)
def test_no_list_has_anything_of_the_earlier_one(twice: Twice, path: str) -> None:
    server = twice.server
    for job in (twice.own, "none"):
        server.call(twice.new, "POST", f"/v1/jobs/{job}/cancel")
    answer = twice.get(path)
    told = answer.body.decode()
    assert answer.status in (200, 404), told
    for word in (f'"{twice.ended}"', f'"{twice.array}"', f'"{twice.array}.', "nightly"):
        assert word not in told, told
    assert answer.headers.get("shoal-count", "1") in ("1", "about 1")


def test_a_look_at_the_past_shows_nothing_of_the_earlier_one(twice: Twice) -> None:
    then = twice.get(f"/v1/moment?at_ms={twice.started_ms}")
    assert then.status in (200, 404, 422), then.body
    assert f'"{twice.ended}"' not in then.body.decode()


def test_a_key_of_the_earlier_one_is_free(twice: Twice) -> None:
    job = twice.submit(twice.new, key="the same")
    assert job != twice.ended
    assert twice.submit(twice.new, key="the same") == job


def test_a_package_of_the_earlier_one_has_to_be_sent_again(twice: Twice) -> None:
    assert twice.get(f"/v1/packages/{NAME}").status == 404
    refused = twice.server.call(
        twice.new, "POST", "/v1/jobs", {"spec": {**JOB, "package": NAME}, "key": ""}
    )
    assert refused.status == 422 and "package" in refused.body.decode()
    assert twice.server.call(twice.new, "PUT", f"/v1/packages/{NAME}", PACKAGE).status == 200
    assert twice.get(f"/v1/packages/{NAME}").status == 200


@pytest.mark.parametrize("verb", ["requeue", "retry", "cancel"])
def test_what_ended_with_the_earlier_one_does_not_run_as_this_one(twice: Twice, verb: str) -> None:
    """Not even for an admin: its processes would run as this tenant's Unix user, who could read
    their environment."""
    for job in (twice.ended, twice.array):
        path = f"/v1/jobs/{job}/{verb}"
        assert twice.server.call(twice.new, "POST", path).status == 404
        if verb != "cancel":
            assert twice.server.call(OPERATORS, "POST", path).status == 422


def test_nobody_learns_how_a_job_of_the_earlier_one_ended(twice: Twice) -> None:
    spec = {**JOB, "after": [f"{twice.ended}:fail"]}
    answer = twice.server.call(twice.new, "POST", "/v1/jobs", {"spec": spec, "key": ""})
    assert (answer.status, "there is no job" in answer.message) == (422, True)


def test_it_has_a_unix_user_of_its_own(twice: Twice) -> None:
    assert twice.record.uid != twice.uid


def test_the_page_shows_none_of_it(twice: Twice, tmp_path: Path) -> None:
    feed = twice.server.app.state["feed"]
    told = twice.server.run(lambda: feed.snapshot("lab")).decode()
    assert f'"{twice.ended}"' not in told and f'"{twice.array}"' not in told, tmp_path


def test_the_ledger_begins_with_the_tenant(twice: Twice) -> None:
    """By the hour, and the hour in which both had the name is nobody's."""
    for path in ("/v1/ledger?by=account", "/v1/ledger?by=job&from_ms=1", "/v1/ledger?by=hour"):
        view = msgspec.json.decode(twice.get(path).body)
        assert view["from_ms"] >= twice.record.since_ms, view
    assert msgspec.json.decode(twice.get("/v1/ledger", OPERATORS).body)["from_ms"] == 0
