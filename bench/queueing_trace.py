"""Reads a trace of jobs, the seconds that starting a job costs, and published results."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TextIO

import msgspec

# The published simulation makes every job this much longer than in its trace.
STRETCH = Decimal("1.015")
OVERHEAD_DEFAULT_S = 10  # for a model that the table of overheads does not name, as published
JOB_FIELDS = ("num_gpu", "submit_time", "iterations", "iteration_time", "model_name")


class TraceError(Exception):
    """The file cannot be used; one line that names the row or the field."""


class TraceJob(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    gpus: int
    submitted_ms: int
    work_ms: int  # its run time without interruption
    model: str


Overheads = dict[tuple[int, str], int]  # (GPUs, model) -> milliseconds
Published = dict[str, dict[str, float]]  # policy -> metric -> value


def read_jobs(path: Path) -> list[TraceJob]:
    """The jobs in order of submission; jobs with the same time keep the order of the file."""
    found = [
        (
            int(_figure(path, row, line, "submit_time")),
            int(_figure(path, row, line, "num_gpu", least=1, whole=True)),
            _work_ms(path, row, line),
            line["model_name"],
        )
        for row, line in _rows(path, JOB_FIELDS)
    ]
    if not found:
        raise TraceError(f"{path.name}: no jobs in it")
    found.sort(key=lambda job: job[0])
    return [
        TraceJob(number=number, submitted_ms=submitted_ms, gpus=gpus, work_ms=work_ms, model=model)
        for number, (submitted_ms, gpus, work_ms, model) in enumerate(found)
    ]


def read_overheads(path: Path) -> Overheads:
    result = {}
    for row, line in _rows(path, ("num_gpu", "model_name", "overhead_s")):
        gpus = int(_figure(path, row, line, "num_gpu", least=1, whole=True))
        seconds = _figure(path, row, line, "overhead_s")
        result[gpus, line["model_name"]] = int(seconds * 1000)
    return result


def read_published(path: Path, trace: str) -> Published:
    """The published figures of one trace, by policy in lower case."""
    result: Published = {}
    for row, line in _rows(path, ("trace", "policy", "metric", "value")):
        if line["trace"] == trace:
            value = float(_figure(path, row, line, "value"))
            result.setdefault(line["policy"].lower(), {})[line["metric"]] = value
    return result


def _work_ms(path: Path, row: int, line: dict[str, str]) -> int:
    iterations = _figure(path, row, line, "iterations")
    iteration_ms = _figure(path, row, line, "iteration_time")
    return max(1, round(iterations * iteration_ms * STRETCH))


def _rows(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Numbered as an editor numbers lines: the header is row 1."""
    row = 1
    try:
        with _open(path) as lines:
            reader = csv.DictReader(lines, strict=True)
            missing = [name for name in fields if name not in (reader.fieldnames or ())]
            if not reader.fieldnames:
                raise TraceError(f"{path.name}: the file is empty")
            if missing:
                raise TraceError(f"{path.name}: no column {missing[0]!r} in the header")
            for row, line in enumerate(reader, start=2):
                short = [name for name in fields if line[name] is None]
                if short:
                    raise TraceError(f"{path.name}: row {row}: no value for {short[0]!r}")
                yield row, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path.name}: damaged or cut off after row {row} ({error})") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path.name}: not text after row {row}") from error
    except csv.Error as error:
        raise TraceError(f"{path.name}: row {row + 1}: {error}") from error
    except OSError as error:
        raise TraceError(f"{path.name}: {error.strerror or error}") from error


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _figure(
    path: Path, row: int, line: dict[str, str], name: str, *, least: int = 0, whole: bool = False
) -> Decimal:
    text = line[name]
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or (whole and value % 1):
        kind = "whole number" if whole else "number"
        raise TraceError(f"{path.name}: row {row}: {name!r} is {text!r}, not a {kind}")
    if value < least:
        raise TraceError(f"{path.name}: row {row}: {name!r} is {text}, less than {least}")
    return value
