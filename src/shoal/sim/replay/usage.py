"""What ordered nodes were used for in a replay, and times as text."""

from __future__ import annotations

import re

import msgspec

from shoal.model.durations import UNITS
from shoal.model.supply import Supply
from shoal.sim.replay.traces import TraceError


class SupplyUse(msgspec.Struct, kw_only=True):
    """Of one supply. `cost`: at its price per node and hour."""

    name: str
    orders: int = 0
    refused: int = 0
    lost: int = 0
    node_hours: float = 0.0
    cost: float = 0.0


def time_option_ms(one: Supply, word: str, default_ms: int) -> int:
    """An option such as `sim_delay: 5m`."""
    text = one.options.get(word)
    if text is None:
        return default_ms
    match = re.fullmatch(r"([0-9]{1,9})(ms|[smhd])", text.strip())
    if match is None:
        raise TraceError(f"supply {one.name}: {word}: {text!r} is not a time; write 90s, 5m or 2h")
    return int(match[1]) * {**dict(UNITS), "ms": 1}[match[2]]


def check_options(one: Supply) -> None:
    """What the simulated supplier is told must make sense before anything runs."""
    time_option_ms(one, "sim_delay", 0)
    time_option_ms(one, "sim_loss", 0)
    text = one.options.get("sim_refuse", "0")
    if not re.fullmatch(r"0(\.[0-9]+)?|1(\.0+)?", text):
        raise TraceError(f"supply {one.name}: sim_refuse: {text!r} is not a share from 0 to 1")


def gpu_hours_text(hours: float) -> str:
    return f"{hours:,.1f} GPU-h"


def time_text(seconds: float) -> str:
    """The two leading units: '0.4s', '42s', '3m 20s', '2h 05m', '12d 4h'."""
    if seconds < 10:
        return f"{seconds:.1f}s" if seconds else "0s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600}h"
