"""`shoal map`: whole output in input order, going on after a kill, one line for what is wrong."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from datetime import date
from pathlib import Path

import msgspec
import pytest
from harness.waiting import until

from shoal.tasks.files import Identity, Journal, JournalError
from tests.cli.conftest import Shoal, assert_one_clear_line, shoal
from tests.needs import need
from tests.tasks.functions import alive, environment

__all__ = ["shoal"]

SCRIPT = """
import os, pathlib, time
import shoal.tasks

def double(value):
    return 2 * value

def broken(value):
    if value == 3:
        raise ValueError("three is too many")
    return {"value": value}

def load():
    return 100

def shifted(value):
    return shoal.tasks.context() + value

def counted(value):
    # Tells that it was run, and from 40 on waits until it may go.
    folder = pathlib.Path(os.environ["FOLDER"])
    (folder / f"{value}.{os.getpid()}").touch()
    while value >= 40 and value % 2 == 0 and not (folder / "go").exists():
        time.sleep(0.01)
    return value


def picky(value):
    folder = pathlib.Path(os.environ["FOLDER"])
    (folder / f"{value}.{os.getpid()}").touch()
    if value == 97:
        raise ValueError(value)
    return value
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "in.jsonl").write_text("".join(f"{n}\n" for n in range(100)))
    return tmp_path


def command(folder: Path, function: str, *more: str) -> list[str]:
    words = [f"{folder}/script.py:{function}", f"{folder}/in.jsonl", "-o", f"{folder}/out.jsonl"]
    return ["map", *words, "--workers", "2", *more]


def output(folder: Path) -> list[object]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("out*")}


def test_a_function_over_the_lines_of_a_file(shoal: Shoal, folder: Path) -> None:
    result = shoal(*command(folder, "double", "--json"))
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert (told["lines"], told["failed"], told["resumed"]) == (100, 0, 0)
    assert output(folder) == [2 * n for n in range(100)]
    assert left(folder) == {"out.jsonl"}


def test_init_is_a_function_of_the_script(shoal: Shoal, folder: Path) -> None:
    assert shoal(*command(folder, "shifted", "--init", "load")).code == 0
    assert output(folder) == [100 + n for n in range(100)]


def test_an_empty_input_has_an_empty_output(shoal: Shoal, folder: Path) -> None:
    (folder / "in.jsonl").write_text("")
    assert shoal(*command(folder, "double")).code == 0
    assert (folder / "out.jsonl").read_bytes() == b""


def test_what_fails_stops_the_map_unless_told_otherwise(shoal: Shoal, folder: Path) -> None:
    result = shoal(*command(folder, "broken"))
    assert result.code == 1
    *traceback, last = result.err.splitlines()
    assert "in.jsonl line 4 failed 3 times: ValueError: three is too many; " in last
    assert "lines are done and kept: run the same command again" in last
    assert any("in broken" in line for line in traceback)
    assert not (folder / "out.jsonl").exists()


def test_what_fails_is_skipped_or_written_as_told(shoal: Shoal, folder: Path) -> None:
    result = shoal(*command(folder, "broken", "--on-error", "skip"))
    assert result.code == 0
    assert "line 4 failed 3 times: ValueError: three is too many" in result.err
    assert "1 failed" in result.out
    assert output(folder) == [{"value": n} for n in range(100) if n != 3]
    (folder / "out.jsonl").unlink()
    assert shoal(*command(folder, "broken", "--on-error", "return", "--retries", "0")).code == 0
    failed = output(folder)[3]
    assert isinstance(failed, dict)
    assert (failed["error"], failed["line"]) == ("ValueError: three is too many", 4)
    assert "in broken" in failed["traceback"]
    assert len(output(folder)) == 100


@pytest.mark.parametrize("how", ["skip", "return"])
def test_a_map_that_failed_goes_on_with_the_flag_that_its_error_advises(
    how: str, shoal: Shoal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = folder / "ran"
    ran.mkdir()
    monkeypatch.setenv("FOLDER", str(ran))
    one_by_one = ("--workers", "1", "--retries", "0")
    first = shoal(*command(folder, "picky", *one_by_one))
    assert first.code == 1
    assert "--on-error skip or return" in first.err
    known = len((folder / "out.jsonl.part").read_text().splitlines())
    before = {path.name for path in ran.iterdir()}
    assert known == 97
    result = shoal(*command(folder, "picky", *one_by_one, "--on-error", how))
    assert result.code == 0, result.err
    assert "continuing: 9" in result.err
    found = output(folder)
    assert [one for one in found if not isinstance(one, dict)] == [n for n in range(100) if n != 97]
    assert len(found) == (99 if how == "skip" else 100)
    again = {path.name.partition(".")[0] for path in ran.iterdir() if path.name not in before}
    assert not again & {str(n) for n in range(known)}
    assert left(folder) == {"out.jsonl"}


def test_a_map_goes_on_after_its_client_was_killed(shoal: Shoal, folder: Path) -> None:
    ran = folder / "ran"
    ran.mkdir()
    words = [sys.executable, "-m", "shoal.main", *command(folder, "counted", "--retries", "0")]
    env = environment(FOLDER=str(ran))
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
        journal = folder / "out.jsonl.journal"
        until(lambda: journal.exists() and b"mark" in journal.read_bytes(), "the journal")
        # Both workers are held up by the first even numbers from 40 on.
        held = until(lambda: _held(ran), "two tasks that wait")
        client.send_signal(signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in held), "the workers' end")
    (ran / "go").touch()
    before = {path.name for path in ran.iterdir()}
    known = sum(1 for line in (folder / "out.jsonl.part").read_text().splitlines())
    assert 0 < known < 100
    os.environ["FOLDER"] = str(ran)
    try:
        result = shoal(*command(folder, "counted"))
    finally:
        del os.environ["FOLDER"]
    assert result.code == 0, result.err
    assert "continuing: " in result.err
    assert output(folder) == list(range(100))
    again = {path.name.partition(".")[0] for path in ran.iterdir() if path.name not in before}
    assert not again & {str(n) for n in range(known)}
    assert left(folder) == {"out.jsonl"}


