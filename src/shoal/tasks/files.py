"""A map over the lines of a file: what `shoal map` does between its flags and its messages."""

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
from shoal.tasks.mapping import AHEAD_BYTES_MAX, Finished, OnError, Plan, run
from shoal.tasks.pool import function_of
from shoal.tasks.warm import lent

if TYPE_CHECKING:
    from shoal.tasks.cluster import Cluster

BLOCK_BYTES = 1 << 20


class BadLine(Exception):
    """An input line that is no JSON; the message says which."""


class Order(NamedTuple):
    """What was asked for, checked."""

    script: Path
    function: str
    init: str
    inputs: Path
    output: Path
    workers: int
    retries: int
    on_error: OnError
    cluster: Cluster | None = None


class Counts(NamedTuple):
    lines: int
    resumed: int
    failed: int


Watch = Callable[[int, TaskFailed | None], None]  # so many more are done, or one is given up


def identify(order: Order) -> Identity:
    """Reads the input once, in blocks: how many lines there are, and a digest of all of it."""
    digest, lines, size, last = hashlib.blake2b(digest_size=16), 0, 0, b"\n"
    with order.inputs.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            lines += block.count(b"\n")
            size += len(block)
            last = block[-1:]
    lines += last != b"\n"
    function = f"{order.script.name}:{order.function}"
    return Identity(lines, size, digest.hexdigest(), function, order.on_error)


def map_file(order: Order, journal: Journal, total: int, watch: Watch) -> Counts:
    """Until all is in the output; raises the error of the first task given up if that is asked."""
    dump = dumper()
    init = dump(InitFunction(str(order.script), order.init)) if order.init else None
    function = function_of(dump(LineFunction(str(order.script), order.function)))
    plan = Plan(function, order.workers, order.retries, Sizer(order.workers), dump)
    resumed = journal.known
    gaps = journal.gaps(total)
    if gaps:
        with lent(order.workers, init, order.cluster) as pool:
            for start, end in gaps:
                items = read_lines(order.inputs, start, end)
                for finished in run(pool, plan, items, end - start, lambda: _room(journal)):
                    placed = _placed(finished, start)
                    _keep(journal, placed, order.on_error)
                    watch(placed.length, placed.failure)
    journal.finish()
    return Counts(total, resumed, journal.failed)


def read_lines(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Checked here, so that a line that is no JSON is told by its number, and at once."""
    check = msgspec.json.Decoder(msgspec.Raw).decode
    with path.open("rb") as file:
        for number, line in enumerate(itertools.islice(file, start, end), start + 1):
            try:
                check(line)
            except msgspec.DecodeError as error:
                raise BadLine(f"{path} line {number}: not JSON: {error}") from None
            yield line


def _room(journal: Journal) -> bool:
    return journal.waiting_bytes() < AHEAD_BYTES_MAX


def _placed(finished: Finished, start: int) -> Finished:
    """Counted from the first line of the file, not of the gap."""
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
        told = {"error": f"{type(failure.error).__name__}: {failure.error}", "line": first + 1}
        data = msgspec.json.encode({**told, "traceback": failure.traceback}) + b"\n"
        journal.add(first, 1, data, failed=1)
