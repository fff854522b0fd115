"""The one pool that stays warm between maps of a process."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shoal.tasks.pool import JOIN_S_MAX, Pool

if TYPE_CHECKING:
    from shoal.tasks.cluster import Cluster

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
