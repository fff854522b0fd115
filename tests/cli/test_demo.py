"""The demo keeps its promises, tells when one is broken, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.waiting import until
from rich.console import Console

import shoal.cli.verbs.demo as demo_verb
from shoal.cli.demo import plan as demo_plan
from shoal.cli.demo.plan import numbers, promises, result_of
from shoal.cli.demo.screen import Picture, Plain
from shoal.cli.demo.state import DemoState, Point, Serving, Sights, Training, curve
from shoal.client import Client
from shoal.control.home import Home
from shoal.control.lifecycle import take_down
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeJoined, NodeLost, NodeReady
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import (
    JobCheckpointed,
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobRunning,
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
    assert board.victim("j1") == "n1"
    assert board.victim("j9") == ""
    assert board.counts() == {"running": 1, "waiting": 0, "finished": 0}
    for event in lost_job(150):
        board.take(event)
    assert board.nodes["n1"].state == "lost"
    assert board.counts() == {"running": 0, "waiting": 1, "finished": 0}
    for event in (*placed("n2", 2, 600), FINISHED):
        board.take(event)
    assert board.nodes["n2"].cells == [""] * 4
    assert board.all_finished(1)


def test_the_demo_itself_kills_one_node_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_verb, "KILL_AFTER_S", -1.0)
    sights = Sights(training=Training(job="j1", saved=demo_verb.SAVED_STEP))
    board = board_after()
    board.kills.clear()
    two = (Slice("n1", (0, 1)), Slice("n2", (2, 3)))
    board.take(JobPlaced(at_ms=20, job="j1", attempt=1, slices=two, master="", why="fits"))
    board.take(JobRunning(at_ms=20, job="j1", attempt=1))
    assert demo_verb._due(board, sights, time.monotonic()) == "n1"
    board.kill("n1", 100)
    board.take(lost_job(150)[0])
    board.jobs["j1"].slices = two[1:]
    assert demo_verb._due(board, sights, time.monotonic()) == "", "the run is still being stopped"


@pytest.mark.parametrize("columns", [40, 80])
def test_the_picture_fits_the_terminal_and_shows_all_of_the_link(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Console(width=columns, height=24)
    monkeypatch.setattr("shoal.cli.demo.screen.console", lambda: shown)
    points = [Point(float(at), at, 9.0 / (at + 1), 1) for at in range(100)]
    sights = Sights(training=Training(job="j1", steps=150, points=points))
    picture = Picture(board_after(), sights)
    link = "http://127.0.0.1:12345/#code=" + "x" * 32
    picture.page(link)
    with shown.capture() as got:
        shown.print(picture._render())
    lines = got.get().splitlines()
    assert link in "".join(lines) and len(lines) <= 24
    assert any(link in line for line in lines) or columns < 75
    told = next(line for line in lines if "training" in line)
    assert told.rstrip().endswith("step 99 of 150, loss 0.09")


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


def demo(place: Path, *args: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shoal.main", "demo", *args],
        env={**os.environ, "TMPDIR": str(place)},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def place() -> Iterator[Path]:
    """Short, as a folder for the gateway's sockets must be."""
    folder = Path(tempfile.mkdtemp(prefix="sd-"))
    yield folder
    shutil.rmtree(folder)


def left_behind(place: Path) -> list[str]:
    """Files, and processes whose command line names the folder."""
    files = [str(path) for path in place.iterdir()]
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(place).encode() in (entry / "cmdline").read_bytes():
                files.append(entry.name)
        except OSError:
            continue
    return files


def test_a_run_that_goes_on_is_drawn_with_its_gap_and_its_checkpoint() -> None:
    before = [Point(0.1 * step, step, 10 / (1 + step), 1) for step in range(40)]
    after = [Point(6 + 0.1 * step, step, 10 / (1 + step), 2) for step in range(30, 80)]
    rows = curve([*before, *after], 40, 4, 11)
    assert len(rows) == 4
    assert {len(row) for row in rows} == {40}
    (column,) = {row.index("|") for row in rows}
    assert not "".join(row[16:column] for row in rows).strip(), "nothing while it was away"
    assert rows[0][0] != " ", "it begins high"
    assert rows[-1].strip("| "), "and ends low"
    assert curve([], 10, 2, 0) == [" " * 10] * 2

    seen = Training(job="j1")
    seen.take(JobCheckpointed(at_ms=1, job="j1", attempt=1, step=30))
    seen.take(JobCheckpointed(at_ms=2, job="j7", attempt=1, step=90))
    for event in placed("n2", 2, 5):
        seen.take(event)
    assert seen.resumed == {2: 30}

    served = Serving(job="j2")
    served.look(b"9 answers, 0 failures, 90 per second\n66 answers, 1 failures, 115 per second\n77")
    assert served.words == "115 requests/s, 1 failed"
    served.look(b"66 answers, 1 failures, 115 per second\n80 answers, 1 failures\n")
    assert served.words == "80 requests, 1 failed"


def test_the_whole_demo_is_as_promised_and_who_watches_may_kill_a_node(place: Path) -> None:
    ours, its = pty.openpty()

    def homes() -> list[Path]:
        return [file.parent for file in place.glob("*/home/controller.json")]

    try:
        with demo(place, "--json", "--keep", stdin=its) as process:
            until(lambda: bool(homes()))
            with Client.at_home(*homes(), patience_s=60) as client:
                jobs = len(demo_plan.jobs({}, ""))
                until(lambda: (client.status().submitted or 0) >= jobs)

                # One that serves nobody: if both replicas go at once, requests fail.
                until(lambda: any(one.ready >= 2 for one in client.services()))
                serving = {node for one in client.service("chat").replicas for node in one.nodes}
                victim = next(name for name in ("n2", "n3", "n4", "n1") if name not in serving)

                def killed() -> bool:
                    os.write(ours, victim[1:].encode())
                    told = client.events(after=0, limit=5000).events
                    lost = (r.event.node for r in told if isinstance(r.event, NodeLost))
                    return victim in lost

                until(killed)
            out, err = process.communicate(timeout=400)
        result = json.loads(out)
        assert [promise for promise in result["promises"] if not promise["kept"]] == []
        assert process.returncode == 0, err
        assert result["submitted"] == result["finished"] >= 20
        assert victim in result["killed"]
        assert 0 < result["lost_gpu_s"] < result["held_gpu_s"]
        assert [result["kept_home"]] == [str(home) for home in homes()]
        with Client.at_home(*homes()) as client:
            assert client.status().nodes == {"ready": 4}, "it is still up"
    finally:
        for home in homes():
            take_down(Home(home), lambda _: None)
        os.close(ours)
        os.close(its)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)]
)
def test_an_interrupted_demo_leaves_nothing_behind(number: signal.Signals, place: Path) -> None:
    with demo(place) as process:
        assert process.stdout is not None
        assert any("jobs submitted" in line for line in iter(process.stdout.readline, ""))
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "interrupted; everything was stopped and removed\n"
    assert left_behind(place) == []
