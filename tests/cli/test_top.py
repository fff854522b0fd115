"""`shoal top` and the line below a job's output: what they show, at any size of the terminal."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from shoal.cli.screen import show
from shoal.cli.screen.alarms import alarms
from shoal.cli.screen.follow import OutputAbove, StatusLine, line_text
from shoal.cli.screen.output import TextOutput
from shoal.cli.screen.paint import names_of
from shoal.cli.screen.top_board import ABOUT_THE_MAP, HELP, Around, Board, detail, draw, spark
from shoal.cli.screen.top_rows import COLUMNS, Seen, condensed, gpu_map, legend, places_of
from shoal.model.feed import Held, JobLine, NodeLine
from shoal.model.job import JobSpec
from shoal.model.series import GpuSample, JobPoint, JobSeries, NodeSample, NodeSeries, ServiceSeries
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


def line_of(number: int, **fields: Any) -> JobLine:
    return JobLine(
        **{
            "id": f"j{number}",
            "name": f"job-{number}",
            "state": "running",
            "tenant": "default",
            "user": "ada" if number % 2 else "bob",
            "members": 2,
            "size": 2,
            "gpus": number % 8,
            "submitted_ms": NOW_MS - 100_000,
            "running_ms": NOW_MS - 1000 * number,
            **({"step": number, "steps": 1000, "loss": 1.25} if number % 2 else {}),
            **fields,
        }
    )


def node_of(number: int, **fields: Any) -> NodeLine:
    held = (Held(f"j{number + 1}", 0, (0, 1, 2), 1000),)
    base = {"id": f"node-{number}", "state": "ready", "gpus": 8, "held": held, "place": "b1/r1"}
    return NodeLine(**{**base, **fields})


def seen(count: int = 60) -> Seen:
    sample = NodeSample(
        at_ms=1,
        cpu_milli=930,
        memory_milli=410,
        gpus=(GpuSample(busy_milli=990, memory_milli=600, power_w=680, temperature_c=88),) * 8,
    )
    nodes = {f"node-{n}": node_of(n) for n in range(count)}
    return Seen(
        status=status(),
        now_ms=NOW_MS,
        jobs={f"j{n}": line_of(n) for n in range(1, count + 1)},
        nodes=nodes,
        services={f"service-{n}": service(f"service-{n}") for n in range(count)},
        samples={"node-0": sample},
        places=places_of(nodes),
    )


WHY = "because \x1b[31mof a reason that is rather long, longer than any terminal is wide " * 2
AROUND = Around("http://127.0.0.1:7700", "a-name", WHY, "curve " * 50)


@pytest.mark.parametrize("size", [(80, 24), (140, 40), (200, 60), (60, 15), (30, 11), (9, 3)])
@pytest.mark.parametrize("view", COLUMNS)
@pytest.mark.parametrize("count", [0, 3, 60])
def test_the_picture_fills_the_terminal_exactly(
    size: tuple[int, int], view: str, count: int
) -> None:
    board, look = Board(), seen(count)
    board.view = view
    board.cursor = 40
    lines = draw(board, look, AROUND, size)
    assert len(lines) == size[1]
    assert max(line.cell_len for line in lines) <= size[0]
    assert all(line.plain.isprintable() for line in lines)
    assert lines[-1].plain.startswith("q quit"[: size[0] - 1])
    if count and size[1] > 10:
        first = {"jobs": "j", "nodes": "node-", "services": "service-"}[view]
        rows = [line.plain for line in lines[4:-4] if line.plain.startswith(first)]
        assert len(rows) >= min(count, 2)
    for mode in ("help", "filter", "ask"):
        board.mode = mode
        assert len(draw(board, look, AROUND, size)) == size[1]


def test_at_80_columns_the_most_important_can_be_read() -> None:
    lines = draw(Board(), seen(), AROUND, (80, 24))
    text = "\n".join(line.plain for line in lines)
    assert "12 of 24 in use, 10 free, 10 lost" in text
    assert "nodes 3 ready, 1 lost; jobs 2 running, 1 waiting" in text
    row = next(line.plain for line in lines if line.plain.startswith("j1 "))
    assert " ".join(row.split()) == "j1 b running 2x1 99% 60% 1s 1/1000 1.25 ada node-0 job-1"
    assert "j1 a-name: because" in text
    assert re.search(r"1-\d+ of 60", text)


def test_ids_are_whole_and_long_names_are_cut_in_the_middle() -> None:
    long = "a-name-of-63-letters-" * 3
    look = seen(3)
    user = "a-user-with-a-rather-long-name"
    look.jobs["j1"] = line_of(1, name=long, user=user)
    for width in (60, 80, 120):
        lines = [line.plain for line in draw(Board(), look, AROUND, (width, 24))]
        (title,) = (line for line in lines if line.startswith("JOB"))
        row = next(line for line in lines if line.startswith("j1 "))
        assert title.split()[-1] == "NAME"
        first, _, last = row.split()[-1].partition("…")
        assert long.startswith(first) and long.endswith(last)
        short = [word for word in row.split()[:-1] if word[:9] != user[:9]]
        assert not any("…" in word for word in short), "only names are cut"


def test_the_keys_move_sort_turn_and_choose() -> None:
    board, look = Board(), seen(30)
    shape = [one.column.title for one in COLUMNS["jobs"]].index("SHAPE")

    def shapes() -> list[int]:
        return [look.jobs[key].gpus for key in board.keys(look)]

    assert board.keys(look)[:3] == ["j1", "j2", "j3"]
    for _ in range(shape + 1):
        board.press(">")  # the largest first
    assert shapes()[0] == 7
    board.press("r")
    assert shapes()[0] == 0
    for _ in range(shape + 1):
        board.press("<")
    assert board.sort["jobs"] is None
    board.press("r")
    board.keys(look)
    board.press("page-down")
    board.press("down")
    assert board.key == "j12"
    del look.jobs["j3"]
    look.number += 1
    board.keys(look)
    assert (board.key, board.cursor) == ("j12", 10), "the cursor stays on the job"
    for _ in range(20):
        board.press("page-down")
    assert board.key == "j30"
    board.press("home")
    assert board.key == "j1"
    board.press("n")
    board.press("s")
    assert (board.view, board.over) == ("services", False)
    board.press("x")
    board.press("q")
    assert board.over


def test_a_filter_is_typed_and_looks_at_names_ids_users_nodes_and_states() -> None:
    board, look = Board(), seen(30)
    look.jobs["j4"] = line_of(4, state="waiting", size=0)

    def typed(text: str) -> list[str]:
        board.press("escape")
        for key in ("/", *text, "enter"):
            board.press(key)
        return board.keys(look)

    assert typed("JOB-12") == ["j12"]
    assert typed("waiting") == ["j4"]
    assert typed("node-6") == ["j7"]
    assert len(typed("ada")) == 15
    assert typed("ada job-1") == ["j1", "j11", "j13", "j15", "j17", "j19"]
    assert typed("nothing") == [] and board.key == ""
    assert board.press("enter") == "logs" and board.press("c") == ""
    assert board.mode == "table", "there is nothing to cancel"
    assert typed("q") == [] and not board.over, "a letter of a filter is not a command"
    board.press("escape")
    assert len(board.keys(look)) == 30
    for key in ("/", "j", "o", "b", "backspace", "ctrl-u", "escape"):
        board.press(key)
    assert (board.filter, board.mode) == ("", "table")


def test_cancel_asks_first() -> None:
    board, look = Board(), seen(3)
    board.keys(look)
    assert board.press("c") == "" and board.mode == "ask"
    assert "cancel j1 a-name? y/n" in "\n".join(
        line.plain for line in draw(board, look, AROUND, (80, 24))
    )
    assert board.press("n") == "" and board.message == "not cancelled"
    board.press("c")
    later = seen(3)
    del later.jobs["j1"]
    later.number += 1
    assert board.keys(later)[0] == board.key == "j2"
    assert "cancel j1" in "\n".join(line.plain for line in draw(board, later, AROUND, (80, 24)))
    assert board.press("y") == "cancel" and board.mode == "table"
    assert board.asked == "j1", "the rows moved on after the question"


def test_a_narrow_terminal_breaks_no_words() -> None:
    board, look = Board(), seen(3)
    known = set(" ".join(map(" ".join, HELP)).split()) | set(ABOUT_THE_MAP.split())
    lines = [line.plain for line in draw(board, look, AROUND, (40, 24))]
    assert lines[-1] == "q quit  ? help  / filter  enter logs"
    board.press("?")
    shown = [line.plain for line in draw(board, look, AROUND, (40, 40))][3:-1]
    assert set(" ".join(shown).split()) == known


def test_every_column_can_be_sorted_by() -> None:
    look = seen(5)
    for view, columns in COLUMNS.items():
        board = Board()
        board.view = view
        for _ in columns:
            board.press("right")
            assert len(board.keys(look)) == 5


def test_what_a_node_does_is_told_where_it_is_known() -> None:
    look = seen(3)

    def texts(name: str) -> list[str]:
        return [one.cell(look, look.nodes[name]).text for one in COLUMNS["nodes"]]

    assert texts("node-0")[2:8] == ["3/8", "99%", "5440W", "88C", "93%", "41%"]
    assert texts("node-1")[3:6] == ["", "", ""]


def test_how_much_of_its_gpus_a_job_uses_is_told_where_it_is_known() -> None:
    look = seen(3)
    cells = {one.column.title: one.cell for one in COLUMNS["jobs"]}
    job = next(job for job in look.jobs if "node-0" in look.places.get(job, ()))
    assert cells["GPU"](look, look.jobs[job]).text == "99%"
    assert cells["MEM"](look, look.jobs[job]).text == "60%"
    look.samples.clear()
    assert cells["GPU"](look, look.jobs[job]).text == ""


def test_keys_as_terminals_send_them() -> None:
    sent = (b"\x1b[A", b"\x1bOB", b"q", b"\x03", b"\x1b[99;5~", b"jj\x1b[Bn", b"\xff", b"\x1b")
    assert [names_of(one) for one in sent] == [
        ["up"], ["down"], ["q"], ["ctrl-c"], [], ["j", "j", "down", "n"], [], ["escape"],
    ]  # fmt: skip
    assert names_of("ü\r\x7f".encode()) == ["ü", "enter", "backspace"]


# -- the map ---------------------------------------------------------------------------------


def map_text(nodes: list[NodeLine], width: int, room: int, chosen: str = "") -> list[str]:
    return [line.plain.rstrip() for line in gpu_map(nodes, chosen, width, room)]


def test_each_gpu_is_a_letter_by_node() -> None:
    nodes = [
        node_of(10),
        node_of(2, held=(Held("j3", 0, (7,), 1000), Held("", 0, (1, 2), 1000))),
        node_of(3, state="lost", held=()),
        node_of(4, state="cordoned", held=(Held("j1", 0, (0,), 500), Held("j3", 0, (0,), 500))),
        node_of(5, gpus=0, held=()),
    ]
    assert map_text(nodes, 80, 5) == [
        "node-2  ·??····d  node-3  xxxxxxxx  node-4  &-------  node-10 lll·····",
    ]
    assert map_text(nodes, 40, 5) == [
        "node-2  ·??····d  node-3  xxxxxxxx",
        "node-4  &-------  node-10 lll·····",
    ]
    (line,) = gpu_map(nodes, "j3", 80, 5)
    marked = [line.plain[span.start : span.end] for span in line.spans if "rev" in str(span.style)]
    assert marked == ["d", "&"], "what the chosen job holds stands out, also without color"


def test_thousands_of_gpus_fit_a_few_lines() -> None:
    nodes = [node_of(n, held=(Held("j1", 0, tuple(range(n % 9)), 1000),)) for n in range(2000)]
    for width, room in ((80, 8), (200, 20), (40, 3)):
        lines = map_text(nodes, width, room)
        assert 1 <= len(lines) <= room
        assert max(map(len, lines)) <= width
        assert condensed(nodes, room, width)
        assert "tenths in use" in legend(nodes, room, width)
    few = map_text(nodes[:9], 30, 1)
    assert few == ["node-0 ·1235678#"]


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
