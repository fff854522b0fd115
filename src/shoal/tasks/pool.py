"""A pool of worker processes and the thread that feeds them: chunks of work in, outcomes out.

Only this thread starts and touches the workers, because the kernel ends a process together with the
thread that started it. Other threads queue calls for it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import pickle
import selectors
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from shoal.tasks import frames
from shoal.tasks.errors import InitFailed, Unloadable, WorkerDied, restored
from shoal.tasks.frames import Body, Frame, Parcel, parcel
from shoal.tasks.functions import main_script, refuse_within_main
from shoal.tasks.process import Bell, Process, cores
from shoal.tasks.worker import NOT_BEGUN

if TYPE_CHECKING:
    from shoal.tasks.cluster import Cluster


WORKERS_MAX = 4096
START_FAILURES_MAX = 3  # in a row; then starting is given up
JOIN_S_MAX = 10.0

_numbers = itertools.count(1)


class Function(NamedTuple):
    """Sent to a worker once, with the first chunk that needs it."""

    number: int
    data: bytes


class Result(NamedTuple):
    took_s: float
    body: Body


class Died(NamedTuple):
    """The worker died in the task at this position of the chunk; None: it is not known which.
    `innocent`: it was stopped on request, so no task is to blame."""

    position: int | None
    error: WorkerDied
    innocent: bool = False


class Hopeless(NamedTuple):
    """Trying again would not help: the function does not load, or no worker starts."""

    error: BaseException


Outcome = Result | Died | Hopeless


@dataclass(eq=False, slots=True)
class Work:
    """A chunk of tasks. `report` and `begin` are called in the pool's thread and must be quick."""

    function: Function
    body: bytes
    report: Callable[[Work, Outcome], None]
    begin: Callable[[], bool] = lambda: True  # False: it was cancelled
    begun: bool = False
    ahead: bool = False  # may wait at a busy worker, as its next chunk
    number: int = field(default_factory=lambda: next(_numbers) & 0xFFFFFFFF)


def function_of(data: bytes) -> Function:
    return Function(next(_numbers) & 0xFFFFFFFF, data)


class Worker(Protocol):
    """The pool's view of a worker: a process, or the far end of a connection."""

    pid: int
    socket: socket.socket
    pidfd: int | None
    known: set[int]  # functions it has been sent
    ready: bool
    failure: BaseException | None  # of `init`

    @property
    def position(self) -> int | None: ...

    @property
    def innocent(self) -> bool: ...

    def begin(self) -> None: ...

    def died(self, frame: Frame) -> None: ...

    def send(self, ready: Parcel) -> None: ...

    def push(self) -> bool: ...

    def receive(self) -> list[Frame] | None: ...

    def kill(self) -> None: ...

    def release(self) -> None: ...

    def reap(self) -> str: ...


