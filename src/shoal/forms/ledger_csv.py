"""A report of the ledger as CSV: exact amounts, and no name that a spreadsheet would calculate."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from typing import TextIO

from shoal.model.ledger import By, LedgerView

FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def text_of(view: LedgerView, *, tokens: bool = False) -> str:
    file = io.StringIO()
    WRITERS["tokens" if tokens else ""](file, view)
    return file.getvalue()


def write(file: TextIO, view: LedgerView) -> None:
    writer = csv.writer(file)
    keyed = [] if view.by is By.ACCOUNT else [view.by.value, "name"]
    titles = [*keyed, "account", "gpu_hours", "gpu_us", "cost", "currency", "energy_wh", "co2_g"]
    writer.writerow(titles)
    for row in view.rows:
        hours = f"{row.gpu_us / 3_600_000_000:.9f}"
        amounts = [row.account, hours, row.gpu_us, _number(row.cost), safe(view.currency)]
        energy = [_number(row.energy_wh), _number(row.co2_g)]
        named = [safe(_key(view.by, row.key)), safe(row.label)] if keyed else []
        writer.writerow([*named, *amounts, *energy])


def write_tokens(file: TextIO, view: LedgerView) -> None:
    """Who used tokens of which service; by day or hour, of each service."""
    writer, timed = csv.writer(file), view.by in (By.DAY, By.HOUR)
    keyed = [view.by.value] if timed else []
    named = ["service", "owner", "key", "tenant"]
    writer.writerow([*keyed, *named, "requests", "prompt", "cached", "generated"])
    for row in view.tokens:
        when = [_key(view.by, row.key)] if timed else []
        who = [safe(one) for one in (row.service, row.owner, row.caller, row.tenant)]
        writer.writerow([*when, *who, row.requests, row.prompt, row.cached, row.generated])


def write_owed(file: TextIO, view: LedgerView) -> None:
    """What neighbors ran, as they have counted it."""
    writer = csv.writer(file)
    writer.writerow(["neighbor", "tenant", "jobs", "gpu_hours", "gpu_ms", "cost"])
    for row in view.owed:
        hours, cost = f"{row.gpu_ms / 3_600_000:.9f}", _number(row.cost)
        names = safe(row.neighbor), safe(row.tenant)
        writer.writerow([*names, row.jobs, hours, row.gpu_ms, cost])


WRITERS = {"": write, "tokens": write_tokens, "owed": write_owed}


def _key(by: By, key: str) -> str:
    if by not in (By.DAY, By.HOUR):
        return key
    text = datetime.fromtimestamp(int(key) / 1000, UTC).strftime("%Y-%m-%d %H:%M")
    return text[: 10 if by is By.DAY else 16]


def safe(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULAS) else text


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"
