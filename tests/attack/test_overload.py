"""More than the controller should bear at a time: it stays small and answers, and recovers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from harness.waiting import until

from shoal.client import Client
from shoal.model.identity import Role
from shoal.model.people import NewToken
from tests.live.cluster import Live, live_cluster

STREAMS = 300
MIB_PER_STREAM = 0.5  # of the controller's memory, generously


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=2, gpus=4) as cluster:
        cluster.client.add_tenant("red")
        cluster.client.add_user("ann", {"red": Role.MEMBER})
        yield cluster


def memory_mib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) // 1024
    raise AssertionError(f"{pid} is gone")


def ask(live: Live, token: str, path: str) -> socket.socket:
    where = urlsplit(live.client.url)
    link = socket.create_connection((where.hostname or "", where.port or 0), timeout=60)
    head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n"
    link.sendall(head.encode())
    return link


def test_three_hundred_streams_and_a_busy_cluster(live: Live) -> None:
    """Half are pages, half follow the log of a job that says little; none of them is read."""
    token, pid = live.home.read_token(), live.controller_pid()
    job = live.run("while sleep 0.2; do echo a line; done", cpu_milli=0)
    live.wait(job, "running")
    before = memory_mib(pid)
    follow = f"/v1/jobs/{job}/logs?offset=1000000&wait_s=30"
    links = [ask(live, token, "/v1/stream") for _ in range(STREAMS // 2)]
    links += [ask(live, token, follow) for _ in range(STREAMS // 2)]
    try:
        for link in links[: STREAMS // 2]:
            assert link.recv(16).startswith(b"HTTP/1.1 200")
        for _ in range(10):  # each of these is a change that every page is sent
            assert live.wait(live.run("true", cpu_milli=0)) == "succeeded"
        assert live.client.status().nodes == {"ready": 2}
        assert memory_mib(pid) - before < STREAMS * MIB_PER_STREAM
    finally:
        for link in links:
            link.close()
        live.client.cancel(job)
    assert live.controller_pid() == pid


def test_streams_of_a_killed_client_are_free_again(live: Live) -> None:
    """The limit is refused with a line, and nothing but the kernel says goodbye."""
    token = live.client.add_token(NewToken(user="ann", tenant="red")).secret
    where = urlsplit(live.client.url)
    script = (
        "import socket, sys, time\n"
        f"head = b'GET /v1/stream HTTP/1.1\\r\\nhost: localhost\\r\\n'\n"
        f"head += b'authorization: Bearer {token}\\r\\n\\r\\n'\n"
        "links = []\n"
        "for _ in range(64):\n"
        f"    link = socket.create_connection(({where.hostname!r}, {where.port}))\n"
        "    link.sendall(head)\n"
        "    assert link.recv(16).startswith(b'HTTP/1.1 200')\n"
        "    links.append(link)\n"
        "print('open', flush=True)\n"
        "time.sleep(600)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        refused = b""
        with ask(live, token, "/v1/stream") as link:
            while not refused.endswith(b"}"):
                refused += link.recv(4096)
        assert refused.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 10" in refused
        assert b"has 64 streams open, the most it may have" in refused
        with Client(live.client.url, token) as client:
            assert client.jobs() == [], "only streams are refused"
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()

    def free() -> bool:
        with ask(live, token, "/v1/stream") as link:
            return link.recv(16).startswith(b"HTTP/1.1 200")

    until(free)