class Pool:
    def __init__(self, size: int, init: bytes | None = None) -> None:
        refuse_within_main()
        self.size = size
        self.broken: BaseException | None = None
        self._init = init
        self._script = main_script()
        self._calls: deque[Callable[[], None]] = deque()
        self._queue: deque[Work] = deque()
        self._idle: list[Worker] = []
        self._busy: dict[Worker, deque[Work]] = {}  # the running chunk and the next
        self._all: set[Worker] = set()
        self._start_failures = 0
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._bell = Bell()
        self._rung = False  # and not yet heard
        self._selector.register(self._bell.end, selectors.EVENT_READ, None)
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()
        self._over = False

    # -- called from any thread ----------------------------------------------------------------

    def submit(self, work: Work) -> None:
        self._call(functools.partial(self._queue.append, work))

    def drop(self, works: list[Work]) -> None:
        """Cancel works: running ones are killed, and nothing is reported."""
        self._call(lambda: self._drop(works))

    def forget(self, function: Function) -> None:
        self._call(lambda: self._forget(function.number))

    def close(self, *, finish: bool, error: BaseException | None = None) -> None:
        """Accept no more works. `finish`: complete the submitted ones first; with an `error`, they
        end with it."""
        with contextlib.suppress(RuntimeError):
            if error is not None:
                self._call(lambda: self._break(error))
            self._call(lambda: self._close(finish))

    def join(self, timeout_s: float | None) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def processes(self) -> list[int]:
        """Process ids of the present workers."""
        return [process.pid for process in list(self._all)]

    def _call(self, call: Callable[[], None]) -> None:
        with self._guard:
            if self._over:
                raise RuntimeError("the pool is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="shoal-tasks", daemon=True)
                self._thread.start()
            self._calls.append(call)
            if not self._rung:
                self._rung = True
                self._bell.ring()

    # -- the thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while True:
                self._assign()  # also removes cancelled works
                if self._closing and not self._queue and not self._busy:
                    return
                for key, _ in self._selector.select():
                    if key.data is None:
                        self._obey()
                    elif key.data in self._all:
                        self._attend(key.data, key.fd)
        except BaseException as error:
            self._break(error)
            raise
        finally:
            self._end()

    def _obey(self) -> None:
        self._bell.hear()
        self._rung = False  # before the calls: one that comes after the last rings again
        while self._calls:
            self._calls.popleft()()

    def _assign(self) -> None:
        """Give works to ready workers, and start workers for the works that wait."""
        if self.broken is not None:
            self._break(self.broken)
        while self._queue and (process := self._free(self._queue[0])) is not None:
            work = self._queue.popleft()
            # It is already begun if its first worker died before reaching it.
            if work.begun or work.begin():
                work.begun = True
                self._give(process, work)
        starting = len(self._all) - len(self._idle) - len(self._busy)
        wanted = min(len(self._queue) - starting, self.size - len(self._all))
        if wanted > 0:
            self._hire(wanted)

    def _free(self, work: Work) -> Worker | None:
        if self._idle:
            return self._idle[-1]
        if work.ahead and self._full():
            return next((p for p, works in self._busy.items() if len(works) == 1), None)
        return None

    def _full(self) -> bool:
        """Whether no further worker will come."""
        return len(self._all) == self.size

    def _hire(self, wanted: int) -> None:
        for _ in range(wanted):
            if self.broken is None:
                self._start()

    def _start(self) -> None:
        threads = max(1, cores() // self.size)
        try:
            process = Process(threads, self._script, self._init)
        except OSError as error:
            self._break(InitFailed(f"cannot start a worker: {error}"))
            return
        self._add(process)

    def _add(self, process: Worker) -> None:
        self._all.add(process)
        self._selector.register(process.socket, selectors.EVENT_READ, process)
        if process.pidfd is not None:
            self._selector.register(process.pidfd, selectors.EVENT_READ, process)

    def _give(self, process: Worker, work: Work) -> None:
        if process in self._busy:
            self._busy[process].append(work)
        else:
            self._idle.remove(process)
            self._busy[process] = deque([work])
            process.begin()
        if work.function.number not in process.known:
            process.known.add(work.function.number)
            body = work.function.data
            process.send(parcel(frames.FUNCTION, work.function.number, body=body))
        process.send(parcel(frames.CHUNK, work.number, work.function.number, work.body))
        self._watch(process)

    def _watch(self, process: Worker) -> None:
        """Wait for room to send too, while anything is left to send."""
        events = selectors.EVENT_READ
        if not process.push():
            events |= selectors.EVENT_WRITE
        if self._selector.get_key(process.socket).events != events:
            self._selector.modify(process.socket, events, process)

    def _attend(self, process: Worker, descriptor: int) -> None:
        if descriptor == process.pidfd:
            while process in self._all and (arrived := process.receive()):
                self._hear(process, arrived)  # what it sent before it died
            if process in self._all:
                self._lost(process)
            return
        self._watch(process)
        heard = process.receive()
        if heard is None:
            process.kill()  # it closed its socket, so it is of no more use
            self._lost(process)
        else:
            self._hear(process, heard)

    def _hear(self, process: Worker, heard: list[Frame]) -> None:
        for frame in heard:
            if process not in self._all:
                return
            if frame.kind == frames.READY:
                process.ready = True
                self._start_failures = 0
                self._idle.append(process)
            elif frame.kind == frames.INIT_FAILED:
                process.failure = _restored(frame.body)  # counted when it ends, which is soon
            elif frame.kind == frames.DIED:
                process.died(frame)
            else:
                self._report(process, frame)

    def _report(self, process: Worker, frame: Frame) -> None:
        works = self._busy.get(process)
        if not works or works[0].number != frame.number:
            process.kill()  # what it says is not about its work, so nothing more is believed
            self._lost(process)
            return
        work = works.popleft()
        if not works:
            del self._busy[process]
            self._idle.append(process)
        if frame.kind == frames.RESULT:
            work.report(work, Result(frame.extra / 1e6, frame.body))
        else:
            work.report(work, Hopeless(_restored(frame.body)))

    def _lost(self, process: Worker) -> None:
        position = process.position
        how = self._remove(process)
        works = self._busy.pop(process, deque())
        if position != NOT_BEGUN and works:
            error = WorkerDied(f"the worker {how} during the task")
            blamed = works.popleft()
            blamed.report(blamed, Died(position, error, process.innocent))
        self._queue.extendleft(reversed(works))  # not begun, so no task is to blame
        if not process.ready and not process.innocent:
            self._start_failures += 1
            if isinstance(process.failure, Unloadable):
                self._break(process.failure)  # no other worker could load it
            elif self._start_failures >= START_FAILURES_MAX and self.broken is None:
                self._break(_no_start(process.failure, how, self._init is not None))

    def _remove(self, process: Worker) -> str:
        self._all.discard(process)
        if process in self._idle:
            self._idle.remove(process)
        self._selector.unregister(process.socket)
        if process.pidfd is not None:
            self._selector.unregister(process.pidfd)
        return process.reap()

    def _drop(self, works: list[Work]) -> None:
        unwanted = set(works)
        for work in [work for work in self._queue if work in unwanted]:
            self._queue.remove(work)
        for process in [p for p, works in self._busy.items() if unwanted.intersection(works)]:
            wanted = [work for work in self._busy.pop(process) if work not in unwanted]
            self._queue.extendleft(reversed(wanted))
            process.kill()
            self._remove(process)

    def _forget(self, number: int) -> None:
        for process in self._all:
            if number in process.known:
                process.known.discard(number)
                process.send(parcel(frames.FORGET, number))
                self._watch(process)

    def _close(self, finish: bool) -> None:
        self._closing = True
        if not finish:
            self._drop([*self._queue, *itertools.chain(*self._busy.values())])

    def _break(self, error: BaseException) -> None:
        self.broken = error
        works = [*self._queue, *itertools.chain(*self._busy.values())]
        self._queue.clear()
        self._drop(works)
        for work in works:
            work.report(work, Hopeless(error))

    def _end(self) -> None:
        with self._guard:
            self._over = True
        while self._calls:  # queued since the last look: they find a broken pool
            self._calls.popleft()()
        left = [*self._queue]
        self._queue.clear()
        for work in left:
            work.report(work, Hopeless(self.broken or InitFailed("the pool was closed")))
        for process in self._all:
            process.release()
        for process in list(self._all):
            if not process.ready:
                process.kill()
            self._remove(process)
        self._selector.close()
        self._bell.close()


def _no_start(failure: BaseException | None, how: str, init: bool) -> InitFailed:
    if failure is None:
        when = "in init" if init else "before they were ready"
        return InitFailed(f"{START_FAILURES_MAX} workers ended {when}: the last one {how}")
    name = type(failure).__name__
    error = InitFailed(f"init failed in {START_FAILURES_MAX} workers: {name}: {failure}")
    error.__cause__ = failure
    return error


def _restored(body: Body) -> BaseException:
    data, text = pickle.loads(body)
    return restored(data, text)


# The one pool that stays warm between maps of a process.


_guard = threading.Lock()
_pool: Pool | None = None
_owner = 0  # a forked process has these variables but not the thread
_began_in: tuple[object, ...] = ()
_lent = False


@contextlib.contextmanager
def borrow_pool(workers: int, init: bytes | None, cluster: Cluster | None = None) -> Iterator[Pool]:
    """The warm pool, if it is free; else a pool that ends with the map. A map with `init` gets its
    own pool, so that what `init` built does not stay in memory, and so does a map on the cluster,
    so that its workers do not keep others waiting."""
    pool = _take(workers) if init is None and cluster is None else None
    if pool is not None:
        try:
            yield pool
        finally:
            _return(pool)
        return
    own = make_pool(workers, init, cluster)
    try:
        yield own
    finally:
        own.close(finish=False)
        own.join(JOIN_S_MAX)


def make_pool(workers: int, init: bytes | None, cluster: Cluster | None) -> Pool:
    if cluster is None:
        return Pool(workers, init)
    from shoal.tasks.cluster import ClusterPool

    return ClusterPool(workers, init, cluster)


def _take(workers: int) -> Pool | None:
    global _pool, _owner, _lent, _began_in
    here = _surroundings()
    with _guard:
        if _owner != os.getpid():
            _pool, _lent, _owner = None, False, os.getpid()
        if _lent:
            return None
        fits = _pool is not None and _pool.size == workers and _pool.broken is None
        if _pool is not None and (not fits or here != _began_in):
            _pool.close(finish=False)
            _pool = None
        if _pool is None:
            _pool, _began_in = Pool(workers), here
        _lent = True
        return _pool


def _surroundings() -> tuple[object, ...]:
    """What a worker inherits when it starts. If this has changed, warm workers are not reused."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        folder = ""
    return dict(os.environ), folder, list(sys.path)


def _return(pool: Pool) -> None:
    global _lent
    with _guard:
        if pool is _pool:
            _lent = False


@atexit.register
def _end() -> None:
    if _pool is not None and _owner == os.getpid():
        _pool.close(finish=False)
        _pool.join(JOIN_S_MAX)
