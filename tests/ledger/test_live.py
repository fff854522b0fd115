"""The ledger of a real cluster adds up, whatever dies meanwhile."""

from __future__ import annotations

import msgspec
from harness.waiting import until

from shoal.client import Client
from shoal.core.state.events.budgets import BudgetHeld
from shoal.core.state.events.log import Event
from shoal.model.ledger import By, LedgerView, Price, PriceList
from shoal.model.policy import Tenant
from tests.ledger.worlds import capacity
from tests.live.cluster import live_cluster


def all_events(client: Client) -> list[Event]:
    found, after = [], 0
    while page := client.events(after=after, limit=10_000).events:
        found += [recorded.event for recorded in page]
        after = page[-1].seq
    return found


def assert_adds_up(client: Client, view: LedgerView) -> None:
    """Against a count of our own of who joined and left."""
    expected = sum(capacity(all_events(client), view.to_ms).values())
    assert view.capacity_gpu_us == expected
    assert sum(row.gpu_us for row in view.rows) == expected
    assert sum(account.gpu_us for account in view.accounts) == expected
    assert all(row.gpu_us > 0 for row in view.rows)
    assert not any("balance" in note for note in view.notes)


def test_nodes_and_controllers_die_and_the_report_adds_up_to_the_millisecond() -> None:
    with live_cluster(3, gpus=4) as live:
        client = live.client
        release = live.home.path / "go"
        wait = f"while [ ! -e {release} ]; do sleep 0.1; done"
        first = live.run(wait, gpus=4, name="first", user="ann", tenant="red")
        second = live.run(wait, members=2, gpus=2, user="bob")
        for job in (first, second):
            live.wait(job, "running")
        assert_adds_up(client, client.ledger())

        node = client.job(first).gang[0].node
        live.kill_agent(node)
        until(lambda: client.job(first).attempt == 2)
        live.wait(first, "running")
        live.kill_controller()
        until(lambda: client.status().epoch == 2)
        release.touch()
        assert live.wait(first) == "succeeded"
        assert live.wait(second) == "succeeded"

        for by in By:
            assert_adds_up(client, client.ledger(by=by))
        rows = client.ledger(by=By.JOB).rows
        lost = {row.account for row in rows if row.key == first}
        assert {"recompute", "useful"} <= lost  # its first attempt was for nothing
        assert {row.key for row in client.ledger(by=By.USER).rows} == {"", "ann", "bob"}
        nobody = {row.account for row in rows if row.key == ""}
        assert "free" in nobody

        cost = client.cost(second)
        assert cost.cost is None
        assert cost.gpu_us == sum(row.gpu_us for row in rows if row.key == second)
        client.set_prices(PriceList(currency="EUR", gpus={"*": Price(per_hour=36)}))
        priced = client.cost(second)
        assert priced.currency == "EUR"
        assert priced.cost is not None
        assert abs(priced.cost - cost.gpu_us / 1e8) < 1e-9
        live.kill_controller()
        until(lambda: client.status().epoch == 3)
        assert client.prices().currency == "EUR"
        assert_adds_up(client, client.ledger())


def test_a_tenant_that_has_spent_its_budget_waits_until_there_is_more() -> None:
    with live_cluster(1, gpus=4) as live:
        client = live.client
        client.set_prices(PriceList(currency="EUR", gpus={"*": Price(per_hour=1_000_000_000)}))
        poor = Tenant(name="red", budget_money=1)
        client.set_policy(msgspec.structs.replace(client.policy(), tenants=(poor,)))
        running = live.run("sleep 600", gpus=1, tenant="red")
        live.wait(running, "running")

        def held() -> bool:
            return any(isinstance(event, BudgetHeld) for event in all_events(client))

        until(held)
        notes = client.ledger(by=By.TENANT).notes
        assert any("red has spent " in note and " of 1 this month" in note for note in notes)
        waits = live.run("true", gpus=1, tenant="red")
        assert client.why(waits).why.startswith("the budget of red is used up")
        assert live.wait(live.run("true", gpus=1, tenant="blue")) == "succeeded"
        assert client.job(running).state == "running"  # nothing that runs is killed
        live.kill_controller()
        until(lambda: client.status().epoch == 2)
        assert "budget" in client.why(waits).why
        rich = Tenant(name="red", budget_money=1_000_000_000_000)
        client.set_policy(msgspec.structs.replace(client.policy(), tenants=(rich,)))
        assert live.wait(waits) == "succeeded"
        # It has slept all the while: with a policy that wants GPUs to be used, it gives them back.
        rule = {"idle_warn_ms": 1_000, "idle_reclaim_ms": 2_000}
        client.set_policy(msgspec.structs.replace(client.policy(), **rule))
        assert live.wait(running) == "cancelled"
        assert "has not used its GPUs" in client.job(running).why
        assert_adds_up(client, client.ledger())
