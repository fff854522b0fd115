"""Supplies as people write them: `{engine: slurm, partition: gpu, gpus: 8, most: 16}`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from decimal import Decimal, InvalidOperation
from typing import Any

from shoal import extensions
from shoal.forms import datafile, readers, units
from shoal.forms.failure import BadField
from shoal.model.phrases import shortened
from shoal.model.supply import SUPPLIES_MAX, Supply

NUMBER_MAX = 10**12
MILLIONTHS = 1_000_000
# For `shoal sim`, which brings the nodes itself.
SIM_WORDS = ("sim_delay", "sim_refuse", "sim_loss")


def price(field: str, value: Any) -> int:
    """2.50 an hour, in millionths."""
    try:
        amount = Decimal(str(value)) if not isinstance(value, bool) else Decimal("NaN")
    except InvalidOperation:
        amount = Decimal("NaN")
    if not amount.is_finite() or not 0 <= amount <= 1_000_000:
        raise BadField(
            field, f"{units.quoted(str(value))} is not a price per hour; write e.g. 2.50"
        )
    return int(amount * MILLIONTHS)


def flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadField(field, "must be true or false")
    return value


time = readers.amount(units.duration_ms, NUMBER_MAX, "90s, 10m or 7d")
_memory = readers.memory(NUMBER_MAX, "64G")

# The word in a file -> the field of `Supply`, and how it is read.
FIELDS: dict[str, tuple[str, readers.Reader]] = {
    "gpus": ("gpus", readers.Count(0, 256, "GPUs of each node")),
    "gpu_model": ("gpu_model", lambda _, value: value),
    "gpu_memory": ("gpu_memory_mb", _memory),
    "cpus": ("cpu_milli", readers.cpus),
    "memory": ("memory_mb", _memory),
    "containers": ("containers", flag),
    "labels": ("labels", lambda _, value: value),
    "taints": ("taints", lambda _, value: value),
    "lot": ("lot", readers.Count(1, 1000, "nodes that one order brings")),
    "least": ("least", readers.Count(0, 1_000_000, "nodes to keep")),
    "most": ("most", readers.Count(0, 1_000_000, "nodes at a time")),
    "idle": ("idle_ms", time),
    "patience": ("patience_ms", time),
    "lasts": ("lasts_ms", time),
    "price": ("price", price),
    "ceiling": ("ceiling", price),
}
ALIASES = {"time": "lasts", "nodes": "most"}
# As `show --json` prints them.
STORED = {target for word, (target, _) in FIELDS.items() if target != word} | {"options"}


def supplies(value: Any) -> list[dict[str, Any]]:
    """A list of tables; or tables by name."""
    if isinstance(value, dict):
        value = [
            {"name": str(name), **about} if isinstance(about, dict) else about
            for name, about in value.items()
        ]
    if not isinstance(value, list):
        example = "[{engine: slurm, partition: gpu, gpus: 8, most: 16}]"
        raise BadField("supply", f"must be a list of supplies, e.g. {example}")
    if len(value) > SUPPLIES_MAX:
        raise BadField("supply", f"must not have more than {SUPPLIES_MAX} entries")
    rows = [supply(row) for row in value]
    names = [row["name"] for row in rows]
    for name in names:
        if names.count(name) > 1:
            raise BadField("supply", f"two are named {units.quoted(name)}; give each a name")
    return rows


def supply(row: Any) -> dict[str, Any]:
    """One of them, as fields of `Supply`. Words that are not ours are its engine's; if no package
    here brings that engine, only the head can say whether they are right."""
    if not isinstance(row, dict):
        raise BadField("supply", "must be tables, e.g. {engine: slurm, partition: gpu, most: 16}")
    written = {str(word).replace("-", "_"): value for word, value in row.items()}
    engine = written.pop("engine", "")
    if not isinstance(engine, str) or not engine:
        given = units.quoted(str(engine)) if engine else "it is missing"
        known = ", ".join(extensions.names(extensions.SUPPLIER))
        raise BadField("supply.engine", f"must be one of {known}; {given}")
    engine_words = _words_of(engine)
    name = written.pop("name", engine)
    if not isinstance(name, str):
        raise BadField("supply.name", "must be a word")
    where = f"supply.{shortened(name, 40)}"
    found: dict[str, Any] = {"name": name, "engine": engine}
    options: dict[str, str] = {}
    raw_prices = bool(STORED & set(written))  # as `show --json` prints them: in millionths
    for given_word, value in written.items():
        word = ALIASES.get(given_word, given_word)
        if word == "options" and isinstance(value, dict):
            options |= {str(key): text(f"{where}.{key}", one) for key, one in value.items()}
        elif word in FIELDS and not (word == "labels" and isinstance(value, str)):
            target, read = FIELDS[word]
            if target in found:
                raise BadField(f"{where}.{given_word}", f"is given twice; leave out {given_word}")
            raw = raw_prices and read is price
            found[target] = value if raw else read(f"{where}.{given_word}", value)
        elif word in STORED:
            found[word] = value
        elif engine_words is None or word in engine_words or word in SIM_WORDS:
            options[word] = text(f"{where}.{word}", value)
        else:
            if word in FIELDS:
                raise BadField(f"{where}.{word}", "must be a table, e.g. {pool: a100}, in a file")
            known_words = ("name", "engine", *FIELDS, *engine_words, *SIM_WORDS)
            has = f"{engine} also has {', '.join(engine_words)}"
            raise datafile.unknown(given_word, known_words, has, where)
    return {**found, "options": options}


def _words_of(engine: str) -> Collection[str] | None:
    try:
        return extensions.supplier(engine).words
    except extensions.Missing:
        return None


def from_words(words: str) -> dict[str, Any]:
    """`engine=slurm,partition=gpu,gpus=8,most=16`, for a command line."""
    row: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in words.split(","))):
        word, equals, value = part.partition("=")
        if not equals:
            raise BadField("supply", f"{units.quoted(part)} is not WORD=VALUE")
        row[word.strip()] = _typed(value.strip())
    return row


def _typed(value: str) -> Any:
    if re.fullmatch(r"[0-9]{1,15}", value):
        return int(value)
    return {"true": True, "false": False}.get(value.lower(), value)


def text(field: str, value: Any) -> str:
    """Options are text for their engine: a list is separated by commas, a table is K=V,K=V, and one
    with tables inside is JSON."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and all(isinstance(one, str | int) for one in value):
        return ",".join(str(one) for one in value)
    if isinstance(value, dict) and any(isinstance(one, dict | list) for one in value.values()):
        return json.dumps(value)
    if isinstance(value, dict):
        return ",".join(f"{key}={one}" for key, one in value.items())
    if not isinstance(value, str | int | float):
        raise BadField(field, "must be text")
    return str(value)


