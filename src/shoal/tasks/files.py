"""Maps a function over the lines of a file: the work of `shoal map`."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec

from shoal.machine.files import lock
from shoal.tasks.errors import TaskFailed
from shoal.tasks.functions import dumper, from_script
from shoal.tasks.mapping import AHEAD_BYTES_MAX, Finished, MapSettings, OnError, Sizer, run
from shoal.tasks.pool import borrow_pool, function_of

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


# Writes the output of `shoal map`: complete and in order, even if the process is killed.
#
# OUTPUT.part has the output lines in input order, as far as they are known. OUTPUT.journal names
# the input, and has marks (the number of inputs and bytes in the part) and results that are ahead
# of their turn. At the end the part becomes OUTPUT.


JOURNAL_BYTES_MAX = 64 << 20  # a longer one starts again as soon as no result waits


class Identity(msgspec.Struct, frozen=True):
    """Identifies the input and the function: a journal continues only with the same ones.
    `on_error` may change while nothing has failed."""

    lines: int
    size_bytes: int
    digest: str
    function: str
    on_error: str


class Mark(msgspec.Struct, frozen=True, tag="mark"):
    done: int  # inputs whose results are in the part
    written: int  # bytes in the part
    failed: int


class Ahead(msgspec.Struct, frozen=True, tag="ahead"):
    """Followed by `size` bytes of output."""

    first: int
    length: int
    size: int
    failed: int


class OnErrorChanged(msgspec.Struct, frozen=True, tag="turned"):
    """From here on, another `--on-error` applies."""

    on_error: str


class JournalError(Exception):
    """Cannot write here; the message has the reason and the fix."""


class Journal:
    def __init__(self, output: Path, identity: Identity) -> None:
        self._output = output
        self._part_path = output.with_name(f"{output.name}.part")
        self._path = output.with_name(f"{output.name}.journal")
        self._identity = identity
        self.done = 0
        self.failed = 0
        self._ahead: dict[int, tuple[Ahead, bytes]] = {}
        self._written = 0
        self._begun = False
        self._read_on_error = identity.on_error
        if output.exists():
            raise JournalError(f"{output}: exists already; remove it, or name another output")
        if self._part_path.exists() and not self._path.exists():
            what = f"{self._part_path}: exists without its journal"
            raise JournalError(f"{what}; remove it, or name another output")
        self._lock = lock(self._path)
        if self._lock is None:
            raise JournalError(f"{output}: another `shoal map` is writing it")
        self._journal: BinaryIO = self._path.open("r+b", buffering=0)
        try:
            end = self._read()
            self._part: BinaryIO = self._part_path.open("ab", buffering=0)
            if os.fstat(self._part.fileno()).st_size < self._written:
                what = f"{self._part_path}: is shorter than its journal says"
                raise JournalError(f"{what}; remove both to start again")
        except BaseException:
            self.close()
            raise
        self._part.truncate(self._written)
        self._journal.truncate(end)
        self._journal.seek(end)
        if end == 0:
            self._begin()
        elif self._read_on_error != identity.on_error:
            _write(self._journal, msgspec.json.encode(OnErrorChanged(identity.on_error)) + b"\n")
        self._begun = True

    @property
    def known(self) -> int:
        """The number of inputs that have results."""
        return self.done + sum(entry.length for entry, _ in self._ahead.values())

    def gaps(self, total: int) -> list[tuple[int, int]]:
        """Ranges of inputs without results."""
        gaps, start = [], self.done
        for first, (entry, _) in sorted(self._ahead.items()):
            if first > start:
                gaps.append((start, first))
            start = first + entry.length
        return [*gaps, (start, total)] if start < total else gaps

    def waiting_bytes(self) -> int:
        return sum(entry.size for entry, _ in self._ahead.values())

    def add(self, first: int, length: int, data: bytes, failed: int = 0) -> None:
        """Add the output of `length` inputs from `first` on."""
        entry = Ahead(first, length, len(data), failed)
        if first != self.done:
            _write(self._journal, msgspec.json.encode(entry) + b"\n" + data)
            self._ahead[first] = entry, data
            return
        self._append(entry, data)
        while self.done in self._ahead:
            self._append(*self._ahead.pop(self.done))
        if not self._ahead and self._journal.tell() > JOURNAL_BYTES_MAX:
            self._begin()
        _write(self._journal, self._mark())

    def finish(self) -> None:
        """The output is complete: rename the part."""
        os.fsync(self._part.fileno())
        self._part_path.rename(self._output)
        self._path.unlink()
        self.close()

    def close(self) -> None:
        """Removes an empty journal, which would only block another map with the same output."""
        if self._lock is not None and self._path.exists() and not self.known and self._begun:
            self._part_path.unlink(missing_ok=True)
            self._path.unlink()
        for file in (getattr(self, "_part", None), self._journal):
            if file is not None:
                file.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _append(self, entry: Ahead, data: bytes) -> None:
        _write(self._part, data)
        self._written += len(data)
        self.done += entry.length
        self.failed += entry.failed

    def _mark(self) -> bytes:
        return msgspec.json.encode(Mark(self.done, self._written, self.failed)) + b"\n"

    def _begin(self) -> None:
        """One write, so that a journal without a whole first line is empty."""
        self._journal.seek(0)
        self._journal.truncate(0)
        _write(self._journal, msgspec.json.encode(self._identity) + b"\n" + self._mark())

    def _read(self) -> int:
        """Reads what an earlier run left; returns where the last whole entry ends."""
        with self._path.open("rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):
                return 0  # killed while it wrote the first line
            try:
                found = msgspec.json.decode(first, type=Identity)
            except msgspec.DecodeError:
                raise JournalError(f"{self._path}: is not a journal of `shoal map`") from None
            self._read_on_error = found.on_error
            if msgspec.structs.replace(found, on_error=self._identity.on_error) != self._identity:
                raise JournalError(_mismatch(self._path, found, self._identity))
            end = file.tell()
            while (line := file.readline()).endswith(b"\n"):
                try:
                    entry = msgspec.json.decode(line, type=Mark | Ahead | OnErrorChanged)
                except msgspec.DecodeError:
                    break
                if isinstance(entry, Mark):
                    self.done, self._written, self.failed = entry.done, entry.written, entry.failed
                elif isinstance(entry, OnErrorChanged):
                    self._read_on_error = entry.on_error
                else:
                    data = file.read(entry.size)
                    if len(data) < entry.size:
                        break
                    self._ahead[entry.first] = entry, data
                end = file.tell()
        self._ahead = {at: kept for at, kept in self._ahead.items() if at >= self.done}
        self._refuse_other_failures()
        return end

    def _refuse_other_failures(self) -> None:
        """Results do not depend on `--on-error`, but the output for a failure does."""
        before, asked = self._read_on_error, self._identity.on_error
        failed = self.failed + sum(entry.failed for entry, _ in self._ahead.values())
        if failed and before != asked:
            raise JournalError(
                f"{self._path}: already has {failed} failed lines from --on-error {before}; "
                f"use that again, or {_start_again(self._path)}"
            )


def _mismatch(path: Path, found: Identity, asked: Identity) -> str:
    what = "another function" if found.function != asked.function else "another input"
    return f"{path}: belongs to a map with {what}; {_start_again(path)}"


def _start_again(path: Path) -> str:
    return f"remove it and {path.stem}.part to start again, or name another output"


def _write(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
