"""`shoal.map`: every input once, in order, whatever happens to the workers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.waiting import until

import shoal
from shoal.tasks import InitFailed, TaskFailed, WorkerDied, pool
from shoal.tasks import worker as worker_module
from shoal.tasks.errors import RemoteError
from shoal.tasks.frames import INLINE_BYTES_MAX, RESULT, parcel
from shoal.tasks.mapping import AHEAD_TASKS_MAX, Sizer
from tests.needs import need
from tests.tasks import functions
from tests.tasks.functions import alive, environment, python

run = functools.partial(shoal.map, workers=2, progress=False)


def test_results_come_in_the_order_of_the_inputs() -> None:
    assert list(run(functions.double, range(5000))) == [2 * n for n in range(5000)]


def test_results_as_they_come_are_all_there() -> None:
    assert sorted(run(functions.double, range(500), order=False)) == [2 * n for n in range(500)]
    assert list(run(functions.double, [])) == []


def test_inputs_are_read_only_a_little_ahead() -> None:
    read = 0

    def endless() -> Iterator[int]:
        nonlocal read
        while True:
            yield read
            read += 1

    results = run(functions.double, endless(), chunk=10)
    assert read == 0
    assert list(itertools.islice(results, 100)) == [2 * n for n in range(100)]
    assert read < 2 * AHEAD_TASKS_MAX, "how far workers get meanwhile depends on the machine"
    results.close()  # type: ignore[attr-defined]
    assert list(run(functions.double, range(9))) == [2 * n for n in range(9)]


def test_a_broken_input_ends_the_map_with_its_own_error() -> None:
    def broken() -> Iterator[int]:
        yield from range(50)
        raise KeyError("the input")

    with pytest.raises(KeyError, match="the input"):
        list(run(functions.double, broken()))


def test_closures_and_lambdas_travel() -> None:
    need("cloudpickle")
    offset = 5
    assert list(run(lambda n: n + offset, range(3))) == [5, 6, 7]


def test_a_map_inside_a_map() -> None:
    assert list(run(functions.nested, [3, 4])) == [6, 12]


def test_the_second_map_finds_the_workers_of_the_first() -> None:
    first = set(run(functions.worker_id, range(50)))
    assert set(run(functions.worker_id, range(50))) & first


# -- what fails ----------------------------------------------------------------------------


def test_what_raises_is_tried_again(tmp_path: Path) -> None:
    function = functools.partial(functions.fail_until, str(tmp_path), 2)
    assert list(run(function, range(20))) == list(range(20))
    assert len(list(tmp_path.iterdir())) == 2


def test_its_exception_is_raised_with_the_traceback_of_the_worker() -> None:
    results = run(functools.partial(functions.fail_at, 30), range(60))
    assert list(itertools.islice(results, 30)) == list(range(30))
    with pytest.raises(ValueError, match="30 is wrong") as caught:
        next(results)
    failure = caught.value.__cause__
    assert isinstance(failure, TaskFailed)
    assert (failure.index, failure.tries) == (30, 3)
    assert "in fail_at" in str(failure)


def test_poison_that_kills_its_worker_is_isolated_and_the_rest_goes_on() -> None:
    function = functools.partial(functions.die_at, 77)
    results = list(run(function, range(200), on_error="return", chunk=50))
    failure = results[77]
    assert isinstance(failure, TaskFailed)
    assert (failure.index, failure.tries) == (77, 3)
    assert isinstance(failure.error, WorkerDied)
    assert "SIGKILL" in str(failure)
    assert results[:77] + results[78:] == [n for n in range(200) if n != 77]


def test_what_is_skipped_is_told(caplog: pytest.LogCaptureFixture) -> None:
    function = functools.partial(functions.fail_at, 3)
    with caplog.at_level(logging.WARNING, "shoal.tasks"):
        assert list(run(function, range(6), on_error="skip", retries=0)) == [0, 1, 2, 4, 5]
    assert "task 3 failed once" in caplog.text
    assert "ValueError: 3 is wrong" in caplog.text


def test_an_exception_that_cannot_travel_is_told_all_the_same() -> None:
    with pytest.raises(RemoteError, match="Awkward: very awkward"):
        list(run(functions.awkward, [1], retries=0))


def test_a_worker_killed_from_outside_costs_nothing(tmp_path: Path) -> None:
    results = run(functions.worker_id, itertools.count(), chunk=5)
    victims = {next(results) for _ in range(20)}
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    # Hundreds of their results may have come before, and waited for an earlier one.
    assert next(worker for worker in results if worker not in victims)
    results.close()  # type: ignore[attr-defined]


def test_the_last_that_hangs_is_started_again_elsewhere(tmp_path: Path) -> None:
    function = functools.partial(functions.slow_once, str(tmp_path))
    assert list(run(function, range(40))) == list(range(40))
    assert (tmp_path / "begun").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers: must be from 1"),
        ({"retries": -1}, "retries: must be from 0"),
        ({"chunk": 0}, "chunk: must be from 1"),
        ({"on_error": "ignore"}, "on_error: must be one of raise, skip, return"),
    ],
)
def test_wrong_arguments_are_told_at_once(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shoal.map(functions.double, [1], **arguments)  # type: ignore[arg-type]


def test_what_is_no_function_is_told() -> None:
    with pytest.raises(TypeError, match="fn: 5 is not a function"):
        shoal.map(5, [1])  # type: ignore[arg-type]


# -- init, large results, sizes --------------------------------------------------------------


def test_init_is_called_once_in_each_worker(tmp_path: Path) -> None:
    init = functools.partial(functions.build, str(tmp_path))
    results = list(run(functions.from_context, range(300), init=init, chunk=7))
    assert [value for _, value in results] == list(range(300))
    assert {str(pid) for pid, _ in results} <= {path.name for path in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) <= 2
    assert shoal.tasks.context() is None


def test_an_init_that_fails_ends_the_map() -> None:
    with pytest.raises(InitFailed, match="RuntimeError: no such model"):
        list(run(functions.double, range(9), init=functions.build_nothing))


def test_large_inputs_and_results_go_by_file_and_leave_none() -> None:
    sizes = [10, 3 << 20, 20, 5 << 20]
    assert [len(data) for data in run(functions.large, sizes)] == sizes
    assert list(run(len, [bytes(3 << 20), b"12"])) == [3 << 20, 2]
    small, big = parcel(RESULT, body=b"1"), parcel(RESULT, body=bytes(INLINE_BYTES_MAX + 1))
    assert small.file is None
    assert big.file is not None
    assert len(big.data) < 100
    big.file.close()


def test_a_chunk_is_handed_back_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cursor = memoryview(bytearray(8)).cast("q")
    assert worker_module.run(functions.double, [1, 2, 3], cursor)[0] == [2, 4, 6]
    monkeypatch.setattr(worker_module, "CHUNK_S_MAX", -1.0)
    assert worker_module.run(functions.double, [1, 2, 3], cursor)[0] == [2]
    assert cursor[0] == 0


def test_chunks_grow_with_quick_tasks_and_stay_small_with_slow_ones() -> None:
    quick, slow = Sizer(4), Sizer(4)
    assert quick.size(None) == slow.size(None) == 1
    for _ in range(5):
        quick.learn(quick.size(None), quick.size(None) * 1e-6, 100)
        slow.learn(1, 2.0, 100)
    assert quick.size(None) > 10_000
    assert slow.size(None) == 1
    medium = Sizer(4)
    for _ in range(9):
        medium.learn(medium.size(None), medium.size(None) * 1e-3, 100)
    assert 50 <= medium.size(None) <= 110
    assert medium.size(80) == 10  # two shares for each of four workers
    wide = Sizer(4)
    wide.learn(1, 1e-6, 4 << 20)
    assert wide.size(None) <= 2  # what is large is not sent in heaps


# -- processes -----------------------------------------------------------------------------

SCRIPT = """
import shoal
class Point:
    def __init__(self, x): self.x = x