def _held(ran: Path) -> set[int]:
    """The workers, when each of them waits."""
    waiting = [path.name.split(".") for path in ran.iterdir()]
    pids = {int(pid) for value, pid in waiting if int(value) >= 40 and int(value) % 2 == 0}
    return pids if len(pids) == 2 else set()


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ("", ["map", "{0}/none.py:f", "{0}/in.jsonl"], "none.py: there is no such file"),
        ("", ["map", "{0}/script.py:double", "{0}/none"], "none: there is no such file"),
        ("", ["map", "{0}/script.py:double", "{0}"], "is not a regular file"),
        ("", ["map", "{0}/script.py", "{0}/in.jsonl"], "write SCRIPT.py:FUNCTION"),
        ("", ["map", "{0}/script.py:nope", "{0}/in.jsonl"], "has no function 'nope'; its"),
        ("", ["map", "{0}/script.py:shifted", "{0}/in.jsonl", "--init", "nope"], "no function"),
        ("", ["map", "{0}/script.py:double", "{0}/in.jsonl", "--on-error", "x"], "--on-error"),
        ("bad line", ["map", "{0}/script.py:double", "{0}/in.jsonl"], "line 101: not JSON"),
        ("bad code", ["map", "{0}/script.py:double", "{0}/in.jsonl"], "script.py line"),
        ("output", ["map", "{0}/script.py:double", "{0}/in.jsonl"], "exists already"),
        ("part", ["map", "{0}/script.py:double", "{0}/in.jsonl"], "without its journal"),
        ("", ["map", "{0}/script.py:double", "{0}/in.jsonl", "-o", "{0}/no/out"], "no folder"),
    ],
)
def test_bad_input_is_one_clear_line(
    change: str, words: list[str], message: str, shoal: Shoal, folder: Path
) -> None:
    if change == "bad line":
        with (folder / "in.jsonl").open("a") as file:
            file.write("{oops\n")
    elif change == "bad code":
        (folder / "script.py").write_text("import nothing_like_this\n")
    elif change:
        (folder / {"output": "out.jsonl", "part": "out.jsonl.part"}[change]).touch()
    before = left(folder)
    where = [] if "-o" in words else ["-o", f"{folder}/out.jsonl"]
    result = shoal(*[word.format(folder) for word in words], *where)
    assert_one_clear_line(result)
    assert message in result.err
    if change != "bad line":
        assert left(folder) == before


# -- the journal ---------------------------------------------------------------------------

IDENTITY = Identity(lines=10, size_bytes=20, digest="d", function="s.py:f", on_error="raise")


