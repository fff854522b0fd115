"""Hostile and slow connections, by somebody who has no token."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from harness.waiting import until

from shoal.api import limits as door
from shoal.control.home import ClusterConfig
from tests.live.cluster import Live, live_cluster, virtual_nodes

FILES = 320  # so few that a hundred connections would be felt
MIB = 1024 * 1024
CHUNKED = b"POST /v1/session HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """With few files for the controller, and none in reserve above them."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    config = ClusterConfig(nodes=virtual_nodes(2, 4), port=0)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(live_cluster(config=config))
        # The next controller inherits what its supervisor may have.
        supervisor = int(cluster.home.supervisor_lock.read_text())
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (FILES, FILES))
        last = cluster.kill_controller()
        until(lambda: cluster.controller_pid() != last)
        assert cluster.client.status().nodes
        yield cluster
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def connect(live: Live, timeout_s: float = 60) -> socket.socket:
    where = urlsplit(live.client.url)
    assert where.hostname and where.port
    return socket.create_connection((where.hostname, where.port), timeout=timeout_s)


def exchange(live: Live, *pieces: bytes) -> tuple[int, str]:
    """What is answered to these bytes: the status, and its one line."""
    with connect(live) as link:
        with contextlib.suppress(OSError):  # it may be refused before all is sent
            for piece in pieces:
                link.sendall(piece)
        answer = b""
        with contextlib.suppress(OSError):
            while data := link.recv(65536):
                answer += data
                if b"\r\n\r\n" in answer and answer.endswith(b"}"):
                    break
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1]) if head else 0
    return status, json.loads(body)["message"] if body else ""


def memory_mib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) // 1024
    raise AssertionError(f"{pid} is gone")


def assert_well(live: Live) -> None:
    """Its user is answered, its nodes are ready, and a job's output is whole."""
    assert {node.health for node in live.client.nodes()} == {"ready"}
    job = live.run("seq 1 1000", gpus=1)
    assert live.wait(job) == "succeeded"
    assert live.output(job) == "".join(f"{n}\n" for n in range(1, 1001))


@pytest.mark.parametrize(
    ("status", "pieces"),
    [
        (414, [b"GET /" + b"a" * (door.ADDRESS_BYTES_MAX + 1) + b" HTTP/1.1\r\n\r\n"]),
        (431, [b"GET / HTTP/1.1\r\n", *[b"x: y\r\n"] * (door.HEADERS_MAX + 1), b"\r\n"]),
        (431, [b"GET / HTTP/1.1\r\nx: ", *[b"a" * 65536] * 8]),
        (431, [b"\r\n" * 65536]),
        (
            431,
            [CHUNKED + b"0\r\nx: ", b"a" * MIB],
        ),
        (400, [b"\x16\x03\x01 hello\r\n\r\n"]),
        (401, [b"POST /v1/jobs HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n", b"a" * 1000]),
        (413, [b"POST /v1/session HTTP/1.1\r\ncontent-length: 99999\r\n\r\n"]),
    ],
    ids=["address", "count", "header", "blank", "trailer", "tls", "body", "declared"],
)
def test_what_is_too_large_is_refused_in_one_line(
    live: Live, status: int, pieces: list[bytes]
) -> None:
    told, message = exchange(live, *pieces)
    assert (told, "\n" in message) == (status, False), message
    assert message


def test_headers_without_end_cost_neither_memory_nor_time(live: Live) -> None:
    before = memory_mib(live.controller_pid())
    stop = threading.Event()

    def shout() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), connect(live, 5) as link:
                link.sendall(b"GET / HTTP/1.1\r\nx: ")
                for _ in range(128):
                    link.sendall(b"a" * 65536)

    shouters = [threading.Thread(target=shout) for _ in range(8)]
    for shouter in shouters:
        shouter.start()
    try:
        for _ in range(5):
            assert_well(live)
    finally:
        stop.set()
        for shouter in shouters:
            shouter.join()
    assert memory_mib(live.controller_pid()) - before < 100


def test_a_thousand_half_sent_requests_starve_nobody(live: Live) -> None:
    pid = live.controller_pid()
    links: list[socket.socket] = []
    try:
        for number in range(600):
            link = connect(live)
            links.append(link)
            with contextlib.suppress(OSError):
                link.sendall(b"GET /v1/status HTTP/1.1\r\nhost: localhost\r\nx: half")
            if number % 200 == 100:
                assert_well(live)
                assert len(os.listdir(f"/proc/{pid}/fd")) < FILES - 20
        assert_well(live)
        # A newcomer from the same address is heard all the same: who came first goes first.
        assert exchange(live, b"GET /v1/status HTTP/1.1\r\nhost: localhost\r\n\r\n")[0] == 401
    finally:
        for link in links:
            link.close()
    assert live.controller_pid() == pid, "it did not even restart"


def test_who_bears_the_token_keeps_its_connection_in_a_crowd(live: Live) -> None:
    where = urlsplit(live.client.url)
    ours = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    ours.connect()
    ours.auto_open = 0  # it is this connection, or none
    crowd = []
    try:
        for _ in range(30):
            headers = {"authorization": f"Bearer {live.home.read_token()}"}
            ours.request("GET", "/v1/status", headers=headers)
            with ours.getresponse() as answer:
                assert answer.status == 200
                answer.read()
            crowd += [connect(live) for _ in range(5)]
    finally:
        for link in crowd:
            link.close()
        ours.close()


def test_who_never_finishes_is_let_go(live: Live) -> None:
    with connect(live) as link:
        link.sendall(b"GET /v1/status HTTP/1.1\r\nx: ")
        answer = b""
        while data := link.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"took too long" in answer
