"""joblib and scikit-learn over a real cluster."""

from __future__ import annotations

import os
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import until

from shoal.tasks import Cluster
from tests.live.cluster import Live
from tests.needs import need

need("joblib")

import joblib  # noqa: E402

import shoal.joblib  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def configured(live: Live) -> Iterator[None]:
    shoal.joblib.register()
    cluster = Cluster(home=live.home.path, name="joblib", cpus=2)
    with joblib.parallel_config("shoal", n_jobs=2, cluster=cluster):
        yield


def test_a_grid_search_of_scikit_learn_runs_on_the_cluster(
    live: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need("sklearn")
    monkeypatch.setenv("SHOAL_HOME", str(live.home.path))
    runpy.run_path(str(EXAMPLES / "grid_search.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert out.startswith("best: {'C': 10, 'gamma': 0.001}, 0.97"), out
    until(lambda: not live.client.jobs(), "the workers outlived the search")
    last = live.client.jobs(finished=True)[0]
    assert (last.name, last.members_max) == ("grid-search", 2)


def test_batches_errors_nesting_and_lost_workers_are_as_joblib_expects(
    configured: None, live: Live, tmp_path: Path
) -> None:
    parallel, delayed = joblib.Parallel(), joblib.delayed
    # Small tasks travel in batches, and the workers stay for the next call.
    found = parallel(delayed(squared)(number) for number in range(2000))
    assert [square for square, _ in found] == [number * number for number in range(2000)]
    workers = {pid for _, pid in found}
    assert len(workers) <= 2
    # The first error is raised, with what the worker saw, and the backend goes on.
    with pytest.raises(ZeroDivisionError) as caught:
        parallel(delayed(divmod)(1, number) for number in (3, 2, 1, 0))
    assert "divmod" not in str(caught.value) and "Traceback" in str(caught.value.__cause__)
    # What is parallel within a task shares the worker's CPUs.
    inner, kind = parallel([delayed(nested)(5)])[0]
    assert (inner, kind) == ([0, 1, 2, 3, 4], "ThreadingBackend")
    # A task whose worker is killed is tried again on another.
    assert parallel(delayed(dies_once)(str(tmp_path), n) for n in range(6)) == list(range(6))
    with pytest.raises(shoal.tasks.WorkerDied):
        parallel([delayed(os._exit)(4)])
    assert list(joblib.Parallel(return_as="generator")([delayed(abs)(-3)])) == [3]


def squared(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def nested(count: int) -> tuple[list[int], str]:
    backend, _ = joblib.parallel.get_active_backend()
    found: list[Any] = joblib.Parallel()(joblib.delayed(abs)(-number) for number in range(count))
    return found, type(backend).__name__


def dies_once(folder: str, number: int) -> int:
    mark = Path(folder) / "died"
    if number == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number
