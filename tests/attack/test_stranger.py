"""An unprivileged user of the same machine, without the token, who wants in."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from harness.waiting import until

from shoal.client import Client, ShoalError, Unreachable, transport
from shoal.client.caller import Caller
from shoal.model.views import StatusView
from tests.live.cluster import Live, live_cluster

STRANGER = 65_534
KILLS = 3

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@pytest.fixture(scope="module")
def victim() -> Iterator[Live]:
    with live_cluster(nodes=1, gpus=1) as live:
        yield live


def become_stranger() -> None:
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)


def as_stranger(act: Callable[[], object]) -> str:
    """What it says, done by another user in a process of their own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become_stranger()
            said = repr(act())
        except BaseException:
            said = traceback.format_exc()
        os.write(writer, said.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


def refused(act: Callable[[], object]) -> bool:
    try:
        act()
    except PermissionError:
        return True
    return False


def test_a_stranger_reads_and_reaches_nothing_of_a_home(victim: Live) -> None:
    job = victim.run("echo secret; umask > umask.txt; cat umask.txt")
    assert victim.wait(job) == "succeeded"
    assert "0077" not in victim.output(job), "jobs keep the user's own umask"
    before = os.umask(0)
    os.umask(before)
    assert f"{before:04o}" in victim.output(job)
    home = victim.home.path
    sockets = [path for path in home.rglob("*") if path.is_socket()]
    assert victim.home.socket in sockets
    assert any(path.name == "agent.sock" for path in sockets)
    files = [path for path in home.rglob("*") if path.is_file()]
    assert {"token", "shoal.db", "shoal.db-wal"} <= {path.name for path in files}
    for path in files:
        if path.parent == home:
            assert path.stat().st_mode & 0o077 == 0, path
    assert victim.home.socket.stat().st_mode & 0o777 == 0o600

    def reads() -> list[str]:
        return [str(path) for path in files if not refused(path.read_bytes)]

    def reaches() -> list[str]:
        def connect(path: Path) -> None:
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(str(path))

        return [str(path) for path in sockets if not refused(lambda path=path: connect(path))]  # type: ignore[misc]

    assert as_stranger(reads) == "[]"
    assert as_stranger(reaches) == "[]"


def test_a_stranger_cannot_take_the_port_while_controllers_die(victim: Live) -> None:
    where = urlsplit(victim.client.url)
    assert where.hostname and where.port
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        become_stranger()
        _squat(where.hostname, where.port, writer)
    os.close(writer)
    try:
        for _ in range(KILLS):
            last = victim.kill_controller()
            with Client.at_home(victim.home.path, patience_s=60) as client:
                assert client.status().nodes
            until(lambda last=last: victim.controller_pid() != last)  # type: ignore[misc]
    finally:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        said = file.read()
    assert "tried" in said
    assert "took" not in said, said


def _squat(host: str, port: int, told: int) -> None:
    """Try to listen there until somebody ends us; a word is told for each thing that happens."""
    os.write(told, b"tried ")
    while True:
        for address in (host, "0.0.0.0"):
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                with socket.socket() as listener:
                    listener.setsockopt(socket.SOL_SOCKET, option, 1)
                    try:
                        listener.bind((address, port))
                        listener.listen()
                    except OSError:
                        continue
                    os.write(told, b"took ")
                    time.sleep(0.2)
        time.sleep(0.0005)


def test_a_client_says_nothing_to_a_strangers_socket(tmp_path: Path) -> None:
    """Were a stranger to listen in a home all the same, the token would not go there."""
    tmp_path.chmod(0o700)
    (tmp_path / "token").write_text("secret")
    path = tmp_path / "controller.sock"
    address = {"url": "http://127.0.0.1:1", "pid": 1, "socket": str(path)}
    (tmp_path / "controller.json").write_text(json.dumps(address))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        become_stranger()
        listener.listen()  # the kernel notes who listens
        os.write(writer, b"listens")
        link, _ = listener.accept()
        os.write(writer, link.recv(100))
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 100) == b"listens"
    with Client.at_home(tmp_path) as client, pytest.raises(Unreachable, match="another user"):
        client.status()
    assert os.read(reader, 100) == b"", "not a byte was sent"
    os.waitpid(child, 0)
    os.close(reader)
    listener.close()


def test_a_home_so_deep_that_no_socket_name_would_fit_works(tmp_path: Path) -> None:
    from shoal.client import SOCKET_NAME
    from shoal.control.home import ClusterConfig, Home
    from shoal.control.sockets import open_doors

    home = Home(tmp_path / ("d" * 60) / ("e" * 60))
    home.create()
    home.write_config(ClusterConfig(nodes=(), port=0))
    doors = open_doors(home)
    try:
        assert (home.path / SOCKET_NAME).stat().st_mode & 0o777 == 0o600
        there = msgspec.structs.replace(transport.at("http://127.0.0.1:1", "t"), socket=home.socket)
        with (
            Caller(there, timeout_s=0.2, patience_s=0) as client,
            pytest.raises(Unreachable, match="timed out"),  # it was heard, but not answered
        ):
            client.request("GET", "/v1/status", StatusView)
    finally:
        for door in doors:
            door.close()


def test_nothing_wrong_or_empty_is_a_token(victim: Live) -> None:
    where = urlsplit(victim.client.url)
    for value in (None, "", "Bearer", "Bearer ", "Bearer  ", "Bearer \t", "Basic Og=="):
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
        connection.request("GET", "/v1/status", headers={"Authorization": value} if value else {})
        assert connection.getresponse().status == 401
        connection.close()
    with pytest.raises(ShoalError) as caught, Client(victim.client.url, "") as client:
        client.status()
    assert caught.value.status == 401
