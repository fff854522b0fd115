"""Amounts as people read them, and the verdicts that are made of them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

import shoal
from shoal.api.fabric import verdict as of_links
from shoal.ledger.accounts import ABOUT, GPU_US_PER_GPU_HOUR, Account
from shoal.ledger.report import verdict as of_ledger
from shoal.model import amounts
from shoal.model.fabric import FabricView, LinkView, Weak
from shoal.model.ledger import AccountSum
from shoal.sim.replay.metrics import Spread, Summary
from shoal.sim.replay.metrics import verdict as of_replays

WEB = Path(shoal.__file__).parent / "web"
HOUR = GPU_US_PER_GPU_HOUR


@pytest.mark.parametrize(
    ("value", "currency", "text"),
    [
        (12.4, "USD", "$12.40"),
        (41_300.4, "eur", "€41,300"),
        (-3.5, "USD", "-$3.50"),
        (12.4, "CHF", "12.40 CHF"),
        (5, "", "5.00"),
    ],
)
def test_money_has_the_sign_of_its_currency(value: float, currency: str, text: str) -> None:
    assert amounts.money_text(value, currency) == text


def test_the_page_knows_the_same_signs() -> None:
    found = re.search(r"const SIGNS = \{(.*?)\}", (WEB / "dom.js").read_text())
    assert found is not None
    pairs = re.findall(r'(\w+): "(.+?)"', found[1])
    assert dict(pairs) == amounts.SIGNS


def test_a_share_that_is_not_all_is_never_100_percent() -> None:
    shares = (0, 0.004, 0.71, 0.996, 0.9999, 1)
    assert [amounts.share_text(share) for share in shares] == [
        "0 %",
        "0.4 %",
        "71 %",
        "99.6 %",
        "99.9 %",
        "100 %",
    ]


def account(name: Account, hours: float, of: float, cost: float | None = None) -> AccountSum:
    return AccountSum(
        account=name.value,
        title=ABOUT[name].title,
        group=ABOUT[name].group,
        gpu_us=int(hours * HOUR),
        gpu_ms=hours * 3.6e6,
        share=hours / of,
        cost=cost,
    )


def test_the_ledgers_verdict_names_the_largest_waste_in_money_if_it_has_prices() -> None:
    week_ms = 7 * 86_400_000
    sums = [
        account(Account.USEFUL, 71, 100, 710),
        account(Account.RECOMPUTE, 5, 100, 50),
        account(Account.IDLE, 24, 100, 312),
    ]
    assert of_ledger(sums, 100 * HOUR, "USD", week_ms) == (
        "Over 7.0 days, 71 % of GPU time did useful work; idle allocations cost $312.00 (24 %)."
    )
    assert of_ledger(sums, 100 * HOUR, "", week_ms).endswith(
        "; idle allocations took 24.0 GPU-hours (24 %)."
    )
    assert of_ledger(sums[:1], 71 * HOUR, "USD", week_ms).endswith("; nothing was wasted.")
    assert of_ledger([], 0, "USD", week_ms) == "No GPU time was recorded in this period."


def replay(policy: str, wait_s: float, cost: float | None = 100.0, jobs: int = 10) -> Summary:
    figures = {"policy": policy, "jobs": jobs, "cost": cost, "currency": "EUR", "utilization": 0.5}
    return cast(Summary, SimpleNamespace(wait=Spread(wait_s, wait_s, wait_s), **figures))


def test_the_verdict_on_replays_is_honest_about_ties_and_cost() -> None:
    fifo = replay("/home/replays/x/current.json", 100)
    assert of_replays([fifo, replay("fair", 82)]) == (
        "fair wins: 18 % shorter waits than current, the same cost."
    )
    assert of_replays([fifo, replay("fair", 82, 90)]).endswith("than current, €10.00 less.")
    assert of_replays([fifo, replay("fair", 82, None)]).endswith("than current.")
    assert of_replays([fifo, replay("fair", 100.2)]) == (
        "No difference: current and fair give 10 jobs the same mean wait, the same cost."
    )
    assert of_replays([replay("a", 50), replay("b", 50), replay("c", 100)]).startswith(
        "a and b tie: 50 % shorter waits than c"
    )
    assert of_replays([fifo]) == "current: 100 s mean wait, 50 % utilization."
    assert of_replays([replay("fair", 0, jobs=0)]) == "No jobs to replay in this period."


def links(*rates: int, **more: Any) -> FabricView:
    names = [f"n{at}" for at in range(len(rates) + 1)]
    made = [
        LinkView("n0", name, 20, rate, rate) for name, rate in zip(names[1:], rates, strict=True)
    ]
    return FabricView(id="t", nodes=names, heard_from=names, links=made, usual_mbs=1000, **more)


def test_the_verdict_on_links_counts_the_weak_ones_and_says_who_is_missing() -> None:
    assert of_links(links(1000, 960)) == (
        "2 links measured, none of them weak: within 4 % of the median, 1 GB/s."
    )
    assert of_links(links(1000, 400)).endswith("none of them weak: 400 MB/s to 1 GB/s.")
    assert of_links(links(1000, 90, weak=[Weak(node="n0", peer="n2")])) == (
        "1 of 2 links is weak: n0-n2."
    )
    assert of_links(links(90, 80, weak=[Weak(node="n0")])) == (
        "2 of 2 links are weak: n0 (all its links)."
    )
    partial = links(1000)
    partial = msgspec.structs.replace(partial, heard_from=["n0"])
    assert of_links(partial).endswith("; 1 node did not answer.")
    nothing = FabricView(id="t", nodes=["n0", "n1"])
    assert of_links(nothing) == "No links were measured: 2 nodes did not answer."
