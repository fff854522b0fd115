"""Tables for people, plain lines for pipes."""

from __future__ import annotations

import re
import sys

import pytest

from shoal.cli.screen import show
from shoal.cli.screen.show import Cell, Column

COLUMNS = [Column("ID"), Column("COUNT", right=True), Column("COMMAND", flexible=True)]
ROWS: list[list[str | Cell]] = [
    [Cell("j1", "bold"), "7", "echo 'a\nb' \x1b[2J"],
    [Cell("j22", "bold"), "1234", ""],
]


def test_a_pipe_gets_aligned_lines_without_colors(capsys: pytest.CaptureFixture[str]) -> None:
    show.table(COLUMNS, ROWS)
    assert capsys.readouterr().out == (
        "ID   COUNT  COMMAND\nj1       7  echo 'a\\nb' \\x1b[2J\nj22   1234  -\n"
    )


def test_a_terminal_gets_colors_and_no_foreign_escapes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    show.table(COLUMNS, ROWS)
    out = capsys.readouterr().out
    assert "\x1b[1m" in out
    assert "\x1b[2J" not in out
    assert "\\x1b[2J" in out
    assert all(len(line) < 200 for line in out.splitlines())


def test_no_color_is_honored_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    show.table([Column("ID")], [[Cell("j1", "green")]])
    show.line("done", "red")
    out = capsys.readouterr().out
    assert "\x1b[3" not in out
    assert "j1" in out


def test_a_dumb_terminal_counts_as_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert not show.at_terminal()


@pytest.mark.parametrize(
    ("used", "total", "text"),
    [
        (0, 8, "□□□□"),
        (1, 800, "■□□□"),
        (4, 8, "■■□□"),
        (799, 800, "■■■□"),
        (8, 8, "■■■■"),
        (0, 0, ""),
    ],
)
def test_a_bar_is_empty_at_nothing_and_full_at_everything(used: int, total: int, text: str) -> None:
    assert show.bar(used, total, 4) == text


def test_progress_tells_each_step_once(capsys: pytest.CaptureFixture[str]) -> None:
    with show.Spinner() as progress:
        for text in ("one", "one", "two"):
            progress(text)
    assert capsys.readouterr().err == "one\ntwo\n"


@pytest.mark.parametrize("columns", [20, 40, 60])
def test_no_word_is_broken(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    text = "  it fits only in room set aside for j1, j2 and might delay them: it may take 2h 30m"
    show.line(text)
    show.table([Column("WHEN"), Column("WHAT", wraps=True)], [["5s ago", text]])
    show.line(show.fitted(text))
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    words = {word.rstrip("\u2026") for word in out.split()}
    assert {word.rstrip(",") for word in words} <= {
        word.rstrip(",:") for word in (*text.split(), "WHEN", "WHAT", "5s", "ago")
    } | set(text.split())
    assert all(len(part) <= columns for part in show.wrapped(text, columns))
