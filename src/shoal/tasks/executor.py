"""`shoal.Executor`: the interface of concurrent.futures over our workers."""

from __future__ import annotations

import atexit
import functools
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.tasks.errors import restored
from shoal.tasks.functions import PLAIN, Steady, dump_function, dumper, steady
from shoal.tasks.mapping import chosen_cluster, workers_of
from shoal.tasks.pool import (
    WORKERS_MAX,
    Died,
    Function,
    Hopeless,
    Outcome,
    Work,
    function_of,
    make_pool,
)
from shoal.tasks.worker import apply, call

if TYPE_CHECKING:
    from shoal.tasks.cluster import Cluster

T = TypeVar("T")


class Executor(futures.Executor):
    """Like ProcessPoolExecutor, but a worker that dies fails only the task it was running (with
    WorkerDied, a BrokenExecutor) and is replaced. Each task is run at most once. `cluster`: as for
    shoal.map."""

    def __init__(
        self,
        max_workers: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        *,
        cluster: bool | Cluster = False,
    ) -> None:
        if max_workers is not None and not 0 < max_workers <= WORKERS_MAX:
            raise ValueError(f"max_workers must be greater than 0 and at most {WORKERS_MAX}")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        self._dump = dumper()
        init = None
        if initializer is not None:
            built = functools.partial(initializer, *initargs)
            init = dump_function(built, self._dump, "initializer")
        where = chosen_cluster(cluster)
        self._pool = make_pool(max_workers or workers_of(where), init, where)
        self._any = function_of(pickle.dumps(call))
        self._last: object = None
        self._known: tuple[Steady, Function] | None = None
        self._guard = threading.Lock()
        self._shut = False
        self._pending: set[futures.Future[Any]] = set()
        weakref.finalize(self, self._pool.close, finish=True)  # no more work can come
        _living.add(self)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> futures.Future[T]:
        future: futures.Future[T] = futures.Future()
        try:
            (function, body), problem = self._packed(fn, args, kwargs), None
        except Exception as error:
            function, body, problem = self._any, b"", error
        with self._guard:
            if self._shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self._pool.broken is not None:
                raise self._pool.broken
            if problem is not None:  # the future reports it, as for any error of a task
                future.set_running_or_notify_cancel()
                future.set_exception(problem)
                return future
            self._pending.add(future)
            future.add_done_callback(self._pending.discard)
            report = functools.partial(_settle, future)
            begin = future.set_running_or_notify_cancel
            self._pool.submit(Work(function, body, report, begin))
        return future

    def _packed(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Function, bytes]:
        """A function that is submitted twice in a row is sent to each worker once, unless its bytes
        may change from task to task."""
        known = self._known if self._known is not None and self._known[0].same(fn) else None
        if known is None and self._last is fn:
            known = self._keep(fn)
        self._last = fn
        if known is None:
            return self._any, self._dump([(fn, args, kwargs)])
        if not kwargs and all(type(value) in PLAIN for value in args):
            return known[1], pickle.dumps([(args, kwargs)])
        return known[1], self._dump([(args, kwargs)])

    def _keep(self, fn: Callable[..., Any]) -> tuple[Steady, Function] | None:
        if self._known is not None:
            self._pool.forget(self._known[1])
        sure = steady(fn, self._dump(fn))
        data = self._dump(functools.partial(apply, fn)) if sure is not None else b""
        self._known = None if sure is None else (sure, function_of(data))
        return self._known

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        **keywords: Any,
    ) -> Iterator[T]:
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout, **keywords)
        chunks = _chunks(zip(*iterables, strict=False), chunksize)
        run = functools.partial(_run_chunk, fn)
        lists = super().map(run, chunks, timeout=timeout, **keywords)
        return itertools.chain.from_iterable(lists)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._guard:
            self._shut = True
            if cancel_futures:
                for future in list(self._pending):
                    future.cancel()
            self._pool.close(finish=True)
        if wait:
            self._pool.join(None)

    def kill(self) -> None:
        """Ends the workers, whatever they are doing. Their tasks fail with a BrokenExecutor."""
        with self._guard:
            self._shut = True
            error = futures.BrokenExecutor("the executor was ended")
            self._pool.close(finish=False, error=error)


def _settle(future: futures.Future[Any], work: Work, outcome: Outcome) -> None:  # noqa: ARG001
    if isinstance(outcome, Died | Hopeless):
        if future.cancelled() or not (future.running() or future.set_running_or_notify_cancel()):
            return
        future.set_exception(outcome.error)
        return
    try:
        values, errors = pickle.loads(outcome.body)
    except BaseException as error:  # the result does not load here
        future.set_exception(error)
        return
    if errors:
        _, data, text = errors[0]
        future.set_exception(restored(data, text))
    else:
        future.set_result(values[0])


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    stream = iter(items)
    while chunk := list(itertools.islice(stream, size)):
        yield chunk


def _run_chunk(fn: Callable[..., T], chunk: list[tuple[Any, ...]]) -> list[T]:
    return [fn(*arguments) for arguments in chunk]


_living: weakref.WeakSet[Executor] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """A script that ends without `shutdown` waits for its tasks, as with standard executors."""
    for executor in list(_living):
        executor.shutdown(wait=True)
