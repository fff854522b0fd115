"""A large array with real processes, while the controller is killed again and again."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from harness.waiting import until

from shoal.model.array import ArrayCounts
from shoal.model.finding import JobFilter
from shoal.model.views import JobView
from tests.live.cluster import Live, live_cluster

BAD = 40  # one of so many elements fails the first time
AT_MOST = 24


def counts(view: JobView) -> ArrayCounts:
    assert view.array is not None
    return view.array


@pytest.mark.parametrize(
    ("elements", "kills"), [(150, 3), pytest.param(2_000, 10, marks=pytest.mark.soak)]
)
def test_each_element_runs_once_through_kills_of_the_controller(
    elements: int, kills: int, tmp_path: Path
) -> None:
    diary = tmp_path / "diary"
    script = f"echo $SHOAL_ARRAY_INDEX $SHOAL_ATTEMPT >> {diary}; "
    script += f"[ $SHOAL_ATTEMPT -gt 1 ] || [ $(({{index}} % {BAD})) -ne 7 ]"
    sweep = {"ranges": [[0, elements - 1, 1]], "at_most": AT_MOST}
    with live_cluster(nodes=2, gpus=1) as live:
        array = live.run(script, sweep=sweep, cpu_milli=100, restart="never")
        for kill in range(kills):
            done = elements * kill // kills
            until(partial(reached, live, array, done), "it goes on")
            assert live.kill_controller()
        assert live.wait(array, timeout_s=300) == "failed"
        bad = [index for index in range(elements) if index % BAD == 7]
        end = counts(live.client.job(array))
        assert (end.succeeded, end.failed) == (elements - len(bad), len(bad))
        assert Counter(diary.read_text().splitlines()) == Counter(f"{n} 1" for n in range(elements))
        failed = live.client.jobs(
            finished=True, limit=500, wanted=JobFilter(array=array, states=("failed",))
        )
        assert sorted(row.id for row in failed) == sorted(f"{array}.{index}" for index in bad)

        assert live.client.retry(array).note == f"{len(bad)} elements will run again"
        until(lambda: live.kill_controller() > 0)
        assert live.wait(array, timeout_s=120) == "succeeded"
        again = Counter(f"{index} 2" for index in bad)
        first = Counter(f"{index} 1" for index in range(elements))
        assert Counter(diary.read_text().splitlines()) == first + again


def reached(live: Live, array: str, done: int) -> bool:
    seen = counts(live.client.job(array))
    assert seen.running + seen.waiting <= AT_MOST
    return seen.ended >= done
