"""What an hour costs: rented, owned, whole nodes, and what is not known."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from shoal.ledger.accounts import GPU_US_PER_GPU_HOUR, Account, Place, Sum
from shoal.ledger.book_state import Hardware, Owner
from shoal.ledger.postings import Addition
from shoal.ledger.prices import NOTHING, Money, money, per_hour, rate_of
from shoal.ledger.report import Spent, Tariff, spendings
from shoal.ledger.store import LedgerStore
from shoal.model.budget import BudgetPeriod
from shoal.model.ledger import Price, PriceList
from shoal.model.policy import Policy, Tenant

H100 = Hardware("H100", 8)


def test_rented_owned_and_by_the_node() -> None:
    assert per_hour(Price(per_hour=2.5)) == Fraction(5, 2)
    assert per_hour(Price(purchase=8760, life_years=2)) == Fraction(1, 2)
    assert per_hour(Price(per_month=73)) == Fraction(1, 10)
    prices = PriceList(
        currency="EUR",
        gpus={"h100": Price(per_hour=0.1)},
        nodes={"rack1-*": Price(per_hour=1.6), "rack1-9": Price(per_hour=0.8)},
    )
    assert rate_of(prices, "rack1-1", H100).per_hour == Fraction(3, 10)
    assert rate_of(prices, "rack1-9", H100).per_hour == Fraction(2, 10)
    assert rate_of(prices, "other", H100).per_hour == Fraction(1, 10)
    assert rate_of(prices, "other", Hardware("T4", 1)).per_hour is None
    assert rate_of(prices, "rack1-1", Hardware("T4", 1)).per_hour == Fraction(16, 10)


def test_energy_follows_the_account_the_pue_and_the_grid() -> None:
    prices = PriceList(
        gpus={"H100": Price(idle_watts=100, busy_watts=700)}, pue=1.5, co2_g_per_kwh=400
    )
    rate = rate_of(prices, "n1", H100)

    def hour(account: Account) -> Money:
        return money(prices, rate, Sum("", "", 0, account, GPU_US_PER_GPU_HOUR))

    assert hour(Account.USEFUL) == Money(None, Fraction(1050), Fraction(420))
    assert hour(Account.FREE).energy_wh == 150
    assert hour(Account.STRAGGLER).energy_wh == 600
    assert hour(Account.LOST).energy_wh == 0


def test_a_known_model_has_power_and_an_unknown_one_has_none() -> None:
    watts = (Fraction(70), Fraction(700))
    assert rate_of(PriceList(), "n1", Hardware("NVIDIA H100 80GB HBM3", 8)).watts == watts
    assert rate_of(PriceList(), "n1", Hardware("frobnicator", 8)).watts is None


@pytest.mark.parametrize("field", range(3))
def test_a_part_is_not_the_sum(field: int) -> None:
    unknown = NOTHING._replace(**{NOTHING._fields[field]: None})
    assert NOTHING.plus(unknown)[field] is None
    assert unknown.plus(NOTHING)[field] is None


def _store(path: Path, nodes: dict[str, str]) -> LedgerStore:
    """An hour of red's on a GPU of each node, in hour 0."""
    store = LedgerStore(path / "ledger.db")
    adds = Addition(
        machines={node: Hardware(model, 1) for node, model in nodes.items()},
        owners={"j1": Owner("red", "me", "")},
        amounts={Place(0, node, "j1", Account.USEFUL): GPU_US_PER_GPU_HOUR for node in nodes},
    )
    store.put([adds], b"", 1)
    return store


def _spent(store: LedgerStore, spent: Spent, prices: PriceList) -> tuple[int, int]:
    tariff = Tariff(prices, store.machines())
    total = BudgetPeriod.TOTAL
    sums = spent.sums(store, tariff.of_machine, total, 0, 11)
    (told,) = spendings(Policy(tenants=(Tenant(name="red"),)), tariff, {total: sums})
    return told.money_milli, told.unpriced_us


def test_what_has_a_price_is_spent_whatever_has_none(tmp_path: Path) -> None:
    store = _store(tmp_path, {"a": "H100", "b": "odd"})
    prices = PriceList(currency="EUR", gpus={"H100": Price(per_hour=2)})
    assert _spent(store, Spent(), prices) == (2000, GPU_US_PER_GPU_HOUR)
    assert _spent(store, Spent(), PriceList()) == (0, 2 * GPU_US_PER_GPU_HOUR)


def test_other_prices_hold_for_hours_that_were_added_up_before(tmp_path: Path) -> None:
    store = _store(tmp_path, {"a": "H100", "b": "H100", "c": "H100"})
    spent = Spent()

    def costs(a: int, b: int, c: int) -> tuple[int, int]:
        each = {"a": a, "b": b, "c": c}
        nodes = {node: Price(per_hour=price) for node, price in each.items()}
        return _spent(store, spent, PriceList(currency="EUR", nodes=nodes))

    assert costs(1, 1, 2) == (4000, 0)
    assert costs(1, 7, 7) == (15000, 0)
    assert costs(5, 5, 5) == (15000, 0)
