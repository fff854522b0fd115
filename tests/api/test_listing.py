"""The list of all jobs: found by words and filters, in any order, page by page while jobs end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest

from shoal.control.store import events
from shoal.model.columns import COLUMNS
from shoal.model.job import Phase
from tests.api.server import Reply, serving
from tests.api.world import POLICY, World

JOBS = 14


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with serving(tmp_path_factory.mktemp("listing") / "home", POLICY) as server:
        yield World(server)


def listed(world: World, who: str = "member", **query: Any) -> Reply:
    path = f"/v1/jobs?{urlencode(query, doseq=True)}"
    reply = world.server.call(world.tokens[who], "GET", path)
    assert reply.status == 200, reply
    return reply


def names(reply: Reply) -> list[str]:
    return [row["name"] for row in msgspec.json.decode(reply.body)]


def found(world: World, who: str = "member", **query: Any) -> set[str]:
    return set(names(listed(world, who, sort="-submitted", **query)))


def end(world: World, job: str) -> None:
    world.until(job, Phase.RUNNING)
    world.on_loop(lambda: world._end(job))
    world.until(job, None)


@pytest.fixture(scope="module")
def jobs(world: World) -> list[str]:
    """Half of them have ended."""
    made = [
        world.submit("member", f"many-{n % 3}{n:02}", cpu_milli=10, labels={"turn": str(n % 2)})
        for n in range(JOBS)
    ]
    for job in made[::2]:
        end(world, job)
    return made


def pages(world: World, turn: Any = None, **query: Any) -> list[str]:
    """The ids of all pages. `turn` is called between two of them."""
    ids: list[str] = []
    cursor: dict[str, str] = {}
    for _ in range(200):
        reply = listed(world, **query, **cursor)
        ids += [row["id"] for row in msgspec.json.decode(reply.body)]
        if "shoal-next" not in reply.headers:
            return ids
        cursor = {"cursor": reply.headers["shoal-next"]}
        if turn is not None:
            turn()
    raise AssertionError("it does not end")


def test_words_and_filters_find_live_and_ended_jobs(world: World, jobs: list[str]) -> None:
    done, live = world.ours["done"], world.ours["job"]
    assert found(world, q="OURdone") == {"ourdone"}
    assert found(world, q=done) >= {"ourdone"}
    assert found(world, q="ourjobcommand") == {"ourjob"}, "the command"
    assert found(world, q="anna our command") >= {"ourdone", "ourjob"}, "each word somewhere"
    assert found(world, q="anna nosuchword") == set()
    assert found(world, q="turn=1 many") == {f"many-{n % 3}{n:02}" for n in range(1, JOBS, 2)}
    assert found(world, q='"we%ird_\\') == set()
    assert found(world, service="ourservice") == {"ourservice-v1"}
    assert found(world, on_node="n1", q="ourdone") == {"ourdone"}
    assert found(world, state="succeeded", q="our") == {"ourdone"}
    submitted = world.ask("member", "GET", f"/v1/jobs/{live}")["submitted_ms"]
    early = found(world, until_ms=submitted)
    assert {"ourdone", "ourjob"} <= early and not any(name.startswith("many") for name in early)
    assert found(world, since_ms=submitted + 10**9) == set()
    assert found(world, user="nobody") == set()
    assert found(world, tenant="zebratenant") == set() == found(world, q="zebra")
    assert found(world, "operator", q="zebradone") == {"zebradone"}
    assert len(jobs) == JOBS


@pytest.mark.parametrize("by", [*(one.name for one in COLUMNS.values() if one.sorts), "attempts"])
def test_every_order_is_paged_without_gaps_or_repeats(
    world: World, jobs: list[str], by: str
) -> None:
    for sort in (by, f"-{by}"):
        whole = [row["id"] for row in msgspec.json.decode(listed(world, sort=sort).body)]
        assert pages(world, sort=sort, limit=4) == whole
        assert set(jobs) <= set(whole) and len(set(whole)) == len(whole)
    back = [row["id"] for row in msgspec.json.decode(listed(world, sort=by).body)]
    assert back == whole[::-1]


def test_no_job_is_missed_or_told_twice_while_jobs_end(world: World, jobs: list[str]) -> None:
    made = [world.submit("member", f"ends-{n}", cpu_milli=10) for n in range(8)]
    for sort in ("-submitted", "name", "-user", "gpus"):
        left = [job for job in made if world.server.loop.tick.state.jobs.get(job)][:2]

        def turn(left: list[str] = left) -> None:
            if left:
                end(world, left.pop())

        ids = pages(world, turn, sort=sort, limit=3)
        assert len(ids) == len(set(ids)), f"by {sort} one comes twice"
        assert {*made, *jobs} <= set(ids), f"by {sort} one is missing"


def test_a_job_that_ends_between_two_looks_comes_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [world.submit("member", f"sudden-{n}", cpu_milli=10) for n in range(3)]
    world.until(made[1], Phase.RUNNING)
    listed_, ends = world.server.store.listed, [made[1]]

    def late(*given: Any) -> Any:
        while ends:
            end(world, ends.pop())
        return listed_(*given)

    monkeypatch.setattr(world.server.store, "listed", late)
    assert pages(world, sort="-submitted", q="sudden") == made[::-1]
    assert world.ask("member", "GET", f"/v1/jobs/{made[1]}")["state"] == "succeeded"


def test_a_search_that_finds_little_stops_and_goes_on(
    world: World, jobs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "LOOKED_MAX", 2)
    for sort in ("-submitted", "ended"):
        reply = listed(world, sort=sort, q="many", label="turn=0", limit=3)
        assert "shoal-next" in reply.headers
        ids = pages(world, sort=sort, q="many", label="turn=0", limit=3)
        assert sorted(ids) == sorted(jobs[::2])
    both = pages(world, sort="-submitted", q="many", limit=10)
    assert both == jobs[::-1], "live ones do not run ahead of what was looked at"
    reply = listed(world, sort="name", q="many", limit=3)
    assert reply.headers["shoal-left-out"] == "true", "and says what it could not sort"


def test_what_matches_is_counted(world: World, jobs: list[str]) -> None:
    every = listed(world, "operator", sort="-submitted", limit=1, count="true")
    rows = msgspec.json.decode(listed(world, "operator", sort="-submitted", limit=10_000).body)
    assert every.headers["shoal-count"] == str(len(rows))
    some = listed(world, sort="-submitted", limit=1, count="true", q="many", state="succeeded")
    assert some.headers["shoal-count"] == f"about {len(jobs[::2])}"
    live = listed(world, sort="-submitted", limit=1, count="true", q="many", state="live")
    assert live.headers["shoal-count"] == str(len(jobs[1::2])), "live ones are counted exactly"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"sort": "color"}, "sort"),
        ({"sort": "name", "cursor": "x"}, "cursor"),
        ({"sort": "name", "cursor": "WzEsMiwzXQ=="}, "cursor"),  # [1,2,3]: a number is no name
        ({"sort": "gpus", "cursor": "WzEsMTIzNDU2Nzg5MDEyMzQ1Njc4OTAsM10="}, "cursor"),
        ({"q": "x" * 201}, "q"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(
    world: World, query: dict[str, str], field: str
) -> None:
    reply = world.server.call(world.tokens["member"], "GET", f"/v1/jobs?{urlencode(query)}")
    assert reply.status in (400, 422)
    problem = msgspec.json.decode(reply.body)
    assert problem["field"] == field and "\n" not in problem["message"]


def test_waiting_jobs_are_grouped_by_reason_and_a_group_opens(world: World) -> None:
    waits = [world.submit("member", f"wide-{n}", gpus=4) for n in range(3)]

    def queue(who: str, **query: Any) -> Any:
        return world.ask(who, "GET", f"/v1/queue?{urlencode(query)}")

    view = queue("member")
    (group,) = [one for one in view["groups"] if one["count"] >= 3]
    assert group["like"], "only the first was asked"
    opened = queue("member", group=group["key"])["rows"]
    assert {row["id"] for row in opened} >= set(waits)
    assert all(row["why"] for row in opened)
    whole = queue("operator")
    total = sum(one["count"] for one in whole["groups"])
    assert total == whole["waiting"]
    theirs = queue("them")
    assert theirs["waiting"] == 0 < len(waits) < view["waiting"], "each counts their own"
    assert not any(row["id"] in waits for row in queue("them", group=group["key"])["rows"])
    assert sum(one["count"] for one in theirs["groups"]) < total
    assert queue("member", group="00000000")["rows"] == []
    rows = listed(world, sort="-submitted", group=group["key"])
    ids = {row["id"] for row in msgspec.json.decode(rows.body)}
    assert {*waits} <= ids, "the list of jobs is filtered by the same"
    assert not {*waits} & {
        row["id"] for row in msgspec.json.decode(listed(world, "them", group=group["key"]).body)
    }
    assert not found(world, group="00000000")
    assert not world.leaks(msgspec.json.encode([view, opened]))
