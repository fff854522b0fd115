"""Into a running job, with real processes: forwarded ports, and what keeps others out."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

import shoal.sessions
from shoal.sessions import Forward
from tests.live.cluster import Live, eventually, live_cluster

# Answers each connection with what it got, after the other side has said that it is done.
ECHO = """
import socket, threading
listener = socket.create_server(("127.0.0.1", 0), backlog=128)
print(listener.getsockname()[1], flush=True)
def answer(end):
    said = b""
    while data := end.recv(65536):
        said += data
    end.sendall(said)
    end.close()
while True:
    threading.Thread(target=answer, args=[listener.accept()[0]]).start()
"""
CONNECTIONS = 40
BYTES = 200_000


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=1, gpus=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def echo(live: Live) -> tuple[str, int]:
    """A job that listens, and its port."""
    job = live.client.submit(live.spec("python3", "-c", ECHO)).id
    assert eventually(lambda: live.output(job).endswith("\n"), 60)
    return job, int(live.output(job))


def say(port: int, data: bytes) -> bytes:
    """What comes back, after a half-close."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as end:
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)
        got = b""
        while more := end.recv(65536):
            got += more
    return got


def test_many_connections_reach_a_job_and_new_ones_after_a_kill_of_the_controller(
    live: Live, echo: tuple[str, int]
) -> None:
    job, port = echo
    with shoal.sessions.forward(live.client, job, port) as forwarded:
        got: dict[int, bytes] = {}

        def one(number: int) -> None:
            got[number] = say(forwarded.port, bytes([number]) * BYTES)

        threads = [threading.Thread(target=one, args=[number]) for number in range(CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {number: bytes([number]) * BYTES for number in range(CONNECTIONS)}
        live.kill_controller()
        assert say(forwarded.port, b"again") == b"again"


def test_only_ports_of_the_job_itself_are_reached(live: Live, echo: tuple[str, int]) -> None:
    job, port = echo
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        other = stranger.getsockname()[1]
        with (
            Forward(live.client, lambda: (job, 0), [(0, other)], told.append) as forwarded,
            socket.create_connection(("127.0.0.1", forwarded.port), timeout=60) as end,
        ):
            with contextlib.suppress(ConnectionResetError):
                assert end.recv(1) == b""
            said = f"no process of {job}.0 listens on port {other}; it listens on {port}"
            assert eventually(lambda: told == [said]), told