def twice(point): return Point(2 * point.x)
results = list(shoal.map(twice, [Point(n) for n in range(100)], workers=2))
print(sum(point.x for point in results), all(isinstance(point, Point) for point in results))
"""


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    need("cloudpickle")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = python(script)
    assert done.stdout == "9900 True\n", done.stderr


WITHOUT = "import sys, importlib.util\nsys.modules['cloudpickle'] = None\n" + (
    "find = importlib.util.find_spec\n"
    "importlib.util.find_spec = lambda name: None if name == 'cloudpickle' else find(name)\n"
)


def test_without_cloudpickle_a_script_needs_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    before, _, after = SCRIPT.partition("results")
    body = "".join(f"    {line}\n" for line in f"results{after}".splitlines())
    script.write_text(f'{WITHOUT}{before}\nif __name__ == "__main__":\n{body}')
    done = python(script)
    assert done.stdout == "9900 True\n", done.stderr
    script.write_text(WITHOUT + SCRIPT)
    done = python(script)
    assert "put it there, or: pip install 'shoal[tasks]'" in done.stderr
    assert done.returncode == 1


def test_nothing_is_left_when_the_client_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import shoal, time\n"
        "from tests.tasks import functions\n"
        "from shoal.tasks import pool\n"
        "list(shoal.map(functions.double, range(200), workers=2))\n"
        "results = shoal.map(time.sleep, [0, 3600, 3600], workers=2)\n"
        "next(results)\n"
        "print(*pool._pool.processes(), flush=True)\n"
        "next(results)\n"
    )
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        workers = [int(word) for word in client.stdout.readline().split()]
        assert workers
        assert all(alive(pid) for pid in workers)
        client.kill()
    until(lambda: not any(alive(pid) for pid in workers), "the workers' end")


def test_nothing_is_left_when_a_script_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import shoal\n"
        "from tests.tasks import functions\n"
        "print(*set(shoal.map(functions.worker_id, range(100), workers=2)))\n"
    )
    done = python(script)
    assert done.returncode == 0, done.stderr
    assert not any(alive(int(word)) for word in done.stdout.split())


def test_importing_shoal_stays_light() -> None:
    code = "import sys, shoal; print('shoal.tasks' in sys.modules, 'subprocess' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "False False\n"
    assert pool.borrow_pool is not None


def test_workers_killed_again_and_again_lose_nothing_and_double_nothing() -> None:
    """Also not the chunk that had been sent ahead to a worker that was still busy."""
    values = []
    killed: set[int] = set()
    for value, pid in run(functions.with_worker, range(3000), retries=50, chunk=20):
        values.append(value)
        if value % 500 == 0 and pid not in killed:
            killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert values == list(range(3000))
    assert killed
