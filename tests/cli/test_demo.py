"""The demo keeps its promises, tells when one is broken, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.demo import plan as demo_plan
from shoal.cli.demo.result import numbers, promises, result_of
from shoal.cli.demo.screen import Picture, Plain
from shoal.cli.demo.state import DemoState
from shoal.model.events import (
    Event,
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobRunning,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    NodeReady,
)
from shoal.model.job import JobSpec, Outcome, StopCause
from shoal.model.node import NodeSpec
from shoal.model.resources import Slice

SPEC = JobSpec(command=("x",), name="train", gpus=2)


def joined(node: str, at_ms: int = 0) -> list[Event]:
    spec = NodeSpec(id=node, cpu_milli=1, memory_mb=1, gpus=4, place="b1/r1")
    return [
        NodeJoined(at_ms=at_ms, node=node, spec=spec, incarnation=1),
        NodeReady(at_ms=at_ms, node=node),
    ]


def placed(node: str, attempt: int, at_ms: int) -> list[Event]:
    slices = (Slice(node, (0, 1)), Slice(node, (2, 3)))
    return [
        JobPlaced(at_ms=at_ms, job="j1", attempt=attempt, slices=slices, master="", why="fits"),
        JobRunning(at_ms=at_ms, job="j1", attempt=attempt),
    ]


def lost_job(at_ms: int) -> list[Event]:
    return [
        NodeLost(at_ms=at_ms, node="n1", incarnation=1, dead=True),
        JobRequeued(
            at_ms=at_ms, job="j1", attempt=1, cause=StopCause.NODE_LOSS, not_before_ms=0, why=""
        ),
    ]


def board_after(*events: Event) -> DemoState:
    board = DemoState()
    for event in (*joined("n1"), *joined("n2"), JobSubmitted(at_ms=0, job="j1", spec=SPEC)):
        board.take(event)
    for event in placed("n1", 1, 10):
        board.take(event)
    board.kill("n1", 100)
    for event in events:
        board.take(event)
    return board


FINISHED = JobFinished(
    at_ms=900, job="j1", attempt=2, outcome=Outcome.SUCCEEDED, code=0, why="every member exited 0"
)
FAILED_ONCE = JobRequeued(
    at_ms=700, job="j1", attempt=2, cause=StopCause.FAILURE, not_before_ms=0, why=""
)


def test_the_board_follows_the_events() -> None:
    board = board_after()
    assert board.nodes["n1"].cells == ["j1"] * 4
    assert board.victim() == "n1"
    assert board.counts() == {"running": 1, "waiting": 0, "finished": 0}
    for event in lost_job(150):
        board.take(event)
    assert board.nodes["n1"].state == "lost"
    assert board.counts() == {"running": 0, "waiting": 1, "finished": 0}
    for event in (*placed("n2", 2, 600), FINISHED):
        board.take(event)
    assert board.nodes["n2"].cells == [""] * 4
    assert board.all_finished(1)


def test_kept_promises_are_told_with_their_times() -> None:
    healed = [*lost_job(150), *placed("n2", 2, 600), FAILED_ONCE, *placed("n2", 3, 800), FINISHED]
    board = board_after(*healed, *joined("n1", 2100))
    result = result_of(board, submitted=1, took_ms=3000, left_behind="")
    assert result.kept
    assert (result.noticed_ms, result.healed_ms, result.back_ms, result.hit) == (50, 500, 2000, 1)
    assert numbers(result)[1:] == [
        "n1 was killed: noticed after 0.05 s, back after 2.00 s",
        "1 job lost members with it; all ran again after 0.50 s",
    ]


def test_a_broken_promise_is_told() -> None:
    result = result_of(board_after(*lost_job(150)), submitted=2, took_ms=1, left_behind="")
    broken = [text for text, kept in promises(result) if not kept]
    assert not result.kept
    assert any("every submitted job finished" in text for text in broken)
    assert any("except train" in text for text in broken)
    assert any("the node came back" in text for text in broken)
    assert not result_of(DemoState(), 0, 0, "a process is left").kept


def test_the_jobs_fit_the_nodes() -> None:
    nodes = demo_plan.nodes()
    jobs = demo_plan.jobs({}, "/tmp")
    assert len(nodes) == 4
    assert 20 <= len(jobs) <= 30
    assert len({job.name for job in jobs}) == len(jobs)
    assert max(job.gpus * job.members for job in jobs) <= 32


@pytest.mark.parametrize("screen", [Plain, Picture])
def test_both_screens_show_any_board(
    screen: type[Plain] | type[Picture], capsys: pytest.CaptureFixture[str]
) -> None:
    board = board_after()
    with screen(board) as shown:
        shown.caption("n1 is killed")
        for event in (*lost_job(150), *placed("n2", 2, 600), FINISHED):
            board.take(event)
            shown.happened(event)
            shown.refresh()
    out = capsys.readouterr().out
    assert "n1 is killed" in out or screen is Picture
    assert "Traceback" not in out


def demo(tmp_path: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shoal.main", "demo", *args],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_behind(tmp_path: Path) -> list[str]:
    """Files, and processes whose command line names the folder."""
    files = [str(path) for path in tmp_path.iterdir()]
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(tmp_path).encode() in (entry / "cmdline").read_bytes():
                files.append(entry.name)
        except OSError:
            continue
    return files


@pytest.mark.outside("the demo plays by the clock")
def test_the_whole_demo_is_as_promised(tmp_path: Path) -> None:
    with demo(tmp_path, "--json") as process:
        out, err = process.communicate(timeout=90)
    result = json.loads(out)
    assert [promise for promise in result["promises"] if not promise["kept"]] == []
    assert process.returncode == 0, err
    assert result["submitted"] == result["finished"] >= 20
    assert result["took_ms"] < 60_000
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)]
)
def test_an_interrupted_demo_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        assert process.stdout is not None
        assert any("jobs submitted" in line for line in iter(process.stdout.readline, ""))
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "interrupted; everything was stopped and removed\n"
    assert left_behind(tmp_path) == []
