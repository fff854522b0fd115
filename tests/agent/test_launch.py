"""A command in another member: its output and its code arrive, whatever was sent to it."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import WAIT_S

from shoal.agent.launch.members import Follower
from shoal.agent.launch.ways import ask, receive, send

KEY = b"secret"


@pytest.fixture
def follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Follower]:
    monkeypatch.setenv("SHOAL_LAUNCH_PLAN", str(tmp_path / "plan.json"))
    made = Follower(1, KEY, {"key": KEY.decode(), "hosts": {}, "own": "n1"})
    yield made
    made._server.close()
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # pipes it leaves
def test_the_code_arrives_though_nobody_read_what_was_sent(follower: Follower) -> None:
    """A connection that is closed while something is unread is reset, and takes the code along."""
    ours, theirs = _connected()
    serving = threading.Thread(target=follower._serve, args=(theirs,))
    serving.start()
    ask(ours, KEY, {"do": "start", "command": "echo out; exit 3"})
    heard: dict[bytes, bytes] = {}
    sending = threading.Thread(target=_send_much, args=(ours,))
    sending.start()
    while b"X" not in heard:
        kind, data = receive(ours)
        heard[kind] = heard.get(kind, b"") + data
    assert heard == {b"O": b"out\n", b"X": b"3"}
    ours.close()
    for thread in (sending, serving):
        thread.join(WAIT_S)
        assert not thread.is_alive()


def _send_much(link: socket.socket) -> None:
    try:
        for _ in range(200):
            send(link, b"I", bytes(60_000))
    except OSError:
        pass  # the other end has ended


def _connected() -> tuple[socket.socket, Any]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname(), timeout=WAIT_S)
        theirs, _ = server.accept()
    return ours, theirs
