"""`shoal.map`: one function over many inputs, with results in input order or as they are ready."""

from __future__ import annotations

import itertools
import logging
import operator
import os
import pickle
import queue
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shoal.tasks.errors import TaskFailed, restored
from shoal.tasks.functions import dump_function, dumper
from shoal.tasks.pool import (
    WORKERS_MAX,
    Died,
    Function,
    Hopeless,
    Outcome,
    Pool,
    Result,
    Work,
    borrow_pool,
    function_of,
)
from shoal.tasks.process import cores
from shoal.tasks.worker import WORKER_MARK

if TYPE_CHECKING:
    from shoal.tasks.cluster import Cluster


OnError = Literal["raise", "skip", "return"]
ON_ERROR = ("raise", "skip", "return")

RETRIES_MAX = 1000
QUEUED = 2  # chunks per worker, running and next, so that no worker waits for the reader
AHEAD_TASKS_MAX = 1 << 16  # results that wait for an earlier one
AHEAD_BYTES_MAX = 256 << 20
BACKUP_FACTOR = 2.0  # a chunk that takes this many times its expected time ...
BACKUP_S_MIN = 0.25  # ... and at least this long is started a second time on an idle worker
LOOK_S = 0.05
WAIT_S = 1.0

log = logging.getLogger("shoal.tasks")


def map(  # noqa: A001 - called as shoal.map
    fn: Callable[[Any], Any],
    items: Iterable[Any],
    *,
    workers: int | None = None,
    init: Callable[[], Any] | None = None,
    order: bool = True,
    retries: int = 2,
    on_error: OnError = "raise",
    chunk: int | None = None,
    progress: bool = True,
    cluster: bool | Cluster = False,
) -> Iterator[Any]:
    """The results of `fn` for each item, computed by worker processes.

    The map starts when the first result is read, and reads `items` only a little ahead. A task that
    raises or kills its worker is tried again, alone, up to `retries` times. Then `on_error`
    applies: raise its exception, skip it (and log it), or return a TaskFailed in its place. With
    `retries=0` every task runs at most once. Otherwise a task may run twice, also because its
    worker is slow. `init` is called once in each worker; `shoal.tasks.context()` returns its
    result. With `cluster=True`, or a Cluster with the resources of each worker, the workers run on
    the cluster.
    """
    where = chosen_cluster(cluster)
    count = workers if workers is not None else workers_of(where)
    _check("workers", count, 1, WORKERS_MAX)
    _check("retries", retries, 0, RETRIES_MAX)
    if chunk is not None:
        _check("chunk", chunk, 1, 1 << 20)
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error: must be one of {', '.join(ON_ERROR)}, not {on_error!r}")
    dump = dumper()
    function = function_of(dump_function(fn, dump, "fn"))
    built = None if init is None else dump_function(init, dump, "init")
    left = operator.length_hint(items, -1)
    settings = MapSettings(function, count, retries, Sizer(count, chunk), dump)
    stream = iter(items)
    size = left if left >= 0 else None
    return _results(settings, stream, size, built, order, on_error, progress, where)


def chosen_cluster(wanted: bool | Cluster) -> Cluster | None:
    if wanted is False:
        return None
    from shoal.tasks.cluster import Cluster

    return Cluster() if wanted is True else wanted


def workers_of(cluster: Cluster | None) -> int:
    if cluster is None:
        return 1 if os.environ.get(WORKER_MARK) else cores()  # in a worker, they are taken
    from shoal.tasks.cluster import default_cluster_workers

    return default_cluster_workers(cluster)


