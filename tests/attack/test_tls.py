"""Hostile and slow connections to the TLS port, by somebody who has no token."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import ssl
import subprocess
from collections.abc import Iterator

import pytest
from harness.waiting import until

from shoal.client import Client, transport
from shoal.control.home import ClusterConfig
from tests.live.cluster import Live, live_cluster, virtual_nodes

FILES = 320  # so few that a hundred connections would be felt
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # a TLS handshake begins, and stops


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """With few files for the controller, and none in reserve above them."""
    config = ClusterConfig(nodes=virtual_nodes(1, 1), port=0, host="0.0.0.0")
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(live_cluster(config=config))
        supervisor = int(cluster.home.supervisor_lock.read_text())
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (FILES, FILES))
        last = cluster.kill_controller()
        until(lambda: cluster.controller_pid() != last)
        assert cluster.client.status().nodes
        yield cluster


def port(live: Live) -> int:
    return transport.at(live.client.url, "").port


def connect(live: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port(live)), timeout=60)


def secure(live: Live) -> Client:
    """From another machine: with the certificate that it pinned, and no second try."""
    url = f"https://localhost:{port(live)}"
    certificate = (live.home.tls / "ca.pem").read_text()
    return Client(url, live.home.read_token(), certificate=certificate, patience_s=0)


def assert_well(live: Live) -> None:
    with secure(live) as client:
        assert {node.health for node in client.nodes()} == {"ready"}
    assert live.wait(live.run("true")) == "succeeded"


def test_who_never_finishes_the_handshake_is_let_go(live: Live) -> None:
    context = transport.trust_in((live.home.tls / "ca.pem").read_text())
    with (
        connect(live) as silent,
        connect(live) as half,
        connect(live) as slow,
        context.wrap_socket(connect(live), server_hostname="localhost") as idle,
    ):
        half.sendall(HELLO)
        slow.sendall(HELLO[:1])
        for link in (silent, half, slow):
            with contextlib.suppress(ConnectionResetError):
                assert link.recv(100) == b""
        assert idle.recv(4096).startswith(b"HTTP/1.1 408 "), "after the handshake, too"


def test_hundreds_of_half_open_handshakes_starve_nobody(live: Live) -> None:
    pid = live.controller_pid()
    with secure(live) as ours, contextlib.ExitStack() as stack:
        ours.status()
        for number in range(500):
            link = stack.enter_context(connect(live))
            with contextlib.suppress(OSError):
                link.sendall(HELLO[: number % len(HELLO)])
            if number % 100 == 50:
                assert_well(live)
                assert len(os.listdir(f"/proc/{pid}/fd")) < FILES - 20
                assert ours.status().nodes, "who has shown a token keeps the connection"
        assert_well(live)
    assert live.controller_pid() == pid, "it did not even restart"


def test_what_is_not_tls_is_dropped_or_answered_in_one_line(live: Live) -> None:
    for data in (b"\x00" * 5000, b"SSH-2.0-x\r\n", b"\x16" * 70_000, HELLO + b"\xff" * 600):
        with connect(live) as link, contextlib.suppress(OSError):
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
            while link.recv(65536):
                pass
    assert_well(live)


def test_the_bounds_before_a_token_hold_inside_tls(live: Live) -> None:
    context = transport.trust_in((live.home.tls / "ca.pem").read_text())
    for data, status in (
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000, b"431"),
        (b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"POST /v1/session HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999\r\n\r\n", b"413"),
    ):
        with context.wrap_socket(connect(live), server_hostname="localhost") as link:
            with contextlib.suppress(OSError):
                link.sendall(data)
            assert link.recv(65536).split()[1] == status
    assert_well(live)


def test_a_client_cannot_renegotiate(live: Live) -> None:
    """With it, one connection could make the controller compute without end."""
    where = f"127.0.0.1:{port(live)}"
    done = subprocess.run(
        ["openssl", "s_client", "-tls1_2", "-connect", where],
        input=b"R\n",
        capture_output=True,
        timeout=60,
    )
    text = (done.stdout + done.stderr).lower()
    assert b"cipher is" in text, "the handshake itself succeeds"
    assert b"no renegotiation" in text
    assert_well(live)


def test_nobody_speaks_plain_http_with_the_port(live: Live) -> None:
    with connect(live) as link:
        link.sendall(b"GET /v1/status HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = b""
        while data := link.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"use https://" in answer


def test_failed_handshakes_leave_no_lines_in_the_log(live: Live) -> None:
    before = live.home.controller_log.stat().st_size
    stranger = ssl.create_default_context()
    for _ in range(3):
        with connect(live) as link, pytest.raises(ssl.SSLError):
            stranger.wrap_socket(link, server_hostname="localhost")
    assert_well(live)
    with live.home.controller_log.open("rb") as log:
        log.seek(before)
        assert log.read() == b""
