"""Inputs of `shoal map` that are not lines of JSON in a file: CSV, Parquet and standard input.

They are written as lines of JSON beside the output first, so that everything behind this, also a
run that continues, sees one kind of file.
"""

from __future__ import annotations

import contextlib
import csv
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

STANDARD = Path("-")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET = (".parquet", ".pq")


class BadInputs(Exception):
    """The message names the file and the fix."""


@contextlib.contextmanager
def lines_of(inputs: Path, output: Path) -> Iterator[Path]:
    """A file with a line of JSON per input. A copy is removed at the end."""
    kind = inputs.suffix.lower()
    if inputs != STANDARD and kind not in (*DELIMITERS, *PARQUET):
        yield inputs
        return
    copy = output.with_name(f"{output.name}.inputs")
    try:
        with copy.open("wb") as file:
            if inputs == STANDARD:
                shutil.copyfileobj(sys.stdin.buffer, file)
            elif kind in DELIMITERS:
                _write_csv(inputs, file, DELIMITERS[kind])
            else:
                _write_parquet(inputs, file)
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def _write_csv(inputs: Path, file: BinaryIO, delimiter: str) -> None:
    """A row is an object of texts, named by the first line."""
    try:
        with inputs.open(encoding="utf-8-sig", newline="") as source:
            rows = csv.reader(source, delimiter=delimiter, strict=True)
            names = next(rows, [])
            if not names or len(set(names)) < len(names):
                what = "names a column twice" if names else "is empty"
                raise BadInputs(f"{inputs}: its first line {what}; it must name the columns")
            for row in rows:
                if row and len(row) != len(names):
                    count = f"{len(row)} values for {len(names)} columns"
                    raise BadInputs(f"{inputs} line {rows.line_num}: has {count}")
                if row:
                    file.write(msgspec.json.encode(dict(zip(names, row, strict=True))) + b"\n")
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadInputs(f"{inputs}: is not CSV: {error}") from None


def _write_parquet(inputs: Path, file: BinaryIO) -> None:
    """A row is an object; dates become text, and bytes base64."""
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise BadInputs(f"{inputs}: reading Parquet needs pyarrow: pip install pyarrow") from None
    encode = msgspec.json.Encoder(enc_hook=_text).encode
    try:
        with parquet.ParquetFile(inputs) as source:
            for batch in source.iter_batches():
                file.writelines(encode(row) + b"\n" for row in batch.to_pylist())
    except ArrowException as error:
        line = str(error).splitlines()[0][:200]
        raise BadInputs(f"{inputs}: is not Parquet: {line}") from None


def _text(value: Any) -> str:
    return str(value)