def _check(name: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: must be a whole number, not {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name}: must be from {least} to {most}, not {value}")


class MapSettings(NamedTuple):
    """What does not change while a map runs."""

    function: Function
    workers: int
    retries: int
    sizer: Sizer
    dump: Callable[[Any], bytes]


class Finished(NamedTuple):
    """Consecutive tasks that are done, or one task that is given up."""

    first: int
    length: int
    values: list[Any]
    size_bytes: int
    failure: TaskFailed | None


def _results(
    settings: MapSettings,
    items: Iterator[Any],
    left: int | None,
    init: bytes | None,
    order: bool,
    on_error: OnError,
    progress: bool,
    cluster: Cluster | None,
) -> Iterator[Any]:
    shown = Progress(left, quiet=not progress)
    with borrow_pool(settings.workers, init, cluster) as pool, shown:
        stitcher = Stitcher(order)
        for finished in run(pool, settings, items, left, stitcher.room):
            shown.add(finished.length, failed=finished.failure is not None)
            for ready in stitcher.add(finished):
                failure = ready.failure
                if failure is None:
                    yield from ready.values
                elif on_error == "return":
                    yield failure
                elif on_error == "raise":
                    raise failure.error from failure
                else:
                    log.warning("skipped: %s", failure)


class Stitcher:
    """Restores the order of the inputs, and bounds the results that wait for their turn."""

    def __init__(self, order: bool) -> None:
        self._order = order
        self._next = 0
        self._waiting: dict[int, Finished] = {}
        self._tasks = 0
        self._bytes = 0

    def room(self) -> bool:
        return self._tasks < AHEAD_TASKS_MAX and self._bytes < AHEAD_BYTES_MAX

    def add(self, finished: Finished) -> Iterator[Finished]:
        if not self._order:
            yield finished
            return
        self._waiting[finished.first] = finished
        self._tasks += finished.length
        self._bytes += finished.size_bytes
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self._next += ready.length
            self._tasks -= ready.length
            self._bytes -= ready.size_bytes
            yield ready


@dataclass(eq=False, slots=True)
class Chunk:
    first: int
    items: list[Any]
    tries: int = 0  # failures; counted only for a chunk with one task
    began_s: float | None = None
    works: list[Work] = field(default_factory=list)

    def begin(self) -> bool:
        if self.began_s is None:
            self.began_s = time.monotonic()
        return True


def run(
    pool: Pool,
    settings: MapSettings,
    items: Iterator[Any],
    left: int | None,
    room: Callable[[], bool],
) -> Iterator[Finished]:
    """Yields tasks as they finish, in any order. The map advances as its results are read."""
    mapper = _Mapper(pool, settings, items, left)
    try:
        while mapper.fill(room()):
            yield from mapper.settle()
    finally:
        mapper.end()


class _Mapper:
    def __init__(
        self, pool: Pool, settings: MapSettings, items: Iterator[Any], left: int | None
    ) -> None:
        self._pool = pool
        self._settings = settings
        self._items = items
        self._left = left
        self._next = 0
        self._exhausted = False
        self._again: deque[Chunk] = deque()
        self._running: dict[Work, Chunk] = {}
        self._inbox: queue.SimpleQueue[tuple[Work, Outcome]] = queue.SimpleQueue()

    def fill(self, room: bool) -> bool:
        """Give the pool enough work; False when everything is done."""
        most = QUEUED * self._settings.workers
        while self._again and len(self._running) < most:
            self._start(self._again.popleft())
        while room and not self._exhausted and len(self._running) < most:
            chunk = Chunk(self._next, self._read())
            self._next += len(chunk.items)
            if chunk.items:
                self._start(chunk)
        return bool(self._running or self._again)

    def _read(self) -> list[Any]:
        size = self._settings.sizer.size(self._left)
        items = list(itertools.islice(self._items, size))
        self._exhausted = len(items) < size
        if self._left is not None:  # only a hint: more may come
            self._left = max(0, self._left - len(items))
        return items

    def _start(self, chunk: Chunk) -> None:
        body = self._settings.dump(chunk.items)
        work = Work(self._settings.function, body, self._on_outcome, chunk.begin)
        # Only quick tasks with more to come may queue behind another chunk; the last ones may not.
        work.ahead = len(chunk.items) > 1 and not self._exhausted and self._left != 0
        chunk.works.append(work)
        self._running[work] = chunk
        self._pool.submit(work)

    def _on_outcome(self, work: Work, outcome: Outcome) -> None:
        self._inbox.put((work, outcome))

    def settle(self) -> Iterator[Finished]:
        """Wait for the next outcome. Meanwhile start a copy of a late chunk."""
        spare = len(self._running) < QUEUED * self._settings.workers and self._settings.retries > 0
        try:
            work, outcome = self._inbox.get(timeout=LOOK_S if spare else WAIT_S)
        except queue.Empty:
            if spare:
                self._back_up()
            return
        chunk = self._running.pop(work, None)
        if chunk is None:
            return  # a copy was faster
        others = [other for other in chunk.works if self._running.pop(other, None)]
        if others:
            self._pool.drop(others)
        if isinstance(outcome, Hopeless):
            raise outcome.error
        if isinstance(outcome, Died):
            yield from self._blame(chunk, outcome)
        else:
            yield from self._take(chunk, outcome, len(work.body))

    def _back_up(self) -> None:
        """Copy the chunk that is latest for its size, once."""
        now, latest, worst = time.monotonic(), None, 0.0
        for chunk in self._running.values():
            usual = self._settings.sizer.expected_s(len(chunk.items))
            if chunk.began_s is None or usual is None or len(chunk.works) > 1:
                continue
            late = now - chunk.began_s - max(BACKUP_S_MIN, BACKUP_FACTOR * usual)
            if late > worst:
                latest, worst = chunk, late
        if latest is not None:
            self._start(latest)

    def _blame(self, chunk: Chunk, died: Died) -> Iterator[Finished]:
        """The task that killed the worker runs alone from now on; its neighbors run again."""
        if died.position is None or died.innocent:
            yield from self._lose(chunk, died)
            return
        at = min(died.position, len(chunk.items) - 1)  # it may have died between two chunks
        for first, items in ((0, chunk.items[:at]), (at + 1, chunk.items[at + 1 :])):
            if items:
                self._again.append(Chunk(chunk.first + first, items))
        yield from self._retry(chunk, at, died.error, str(died.error))

    def _lose(self, chunk: Chunk, died: Died) -> Iterator[Finished]:
        """It is not known which task killed the worker, if any. Halving the chunk finds a task that
        ends whole nodes. A node that is lost by itself costs a try only to a task that ran
        alone."""
        count = len(chunk.items)
        if not self._settings.retries:  # at most once, and each of them may have run
            for position in range(count):
                yield from self._retry(chunk, position, died.error, str(died.error))
        elif died.innocent:
            self._again.append(Chunk(chunk.first, chunk.items, chunk.tries))
        elif count == 1:
            yield from self._retry(chunk, 0, died.error, str(died.error))
        else:
            half = count // 2
            self._again.append(Chunk(chunk.first, chunk.items[:half]))
            self._again.append(Chunk(chunk.first + half, chunk.items[half:]))

    def _take(self, chunk: Chunk, result: Result, sent_bytes: int) -> Iterator[Finished]:
        values, errors = pickle.loads(result.body)
        size_bytes = len(result.body)
        if not chunk.tries:
            self._settings.sizer.learn(len(values), result.took_s, size_bytes + sent_bytes)
        if len(values) < len(chunk.items):
            self._split(chunk, len(values))
        if not errors:
            yield Finished(chunk.first, len(values), values, size_bytes, None)
            return
        start = 0
        for position, _, _ in (*sorted(errors), (len(values), b"", "")):
            if position > start:
                good = values[start:position]
                yield Finished(chunk.first + start, len(good), good, size_bytes, None)
            start = position + 1
        # Failures last, so that a caller that stops at the first has the finished neighbors.
        for position, data, text in sorted(errors):
            yield from self._retry(chunk, position, restored(data, text), text)

    def _split(self, chunk: Chunk, done: int) -> None:
        """The worker ran out of time: the rest of its chunk is shared out, ahead of new tasks."""
        size = self._settings.sizer.size(len(chunk.items) - done)
        starts = range(done, len(chunk.items), size)
        self._again.extendleft(
            Chunk(chunk.first + start, chunk.items[start : start + size])
            for start in reversed(starts)
        )

    def _retry(
        self, chunk: Chunk, position: int, error: BaseException, text: str
    ) -> Iterator[Finished]:
        tries, index = chunk.tries + 1, chunk.first + position
        if tries <= self._settings.retries:
            self._again.append(Chunk(index, [chunk.items[position]], tries))
            return
        yield Finished(index, 1, [], 0, TaskFailed(index, tries, error, text))

    def end(self) -> None:
        """Also called when the caller stops reading."""
        try:
            if self._running:
                self._pool.drop(list(self._running))
            self._pool.forget(self._settings.function)
        except RuntimeError:
            log.debug("the pool is closed already")


# Decides how many tasks go into a chunk: many to hide the cost of sending, few for an even end.


TARGET_S = 0.1  # duration of a chunk: a hundred times the cost of sending one
GROWTH_MAX = 1024  # can be large, because a worker hands back what it does not finish in time
CHUNK_TASKS_MAX = 1 << 16
CHUNK_BYTES_MAX = 8 << 20
SHARES = 2  # each worker should get at least this many of the remaining chunks ...
EVEN_S = 0.001  # ... unless they would be shorter than this
WEIGHT = 0.5  # of the newest chunk in the averages


class Sizer:
    """Starts with one task per chunk, and learns from every finished chunk."""

    def __init__(self, workers: int, fixed: int | None = None) -> None:
        self._workers = workers
        self._fixed = fixed
        self._size = 1
        self._task_s: float | None = None
        self._task_bytes = 0.0

    def size(self, left: int | None) -> int:
        """Tasks in the next chunk. `left`: the number of remaining tasks, if known."""
        if self._fixed is not None:
            return self._fixed
        if left is None:
            return self._size
        share = -(-left // (SHARES * self._workers))
        even = int(EVEN_S / max(self._task_s, 1e-9)) if self._task_s is not None else 1
        return max(1, min(self._size, max(share, even)))

    def learn(self, tasks: int, took_s: float, sent_bytes: int) -> None:
        """`sent_bytes` counts both directions: a large result must not wait for its neighbors."""
        task_s = took_s / tasks
        known = self._task_s
        self._task_s = task_s if known is None else WEIGHT * task_s + (1 - WEIGHT) * known
        self._task_bytes = max(sent_bytes / tasks, self._task_bytes * (1 - WEIGHT))
        fitting = min(
            TARGET_S / max(self._task_s, 1e-9), CHUNK_BYTES_MAX / max(self._task_bytes, 1.0)
        )
        most = min(self._size * GROWTH_MAX, CHUNK_TASKS_MAX) if tasks >= self._size else self._size
        self._size = max(1, min(int(fitting), most))

    def expected_s(self, tasks: int) -> float | None:
        return None if self._task_s is None else self._task_s * tasks


# A progress bar with rate and time left, on a terminal, for maps that take more than a moment.


QUIET_S = 1.0
FRAME_S = 0.2
BAR_WIDTH = 24
RATE_WEIGHT = 0.3


class Progress:
    def __init__(
        self, total: int | None, *, quiet: bool = False, done: int = 0, lines_s: float = 0.0
    ) -> None:
        """`lines_s`: without a terminal, print a line every `lines_s` seconds; 0 for none."""
        terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._live = terminal and not quiet
        self._every_s = FRAME_S if self._live else lines_s
        self._silent = quiet or not self._every_s
        self._total = total
        self._done = done
        self._failed = 0
        self._rate: float | None = None
        self._began_s = time.monotonic()
        self._shown_s, self._shown_done = self._began_s, done
        self._drawn = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn and self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def add(self, count: int, failed: bool = False) -> None:
        self._done += count
        self._failed += failed
        if self._silent:
            return
        now = time.monotonic()
        since = now - self._shown_s
        if since < self._every_s or now - self._began_s < QUIET_S:
            return
        rate = (self._done - self._shown_done) / since
        old = self._rate
        self._rate = rate if old is None else RATE_WEIGHT * rate + (1 - RATE_WEIGHT) * old
        self._shown_s, self._shown_done, self._drawn = now, self._done, True
        text = progress_text(self._done, self._total, self._rate, self._failed)
        if self._live:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


def progress_text(done: int, total: int | None, rate: float, failed: int = 0) -> str:
    """'■■■□□□ 1,200 of 10,000, 310/s, 28s left, 2 failed'."""
    speed = f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"
    parts = [f"{done:,}", speed]
    if total:
        filled = min(BAR_WIDTH, BAR_WIDTH * done // total)
        bar = "■" * filled + "□" * (BAR_WIDTH - filled)
        parts[0] = f"{bar} {done:,} of {max(total, done):,}"
        if rate > 0:
            parts.append(f"{time_text((total - done) / rate)} left")
    if failed:
        parts.append(f"{failed:,} failed")
    return ", ".join(parts)


def time_text(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole}s"
    if whole < 6000:
        return f"{whole // 60}m {whole % 60:02}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02}m"
