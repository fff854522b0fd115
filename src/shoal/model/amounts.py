"""Amounts in sentences for people: money in the price list's currency, shares, and times in words.

The page formats its tables the same way, in `web/dom.js`."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.model.durations import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS

SIGNS = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥"}
CENTS_BELOW = 1000  # larger sums are shown without cents


def money_text(value: float, currency: str) -> str:
    """'$12.40', '€41,300', '12.40 CHF'."""
    number = f"{abs(value):,.2f}" if abs(value) < CENTS_BELOW else f"{abs(value):,.0f}"
    sign = SIGNS.get(currency.upper())
    text = f"{sign}{number}" if sign else f"{number} {currency}".rstrip()
    return f"-{text}" if value < 0 else text


def share_text(share: float) -> str:
    """'71 %', '0.4 %', '0 %'. What is not everything is never '100 %'."""
    percent = 100 * share
    if 0 < abs(percent) < 1 or 99 < percent < 100:
        return f"{min(percent, 99.9):.1f} %"
    return f"{percent:.0f} %"


def time_words(ms: float) -> str:
    """One unit: '42 s', '12 min', '3.2 h', '9.2 days'."""
    if ms < 10 * SECOND_MS:
        return f"{ms / SECOND_MS:.1f} s"
    if ms < 2 * MINUTE_MS:
        return f"{ms / SECOND_MS:.0f} s"
    if ms < 2 * HOUR_MS:
        return f"{ms / MINUTE_MS:.0f} min"
    if ms < 2 * DAY_MS:
        return f"{ms / HOUR_MS:.1f} h"
    return f"{ms / DAY_MS:,.1f} days"


def listed(names: Sequence[str], most: int = 3) -> str:
    """'n1, n2 and n3', 'n1, n2, n3 and 5 more'."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most:,} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
