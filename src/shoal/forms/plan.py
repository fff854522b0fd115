"""What people write when they plan: models, amounts of tokens or money, goals, measurements."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.forms import datafile, units
from shoal.forms.failure import REFUSED, USAGE, BadField, Failure
from shoal.plan import library
from shoal.plan import library as huggingface
from shoal.plan.hardware import Impossible
from shoal.plan.model import Model
from shoal.plan.serving import Point

if TYPE_CHECKING:
    from shoal.plan.library import Catalog
    from shoal.sim.replay.sizing import Goal

SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15}
_AMOUNT = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,15})?(?:e[+-]?[0-9]{1,3})?)\s*([kmbgtp]?)")
_GOAL = re.compile(r"(p[0-9]{1,2}(?:\.[0-9]+)?|mean|median)\s+(wait|jct|completion)\s*<=?\s*(\S.*)")
AMOUNT_MAX = 1e18
POINTS_MAX = 1000


def amount(text: str, flag: str) -> float:
    """'2T', '300B', '15.6e12'."""
    found = _AMOUNT.fullmatch(text.strip().lower())
    value = float(found[1]) * SUFFIXES[found[2]] if found else math.nan
    if not found:
        raise Failure(
            f"{flag}: {units.quoted(text)} is not an amount; write e.g. 300B, 2T or 1e12", USAGE
        )
    if not 0 < value <= AMOUNT_MAX:
        raise Failure(
            f"{flag}: must be more than 0 and at most {AMOUNT_MAX:g}, not {text[:40]}", USAGE
        )
    return value


def whole(text: str, flag: str, most: float = 1e9) -> int:
    value = amount(text, flag)
    if value != int(value) or value > most:
        raise Failure(f"{flag}: must be a whole number from 1 to {most:g}, not {text[:40]}", USAGE)
    return int(value)


def seconds(text: str, flag: str) -> float:
    try:
        value = units.duration_ms(text) / 1000
    except units.BadAmount as error:
        raise Failure(f"{flag}: {error}", USAGE) from None
    if not value:
        raise Failure(f"{flag}: must be more than 0", USAGE)
    return value


def rate(text: str) -> float:
    """'20/s', '20', '1200/m'."""
    number, _, unit = text.strip().lower().partition("/")
    per = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}.get(unit.strip())
    if per is None:
        raise Failure(f"--rate: {units.quoted(text)} is not a rate; write e.g. 20/s", USAGE)
    return amount(number, "--rate") / per


def model(word: str) -> Model:
    """By its name, or from a file."""
    if not datafile.is_job_file(word):
        try:
            return library.model(word)
        except Impossible as error:
            raise Failure(
                f"--model: {error}; or name a .yaml, .toml or .json file", USAGE
            ) from None
    return datafile.read_named(word, "model", _model)


def _model(text: str, ending: str) -> Model:
    fields = datafile.load(text, ending, "layers: 80")
    try:
        if huggingface.is_config(fields):
            fields = huggingface.shape(fields)
        made: Model = library.convert(Model, {"name": "model", **fields}, "model")
        return made.check()
    except Impossible as error:
        raise BadField("", str(error)) from None


def hardware(word: str) -> Catalog:
    """What Shoal knows, with what the file changes or adds."""
    known = library.hardware()
    if not word:
        return known

    def parse(text: str, ending: str) -> Catalog:
        try:
            return library.catalog(datafile.load(text, ending, "[accelerators.mine]"), known)
        except Impossible as error:
            raise BadField("", str(error)) from None

    return datafile.read_named(word, "hardware file", parse)


def layout(text: str) -> dict[str, int | str | bool]:
    """'tensor=8,pipeline=4' as fields of a layout."""
    fixed: dict[str, int | str | bool] = {}
    known = ("tensor", "pipeline", "context", "expert", "micro_batch", "interleave", "zero")
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if name == "recompute" and value in ("none", "selective", "full"):
            fixed[name] = value
        elif not equals or name not in known or not re.fullmatch(r"[0-9]{1,6}", value.strip()):
            raise Failure(
                f"--layout: write e.g. tensor=8,pipeline=4; also {', '.join(known)}",
                USAGE,
            )
        elif not int(value) and name != "zero":
            raise Failure(f"--layout: {name} must be at least 1", USAGE)
        else:
            fixed[name] = int(value)
    return fixed


def goal(text: str) -> Goal:
    """'p90 wait < 1h'."""
    from shoal.sim.replay.sizing import Goal

    found = _GOAL.fullmatch(text.strip().lower())
    if found is None:
        raise Failure(
            f'--goal: {units.quoted(text)} is not a goal; write e.g. "p90 wait < 1h"',
            USAGE,
        )
    share = {"mean": None, "median": 0.5}.get(found[1])
    if found[1].startswith("p"):
        share = float(found[1][1:]) / 100
        if not 0 < share < 1:
            raise Failure("--goal: the percentile must be above 0 and below 100, e.g. p90", USAGE)
    below_ms = int(1000 * seconds(found[3], "--goal"))
    return Goal(share, "wait" if found[2] == "wait" else "jct", below_ms)


def measured(word: str) -> tuple[int, list[Point]]:
    """GPUs of the replica, and its points, from a file."""

    def parse(text: str, ending: str) -> tuple[int, list[Point]]:
        written = datafile.load(text, ending, "gpus: 1")
        datafile.check_names(written, ("gpus", "points"), "there are gpus, points")
        gpus, rows = written.get("gpus", 1), written.get("points")
        if not isinstance(gpus, int) or isinstance(gpus, bool) or not 1 <= gpus <= 10_000:
            raise BadField("gpus", "must be the GPUs of the measured replica, from 1 to 10000")
        if not isinstance(rows, list) or not 1 <= len(rows) <= POINTS_MAX:
            raise BadField("points", "must be a list, e.g. [{rate: 2, ttft: 150ms, tpot: 20ms}]")
        return gpus, [_point(index, row) for index, row in enumerate(rows)]

    return datafile.read_named(word, "measurement", parse)


def _point(index: int, row: object) -> Point:
    where = f"points[{index}]"
    if not isinstance(row, dict):
        raise BadField(where, "must be a table, e.g. {rate: 2, ttft: 150ms, tpot: 20ms}")
    datafile.check_names(row, ("rate", "ttft", "tpot"), "there are rate, ttft, tpot", where)
    value = row.get("rate")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise BadField(f"{where}.rate", "must be requests per second, more than 0")
    times = {}
    for name in ("ttft", "tpot"):
        try:
            times[f"{name}_s"] = units.duration_ms(str(row.get(name, "0"))) / 1000
        except units.BadAmount as error:
            raise BadField(f"{where}.{name}", str(error)) from None
    return Point(rate=float(value), **times)


def existing(word: str, flag: str) -> Path:
    path = Path(word)
    if not path.exists():
        raise Failure(f"{flag}: there is no {path}", REFUSED)
    return path
