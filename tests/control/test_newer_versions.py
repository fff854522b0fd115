"""Data of a newer version is refused in one line, or what is unknown in it is left out: it is never
half-read, and never a traceback."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import shoal
from shoal.agent.dialling import read_link_file
from shoal.agent.startup import NEWER_CODE
from shoal.client import Address
from shoal.control.clock import Anchor, SystemClock
from shoal.control.home import ClusterConfig, Home
from shoal.control.store.marks import Marks, Numbers
from shoal.control.store.sqlite import SqliteStore
from shoal.core.state.events.cluster import ControllerStarted
from shoal.core.state.state import State
from shoal.database.formats import FORMAT
from shoal.link.wire import LinkFile
from shoal.machine.files import FORMAT_FILE, LINK_FILE, SPEC
from shoal.model.node import NodeSpec
from shoal.ports import StoreDamaged, StoreError

NODE = NodeSpec(id="n1", cpu_milli=1000, memory_mb=1000)


def with_more(struct: msgspec.Struct) -> bytes:
    """As a newer version would write it."""
    return msgspec.json.encode({**msgspec.to_builtins(struct), "of_the_future": 1})


def begun(path: Path) -> SqliteStore:
    store = SqliteStore(path)
    store.commit([ControllerStarted(at_ms=1, epoch=1)], [])
    return store


def raise_format(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE meta SET value = ? WHERE key = 'format'", (FORMAT + 1,))
        database.execute("UPDATE meta SET value = 98007000 WHERE key = 'version'")


def test_a_database_that_a_newer_version_has_written_to_is_refused_in_one_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "shoal.db"
    begun(path).close()
    SqliteStore(path).close()  # its own is opened again
    raise_format(path)
    with pytest.raises(StoreError) as refused:
        SqliteStore(path)
    assert str(refused.value) == (
        f"{path} was written by shoal 98.7.0 (format {FORMAT + 1}); this is {shoal.__version__} "
        f"(format {FORMAT}): install 98.7.0 or newer, or restore a backup"
    )
    assert not isinstance(refused.value, StoreDamaged)


def test_a_head_that_follows_the_log_stops_when_a_newer_version_leads(tmp_path: Path) -> None:
    path = tmp_path / "shoal.db"
    begun(path)
    standby = SqliteStore(path)
    state = State()
    seq = standby.follow(state, 0)
    raise_format(path)
    leader = sqlite3.connect(path)
    row = leader.execute("SELECT job, node, body, crc, kind FROM events").fetchone()
    leader.execute("INSERT INTO events VALUES (2, ?, ?, ?, NULL, ?)", (*row[:3], row[4]))
    leader.commit()
    with pytest.raises(StoreError, match=r"was written by shoal 98\.7\.0"):
        standby.follow(state, seq)


def test_an_event_of_a_kind_that_nobody_knows_is_damage_in_one_line(tmp_path: Path) -> None:
    """It cannot come from a newer version, because the format would be refused first."""
    path = tmp_path / "shoal.db"
    begun(path).close()
    database = sqlite3.connect(path)
    body = b'{"event":"Nonsense","at_ms":1}'
    database.execute("INSERT INTO events (seq, body, kind) VALUES (2, ?, 'Nonsense')", (body,))
    database.commit()
    with pytest.raises(StoreDamaged, match=r"event 2 cannot be read: .*Nonsense") as refused:
        SqliteStore(path).load()
    assert "\n" not in str(refused.value)


def test_what_is_unknown_in_files_that_older_versions_also_use_is_left_out(tmp_path: Path) -> None:
    marks, clock = tmp_path / "marks", tmp_path / "clock"
    marks.write_bytes(with_more(Marks(7, 8)))
    assert Numbers(marks).written == Marks(7, 8)
    clock.write_bytes(with_more(Anchor("boot", 5)))
    SystemClock(0, clock)
    address = Address(url="http://127.0.0.1:1", pid=1)
    assert msgspec.json.decode(with_more(address), type=Address) == address
    assert msgspec.json.decode(with_more(NODE), type=NodeSpec) == NODE
    link = LinkFile(urls=("https://head:7700",), key="k")
    (tmp_path / LINK_FILE).write_bytes(with_more(link))
    assert read_link_file(tmp_path) == link


def test_a_configuration_with_something_unknown_starts_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    home.config.write_bytes(with_more(ClusterConfig(nodes=(NODE,))))
    done = _shoal("up", "--home", str(home.path))
    assert done.returncode == 1
    assert "a newer version of shoal wrote it" in done.stderr and "of_the_future" in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_an_agent_refuses_a_folder_that_a_newer_one_has_used(tmp_path: Path) -> None:
    (tmp_path / SPEC).write_bytes(msgspec.json.encode(NODE))
    (tmp_path / FORMAT_FILE).write_bytes(
        msgspec.json.encode({"format": FORMAT + 1, "version": "98.7.0", "more": 1})
    )
    agent = [sys.executable, "-m", "shoal.agent", str(tmp_path)]
    done = subprocess.run(agent, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == NEWER_CODE
    assert done.stderr.startswith(f"shoal: {tmp_path} was written by shoal 98.7.0")
    assert done.stderr.count("\n") == 1


def _shoal(*words: str) -> Any:
    command = [sys.executable, "-m", "shoal.main", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
