"""Price lists as people write them: read and checked field by field, and written back."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from shoal.forms import datafile
from shoal.forms.datafile import check_names
from shoal.forms.failure import BadField
from shoal.model.ledger import Price, PriceList, problem_with
from shoal.model.phrases import shortened

NAMES = tuple(field.name for field in msgspec.structs.fields(PriceList))
PRICE_NAMES = tuple(field.name for field in msgspec.structs.fields(Price))


def read(word: str) -> PriceList:
    return datafile.read_named(word, "price list", parse)


def parse(text: str, ending: str) -> PriceList:
    """ValueError names the field and the fix."""
    written = datafile.load(text, ending, "currency: EUR")
    check_names(written, NAMES, f"there are {', '.join(NAMES)}")
    for table in ("gpus", "nodes"):
        entries = written.get(table, {})
        if not isinstance(entries, dict):
            raise BadField(table, "must be names with prices, e.g. {H100: {per_hour: 2.5}}")
        written[table] = {str(name): entry for name, entry in entries.items()}
        for name, entry in written[table].items():
            where = f"{table}.{shortened(name, 60)}"
            if not isinstance(entry, dict):
                raise BadField(where, "must be a table, e.g. {per_hour: 2.5}")
            check_names(entry, PRICE_NAMES, f"there are {', '.join(PRICE_NAMES)}", where)
            for field, value in entry.items():
                _check_number(f"{where}.{field}", value)
    for field in ("pue", "co2_g_per_kwh"):
        _check_number(field, written.get(field, 1))
    try:
        prices = msgspec.convert(written, PriceList)
    except msgspec.ValidationError as error:
        raise datafile.invalid(error) from None
    problem = problem_with(prices)
    if problem is not None:
        raise BadField("", problem)
    return prices


def _check_number(where: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadField(where, "must be a number, e.g. 2.5")
    if not math.isfinite(value):
        raise BadField(where, "must be a finite number")
    if value < 0:
        raise BadField(where, f"is {value:g}, but a price or an amount is not negative")


def to_text(prices: PriceList) -> str:
    """A file that `read` accepts."""
    import yaml

    fields = msgspec.to_builtins(prices)
    for table in ("gpus", "nodes"):
        fields[table] = {
            name: {field: value for field, value in entry.items() if value is not None}
            for name, entry in fields[table].items()
        }
    kept = {name: value for name, value in fields.items() if value not in (None, "", {})}
    return str(yaml.safe_dump(kept, sort_keys=False, default_flow_style=None, allow_unicode=True))
