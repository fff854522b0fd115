"""Every kind of damage to the store: what is kept and what is lost, in numbers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.cli.app import call
from shoal.control.backup.saving import save
from shoal.control.home import ClusterConfig, Home
from shoal.control.store.marks import Numbers
from shoal.control.store.salvage import salvage
from shoal.control.store.sqlite import SqliteStore, begin_check, check
from shoal.core.invariants import verify
from shoal.ports import StoreDamaged
from tests.attack.test_damage import filled

JOBS, PAGE = 60, 4096


class Whole(NamedTuple):
    """The file before the damage; `journalled` is the same with its journal, not put into it."""

    closed: Path
    journalled: Path
    events: int
    roots: dict[str, int]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    top = tmp_path_factory.mktemp("whole")
    for name in ("closed", "journalled"):
        (top / name).mkdir()
    store = filled(top / "closed" / "shoal.db", jobs=JOBS)
    for path in (top / "closed").iterdir():
        shutil.copy(path, top / "journalled" / path.name)
    last = store._last
    store.close()
    with contextlib.closing(sqlite3.connect(top / "closed" / "shoal.db")) as source:
        roots = dict(source.execute("SELECT name, rootpage FROM sqlite_master").fetchall())
    return Whole(top / "closed", top / "journalled", last, roots)


def overwrite(page: int, size: int = PAGE, body: bytes = b"\xa5") -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek((page - 1) * PAGE)
            file.write(body * size)

    return spoil


def middle(path: Path) -> None:
    overwrite(path.stat().st_size // PAGE // 2)(path)


def cut(part: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(path.stat().st_size * part))


def without_journal(path: Path) -> None:
    path.with_name("shoal.db-wal").unlink()


DAMAGES: dict[str, tuple[str | Callable[[Path], object], str, float]] = {
    # how the file is damaged, which file, and the least part of the events that must be kept
    "header": (overwrite(1, 100, b"\0"), "closed", 0.0),
    "first page": (overwrite(1), "closed", 0.0),
    "header, with a journal": (overwrite(1, 100, b"\0"), "journalled", 1.0),
    "a page in the middle": (middle, "closed", 0.9),
    "root of the events": ("events", "closed", 0.0),
    "root of the jobs": ("jobs", "closed", 1.0),
    "an index": ("events_between", "closed", 1.0),
    "tail missing": (cut(0.75), "closed", 0.0),
    "cut in a page": (cut(0.5003), "closed", 0.0),
    "journal lost": (without_journal, "journalled", 0.0),
    "zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "closed", 0.0),
    "no bytes": (cut(0), "closed", 0.0),
    "100 bytes": (lambda path: os.truncate(path, 100), "closed", 0.0),
    "another file": (lambda path: path.write_text("hello" * 999), "closed", 0.0),
}


def damaged(whole: Whole, home: Home, kind: str) -> None:
    spoil, which, _ = DAMAGES[kind]
    home.create()
    source = whole.closed if which == "closed" else whole.journalled
    for path in source.iterdir():
        shutil.copy(path, home.path / path.name)
    for number in range(1, JOBS + 2):
        (home.logs / f"j{number}").mkdir()
    if isinstance(spoil, str):
        overwrite(whole.roots[spoil])(home.database)
    else:
        spoil(home.database)


def figures(lines: list[str]) -> list[int]:
    """Live jobs, records and events that were kept; events lost or senseless, jobs and records."""
    return [int(number) for line in lines[:2] for number in re.findall(r"\d+", line)]


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_is_kept_and_what_is_lost_add_up(whole: Whole, tmp_path: Path, kind: str) -> None:
    home = Home(tmp_path)
    damaged(whole, home, kind)
    numbers = Numbers(home.marks, (home.logs,))
    lines = salvage(home.database, home.salvaged, numbers, at_least=whole.events)
    live, records, events, lost, _, jobs_lost, records_lost = figures(lines)
    assert events + lost == whole.events, lines
    assert events >= whole.events * DAMAGES[kind][2], lines
    # One of the jobs lives; records are lost with their names only if nothing else names them.
    assert live + records + jobs_lost + records_lost >= JOBS + 1, lines
    store = SqliteStore(home.database, Numbers(home.marks, (home.logs,)))
    state, seq = store.load()
    verify(state)
    store.close()
    assert seq > whole.events
    assert state.next_job > JOBS + 1, "no number comes twice"
    assert Path(lines[-1].removeprefix("the damaged file is ")).exists()


@pytest.mark.parametrize("kind", ["tail missing", "zeros", "a page in the middle"])
def test_a_backup_fills_what_the_damaged_file_lacks(
    whole: Whole, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path / "home")
    damaged(whole, home, "an index")  # whole, as far as a backup sees
    shutil.copy(whole.closed / "shoal.db", home.database)
    home.write_config(ClusterConfig(nodes=()))
    save(home, tmp_path / "b.tar", (), lambda *_: None)
    spoil = DAMAGES[kind][0]
    assert not isinstance(spoil, str)
    spoil(home.database)
    assert call(["salvage", "--from", str(tmp_path / "b.tar"), "--home", str(home.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert figures(lines) == [1, JOBS, whole.events, 0, 0, 0, 0]
    other = Home(tmp_path / "other")
    damaged(whole, other, kind)
    assert call(["salvage", "--from", str(tmp_path / "b.tar"), "--home", str(other.path)]) == 1
    assert "is a backup of another cluster" in capsys.readouterr().err


def test_a_store_that_lost_its_newest_part_is_an_alarm(whole: Whole, tmp_path: Path) -> None:
    """SQLite opens it without a complaint."""
    home = Home(tmp_path)
    damaged(whole, home, "journal lost")
    home.marks.write_text('{"job": 900, "epoch": 7}')
    store = SqliteStore(home.database, Numbers(home.marks))
    state, _ = store.load()
    assert store.used(state.next_job, state.epoch)[:2] == (900, 7)
    assert (
        "may lack its newest part: it does not know j1, but job numbers below j900 were"
        in store.alarms.texts[0]
    )
    store.close()


def test_damage_that_a_start_does_not_meet_is_an_alarm(whole: Whole, tmp_path: Path) -> None:
    home = Home(tmp_path)
    damaged(whole, home, "an index")
    store = SqliteStore(home.database)
    store.load()
    begin_check(home.database, store.alarms).join(60)
    assert "is damaged where nothing needs it yet" in store.alarms.texts[0]
    store.close()
    assert check(whole.closed / "shoal.db") == ""
    assert check(home.database, seconds_max=-1) in ("", check(home.database)), "it is bounded"


def test_a_file_that_sqlite_refuses_is_not_opened(whole: Whole, tmp_path: Path) -> None:
    home = Home(tmp_path)
    damaged(whole, home, "first page")
    with pytest.raises(StoreDamaged, match=r"shoal restore FILE --replace, or recover what is"):
        SqliteStore(home.database).load()
