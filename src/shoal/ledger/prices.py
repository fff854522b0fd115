"""What a GPU-hour costs and how much power it draws, by a price list or as measured."""

from __future__ import annotations

import logging
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import NamedTuple

import msgspec

from shoal.database.settings import Settings
from shoal.ledger.accounts import ABOUT, GPU_US_PER_GPU_HOUR, Sum
from shoal.ledger.book_state import Hardware
from shoal.model.ledger import ANY, HOURS_PER_YEAR, MONTHS_PER_YEAR, Price, PriceList
from shoal.ports import StoreError

log = logging.getLogger("shoal.ledger")

PRICES = "prices.json"  # a setting
MJ_PER_WH = 3_600_000

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


def money(prices: PriceList, rate: Rate, spent: Sum) -> Money:
    """The energy is what was measured; for time without a measurement it follows from the rate."""
    hours = Fraction(spent.gpu_us, GPU_US_PER_GPU_HOUR)
    cost = None if rate.per_hour is None else rate.per_hour * hours
    energy: Fraction | None = Fraction(spent.energy_mj) / MJ_PER_WH
    modeled = Fraction(spent.gpu_us - spent.measured_us, GPU_US_PER_GPU_HOUR)
    load = ABOUT[spent.account].load
    if modeled and load is not None and energy is not None:  # out of reach counts as off
        watts = rate.watts
        draw = None if watts is None else watts[0] + (watts[1] - watts[0]) * load / 1000
        energy = None if draw is None else energy + draw * modeled
    co2 = None
    if energy is not None:
        energy *= _exactly(prices.pue)
        if prices.co2_g_per_kwh is not None:
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
