"""`make gpu` keeps what it has found, whatever a part does, and calls nothing passed that did not
run. The parts themselves need a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from bench import gpu_checks
from bench.gpu_checks import (
    FAILED,
    LINE,
    NOT_RUN,
    PARTS,
    PASSED,
    Part,
    Result,
    Row,
    rows_of,
    run,
)
from bench.gpu_parts import CannotRun, check

HANGS = "import threading; threading.Event().wait()"
FIRST = LINE + msgspec.json.encode(Row("first", "a thing | with a bar", PASSED, "7")).decode()


def part_of(seconds: int = 60) -> Part:
    return Part(PARTS[0].name, seconds, ("first", "second"))


def test_what_a_part_found_stays_when_it_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"print({FIRST!r}); print('other words'); raise SystemExit(3)"
    monkeypatch.setattr(gpu_checks, "command_of", lambda *_, **__: [sys.executable, "-c", script])
    file = tmp_path / "results" / "2026-11-18.md"
    later = Part(PARTS[1].name, 1_000, ("third",))  # for which no time is left
    assert run([part_of(), later], Result(file, "a GPU"), 100, virtual=True) is False
    read = {row.check: row for _, row in Result(file, "a GPU").rows}
    assert read["first"] == Row("first", "a thing / with a bar", PASSED, "7")
    assert [read[name].outcome for name in ("second", "third")] == [FAILED, NOT_RUN]
    assert "1 passed, 1 failed, 1 not run" in file.read_text()


def test_a_part_that_hangs_is_stopped() -> None:
    assert list(rows_of(part_of(), [sys.executable, "-c", HANGS], 0.01)) == []


def test_a_check_says_what_became_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with check("one", "a thing") as row:
        row.figure = "7"
    with check("two", "a thing"):
        raise CannotRun("no such thing here")
    with check("three", "a thing"):
        raise RuntimeError("it broke\nwith details")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(LINE)]
    rows = [msgspec.json.decode(line.removeprefix(LINE), type=Row) for line in lines]
    assert [(row.outcome, row.figure) for row in rows] == [
        (PASSED, "7"),
        (NOT_RUN, "no such thing here"),
        (FAILED, "RuntimeError: it broke"),
    ]


def test_a_part_that_is_run_again_replaces_its_own_lines(tmp_path: Path) -> None:
    file = tmp_path / "day.md"
    first, second = PARTS[:2]
    before = Result(file, "a GPU")
    before.add(second, Row("b", "x", PASSED))
    before.add(first, Row("a", "x", FAILED, "why"))
    again = Result(file, "a GPU")
    again.add(first, Row("a", "x", PASSED, "1 s"))
    assert [(name, row.check, row.outcome) for name, row in Result(file, "").rows] == [
        (first.name, "a", PASSED),
        (second.name, "b", PASSED),
    ]
