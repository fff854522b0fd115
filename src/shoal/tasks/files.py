"""Maps a function over the lines of a file: the work of `shoal map`."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from shoal.tasks.chunks import Sizer
from shoal.tasks.errors import TaskFailed
from shoal.tasks.functions import dumper
from shoal.tasks.journal import Identity, Journal
from shoal.tasks.lines import InitFunction, LineFunction
from shoal.tasks.mapping import AHEAD_BYTES_MAX, Finished, MapSettings, OnError, run
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