def where_of(path: str, rows: list[dict[str, Any]]) -> str | None:
    """The field, as people write it, at a path such as `supply[0].cpu_milli`."""
    match = re.match(r"supply\[(\d+)\]\.?(\w*)", path)
    if match is None:
        return None
    name = shortened(str(rows[int(match[1])]["name"]), 40)
    word = next((word for word, (target, _) in FIELDS.items() if target == match[2]), match[2])
    return f"supply.{name}" + (f".{word}" if word else "")


def about(one: Supply) -> str:
    """As a file would write it: only what differs from the defaults."""
    usual = Supply(name=one.name, engine=one.engine)
    parts = [f"engine: {one.engine}"]
    if one.name != one.engine:
        parts.insert(0, f"name: {one.name}")
    for word, (target, read) in FIELDS.items():
        value = getattr(one, target)
        if value != getattr(usual, target):
            parts.append(f"{word}: {written_as(value, read)}")
    parts += [f"{word}: {_quoted(value)}" for word, value in one.options.items()]
    return "{" + ", ".join(parts) + "}"


def written_as(value: Any, read: readers.Reader) -> str:
    if read is time:
        return units.duration_exact(value)
    if read is _memory:
        return f"{value}M"
    if read is readers.cpus:
        return (
            f"{Decimal(value) / 1000:f}".rstrip("0").rstrip(".")
            if value % 1000
            else (f"{value // 1000}")
        )
    if read is price:
        return price_text(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(k)}: {_quoted(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_quoted(one) for one in value) + "]"
    return _quoted(value) if isinstance(value, str) else str(value)


def price_text(millionths: int) -> str:
    """'2.50', '0.125'."""
    whole, rest = divmod(millionths, MILLIONTHS)
    digits = f"{rest:06d}".rstrip("0")
    return f"{whole}.{digits:0<2}"


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
