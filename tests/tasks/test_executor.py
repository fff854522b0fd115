"""`shoal.Executor` does what code written for concurrent.futures expects."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import WAIT_S, until

import shoal
from shoal.tasks import InitFailed, WorkerDied
from tests.tasks import functions
from tests.tasks.functions import alive, python


@pytest.fixture
def executor() -> Iterator[shoal.Executor]:
    with shoal.Executor(max_workers=2) as one:
        yield one


def keywords(*args: int, **named: int) -> tuple[tuple[int, ...], dict[str, int]]:
    return args, named


def call_with(function: Callable[[int], int], *, number: int) -> int:
    return function(number)


def begin_and_wait(folder: str) -> str:
    """Tells that it runs, and waits to be let go."""
    (Path(folder) / "begun").touch()
    until((Path(folder) / "go").exists, "leave to go")
    return "went"


def add(one: int, two: int) -> int:
    return one + two


def test_it_is_an_executor(executor: shoal.Executor) -> None:
    assert isinstance(executor, futures.Executor)
    future = executor.submit(keywords, 1, 2, fn=3, self=4)
    assert future.result(WAIT_S) == ((1, 2), {"fn": 3, "self": 4})
    assert future.done()
    assert not future.running()


FACTOR = 2


def test_a_function_is_run_as_it_was_when_it_was_submitted(
    executor: shoal.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cloudpickle")  # else functions are sent by name
    scale = lambda number: FACTOR * number  # noqa: E731
    seen: list[int] = []
    count = lambda: len(seen)  # noqa: E731
    for factor in (2, 7):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        assert [executor.submit(scale, 10).result() for _ in range(4)] == [10 * factor] * 4
        for length in range(1, 4):
            seen[:] = [0] * length
            assert executor.submit(count).result() == length
    scale.__code__ = (lambda number: FACTOR + number).__code__
    assert [executor.submit(scale, 10).result() for _ in range(3)] == [17] * 3
    assert executor.submit(call_with, scale, number=1).result() == 8


def test_a_function_that_is_submitted_again_and_again_is_turned_into_bytes_once(
    executor: shoal.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped: list[Any] = []
    dump = executor._dump

    def counted(value: Any) -> bytes:
        dumped.append(value)
        return dump(value)

    monkeypatch.setattr(executor, "_dump", counted)
    assert list(executor.map(functions.double, range(50))) == [2 * n for n in range(50)]
    assert len(dumped) == 3, "the first task, the function, and the function as it is sent"


def test_an_exception_keeps_its_type_and_its_traceback(executor: shoal.Executor) -> None:
    future = executor.submit(functions.fail_at, 1, 1)
    with pytest.raises(ValueError, match="1 is wrong") as caught:
        future.result(WAIT_S)
    assert "in fail_at" in str(caught.value.__cause__)
    assert isinstance(future.exception(), ValueError)


def test_map_keeps_the_order_and_stops_with_the_shortest(executor: shoal.Executor) -> None:
    assert list(executor.map(add, range(100), range(50))) == [2 * n for n in range(50)]
    assert list(executor.map(add, range(10), range(10), chunksize=3)) == [2 * n for n in range(10)]
    with pytest.raises(ValueError, match="chunksize"):
        executor.map(add, [1], [2], chunksize=0)


def test_map_raises_at_the_place_of_the_failure(executor: shoal.Executor) -> None:
    results = executor.map(functools.partial(functions.fail_at, 2), range(5))
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="2 is wrong"):
        next(results)


def test_timeouts(executor: shoal.Executor, tmp_path: Path) -> None:
    future = executor.submit(begin_and_wait, str(tmp_path))
    with pytest.raises(futures.TimeoutError):
        future.result(timeout=0.01)
    with pytest.raises(futures.TimeoutError):
        list(executor.map(time.sleep, [0, 3], timeout=0.01))
    (tmp_path / "go").touch()
    assert future.result(WAIT_S) == "went"


def test_what_waits_can_be_cancelled_and_what_runs_cannot(tmp_path: Path) -> None:
    with shoal.Executor(max_workers=1) as executor:
        running = executor.submit(begin_and_wait, str(tmp_path))
        waiting = [executor.submit(functions.double, n) for n in range(3)]
        until((tmp_path / "begun").exists, "the first task")
        assert running.running()
        assert not running.cancel()
        assert waiting[1].cancel()
        (tmp_path / "go").touch()
        everything: list[futures.Future[Any]] = [running, *waiting]
        done, pending = futures.wait(everything, timeout=WAIT_S)
        assert not pending
        assert len(done) == 4
    assert waiting[1].cancelled()
    assert [waiting[0].result(), waiting[2].result()] == [0, 4]


def test_shutdown_can_cancel_what_waits(tmp_path: Path) -> None:
    executor = shoal.Executor(max_workers=1)
    running = executor.submit(begin_and_wait, str(tmp_path))
    waiting = [executor.submit(functions.double, n) for n in range(3)]
    until((tmp_path / "begun").exists, "the first task")
    executor.shutdown(wait=False, cancel_futures=True)
    (tmp_path / "go").touch()
    executor.shutdown(wait=True)
    assert running.result(0) == "went"
    assert all(future.cancelled() for future in waiting)


def test_shutdown_waits_and_takes_nothing_more() -> None:
    executor = shoal.Executor(max_workers=2)
    results = [executor.submit(functions.double, n) for n in range(20)]
    processes = executor.submit(os.getpid).result(WAIT_S)
    executor.shutdown()
    assert [future.result(0) for future in results] == [2 * n for n in range(20)]
    assert not alive(processes)
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        executor.submit(functions.double, 1)
    executor.shutdown()
    shoal.Executor().shutdown()  # one that was never used


def test_waiting_and_callbacks_work(executor: shoal.Executor, tmp_path: Path) -> None:
    slow = executor.submit(begin_and_wait, str(tmp_path))
    quick = executor.submit(functions.double, 4)
    both: list[futures.Future[Any]] = [slow, quick]
    done, pending = futures.wait(both, WAIT_S, futures.FIRST_COMPLETED)
    assert quick in done
    assert slow in pending
    (tmp_path / "go").touch()
    assert set(futures.as_completed(both, WAIT_S)) == {slow, quick}
    called = threading.Event()
    executor.submit(functions.double, 1).add_done_callback(lambda _: called.set())
    assert called.wait(WAIT_S)


def test_many_threads_may_submit(executor: shoal.Executor) -> None:
    with futures.ThreadPoolExecutor(8) as threads:
        jobs = list(threads.map(lambda n: executor.submit(functions.double, n), range(400)))
    assert [job.result(WAIT_S) for job in jobs] == [2 * n for n in range(400)]


def test_what_cannot_be_sent_is_told_by_its_future(executor: shoal.Executor) -> None:
    with pytest.raises(TypeError):
        executor.submit(functions.double, threading.Lock()).result(WAIT_S)
    with pytest.raises(TypeError, match="cannot be sent"):
        executor.submit(threading.Lock).result(WAIT_S)
    assert executor.submit(functions.double, 2).result(WAIT_S) == 4


def test_a_worker_that_dies_fails_its_task_only(executor: shoal.Executor, tmp_path: Path) -> None:
    safe = executor.submit(begin_and_wait, str(tmp_path))
    until((tmp_path / "begun").exists, "the other task")
    dead = executor.submit(functions.die_at, 1, 1)
    error = dead.exception(WAIT_S)
    assert isinstance(error, WorkerDied)
    assert isinstance(error, futures.BrokenExecutor)
    (tmp_path / "go").touch()
    assert safe.result(WAIT_S) == "went"
    assert executor.submit(functions.double, 2).result(WAIT_S) == 4


def test_an_idle_worker_that_is_killed_is_replaced(executor: shoal.Executor) -> None:
    pid = executor.submit(os.getpid).result(WAIT_S)
    os.kill(pid, signal.SIGKILL)
    assert executor.submit(os.getpid).result(WAIT_S) != pid


def test_initializer_and_its_arguments(tmp_path: Path) -> None:
    with shoal.Executor(1, initializer=functions.build, initargs=(str(tmp_path),)) as executor:
        pid = executor.submit(os.getpid).result(WAIT_S)
    assert [path.name for path in tmp_path.iterdir()] == [str(pid)]


def test_an_initializer_that_fails_breaks_the_executor() -> None:
    executor = shoal.Executor(1, initializer=functions.build_nothing)
    with pytest.raises(InitFailed, match="no such model"):
        executor.submit(functions.double, 1).result(WAIT_S)
    with pytest.raises(futures.BrokenExecutor):
        executor.submit(functions.double, 1).result(WAIT_S)
    executor.shutdown()


@pytest.mark.parametrize("number", [0, -1])
def test_wrong_arguments(number: int) -> None:
    with pytest.raises(ValueError, match="max_workers must be greater than 0"):
        shoal.Executor(max_workers=number)
    with pytest.raises(TypeError, match="initializer must be a callable"):
        shoal.Executor(initializer=number)  # type: ignore[arg-type]


def test_a_script_that_ends_without_shutdown_gets_its_work_done(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import shoal\n"
        "from tests.tasks import functions\n"
        "executor = shoal.Executor(1)\n"
        "for n in range(5):\n"
        "    executor.submit(functions.double, n).add_done_callback(lambda f: print(f.result()))\n"
    )
    done = python(script)
    assert (done.returncode, done.stdout.split()) == (0, ["0", "2", "4", "6", "8"]), done.stderr
