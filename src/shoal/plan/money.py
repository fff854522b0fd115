"""What GPU time costs: money, energy and CO2.

Energy is that of the GPUs and the rest of their nodes, times the data center's PUE. CO2 follows
from the grid: yearly averages of 2023, in grams of CO2 equivalent per kWh, by Ember and the
Energy Institute through Our World in Data.
"""

from __future__ import annotations

import msgspec

HOURS_PER_MONTH = 730.0
PUE = 1.3  # between hyperscalers' 1.1 and the 1.58 of Uptime's survey of 2023; an assumption
GRID = "world"
GRIDS = {
    "world": 481.0,
    "at": 111.0,
    "au": 549.0,
    "be": 138.0,
    "br": 98.0,
    "ca": 170.0,
    "cl": 291.0,
    "cn": 582.0,
    "cz": 450.0,
    "de": 381.0,
    "dk": 152.0,
    "es": 174.0,
    "fi": 79.0,
    "fr": 56.0,
    "gb": 238.0,
    "ie": 291.0,
    "in": 713.0,
    "jp": 485.0,
    "kr": 431.0,
    "nl": 268.0,
    "no": 30.0,
    "pl": 662.0,
    "se": 41.0,
    "us": 369.0,
}


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What one GPU costs while it is rented or owned, and draws while it works. `price_source` says
    where the price is from; a price that nobody named is a list price, not an offer."""

    currency: str
    per_gpu_hour: float | None  # None: not known
    price_source: str
    watts_per_gpu: float | None  # with its part of the node
    pue: float = PUE
    co2_g_per_kwh: float | None = GRIDS[GRID]
    grid: str = GRID


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Of an amount of GPU time; None: not known."""

    gpu_hours: float
    currency: str
    money: float | None
    price_source: str
    power_w: float | None  # of all GPUs and their nodes, with the data center's part
    energy_kwh: float | None
    co2_kg: float | None


def cost(gpus: int, hours: float, rates: Rates) -> Cost:
    """GPUs cost whether they work or wait for a restart, so `hours` is the whole time."""
    gpu_hours = gpus * hours
    power_w = None if rates.watts_per_gpu is None else gpus * rates.watts_per_gpu * rates.pue
    energy_kwh = None if power_w is None else power_w * hours / 1000
    grams = rates.co2_g_per_kwh
    return Cost(
        gpu_hours=gpu_hours,
        currency=rates.currency,
        money=None if rates.per_gpu_hour is None else gpu_hours * rates.per_gpu_hour,
        price_source=rates.price_source,
        power_w=power_w,
        energy_kwh=energy_kwh,
        co2_kg=None if energy_kwh is None or grams is None else energy_kwh * grams / 1000,
    )


def per_month(gpus: int, rates: Rates) -> float | None:
    """What this many GPUs cost in an average month."""
    return cost(gpus, HOURS_PER_MONTH, rates).money