def test_a_journal_knows_what_is_done_and_what_came_early(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out", IDENTITY)
    journal.add(0, 2, b"0\n1\n")
    journal.add(4, 2, b"4\n5\n")
    journal.add(8, 1, b"", failed=1)
    journal.close()
    again = Journal(tmp_path / "out", IDENTITY)
    assert (again.done, again.known) == (2, 5)
    assert again.gaps(10) == [(2, 4), (6, 8), (9, 10)]
    again.add(2, 2, b"2\n3\n")
    again.add(6, 2, b"6\n7\n")
    again.add(9, 1, b"9\n")
    assert again.gaps(10) == []
    again.finish()
    assert (tmp_path / "out").read_text() == "0\n1\n2\n3\n4\n5\n6\n7\n9\n"
    assert again.failed == 1


def test_a_journal_cut_anywhere_still_gives_the_whole_output(tmp_path: Path) -> None:
    """As a kill may leave it: whatever of its end is missing, nothing is lost or doubled."""
    whole = Journal(tmp_path / "whole", IDENTITY)
    for first in (0, 4, 2, 8, 6):
        whole.add(first, 2, b"%d\n%d\n" % (first, first + 1))
    whole.close()
    entries = (tmp_path / "whole.journal").read_bytes()
    part = (tmp_path / "whole.part").read_bytes()
    begun = entries.index(b"\n") + 1
    for cut in range(begun, len(entries) + 1, 7):
        (tmp_path / "out.journal").write_bytes(entries[:cut])
        (tmp_path / "out.part").write_bytes(part)
        journal = Journal(tmp_path / "out", IDENTITY)
        for first, end in journal.gaps(10):
            journal.add(first, end - first, b"".join(b"%d\n" % n for n in range(first, end)))
        journal.finish()
        assert (tmp_path / "out").read_text().split() == [str(n) for n in range(10)]
        (tmp_path / "out").unlink()


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out", IDENTITY)
    with pytest.raises(JournalError, match="another `shoal map` is writing it"):
        Journal(tmp_path / "out", IDENTITY)
    journal.add(0, 1, b"0\n")
    journal.close()
    other = Identity(lines=9, size_bytes=20, digest="d", function="s.py:f", on_error="raise")
    with pytest.raises(JournalError, match="belongs to a map with another input"):
        Journal(tmp_path / "out", other)
    (tmp_path / "out.journal").write_text("something\n")
    with pytest.raises(JournalError, match="is not a journal"):
        Journal(tmp_path / "out", IDENTITY)


def test_a_journal_goes_on_under_another_on_error_until_something_failed(tmp_path: Path) -> None:
    skips = msgspec.structs.replace(IDENTITY, on_error="skip")
    journal = Journal(tmp_path / "out", IDENTITY)
    journal.add(0, 2, b"0\n1\n")
    journal.add(4, 1, b"4\n")
    journal.close()
    for identity in (skips, IDENTITY, skips):  # there and back: nothing has failed
        journal = Journal(tmp_path / "out", identity)
        assert journal.known == 3
        journal.close()
    journal = Journal(tmp_path / "out", skips)
    journal.add(2, 1, b"", failed=1)
    journal.close()
    with pytest.raises(JournalError, match="already has 1 failed lines from --on-error skip"):
        Journal(tmp_path / "out", IDENTITY)
    last = Journal(tmp_path / "out", skips)
    assert last.known == 4
    last.close()


def test_a_journal_is_begun_anew_when_it_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.tasks.files.JOURNAL_BYTES_MAX", 1000)
    journal = Journal(tmp_path / "out", IDENTITY)
    for number in range(500):
        journal.add(number, 1, b"%d\n" % number)
    assert (tmp_path / "out.journal").stat().st_size < 1500
    journal.close()
    again = Journal(tmp_path / "out", IDENTITY)
    assert again.done == 500
    again.close()


ROWS = """
def row(value):
    return [value["name"].upper(), value["size"]]
"""


def mapped(shoal: Shoal, folder: Path, inputs: str) -> list[object]:
    (folder / "rows.py").write_text(ROWS)
    out = folder / "out.jsonl"
    result = shoal("map", f"{folder}/rows.py:row", inputs, "-o", str(out), "--workers", "1")
    assert result.code == 0, result.err
    assert [path.name for path in folder.glob("out.jsonl*")] == ["out.jsonl"]
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rows_of_a_csv_file_are_inputs(folder: Path, shoal: Shoal) -> None:
    (folder / "in.csv").write_text('\ufeffname,size\n"a, b",1\n\nc,\n')
    assert mapped(shoal, folder, f"{folder}/in.csv") == [["A, B", "1"], ["C", ""]]


def test_standard_input_is_an_input(
    folder: Path, shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b'{"name": "a", "size": 1}\n{"name": "b", "size": null}\n'
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert mapped(shoal, folder, "-") == [["A", 1], ["B", None]]


def test_rows_of_a_parquet_file_are_inputs(folder: Path, shoal: Shoal) -> None:
    need("pyarrow")
    import pyarrow  # type: ignore[import-not-found, unused-ignore]
    from pyarrow import parquet

    table = pyarrow.table({"name": ["a", "b"], "size": [1, None], "day": [date(2026, 1, 2)] * 2})
    parquet.write_table(table, folder / "in.parquet")
    assert mapped(shoal, folder, f"{folder}/in.parquet") == [["A", 1], ["B", None]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("in.csv", "", "in.csv: its first line is empty; it must name the columns"),
        ("in.csv", "a,a\n1,2\n", "in.csv: its first line names a column twice"),
        ("in.csv", "a,b\n1,2\n3\n", "in.csv line 3: has 1 values for 2 columns"),
        ("in.tsv", 'a\n"x', "in.tsv: is not CSV: unexpected end of data"),
        ("in.parquet", "x", "in.parquet: "),
    ],
)
def test_what_is_wrong_with_a_table_is_one_line(
    name: str, text: str, message: str, folder: Path, shoal: Shoal
) -> None:
    (folder / name).write_text(text)
    out = str(folder / "out.jsonl")
    result = shoal("map", f"{folder}/script.py:double", f"{folder}/{name}", "-o", out)
    assert_one_clear_line(result)
    assert message in result.err
    assert not list(folder.glob("out.jsonl*"))
