"""The policy, budgets and the ledger's parts through the API: what people see, set and may not."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from shoal.forms import ledger_csv
from shoal.ledger.report import resets_ms
from shoal.model.budget import BudgetPeriod
from shoal.model.job import Phase
from shoal.model.ledger import By, LedgerRow, LedgerView
from shoal.model.policy import Policy, version_of
from tests.api.server import Reply, serving
from tests.api.world import MARK, OURS, POLICY, THEIRS, World

HOUR_MS = 3_600_000
BYS = ("account", "tenant", "user", "job", "node", "day", "hour")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with serving(tmp_path_factory.mktemp("policy") / "home", POLICY) as server:
        made = World(server)
        made.until(made.submit("member", "ourgpu", gpus=1), Phase.RUNNING)
        server.loop.clock.ms += HOUR_MS // 2  # type: ignore[attr-defined]
        yield made


def call(world: World, who: str, method: str, path: str, body: Any = None) -> Reply:
    return world.server.call(world.tokens[who], method, path, body)


def test_of_two_who_looked_at_the_same_policy_one_is_refused(world: World) -> None:
    seen = world.ask("admin", "GET", "/v1/policy/form")
    now = world.server.loop.policy
    assert seen["version"] == version_of(now)
    mine = msgspec.structs.replace(now, hangs_max=5)
    theirs = msgspec.structs.replace(now, hangs_max=6)
    where = f"/v1/policy?expected={seen['version']}"
    assert call(world, "admin", "PUT", where, mine).status == 200
    late = call(world, "operator", "PUT", where, theirs)
    assert late.status == 409
    assert "changed by someone else" in late.message
    assert world.server.loop.policy == mine
    again = call(world, "admin", "PUT", where, mine)
    assert again.status == 200, "who asks again for what is in force is told that it is"
    assert call(world, "operator", "PUT", "/v1/policy", theirs).status == 200, "without a version"
    records = world.ask("viewer of all", "GET", "/v1/policy/history?limit=2")
    told = [
        (one["who"], [(c["field"], c["before"], c["after"]) for c in one["changes"]])
        for one in records
    ]
    assert told == [
        ("a user", [("hangs_max", "5", "6")]),
        ("ada", [("hangs_max", "3", "5")]),
    ]
    old = world.ask("admin", "GET", f"/v1/policy/history/{records[1]['seq']}")
    assert "hangs_max: 5" in old["text"]
    assert call(world, "admin", "GET", "/v1/policy/history/1").status == 404, "another event"
    assert call(world, "member", "GET", "/v1/policy/history").status == 403


def test_a_draft_is_read_and_compared_but_changes_nothing(world: World) -> None:
    now = world.server.loop.policy

    def draft(**body: Any) -> Any:
        return world.ask("admin", "POST", "/v1/policy/draft", body)

    changes = {
        "patience": "30m",
        "idle": "sleep",
        "tenants": {OURS: {"quota_gpus": 2}, THEIRS: None},
    }
    found = draft(changes=changes)
    fields = {one["field"]: (one["before"], one["after"], one["about"]) for one in found["changes"]}
    assert fields["patience"][:2] == ("1h", "30m")
    assert fields["idle"][:2] == ("end", "sleep")
    assert fields[f"tenants.{OURS}.quota_gpus"][:2] == ("0", "2")
    assert "guaranteed" in fields[f"tenants.{OURS}.quota_gpus"][2]
    assert fields[f"tenants.{THEIRS}"][1] == "", "it would go"
    assert len(fields) == 4
    assert found["expected"] == version_of(now)
    wanted = msgspec.convert(found["policy"], Policy)
    assert found["version"] == version_of(wanted)
    same = draft(text=found["text"])
    assert msgspec.convert(same["policy"], Policy) == wanted, "as text, it is the same"
    assert draft(changes={})["changes"] == []
    assert world.server.loop.policy == now
    for body, field in (
        ({"changes": {"patience": "soon"}}, "patience"),
        ({"changes": {"patients": "1h"}}, ""),
        ({"changes": {"tenants": {OURS: {"weight": 0}}}}, f"tenants.{OURS}.weight"),
        ({"changes": {"tenants": {OURS: 7}}}, f"tenants.{OURS}"),
        ({"text": "patience: [", "ending": "yaml"}, ""),
        ({"text": "{}", "changes": {"spares": 1}}, "changes"),
    ):
        reply = call(world, "admin", "POST", "/v1/policy/draft", body)
        assert reply.status == 422, (body, reply)
        assert msgspec.json.decode(reply.body).get("field", "") == field, reply
        assert "\n" not in reply.message
    assert call(world, "member", "POST", "/v1/policy/draft", {"changes": {}}).status == 403


def test_a_given_policy_is_replayed_only_if_it_could_be_set(world: World) -> None:
    policy = msgspec.to_builtins(world.server.loop.policy)
    ask = {"policies": ["current", "edited"]}
    for body, field in (
        (ask, "policy"),
        ({"policies": ["current"], "policy": policy}, "policy"),
        ({**ask, "policy": {**policy, "order": "best"}}, "policy.order"),
    ):
        reply = call(world, "admin", "POST", "/v1/simulation", body)
        assert reply.status == 422, (body, reply)
        assert msgspec.json.decode(reply.body)["field"] == field


def rows(world: World, who: str, by: str, **only: str) -> list[dict[str, Any]]:
    more = "".join(f"&{name}={value}" for name, value in only.items())
    now_ms = world.server.loop.clock.now_ms()
    return list(world.ask(who, "GET", f"/v1/ledger?by={by}&to_ms={now_ms}{more}")["rows"])


def by_account(found: list[dict[str, Any]], key: str | None = None) -> dict[str, int]:
    sums: dict[str, int] = {}
    for row in found:
        if key in (None, row["key"]):
            sums[row["account"]] = sums.get(row["account"], 0) + row["gpu_us"]
    return sums


def test_parts_of_the_ledger_add_up_to_the_whole_exactly(world: World) -> None:
    tenants = rows(world, "admin", "tenant")
    for tenant, user in ((OURS, "anna"), (THEIRS, "zebrauser")):
        whole = by_account(tenants, tenant)
        assert sum(whole.values()) >= HOUR_MS // 2 * 1000
        for by in BYS:
            assert by_account(rows(world, "admin", by, tenant=tenant)) == whole, by
        users = rows(world, "admin", "user", tenant=tenant)
        jobs = rows(world, "admin", "job", tenant=tenant, user=user)
        assert by_account(jobs) == by_account(users, user)
        text = call(world, "admin", "GET", f"/v1/ledger/csv?by=job&tenant={tenant}")
        assert text.headers["content-type"].startswith("text/csv")
        assert text.headers["content-disposition"].startswith("attachment")
        assert sum(
            int(row["gpu_us"]) for row in csv.DictReader(io.StringIO(text.body.decode()))
        ) == sum(by_account(rows(world, "admin", "job", tenant=tenant)).values())
    nobody = by_account(tenants, "")
    everything = by_account(rows(world, "admin", "account"))
    parts = [nobody, by_account(tenants, OURS), by_account(tenants, THEIRS)]
    assert everything == {
        account: sum(part.get(account, 0) for part in parts) for account in everything
    }
    assert by_account(rows(world, "member", "account", tenant=OURS)) == by_account(tenants, OURS)
    assert rows(world, "member", "job", user="zebrauser") == []
    for tenant in (THEIRS, "never"):
        refused = call(world, "member", "GET", f"/v1/ledger?by=job&tenant={tenant}")
        assert (refused.status, refused.message) == (
            404,
            f"there is no tenant '{tenant}' that you may see",
        )


def test_a_gauge_says_what_is_used_held_and_how_long_it_lasts(world: World) -> None:
    found = world.ask("admin", "GET", "/v1/budgets")
    assert [one["tenant"] for one in found] == [THEIRS, OURS], "the fullest first"
    (ours,) = world.ask("member", "GET", "/v1/budgets")
    assert ours == found[1]
    now_ms = world.server.loop.clock.now_ms()
    (gauge,) = ours["gauges"]
    assert ours["gpus"] == gauge["per_hour"] == 1.0
    assert 0.5 <= gauge["used"] < 0.51
    assert gauge["limit"] == 100
    assert gauge["ends_ms"] == pytest.approx(now_ms + (100 - gauge["used"]) * HOUR_MS, abs=1000)
    assert ours["resets_ms"] == resets_ms(BudgetPeriod.MONTH, now_ms)
    assert ours["level"] is None
    assert MARK not in call(world, "viewer", "GET", "/v1/budgets").body.lower()
    assert resets_ms(BudgetPeriod.MONTH, 1_797_000_000_000) == 1_798_761_600_000  # 2026-12-11
    assert resets_ms(BudgetPeriod.TOTAL, now_ms) is None


def test_a_spreadsheet_gets_numbers_and_no_formulas() -> None:
    row = LedgerRow(
        key="=1+1", label='@a,"b"', account="useful", gpu_us=2**53 + 1, gpu_ms=0.0, cost=1.5
    )
    view = LedgerView(
        from_ms=0, to_ms=1, by=By.JOB, capacity_gpu_us=0, capacity_gpu_ms=0, rows=[row], accounts=[]
    )
    text = ledger_csv.text_of(view)
    (read,) = csv.DictReader(io.StringIO(text))
    assert read["job"] == "'=1+1"
    assert read["name"] == '\'@a,"b"'
    assert read["gpu_us"] == "9007199254740993"
    assert read["cost"] == "1.500000"
    assert '"\'@a,""b"""' in text
