"""Shoal as a backend of joblib, and so of scikit-learn (docs/python.md).

import joblib, shoal.joblib

shoal.joblib.register()
with joblib.parallel_config("shoal", n_jobs=16):
    search.fit(X, y)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import joblib
from joblib.parallel import (
    AutoBatchingMixin,
    ParallelBackendBase,
    SequentialBackend,
    ThreadingBackend,
)

from shoal.tasks import Cluster, Executor, WorkerDied
from shoal.tasks.mapping import chosen_cluster, workers_of

RETRIES_MAX = 2  # of a batch whose worker was lost

Done = Callable[["Future[Any]"], object]


def register() -> None:
    """From now on, joblib knows the backend "shoal"."""
    joblib.register_parallel_backend("shoal", ShoalBackend)


class ShoalBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc] # joblib has no types
    """`cluster` as for `shoal.map`: True, a `shoal.tasks.Cluster` with the resources of a worker,
    or False for processes on this machine. The workers stay for the next call, until the
    `parallel_config` ends."""

    supports_retrieve_callback = True
    supports_inner_max_num_threads = True
    default_n_jobs = -1

    def __init__(
        self,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        *,
        cluster: bool | Cluster = True,
    ) -> None:
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads)
        where = chosen_cluster(cluster)
        if where is not None and inner_max_num_threads is not None:
            threads = dict.fromkeys(self.MAX_NUM_THREADS_VARS, str(inner_max_num_threads))
            where = where._replace(env={**threads, **where.env})
        self._cluster = where
        self._size = 0
        self._executor: Executor | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        if n_jobs > 0:
            return n_jobs
        return max(1, workers_of(self._cluster) + 1 + n_jobs)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **_: Any) -> int:
        size = self.effective_n_jobs(n_jobs)
        if self._executor is None or size != self._size:
            self._close(abort=False)
            self._executor, self._size = Executor(size, cluster=self._cluster or False), size
        self.parallel = parallel
        return size

    def submit(self, func: Callable[[], Any], callback: Done | None = None) -> Future[Any]:
        assert self._executor is not None
        found: Future[Any] = Future()
        if callback is not None:
            found.add_done_callback(callback)
        _try(self._executor, func, found, RETRIES_MAX)
        return found

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        return out.result()

    def get_nested_backend(self) -> tuple[Any, int | None]:
        """A worker has few CPUs of its own: what is parallel inside a task shares them."""
        cpus = int(self._cluster.cpus) if self._cluster is not None else 1
        level = (self.nesting_level or 0) + 1
        if cpus > 1 and level == 1:
            return ThreadingBackend(nesting_level=level), cpus
        return SequentialBackend(nesting_level=level), None

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """A task has failed, so the results of the others are not wanted."""
        self._close(abort=True)
        if ensure_ready:
            self.configure(n_jobs=self.parallel.n_jobs, parallel=self.parallel)

    def terminate(self) -> None:
        """At the end of a call. What refers to the backend may keep its workers."""
        self.parallel = None
        self.reset_batch_stats()

    def _close(self, *, abort: bool) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=abort)
            if abort:
                executor.kill()


def _try(executor: Executor, func: Callable[[], Any], found: Future[Any], left: int) -> None:
    inner = executor.submit(func)
    inner.add_done_callback(functools.partial(_settle, executor, func, found, left))


def _settle(
    executor: Executor,
    func: Callable[[], Any],
    found: Future[Any],
    left: int,
    inner: Future[Any],
) -> None:
    """A node that is lost takes its tasks along; they are tried elsewhere."""
    if inner.cancelled():
        found.cancel()
        return
    error = inner.exception()
    if isinstance(error, WorkerDied) and left:
        try:
            _try(executor, func, found, left - 1)
            return
        except Exception as problem:  # the executor was shut down meanwhile
            error = problem
    if error is not None:
        found.set_exception(error)
    else:
        found.set_result(inner.result())
