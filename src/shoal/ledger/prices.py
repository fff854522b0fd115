"""What a GPU-hour costs and how much power it draws, by a price list or as measured."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import NamedTuple

import msgspec

from shoal.database.settings import Settings
from shoal.ledger.accounts import ABOUT, GPU_US_PER_GPU_HOUR, HOUR_MS, Account
from shoal.ledger.book_state import Hardware
from shoal.ledger.postings import Postings
from shoal.model.ledger import ANY, HOURS_PER_YEAR, MONTHS_PER_YEAR, Price, PriceList
from shoal.model.resources import WHOLE_GPU_MILLI
from shoal.model.series import NodeSample
from shoal.ports import StoreError

log = logging.getLogger("shoal.ledger")

PRICES = "prices.json"  # a setting

# Idle and busy watts of a GPU's board, for models without watts in the price list: about what an
# idle one draws, and the vendor's power limit. Measured power is better than this.
WATTS = {
    "b200": (140, 1000),
    "h200": (75, 700),
    "h100": (70, 700),
    "a100": (55, 400),
    "l40s": (35, 350),
    "l40": (35, 300),
    "l4": (16, 72),
    "a10": (20, 150),
    "v100": (40, 300),
    "t4": (10, 70),
    "rtx 4090": (25, 450),
    "rtx 3090": (25, 350),
}


def read_prices(settings: Settings) -> PriceList:
    """The prices set in a cluster; none if they are missing or damaged."""
    try:
        found = settings.get(PRICES)
        return msgspec.json.decode(found, type=PriceList) if found else PriceList()
    except (StoreError, msgspec.DecodeError) as error:
        log.error("%s cannot be read, so there are no prices: %s", PRICES, error)
        return PriceList()


class Rate(NamedTuple):
    """Per GPU and hour; None: not known."""

    per_hour: Fraction | None
    watts: tuple[Fraction, Fraction] | None


class Money(NamedTuple):
    """The cost and energy of an amount of GPU time."""

    cost: Fraction | None
    energy_wh: Fraction | None
    co2_g: Fraction | None

    def plus(self, other: Money) -> Money:
        """Known plus unknown is unknown: a part is not the sum."""
        pairs = zip(self, other, strict=True)
        return Money(*[None if a is None or b is None else a + b for a, b in pairs])


NOTHING = Money(Fraction(0), Fraction(0), Fraction(0))


def rate_of(prices: PriceList, node: str, machine: Hardware) -> Rate:
    gpu = _named(prices.gpus, machine.model)
    whole = _matching(prices.nodes, node)
    parts = []
    if gpu is not None and gpu.priced:
        parts.append(per_hour(gpu))
    if whole is not None and whole.priced:
        parts.append(per_hour(whole) / max(1, machine.gpus))
    return Rate(sum(parts, Fraction(0)) if parts else None, _watts(gpu, machine.model))


def per_hour(price: Price) -> Fraction:
    """What it costs, rented or owned, whether it is used or not."""
    total = Fraction(0)
    if price.per_hour is not None:
        total += _exactly(price.per_hour)
    if price.purchase is not None and price.life_years is not None:
        total += _exactly(price.purchase) / (_exactly(price.life_years) * HOURS_PER_YEAR)
    if price.per_month is not None:
        total += _exactly(price.per_month) * MONTHS_PER_YEAR / HOURS_PER_YEAR
    return total


def money(prices: PriceList, rate: Rate, account: Account, gpu_us: int) -> Money:
    hours = Fraction(gpu_us, GPU_US_PER_GPU_HOUR)
    cost = None if rate.per_hour is None else rate.per_hour * hours
    load = ABOUT[account].load
    energy = None
    if load is None:
        energy = Fraction(0)  # out of reach, so it counts as off
    elif rate.watts is not None:
        idle, busy = rate.watts
        energy = (idle + (busy - idle) * load / 1000) * hours * _exactly(prices.pue)
    co2 = None
    if energy is not None and prices.co2_g_per_kwh is not None:
        co2 = energy * _exactly(prices.co2_g_per_kwh) / 1000
    return Money(cost, energy, co2)


def _exactly(number: float) -> Fraction:
    """0.1 means exactly a tenth, not the nearest float."""
    return Fraction(str(number))


def _named(table: dict[str, Price], model: str) -> Price | None:
    for name, price in table.items():
        if name.casefold() == model.casefold():
            return price
    return table.get(ANY)


def _matching(table: dict[str, Price], node: str) -> Price | None:
    if node in table:
        return table[node]
    return next((price for name, price in table.items() if fnmatchcase(node, name)), None)


def _watts(gpu: Price | None, model: str) -> tuple[Fraction, Fraction] | None:
    if gpu is not None and gpu.idle_watts is not None and gpu.busy_watts is not None:
        return _exactly(gpu.idle_watts), _exactly(gpu.busy_watts)
    folded = model.casefold()
    for name, (idle, busy) in WATTS.items():
        if name in folded:
            return Fraction(idle), Fraction(busy)
    return None


# Measured power: if drivers report it, a node's energy model is fitted to it.


# Samples come every few seconds; the time between two that are further apart is not measured.
APART_MS_MAX = 15_000


class Drawn(NamedTuple):
    """The power that a machine drew in a range, for how much of its GPU time, and of how much."""

    watt_ms: int
    covered_us: int
    accounts: dict[Account, int]


def hear_power(postings: Postings, node_id: str, sample: NodeSample) -> None:
    """Counts only if every GPU of the node reports: a part says nothing about the whole."""
    node = postings.cluster.nodes.get(node_id)
    watts = [gpu.power_w for gpu in sample.gpus if gpu.power_w is not None]
    if node is None or not node.gpus or len(watts) != node.gpus:
        return
    now_ms, since_ms = postings.cluster.now_ms, node.power_ms
    node.power_ms = now_ms
    if since_ms >= 0 and 0 < now_ms - since_ms <= APART_MS_MAX:
        key = (since_ms // HOUR_MS, node_id)
        drawn, covered = postings.adds.power.get(key, (0, 0))
        passed_ms = now_ms - since_ms
        postings.adds.power[key] = (
            drawn + sum(watts) * passed_ms,
            covered + node.gpus * WHOLE_GPU_MILLI * passed_ms,
        )


def fitted(rate: Rate, drawn: Drawn) -> Rate:
    """The rate with watts fitted so that the model's energy equals the measured one; for unmeasured
    time the model stays as it is. Without a model all accounts draw the same."""
    total_us = sum(drawn.accounts.values())
    if not drawn.covered_us or not total_us:
        return rate
    measured = Fraction(drawn.watt_ms * 1000, drawn.covered_us)  # watts per GPU
    if rate.watts is None:
        whole = drawn.covered_us * 10 >= total_us * 9
        return rate._replace(watts=(measured, measured)) if whole else rate
    idle, busy = rate.watts
    model = sum(
        (_draw(idle, busy, account) * amount for account, amount in drawn.accounts.items()),
        Fraction(0),
    )
    if not model:
        return rate
    part = min(Fraction(1), Fraction(drawn.covered_us, total_us))
    factor = part * measured * total_us / model + (1 - part)
    return rate._replace(watts=(idle * factor, busy * factor))


def _draw(idle: Fraction, busy: Fraction, account: Account) -> Fraction:
    load = ABOUT[account].load
    return Fraction(0) if load is None else idle + (busy - idle) * load / 1000


def by_machine(
    powers: Iterable[tuple[int, int, int]], amounts: Iterable[tuple[int, Account, int]]
) -> dict[int, Drawn]:
    drawn = {machine: Drawn(watt_ms, covered, {}) for machine, watt_ms, covered in powers}
    for machine, account, gpu_us in amounts:
        if machine in drawn:
            drawn[machine].accounts[account] = gpu_us
    return drawn
