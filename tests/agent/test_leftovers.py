"""What a dead node has left is gone before anybody may know that it is dead."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.agent import starter
from shoal.machine.files import AGENT_LOCK, held, lock
from shoal.machine.kernel import NODE_MARK
from shoal.machine.leftovers import end_node


@pytest.fixture
def left(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of a member, in a session of its own."""
    env = {**os.environ, NODE_MARK: str(tmp_path)}
    made = subprocess.Popen(["sleep", "600"], env=env, start_new_session=True)
    yield made
    made.kill()
    made.wait()


def test_what_is_marked_is_ended_while_the_nodes_lock_is_held(
    tmp_path: Path, left: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def swept(directory: Path) -> None:
        seen.append(held(directory / AGENT_LOCK))

    monkeypatch.setattr("shoal.machine.leftovers.sweep", swept)
    assert end_node(tmp_path)
    assert left.wait(60) and seen == [True]  # its memory goes before its process
    assert not held(tmp_path / AGENT_LOCK)


def test_nothing_is_ended_where_an_agent_lives(
    tmp_path: Path, left: subprocess.Popen[bytes]
) -> None:
    handle = lock(tmp_path / AGENT_LOCK)
    assert handle is not None
    assert not end_node(tmp_path)
    assert left.poll() is None
    os.close(handle)


def test_a_starter_ends_what_is_left_before_it_reports_the_death(
    tmp_path: Path, left: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = []
    made = object.__new__(starter.Starter)
    made._directory, made._keeper, made._stopping, made._grace_s = tmp_path, 0, True, 1.0
    monkeypatch.setattr(made, "_report_death", lambda: reported.append(left.poll()))
    assert made.run() == 0
    assert reported and reported[0] is not None
