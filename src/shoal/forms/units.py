"""Amounts as people write them: durations, memory and CPUs, read and shown."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from shoal.model.durations import duration_text

__all__ = ["duration_text"]

MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
MEGABYTES = {"m": 1, "g": 1024, "t": 1024 * 1024}

_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,9})?"
_DURATION_PART = re.compile(rf"({_NUMBER})(ms|s|m|h|d)")
_DURATION = re.compile(rf"(?:{_NUMBER}(?:ms|s|m|h|d))+")
_MEMORY = re.compile(rf"({_NUMBER})([mgt])(?:i?b)?")
_BARE = re.compile(_NUMBER)
_QUOTED_MAX = 40


class BadAmount(ValueError):
    """The text is not such an amount; the message gives examples of one."""


def duration_ms(text: str) -> int:
    """'90s', '1h30m' or '500ms' in milliseconds."""
    compact = text.replace(" ", "").lower()
    if compact == "0":
        return 0
    if _BARE.fullmatch(compact):
        raise BadAmount(f"{compact} of what? Write {compact}s, {compact}m or {compact}h")
    if not _DURATION.fullmatch(compact):
        raise BadAmount(f"{quoted(text)} is not a time; write e.g. 90s, 10m, 2h, 1d or 1h30m")
    parts = _DURATION_PART.findall(compact)
    return _whole(sum((Decimal(n) * MILLISECONDS[u] for n, u in parts), Decimal(0)), text, "1ms")


def memory_mb(text: str) -> int:
    """'512M', '4G' or '1.5T' in units of 1024 x 1024 bytes."""
    compact = text.replace(" ", "").lower()
    if compact == "0":
        return 0
    if _BARE.fullmatch(compact):
        raise BadAmount(f"{compact} of what? Write {compact}M or {compact}G")
    match = _MEMORY.fullmatch(compact)
    if match is None:
        raise BadAmount(f"{quoted(text)} is not an amount of memory; write e.g. 512M, 4G or 1.5T")
    return _whole(Decimal(match[1]) * MEGABYTES[match[2]], text, "1M")


def cpu_milli(text: str) -> int:
    """'2' or '0.5' CPUs in thousandths of one."""
    if not _BARE.fullmatch(text.strip()):
        raise BadAmount(f"{quoted(text)} is not a number of CPUs; write e.g. 4 or 0.5")
    return _whole(Decimal(text.strip()) * 1000, text, "0.001")


def duration_exact(ms: int) -> str:
    """As `duration_ms` reads it back: '7d', '90s', '1500ms'."""
    for unit in ("d", "h", "m", "s"):
        if ms and ms % MILLISECONDS[unit] == 0:
            return f"{ms // MILLISECONDS[unit]}{unit}"
    return f"{ms}ms" if ms else "0s"


def quoted(text: str) -> str:
    """Text from outside in a message: one line, printable, not too long."""
    from shoal.model.phrases import shortened  # help pages do without it

    short = shortened(text, _QUOTED_MAX)
    return repr(short) if "'" in short or not short.isprintable() else f"'{short}'"


def _whole(amount: Decimal, text: str, smallest: str) -> int:
    if amount and amount < 1:
        raise BadAmount(f"{quoted(text)} is too little; the least is {smallest}")
    return math.floor(amount)
