"""`shoal top` and the line below a job's output: what they show, at any size of the terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest

from shoal.cli.screen import show
from shoal.cli.screen.alarms import alarms
from shoal.cli.screen.keys import name_of
from shoal.cli.screen.output import TextOutput
from shoal.cli.screen.status_line import OutputAbove, StatusLine, line_text
from shoal.cli.screen.top_board import COLUMNS, Board, Seen, detail, spark
from shoal.cli.screen.top_screen import draw
from shoal.model.job import JobSpec
from shoal.model.samples import GpuSample, NodeSample
from shoal.model.series import JobPoint, JobSeries, NodeSeries, ServiceSeries
from shoal.model.service import ServiceSpec
from shoal.model.views import (
    JobRow,
    JobView,
    NodeView,
    ProgressView,
    ServiceView,
    StatusView,
)

NOW_MS = 1_790_000_000_000


def status(**fields: Any) -> StatusView:
    return StatusView(
        **{
            "version": "1.2",
            "epoch": 1,
            "now_ms": NOW_MS,
            "up_since_ms": NOW_MS - 60_000,
            "nodes": {"ready": 3, "lost": 1},
            "gpus": 24,
            "gpus_held": 12,
            "gpus_free": 10,
            "gpus_unusable": 10,
            "cpu_milli": 0,
            "cpu_milli_held": 0,
            "jobs": {"running": 2, "waiting": 1},
            "submitted": 3,
            "finished": 0,
            "last_seq": 1,
            **fields,
        }
    )


def progress(**fields: Any) -> ProgressView:
    return ProgressView(
        **{
            "step": 250,
            "steps_total": 1000,
            "step_us": 100_000,
            "left_ms": 75_000,
            "saved_step": 200,
            "loss": 1.25,
            "metrics": {},
            "slow": [],
            **fields,
        }
    )


def job_fields(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"j{number}",
        "name": f"job-{number}",
        "state": "running",
        "tenant": "default",
        "members": 2,
        "members_max": 0,
        "size": 2,
        "gpus": number % 8,
        "gpu_milli": 1000,
        "gpu_memory_mb": 0,
        "priority": 0,
        "attempt": 1,
        "nodes": ["n1", "n2"],
        "submitted_ms": NOW_MS - 100_000,
        "running_ms": NOW_MS - 1000 * number,
        "finished_ms": None,
        "code": None,
        "command": "python train.py",
        "why": "because \x1b[31mof a reason that is rather long, longer than any terminal is wide",
        "progress": None,
        **fields,
    }


def job(number: int, **fields: Any) -> JobRow:
    return JobRow(**job_fields(number, **fields))


def node(name: str, **fields: Any) -> NodeView:
    return NodeView(
        **{
            "id": name,
            "state": "ready",
            "health": "ready",
            "intent": "open",
            "why": "",
            "since_ms": 0,
            "standing": "ok",
            "history": [],
            "place": "b1/r1",
            "address": "",
            "incarnation": 1,
            "gpu_model": "H100",
            "gpu_memory_mb": 80_000,
            "gpus": 8,
            "gpus_free": 3,
            "gpu_milli_free": 3000,
            "cpu_milli": 64_000,
            "cpu_milli_free": 1000,
            "memory_mb": 1000,
            "memory_mb_free": 10,
            "jobs": ["j1", "j2"],
            **fields,
        }
    )


def service(name: str, **fields: Any) -> ServiceView:
    return ServiceView(
        **{
            "name": name,
            "state": "ready",
            "url": f"http://127.0.0.1:8080/{name}/",
            "version": 3,
            "least": 1,
            "most": 4,
            "wanted": 2,
            "ready": 2,
            "in_flight": 5,
            "queued": 0,
            "requests_per_s": 12.5,
            "failed_per_s": 0.0,
            "response_ms": 20,
            "why": "",
            "replicas": [],
            "spec": ServiceSpec(name=name, replica=JobSpec(command=("serve",))),
            **fields,
        }
    )


def seen(count: int = 60) -> Seen:
    sample = NodeSample(
        at_ms=1,
        cpu_milli=930,
        memory_milli=410,
        gpus=(GpuSample(busy_milli=990, power_w=680, temperature_c=88),) * 8,
    )
    return Seen(
        status=status(),
        jobs=[job(n, progress=progress(step=n) if n % 2 else None) for n in range(1, count + 1)],
        nodes=[node(f"node-{n}") for n in range(count)],
        services=[service(f"service-{n}") for n in range(count)],
        samples={"node-0": sample},
    )


@pytest.mark.parametrize("size", [(80, 24), (140, 40), (200, 60), (60, 15), (30, 11)])
@pytest.mark.parametrize("view", COLUMNS)
@pytest.mark.parametrize("count", [0, 3, 60])
def test_the_picture_fills_the_terminal_exactly(
    size: tuple[int, int], view: str, count: int
) -> None:
    board = Board()
    board.view = view
    board.cursor = 40
    lines = draw(board, seen(count), "", "curve " * 50, size, "http://127.0.0.1:7700")
    assert len(lines) == size[1]
    assert max(line.cell_len for line in lines) <= size[0]
    assert all(line.plain.isprintable() for line in lines)
    assert lines[-1].plain.startswith("q quit")
    if count:
        first = {"jobs": "j", "nodes": "node-", "services": "service-"}[view]
        rows = [line.plain for line in lines if line.plain.startswith(first)]
        assert len(rows) >= min(count, size[1] - 9)


def test_at_80_columns_the_most_important_can_be_read() -> None:
    lines = draw(Board(), seen(), "", "", (80, 24), "http://127.0.0.1:7700")
    text = "\n".join(line.plain for line in lines)
    assert "12 of 24 held, 10 free, 10 unusable" in text
    assert "nodes 3 ready, 1 lost; jobs 2 running, 1 waiting" in text
    row = next(line.plain for line in lines if line.plain.startswith("j1 "))
    assert row.split()[:4] == ["j1", "job-1", "running", "default"]
    assert "1/1000" in row and "1.25" in row
    assert "1-15 of 60" in text


def test_the_keys_move_sort_turn_and_choose() -> None:
    board, look = Board(), seen(30)
    assert [row.key for row in board.rows(look)][:3] == ["j1", "j2", "j3"]
    for _ in range(5):
        board.press(">")  # to SHAPE: the largest first
    assert board.rows(look)[0].cells[4].text == "2x7"
    board.press("r")
    assert board.rows(look)[0].cells[4].text == "2x0"
    for _ in range(5):
        board.press("<")
    assert board.sort["jobs"] is None
    board.press("r")
    board.press("page-down")
    board.press("down")
    assert board.cursor == 11
    board.press("up")
    for _ in range(20):
        board.press("page-down")
    assert [row.key for row in board.rows(look)][board.cursor] == "j30"
    board.press("home")
    assert board.cursor == 0
    assert board.press("n") and not board.press("n") and board.press("s")
    assert (board.view, board.over) == ("services", False)
    board.press("x")
    board.press("q")
    assert board.over


def test_every_column_can_be_sorted_by() -> None:
    for view, titles in COLUMNS.items():
        board = Board()
        board.view = view
        for _ in titles:
            board.press("right")
            assert len(board.rows(seen(5))) == 5


def test_what_a_node_does_is_told_where_it_is_known() -> None:
    board = Board()
    board.view = "nodes"
    first, second, *_ = board.rows(seen(3))
    texts = [cell.text for cell in first.cells]
    assert texts[2:8] == ["5/8", "99%", "5440W", "88C", "93%", "41%"]
    assert [cell.text for cell in second.cells][3:6] == ["", "", ""]


def test_keys_as_terminals_send_them() -> None:
    sent = (b"\x1b[A", b"\x1bOB", b"q", b"\x03", b"\x1b[99;5~", b"jjn", b"\xff")
    assert [name_of(one) for one in sent] == ["up", "down", "q", "ctrl-c", "", "n", ""]


def test_curves_in_one_line() -> None:
    assert spark([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert spark([5.0] * 100, 4) == "▄▄▄▄"
    assert spark([], 5) == ""
    assert spark([0.5], 9, 1.0) == "▅"
    points = [JobPoint(at_ms=n, step=n, loss=9.0 - n, step_ms=10.0) for n in range(8)]
    told = detail(JobSeries(id="j1", width_ms=1000, points=points), 80)
    assert told == "loss █▇▆▅▄▃▂▁ 2   step ▄▄▄▄▄▄▄▄ 10 ms"
    assert detail(JobSeries(id="j1", width_ms=1000), 80) == ""
    assert detail(None, 80) == ""
    nodes = NodeSeries(id="n1", at_ms=[1, 2], cpu=[None, 0.5], memory=[None, None])
    assert detail(nodes, 80) == "CPU ▅ 50%"
    served = ServiceSeries(name="s", at_ms=[1, 2], requests_per_s=[1, 2], p99_ms=[None, 30])
    assert detail(served, 80) == "rps ▁█ 2.0   p99 ▄ 30 ms"


# -- the line below a job's output -----------------------------------------------------------


def view(**fields: Any) -> JobView:
    whole = job_fields(7, running_ms=NOW_MS - 60_000, **fields)
    return JobView(
        **whole,
        spec=JobSpec(command=("x",)),
        gang=[],
        placed_ms=None,
        not_before_ms=0,
        failures=0,
        losses=0,
        hangs=0,
        master="",
    )


def test_the_line_tells_how_far_the_job_is() -> None:
    told = line_text(view(progress=progress()), NOW_MS)
    assert told == ("j7 ■■■■■□□□□□□□□□□□□□□□ 25%  step 250/1000, loss 1.25, 1m 15s left; 1m so far")
    assert line_text(view(), NOW_MS) == "j7 running 1m"
    assert line_text(view(state="waiting"), NOW_MS) == "j7 waiting 1m 40s"
    assert line_text(view(state="succeeded"), NOW_MS) == ""
    unknown = progress(steps_total=0, left_ms=None, loss=None)
    assert line_text(view(progress=unknown), NOW_MS) == "j7 step 250; 1m so far"


def test_the_line_is_never_in_the_way_of_the_output() -> None:
    """What a terminal would show that gets stdout and stderr in the order written."""
    screen = io.StringIO()

    class Bytes(io.BytesIO):
        def write(self, data: Any) -> int:
            return screen.write(bytes(data).decode())

    with StatusLine(screen) as line:
        above = OutputAbove(
            TextOutput(prefixed=False, terminal=True, out=Bytes()), line, prefixed=False
        )
        line.set("step 1")
        above.write(1, 0, b"one\n")
        above.write(1, 0, b"half a li")
        line.set("step 2")  # held back: it would stand in the middle of the job's line
        above.write(1, 0, b"ne\n")
        show.note("a note")
        line.set("step 3")
        above.end()
    assert shown(screen.getvalue()) == ["one", "half a line"]
    assert "step 2" not in screen.getvalue().split("half a li")[1].split("ne\n")[0]
    assert show.before_note is None


def shown(text: str) -> list[str]:
    """A terminal in short: carriage returns, line ends, and erasing to the end of the line."""
    lines, column = [""], 0
    for part in text.replace("\x1b[2m", "").replace("\x1b[0m", "").replace("\x1b[K", "\x00"):
        if part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
            column = 0
        elif part == "\x00":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + part + lines[-1][column + 1 :]
            column += 1
    return [line for line in lines if line]


# -- alarms ----------------------------------------------------------------------------------


def test_what_somebody_should_look_at_is_told_with_where_to_look() -> None:
    found = alarms(
        status(restarts=2, up_since_ms=NOW_MS - 5_000),
        [
            node("n1", state="lost", why="its agent died"),
            *[node(f"n{n}", state="silent") for n in range(2, 9)],
            node("n9"),
        ],
        [service("chat", state="failing", ready=0, why="it exited 2"), service("ok")],
        [job(1, progress=progress(slow=[3])), job(2, progress=progress(slow=[1, 2])), job(3)],
    )
    assert [alarm.text for alarm in found] == [
        "n1 is lost: its agent died",
        "n2, n3, n4, n5 and 3 more do not answer",
        "service chat has 0 of 2 replicas: it exited 2",
        "j1: a slow member delays the others",
        "j2: 2 slow members delay the others",
        "the controller died and was restarted, 2 times since `shoal up`",
    ]
    assert found[0].see == "shoal events --node n1"
    assert alarms(status(), [node("n9")], [service("ok")], [job(3)]) == []


def test_what_is_wrong_with_the_controller_comes_first() -> None:
    found = alarms(status(alarms=("the disk is full",)), [node("n1", state="lost")], [], [])
    assert found[0].text == "the disk is full"
    assert len(found) == 2
