"""Maps a function over the lines of a file: the work of `shoal map`."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import itertools
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec

from shoal.tasks.errors import TaskFailed
from shoal.tasks.functions import dumper, from_script
from shoal.tasks.journal import Identity, Journal
from shoal.tasks.mapping import AHEAD_BYTES_MAX, Finished, MapSettings, OnError, Sizer, run
from shoal.tasks.pool import function_of
from shoal.tasks.warm import borrow_pool

if TYPE_CHECKING:
    from shoal.tasks.cluster import Cluster


BLOCK_BYTES = 1 << 20


class BadLine(Exception):
    """An input line is not JSON; the message names the line."""


class MapRequest(NamedTuple):
    """The arguments of `shoal map`, checked."""

    script: Path
    function: str
    init: str
    inputs: Path
    output: Path
    workers: int
    retries: int
    on_error: OnError
    cluster: Cluster | None = None
    shown: str = ""  # what people call the inputs


class Counts(NamedTuple):
    lines: int
    resumed: int
    failed: int


Watch = Callable[[int, TaskFailed | None], None]  # (tasks done, failure)


def identify(request: MapRequest) -> Identity:
    """Reads the input once to count its lines and compute its digest."""
    digest, lines, size, last = hashlib.blake2b(digest_size=16), 0, 0, b"\n"
    with request.inputs.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            lines += block.count(b"\n")
            size += len(block)
            last = block[-1:]
    lines += last != b"\n"
    function = f"{request.script.name}:{request.function}"
    return Identity(lines, size, digest.hexdigest(), function, request.on_error)


def map_file(request: MapRequest, journal: Journal, total: int, watch: Watch) -> Counts:
    """Runs until the output is complete. With on_error "raise", raises the first failure."""
    dump = dumper()
    init = dump(InitFunction(str(request.script), request.init)) if request.init else None
    function = function_of(dump(LineFunction(str(request.script), request.function)))
    settings = MapSettings(function, request.workers, request.retries, Sizer(request.workers), dump)
    resumed = journal.known
    gaps = journal.gaps(total)
    if gaps:
        with borrow_pool(request.workers, init, request.cluster) as pool:
            for start, end in gaps:
                items = read_lines(request.inputs, start, end, request.shown)
                for finished in run(pool, settings, items, end - start, lambda: _room(journal)):
                    placed = _placed(finished, start)
                    _keep(journal, placed, request.on_error)
                    watch(placed.length, placed.failure)
    journal.finish()
    return Counts(total, resumed, journal.failed)


def read_lines(path: Path, start: int, end: int, shown: str = "") -> Iterator[bytes]:
    """Checked here, so that a line that is not JSON is reported at once, with its number."""
    check = msgspec.json.Decoder(msgspec.Raw).decode
    with path.open("rb") as file:
        for number, line in enumerate(itertools.islice(file, start, end), start + 1):
            try:
                check(line)
            except msgspec.DecodeError as error:
                raise BadLine(f"{shown or path} line {number}: not JSON: {error}") from None
            yield line


def _room(journal: Journal) -> bool:
    return journal.waiting_bytes() < AHEAD_BYTES_MAX


def _placed(finished: Finished, start: int) -> Finished:
    """Renumbered from the first line of the file instead of the gap."""
    first, failure = start + finished.first, finished.failure
    if failure is not None:
        failure = TaskFailed(first, failure.tries, failure.error, failure.traceback)
    return finished._replace(first=first, failure=failure)


def _keep(journal: Journal, finished: Finished, on_error: OnError) -> None:
    first, failure = finished.first, finished.failure
    if failure is None:
        journal.add(first, finished.length, b"\n".join(finished.values) + b"\n")
    elif on_error == "raise":
        raise failure
    elif on_error == "skip":
        journal.add(first, 1, b"", failed=1)
    else:
        line = {"error": f"{type(failure.error).__name__}: {failure.error}", "line": first + 1}
        data = msgspec.json.encode({**line, "traceback": failure.traceback}) + b"\n"
        journal.add(first, 1, data, failed=1)


# Applies a script's function to lines of JSON: what a worker of `shoal map` runs.


class LineFunction:
    """Sent by name and loaded in the worker, so the client never imports the script."""

    def __init__(self, path: str, name: str) -> None:
        self._where = path, name

    def __reduce__(self) -> tuple[Callable[[str, str], Any], tuple[str, str]]:
        return line_function, self._where

    def __call__(self, line: bytes) -> bytes:
        return line_function(*self._where)(line)


class InitFunction(LineFunction):
    """Called once in each worker, without arguments."""

    def __reduce__(self) -> tuple[Callable[[str, str], Any], tuple[str, str]]:
        return from_script, self._where


def line_function(path: str, name: str) -> Callable[[bytes], bytes]:
    import msgspec

    function = from_script(path, name)
    decode, encode = msgspec.json.decode, msgspec.json.Encoder(enc_hook=_plain).encode

    def run(line: bytes) -> bytes:
        return encode(function(decode(line)))

    return run


def _plain(value: Any) -> Any:
    """Converts arrays and tensors; the function must turn other types into JSON itself."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a result of type {type(value).__name__} cannot be written as JSON")


# Inputs of `shoal map` that are not lines of JSON in a file: CSV, Parquet and standard input.
#
# They are written as lines of JSON beside the output first, so that everything behind this, also a
# run that continues, sees one kind of file.


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
