"""What people see of a job that sleeps: on a node, in a list, in metrics and afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.api.feed_rows import job_line, node_line
from shoal.api.metrics import _jobs, _nodes
from shoal.api.views import nap_view, naps_mark, node_naps, row_fields
from shoal.cli.screen.explanation import _attempt
from shoal.cli.verbs.nodes import sleepers_text
from shoal.cli.verbs.ps import nap_text
from shoal.core.answers.explain import attempts_of, no_tail
from shoal.model.columns import elapsed_ms
from shoal.model.explanation import Explanation
from shoal.model.policy import Policy
from shoal.model.report import SleepJob, WakeJob
from shoal.model.views import JobRow
from tests.core.build import Cluster
from tests.core.test_sleep import CALM, nap, rouse


def loop_of(made: Cluster) -> Any:
    clock = SimpleNamespace(now_ms=lambda: made.now_ms)
    return SimpleNamespace(state=made.state, policy=made.policy, clock=clock)


def row_of(made: Cluster, job: str) -> JobRow:
    return JobRow(**row_fields(made.job(job)), why=made.job(job).why, progress=None)


@pytest.fixture
def made() -> Cluster:
    """j1 has run for 10 s and is asleep, with 300 MB, since 1 s; j2 has its GPU."""
    made = Cluster(Policy(**CALM))
    made.join("a", gpus=1, sleep="cuda", gpu_memory_mb=400)
    job = made.run(gpus=1, name="long")
    made.wait(10_000)
    made.ask(SleepJob(job, "ann"))
    made.wait(1_000)
    nap(made, job, memory_mb=300)
    made.run(gpus=1)
    return made


def test_the_map_shows_who_holds_a_gpu_and_who_sleeps_beside_it(made: Cluster) -> None:
    line = node_line(loop_of(made), made.node("a"))
    assert [(held.job, held.gpus) for held in line.held] == [("j2", (0,))]
    assert (line.asleep, line.sleepers_mb, line.no_sleep) == (("j1",), 300, "")
    told = job_line(loop_of(made), made.job("j1"))
    assert (told.state, told.nap_ms, told.wants) == ("asleep", 11_000, False)


def test_a_page_hears_of_every_change_of_what_is_lent(made: Cluster) -> None:
    marks = {naps_mark(made.state.placed["a"].values())}
    made.end("j2")
    made.ask(WakeJob("j1", "ann"))
    marks.add(naps_mark(made.state.placed["a"].values()))
    rouse(made, "j1")
    marks.add(naps_mark(made.state.placed["a"].values()))
    assert len(marks) == 3


def test_a_list_says_since_when_why_and_what_wakes_it(made: Cluster) -> None:
    made.wait(59_000)
    row = row_of(made, "j1")
    assert row.nap is not None
    assert (row.nap.cause, row.nap.wants, row.nap.host_mb) == ("user", False, 300)
    assert elapsed_ms(row, made.now_ms) == 10_000  # sleep is not run time
    slept = "asleep for 1m, 300M of its GPUs' memory on its nodes"
    assert nap_text(row, made.now_ms) == f"{slept}: {made.job('j1').why}"
    assert nap_view(made.job("j2")) is None


def test_a_node_says_how_members_sleep_there_or_why_not(made: Cluster) -> None:
    made.join("b", gpus=1, sleep_why="the driver is too old")
    told = node_naps(loop_of(made), made.node("a"))
    assert told == {"sleep": "cuda", "sleep_why": "", "sleepers": 1, "sleepers_mb": 300}
    assert node_naps(loop_of(made), made.node("b"))["sleep_why"] == "the driver is too old"
    assert node_line(loop_of(made), made.node("b")).no_sleep == "the driver is too old"
    assert sleepers_text(cast(Any, SimpleNamespace(**told))) == "1 asleep, 300M of memory for them"


def test_metrics_count_sleepers_and_their_memory(made: Cluster) -> None:
    loop = loop_of(made)
    text = "".join([*_nodes(loop, cast(Any, SimpleNamespace(newest={}))), *_jobs(loop)])
    assert 'shoal_node_sleepers{node="a"} 1\n' in text
    assert f'shoal_node_sleepers_memory_bytes{{node="a"}} {300 * 2**20}\n' in text
    assert 'shoal_jobs{state="asleep",tenant="default"} 1\n' in text
    assert 'shoal_gpus{state="held"} 1\n' in text


def test_an_explanation_tells_run_time_from_sleep(made: Cluster) -> None:
    made.wait(30_000)
    (told,) = attempts_of([e for e in made.log if getattr(e, "job", "") == "j1"], no_tail)
    explanation = cast(Explanation, SimpleNamespace(now_ms=made.now_ms, attempts=[told]))
    assert ": ran 10s, slept 31s (1 nap), " in _attempt(explanation, told, [], None)[0]
    made.end("j2")
    made.ask(WakeJob("j1", "ann"))
    rouse(made, "j1")
    made.wait(5_000)
    made.end("j1")
    (told,) = attempts_of([e for e in made.log if getattr(e, "job", "") == "j1"], no_tail)
    explanation = cast(Explanation, SimpleNamespace(now_ms=made.now_ms, attempts=[told]))
    assert ": ran 15s, slept 31s (1 nap), " in _attempt(explanation, told, [], None)[0]
