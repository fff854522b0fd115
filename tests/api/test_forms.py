"""The form of a job: its table, a job that is run again, what stays hidden, and one in the place of
another."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from shoal.forms.fields import COMMON, JOB
from shoal.model.job import Phase
from tests.api.server import Reply, serving
from tests.api.world import POLICY, World

HOOK = "failed=https://hooks.example.com/services/verysecret"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with serving(tmp_path_factory.mktemp("forms") / "home", POLICY) as server:
        yield World(server)


def fill(world: World, who: str, path: str = "/v1/form/submit", **body: Any) -> Reply:
    return world.server.call(world.tokens[who], "POST", path, body)


def submitted(world: World, who: str, **body: Any) -> dict[str, Any]:
    reply = fill(world, who, **body)
    assert reply.status == 201, reply
    found: dict[str, Any] = msgspec.json.decode(reply.body)
    return found


def refused(reply: Reply) -> tuple[int, str, str]:
    problem = msgspec.json.decode(reply.body)
    return reply.status, problem["field"], problem["message"]


def spec_of(world: World, job: str) -> Any:
    live = world.server.loop.tick.state.live(job)
    assert live is not None
    return live.spec


def waiting(world: World, who: str = "member", **fields: Any) -> str:
    """A job that cannot start, because others hold the GPUs."""
    job = world.submit(who, "ourbig", gpus=4, **fields)
    world.until(job, Phase.WAITING)
    return job


def test_the_table_is_that_of_the_command_line(world: World) -> None:
    told = {one["name"]: one for one in world.ask("viewer", "GET", "/v1/fields")}
    assert list(told) == [name for name in JOB if name != "pack"]
    assert {name for name, one in told.items() if one["common"]} == set(COMMON)
    assert told["within"]["choices"] == ["anywhere", "node", "rack", "block"]
    assert (told["priority"]["least"], told["priority"]["most"]) == (-1000, 1000)
    kinds = {name: one["kind"] for name, one in told.items()}
    assert [kinds[name] for name in ("command", "gpus", "strict", "within", "env", "retries")] == [
        "long",
        "text",
        "switch",
        "choice",
        "lines",
        "number",
    ]


def test_what_is_filled_in_is_read_and_a_wrong_field_is_named(world: World) -> None:
    fields = {"command": "python t.py --name 'a b'", "gpus": "0.5", "env": ["A=1 2"]}
    view = msgspec.json.decode(fill(world, "member", "/v1/form", fields=fields).body)
    assert shlex.split(view["command_line"])[2:] == [
        *("-g", "0.5", "--env", "A=1 2", "--", "python", "t.py", "--name", "a b"),
    ]
    as_file = msgspec.json.decode(fill(world, "member", "/v1/form", file=view["file"]).body)
    assert as_file["fields"] == view["fields"] == fields
    for body, field, says in (
        ({"fields": {"command": "true", "gpus": "many"}}, "gpus", "is not a number of GPUs"),
        ({"fields": {"command": "true", "gpus": "99"}}, "gpus", "no node has more than 4"),
        ({"fields": {"command": "true", "secret": ["nosuch"]}}, "secret", "nosuch"),
        ({"fields": {"command": "true", "priority": "1000"}}, "priority", "is at most"),
        ({"fields": {"command": "true"}, "instead": True}, "like", "in whose place"),
        ({"fields": {"command": "true"}, "key": "k" * 129}, "key", "longer than"),
        ({"file": "command: [unclosed"}, "", "not YAML"),
        ({}, "command", "is missing"),
    ):
        reply = fill(world, "member", **body)
        assert refused(reply)[1] == field, reply
        assert says in refused(reply)[2]
        assert 400 <= reply.status < 500
    early = fill(world, "member", "/v1/form", fields={"command": "true", "gpus": "many"})
    assert (early.status, msgspec.json.decode(early.body)["problem"]["field"]) == (200, "gpus")


def test_a_job_runs_again_with_a_change_and_what_is_hidden_is_carried_over(world: World) -> None:
    world.ask("member", "PUT", f"/v1/packages/{world.ours['package']}", b"our package")
    old = world.submit(
        "member",
        "ourhook",
        notify=[HOOK, "mail:me@example.com"],
        package=world.ours["package"],
        env={"SHOAL_TASKS_SECRET": "verysecret", "A": "b"},
        time_limit_ms=60_000,
    )
    reply = world.server.call(world.tokens["viewer"], "GET", f"/v1/form?like={old}")
    assert b"verysecret" not in reply.body
    form = msgspec.json.decode(reply.body)
    assert form["package"] == world.ours["package"]
    assert "hooks" not in form["command_line"] and "hidden" in " ".join(form["notes"])
    fields = {**form["fields"], "time_limit": "5m"}
    again = submitted(world, "member", fields=fields, like=old)
    assert "verysecret" not in str(again)
    was, now = spec_of(world, old), spec_of(world, again["id"])
    assert now == msgspec.structs.replace(was, time_limit_ms=300_000)
    other = submitted(world, "member", fields={**fields, "notify": ["mail:me@example.com"]})
    assert spec_of(world, other["id"]).notify == ("mail:me@example.com",)
    assert not spec_of(world, other["id"]).package, "without the old job, nothing of it"


def test_another_tenants_job_is_as_unknown_as_none(world: World) -> None:
    fields = {"command": "true"}
    for like, instead in ((world.theirs["done"], False), (world.theirs["job"], True)):
        for path in ("/v1/form", "/v1/form/submit"):
            theirs = fill(world, "member", path, fields=fields, like=like, instead=instead)
            never = fill(world, "member", path, fields=fields, like="j99999", instead=instead)
            assert theirs.status == never.status == 404
            assert theirs.body.replace(like.encode(), b"j99999") == never.body
    assert fill(world, "viewer", fields=fields).status == 403


def test_a_key_makes_one_job_however_often_it_is_sent_at_once(world: World) -> None:
    body = {"fields": {"command": "true", "name": "ouronce"}, "key": "page-1"}
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: submitted(world, "member", **body)["id"], range(16)))
    assert len(set(made)) == 1


def test_a_change_takes_the_place_of_a_job_that_waits_once(world: World) -> None:
    old = waiting(world, after=[f"{world.ours['done']}:any"])
    form = world.ask("member", "GET", f"/v1/form?like={old}&instead=true")
    assert form["waits"] and form["fields"]["after"] == [f"{world.ours['done']}:any"]
    body = {"fields": {**form["fields"], "gpus": ""}, "like": old, "instead": True, "key": "swap"}
    with ThreadPoolExecutor(8) as pool:
        made = {job["id"] for job in pool.map(lambda _: submitted(world, "member", **body), "1234")}
    (new,) = made
    world.until(old, None)
    was = world.ask("member", "GET", f"/v1/jobs/{old}")
    assert (was["state"], was["why"]) == (
        "cancelled",
        f"replaced by {new}, which asks for something else",
    )
    late = fill(world, "member", fields=body["fields"], like=old, instead=True, key="other")
    assert refused(late)[::2] == (404, f"there is no live job {old}")
    assert submitted(world, "member", **body)["id"] == new, "an answer that was lost is told again"


def test_what_others_count_on_is_not_replaced(world: World) -> None:
    old = waiting(world)
    world.submit("member", "ourafter", after=[old])
    body: dict[str, Any] = {"fields": {"command": "true"}, "instead": True}
    assert "wait for it" in refused(fill(world, "member", like=old, **body))[2]
    running = world.submit("member", "ourruns")
    world.until(running, Phase.RUNNING)
    assert "has already started" in refused(fill(world, "member", like=running, **body))[2]
    alone = waiting(world)
    after: dict[str, Any] = {"fields": {"command": "true", "after": [alone]}, "instead": True}
    assert refused(fill(world, "member", like=alone, **after))[1] == "after"
    assert world.ask("member", "GET", f"/v1/jobs/{alone}")["state"] == "waiting"


def test_an_element_runs_again_on_its_own_and_a_replica_not_at_all(world: World) -> None:
    array = world.submit("member", "ourarray", sweep={"ranges": [[3, 3, 1]]})
    world.until(f"{array}.3", Phase.RUNNING)
    form = world.ask("member", "GET", f"/v1/form?like={array}.3")
    assert not any("SHOAL_" in line for line in form["fields"].get("env", []))
    again = submitted(world, "member", fields=form["fields"], like=f"{array}.3")
    assert not spec_of(world, again["id"]).array
    replica = next(
        job.id
        for job in world.server.loop.tick.state.jobs.values()
        if job.spec.service == world.ours["service"]
    )
    reply = world.server.call(world.tokens["member"], "GET", f"/v1/form?like={replica}")
    assert refused(reply)[0] == 422


def test_a_waiting_job_has_remedies_in_words_and_as_what_to_do(world: World) -> None:
    old = waiting(world)
    world.ask("admin", "POST", "/v1/nodes/n1/cordon")
    for job in list(world.server.loop.tick.state.jobs.values()):
        if job.phase is Phase.RUNNING and job.spec.gpus:
            world.ask("admin", "POST", f"/v1/jobs/{job.id}/cancel")
            world.until(job.id, Phase.STOPPING)
            world.on_loop(lambda job=job: world._end(job.id))  # type: ignore[misc]
            world.until(job.id, None)
        elif job.phase is Phase.WAITING and job.spec.gpus and job.id != old:  # it would come first
            world.ask("admin", "POST", f"/v1/jobs/{job.id}/cancel")
    world.server.loop.clock.ms += 10_000  # type: ignore[attr-defined]
    why = world.ask("member", "GET", f"/v1/jobs/{old}/why")
    assert why["remedies"] == [
        {
            "text": "if n1 is uncordoned, it would start now",
            "node": "n1",
            "fields": {},
            "tenant": "",
            "how": "uncordon",
            "nodes": ["n1"],
            "cost": "n1 was cordoned 10s ago by ada",
        }
    ]
    foreseen = world.ask("operator", "GET", "/v1/queue")["rows"]
    assert all([one["text"] for one in row["remedies"]] == row["help"] for row in foreseen)
    assert any(row["remedies"] for row in foreseen)
    assert world.server.call(world.tokens["member"], "POST", "/v1/nodes/n1/uncordon").status == 403
    world.ask("admin", "POST", "/v1/nodes/n1/uncordon")
