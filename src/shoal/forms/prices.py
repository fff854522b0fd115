"""A price list as people write it, in YAML, TOML or JSON: read, checked field by field, told."""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import Any

import msgspec

from shoal.forms import datafile, units
from shoal.forms.datafile import is_job_file
from shoal.forms.failure import REFUSED, USAGE, Failure
from shoal.model.prices import Price, PriceList, problem_with

PLACES = re.compile(r"\$\.?(.*)")
NAMES = tuple(field.name for field in msgspec.structs.fields(PriceList))
PRICE_NAMES = tuple(field.name for field in msgspec.structs.fields(Price))


def read(word: str) -> PriceList:
    if not is_job_file(word):
        fix = "name a .yaml, .toml or .json file"
        raise Failure(f"{units.quoted(word)} is no price list; {fix}", USAGE)
    path = Path(word)
    text = datafile.read_text(path, "price list")
    try:
        return parse(text, path.suffix.lower())
    except (datafile.BadData, ValueError) as error:
        raise Failure(f"{path}: {error}", REFUSED) from None


def parse(text: str, ending: str) -> PriceList:
    """ValueError says the field and the fix."""
    if not text.strip():
        raise ValueError("the file is empty; see: shoal prices --help")
    written = datafile.load(text, ending)
    _check_names(written, NAMES, "")
    for table in ("gpus", "nodes"):
        entries = written.get(table, {})
        if not isinstance(entries, dict):
            raise ValueError(
                f"{table}: must be names with prices, e.g. {{H100: {{per_hour: 2.5}}}}"
            )
        written[table] = {str(name): entry for name, entry in entries.items()}
        for name, entry in written[table].items():
            where = f"{table}.{units.shortened(name, 60)}"
            if not isinstance(entry, dict):
                raise ValueError(f"{where}: must be a table, e.g. {{per_hour: 2.5}}")
            _check_names(entry, PRICE_NAMES, where)
            for field, value in entry.items():
                _check_number(f"{where}.{field}", value)
    for field in ("pue", "co2_g_per_kwh"):
        _check_number(field, written.get(field, 1))
    try:
        prices = msgspec.convert(written, PriceList)
    except msgspec.ValidationError as error:
        raise ValueError(_clear(error)) from None
    wrong = problem_with(prices)
    if wrong is not None:
        raise ValueError(wrong)
    return prices


def _check_names(written: dict[Any, Any], known: tuple[str, ...], where: str) -> None:
    for field in written:
        if field not in known:
            close = difflib.get_close_matches(str(field).replace("-", "_").lower(), known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known)}"
            told = f"there is no field {units.quoted(str(field))}; {hint}"
            raise ValueError(f"{where}: {told}" if where else told)


def _check_number(where: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: must be a number, e.g. 2.5")
    if not math.isfinite(value):
        raise ValueError(f"{where}: must be a number that is finite")
    if value < 0:
        raise ValueError(f"{where}: is {value:g}, but a price or an amount is not negative")


def _clear(error: msgspec.ValidationError) -> str:
    """The path first, as everywhere."""
    message, _, path = str(error).partition(" - at `")
    where = path.rstrip("`").lstrip("$.").replace("[...]", "")
    sentence = message[:1].lower() + message[1:]
    return f"{where}: {sentence}" if where else sentence


def to_text(prices: PriceList) -> str:
    """As a file that `read` takes."""
    import yaml

    fields = msgspec.to_builtins(prices)
    for table in ("gpus", "nodes"):
        fields[table] = {
            name: {field: value for field, value in entry.items() if value is not None}
            for name, entry in fields[table].items()
        }
    kept = {name: value for name, value in fields.items() if value not in (None, "", {})}
    return str(yaml.safe_dump(kept, sort_keys=False, default_flow_style=None, allow_unicode=True))
