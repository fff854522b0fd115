"""Budgets: a warning at 80 %, a hold at 100 %, and nobody who runs is stopped unless asked."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.core.answers.why import explain
from shoal.core.features.budget import refused_keys
from shoal.core.state.load import restore
from shoal.model.budget import BudgetLevel, BudgetPeriod, Spending
from shoal.model.identity import ApiKey
from shoal.model.job import Phase
from shoal.model.policy import Policy, Tenant
from shoal.model.reason import render
from shoal.model.report import AddTenant, RemoveApiKey, SetApiKey
from tests.core.build import Cluster, kinds

HOUR = 3_600_000_000
TENANTS = (
    Tenant(name="lab", budget_gpu_hours=100),
    Tenant(name="red", parent="lab", budget_gpu_hours=10),
    Tenant(name="blue", parent="lab", budget_money=50, budget_period=BudgetPeriod.TOTAL),
)


def spent(**hours: float) -> tuple[Spending, ...]:
    return tuple(
        Spending(tenant=name, period=period, gpu_us=int(used * HOUR), money_milli=int(used * 1000))
        for name, used in hours.items()
        for period in BudgetPeriod
    )


def cluster(**rules: Any) -> Cluster:
    made = Cluster(Policy(tenants=TENANTS, **rules))
    made.join("a", gpus=4)
    return made


def why(made: Cluster, job: str) -> str:
    return render(explain(made.state, made.job(job), made.policy, made.now_ms))


def key(tokens: int, limit: int, name: str = "k1") -> Spending:
    period = BudgetPeriod.DAY
    until_ms = 86_400_000
    return Spending(
        tenant="red",
        period=period,
        gpu_us=0,
        tokens=tokens,
        key=name,
        limit=limit,
        until_ms=until_ms,
    )


def test_a_key_that_has_used_up_its_tokens_is_held_until_it_has_more() -> None:
    made = cluster()
    assert kinds(made.step(spendings=(key(999, 1_000), key(5, 0, "k2"))).events) == []
    held = made.step(spendings=(key(1_000, 1_000), key(5, 0, "k2"))).events
    assert kinds(held) == ["KeyHeld"]
    assert held[0].why == "1000 of 1000 tokens"  # type: ignore[attr-defined]
    assert made.state.accounts.held_keys == {"k1": ("red", 86_400_000)}
    assert restore(made.state.snapshot()).accounts.held_keys == made.state.accounts.held_keys
    assert kinds(made.step(spendings=(key(2_000, 1_000),)).events) == []  # it is said once
    assert kinds(made.step().events) == []  # nothing told is nothing changed
    assert kinds(made.step(spendings=(key(0, 1_000),)).events) == ["KeyFreed"]
    made.step(spendings=(key(2_000, 1_000),))
    assert kinds(made.step(spendings=(key(2_000, 5_000),)).events) == ["KeyFreed"]
    made.step(spendings=(key(2_000, 1_000),))
    gone = made.step(spendings=(key(1, 0, "k2"),)).events
    assert kinds(gone) == ["KeyFreed"]
    assert gone[0].why == "it has no quota any more"  # type: ignore[attr-defined]
    assert made.state.accounts.held_keys == {}


def test_whose_requests_are_refused() -> None:
    lab = Tenant(name="lab", budget_tokens=1_000)
    made = Cluster(Policy(tenants=(lab, Tenant(name="red", parent="lab"), Tenant(name="blue"))))
    identity = made.state.identity
    for number, tenant in enumerate(("red", "blue", "blue"), 1):
        made.ask(AddTenant(tenant))
        made.ask(SetApiKey(ApiKey(id=f"key0000{number}", hash="0" * 64, tenant=tenant)))
    assert len(identity.api_keys) == 3
    assert refused_keys(made.state) == {}
    made.step(spendings=(key(9, 9, "key00002"),))
    assert refused_keys(made.state) == {"key00002": 86_400_000}
    used = Spending(tenant="red", period=BudgetPeriod.MONTH, gpu_us=0, tokens=1_000)
    made.step(spendings=(used, key(9, 9, "key00002")))
    assert refused_keys(made.state) == {"key00002": 86_400_000, "key00001": 0}
    made.ask(RemoveApiKey("key00002"))
    assert refused_keys(made.state) == {"key00001": 0}
    assert made.state.accounts.held_keys == {}


def test_a_budget_in_tokens_holds_as_one_in_gpu_hours_and_counts_branches() -> None:
    lab = Tenant(name="lab", budget_tokens=1_000, budget_period=BudgetPeriod.DAY)
    made = Cluster(Policy(tenants=(lab, Tenant(name="red", parent="lab"))))
    made.join("a", gpus=4)

    def used(tokens: int) -> tuple[Spending, ...]:
        spending = Spending(tenant="red", period=BudgetPeriod.DAY, gpu_us=0, tokens=tokens)
        return spending, key(tokens, 0)  # the key's are among its tenant's

    warned = made.step(spendings=used(800)).events
    assert kinds(warned) == ["BudgetWarned"]
    assert warned[0].why == "lab has used 800 of 1,000 tokens today"  # type: ignore[attr-defined]
    assert kinds(made.step(spendings=used(1_000)).events) == ["BudgetHeld"]
    assert made.job(made.submit(gpus=1, tenant="red")).phase is Phase.WAITING
    assert kinds(made.step(spendings=used(0)).events)[0] == "BudgetFreed"


def test_a_budget_is_warned_about_then_held_then_free_again() -> None:
    made = cluster()
    running = made.run(gpus=1, tenant="red")
    assert kinds(made.step(spendings=spent(red=7.9)).events) == []
    warned = made.step(spendings=spent(red=8)).events
    assert kinds(warned) == ["BudgetWarned"]
    assert warned[0].why == "red has used 8.0 of 10 GPU-hours this month"  # type: ignore[attr-defined]
    assert kinds(made.step(spendings=spent(red=9)).events) == []  # it is said once
    assert kinds(made.step(spendings=spent(red=10)).events) == ["BudgetHeld"]
    assert made.job(running).phase is Phase.RUNNING
    waits = made.submit(gpus=1, tenant="red")
    assert made.job(waits).phase is Phase.WAITING
    assert why(made, waits) == "the budget of red is used up; see: shoal report --by tenant"
    other = made.submit(gpus=1, tenant="blue")
    assert made.job(other).phase is not Phase.WAITING
    assert kinds(made.step().events) == []  # nothing told is nothing changed
    freed = made.step(spendings=spent(red=0)).events
    assert kinds(freed)[:2] == ["BudgetFreed", "JobPlaced"]
    assert made.job(waits).phase is Phase.STARTING


def test_a_budget_may_be_a_part_of_an_hour() -> None:
    tenant = msgspec.json.decode(b'{"name": "red", "budget_gpu_hours": 0.001}', type=Tenant)
    made = Cluster(Policy(tenants=(tenant,)))
    made.join("a", gpus=4)
    warned = made.step(spendings=spent(red=0.0008)).events
    assert warned[0].why == "red has used 0.0008 of 0.001 GPU-hours this month"  # type: ignore[attr-defined]
    assert kinds(made.step(spendings=spent(red=0.001)).events) == ["BudgetHeld"]
    least = Policy(tenants=(Tenant(name="red", budget_gpu_hours=1e-300, budget_money=1e-300),))
    assert kinds(Cluster(least).step(spendings=spent(red=1)).events)[-1] == "BudgetHeld"
    for wrong in (b"-0.5", b"1e300"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(b'{"name": "red", "budget_money": %b}' % wrong, type=Tenant)


def test_who_falls_back_below_its_budget_but_not_far_is_warned_again() -> None:
    made = cluster()
    made.step(spendings=spent(red=10))
    assert kinds(made.step(spendings=spent(red=9)).events) == ["BudgetFreed", "BudgetWarned"]
    assert made.state.accounts.budgets == {"red": BudgetLevel.WARNED}


def test_a_parents_budget_is_for_all_its_branches() -> None:
    made = cluster()
    assert kinds(made.step(spendings=spent(red=5, blue=5, lab=90)).events) == ["BudgetHeld"]
    waits = made.submit(gpus=1, tenant="red")
    assert why(made, waits).startswith("the budget of lab is used up")


@pytest.mark.parametrize("unpriced_us", [0, 1, HOUR])
@pytest.mark.parametrize(("money_milli", "held"), [(50_000, True), (49_999, False)])
def test_money_that_is_known_counts_whatever_else_has_no_price(
    money_milli: int, held: bool, unpriced_us: int
) -> None:
    made = cluster()
    told = Spending(
        tenant="blue",
        period=BudgetPeriod.TOTAL,
        gpu_us=HOUR,
        money_milli=money_milli,
        unpriced_us=unpriced_us,
    )
    made.step(spendings=(told,))
    assert (made.state.accounts.budgets.get("blue") is BudgetLevel.HELD) == held


def test_a_budget_in_money_says_at_once_that_some_time_has_no_price() -> None:
    made = cluster()

    def told(unpriced_us: int) -> tuple[Spending, ...]:
        total = BudgetPeriod.TOTAL
        return (
            Spending(
                tenant="blue", period=total, gpu_us=HOUR, money_milli=1000, unpriced_us=unpriced_us
            ),
        )

    warned = made.step(spendings=told(HOUR // 2)).events
    assert kinds(warned) == ["BudgetWarned"]
    assert warned[0].why == (  # type: ignore[attr-defined]
        "blue has spent 1.00 of 50 in all; 0.5 GPU-hours have no price and cannot count: "
        "shoal prices --help"
    )
    assert kinds(made.step(spendings=told(HOUR)).events) == []  # it is said once
    assert kinds(made.step(spendings=told(0)).events) == ["BudgetFreed"]


def test_a_policy_that_raises_the_budget_or_has_none_lets_them_go() -> None:
    made = cluster()
    made.step(spendings=spent(red=10))
    waits = made.submit(gpus=1, tenant="red")
    made.policy = Policy(tenants=(Tenant(name="red"),))
    assert kinds(made.step().events) == ["PolicyChanged", "BudgetFreed", "JobPlaced"]
    assert made.job(waits).phase is Phase.STARTING


def test_a_policy_that_says_so_stops_who_is_held_and_runs_it_again_later() -> None:
    made = cluster(budget_stops=True)
    running = made.run(gpus=1, tenant="red")
    never = made.run(gpus=1, tenant="red", restart="never")
    assert kinds(made.step(spendings=spent(red=10)).events) == ["BudgetHeld", "JobStopping"]
    assert made.job(never).phase is Phase.RUNNING  # it must not run twice
    made.end(running, code=143)
    assert made.job(running).phase is Phase.WAITING
    assert "budget" in why(made, running)
    made.step(spendings=spent(red=0))
    assert made.job(running).attempt == 2


def test_the_hold_survives_a_snapshot() -> None:

    made = cluster()
    made.step(spendings=spent(red=10))
    waits = made.submit(gpus=1, tenant="red")
    made.state = restore(made.state.snapshot())
    made.step()
    assert made.job(waits).phase is Phase.WAITING
    assert "budget" in why(made, waits)
