"""A real HAProxy, real replicas, and clients that keep count, for the tests of the gateway."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from harness.ports import free_port
from harness.waiting import WAIT_S, until

from shoal.gateway.gateway import Gateway
from shoal.machine.files import held
from shoal.model.service import GatewayEntry, Replica, Route, Served, Wanted
from shoal.model.tokens import ReplicaState

ROOT = Path(__file__).parent.parent.parent


class Answer(msgspec.Struct, frozen=True):
    status: int
    headers: dict[str, str]
    body: str


class World:
    """One gateway in a directory of its own, and the replicas that were started for it."""

    def __init__(self) -> None:
        self._parent = Path(tempfile.mkdtemp(prefix="gw-"))
        self.directory = self._parent / "gateway"
        self.directory.mkdir()
        self.port = free_port()
        self.gateway = Gateway(self.directory)
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self.ports: dict[str, int] = {}

    def start(self, *names: str) -> tuple[Replica, ...]:
        for name in names:
            self._processes[name] = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.gateway.replica",
                    str(self.ports.get(name, 0)),
                    name,
                ],
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
        for name in names:
            out = self._processes[name].stdout
            assert out is not None
            self.ports[name] = int(out.readline())
        return tuple(self.replica(name) for name in names)

    def replica(self, name: str, state: ReplicaState = ReplicaState.READY) -> Replica:
        return Replica(id=name, address="127.0.0.1", port=self.ports[name], state=state)

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait(WAIT_S)
        if process.stdout is not None:
            process.stdout.close()

    def wanted(self, route: Route, *replicas: Replica) -> Wanted:
        return Wanted(
            entry=GatewayEntry(port=self.port), services=(Served(route=route, replicas=replicas),)
        )

    def serve(self, route: Route, *replicas: Replica) -> None:
        self.gateway.apply(self.wanted(route, *replicas))

    def get(self, path: str, **options: Any) -> Answer:
        return get(self.port, path, **options)

    def control(self, name: str, words: str = "") -> str:
        return get(self.ports[name], f"/control?{words}").body

    def logged(self) -> str:
        """The access log, with the file before it."""
        text = ""
        for name in ("access.log.1", "access.log"):
            with contextlib.suppress(FileNotFoundError):
                text += (self.directory / name).read_text()
        return text

    def _removed(self) -> bool:
        if held(self.directory / "access.lock"):
            return False
        shutil.rmtree(self._parent, ignore_errors=True)  # one may just be beginning
        return not self._parent.exists()

    def close(self) -> None:
        self.gateway.stop(grace_s=0)
        for name in list(self._processes):
            self.kill(name)
        until(self._removed, "the end of the log's keeper")


def get(
    port: int,
    path: str,
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
    timeout_s: float = WAIT_S,
    source: str = "127.0.0.1",
) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout_s, (source, 0))
    with contextlib.closing(connection):
        connection.request(method, path, body=body, headers=headers or {})
        response = connection.getresponse()
        found: dict[str, str] = {}
        for key, value in response.getheaders():  # repeated headers, as one list
            found[key.lower()] = ", ".join(filter(None, (found.get(key.lower()), value)))
        return Answer(response.status, found, response.read().decode())


class Clients:
    """Threads that ask without pause over connections that they keep; what fails is kept too."""

    def __init__(self, port: int, path: str, count: int = 4, method: str = "GET") -> None:
        self.answers: dict[str, int] = {}
        self.failures: list[str] = []
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(port, path, method)) for _ in range(count)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def total(self) -> int:
        with self._lock:
            return sum(self.answers.values())

    def of(self, name: str) -> int:
        with self._lock:
            return self.answers.get(name, 0)

    def more(self, count: int = 50) -> None:
        """Wait until so many more were answered."""
        goal = self.total() + count
        until(lambda: self.total() >= goal or bool(self.failures), f"{count} more answers")

    def _ask(self, port: int, path: str, method: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        body = b"{}" if method == "POST" else None
        with contextlib.closing(connection):
            while not self._end.is_set():
                try:
                    connection.request(method, path, body=body)
                    response = connection.getresponse()
                    text = response.read().decode()
                except (OSError, http.client.HTTPException) as error:
                    text, status = repr(error), 0
                    connection.close()
                else:
                    status = response.status
                with self._lock:
                    if status == 200:
                        self.answers[text] = self.answers.get(text, 0) + 1
                    else:
                        self.failures.append(f"{status} {text}")


@contextlib.contextmanager
def raw(port: int, text: str) -> Iterator[socket.socket]:
    """A connection on which a request was written by hand."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
        connection.sendall(text.replace("\n", "\r\n").encode())
        yield connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        part = connection.recv(4096)
        if not part:
            return data
        data += part
    return data
