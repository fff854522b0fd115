"""A router and its engines as real processes, and clients that speak to them byte by byte."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from harness.waiting import until

from shoal.model.tokens import RoutedReplica, RoutedService, RouterSeen, RouterWanted

ROOT = Path(__file__).parent.parent.parent


class Engine:
    def __init__(self, name: str) -> None:
        self.name = name
        words = [sys.executable, "-m", "tests.router.engine", name]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @property
    def replica(self) -> RoutedReplica:
        return RoutedReplica(id=self.name, address="127.0.0.1", port=self.port)

    def control(self, **wish: Any) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", "/control", json.dumps(wish))
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("router", timeout=120)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(120)
        self.sock.connect(self._path)


class Router:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wanted = RouterWanted()
        self.log = folder.with_name(f"{folder.name}.log")
        folder.mkdir(mode=0o700, exist_ok=True)
        self.start()

    def start(self) -> None:
        words = [sys.executable, "-m", "shoal.router", str(self.folder)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)
        until(self.answers, "the router did not start", self.log.read_text)

    def answers(self) -> bool:
        try:
            self.raw().close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def raw(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(120)
        try:
            connection.connect(str(self.folder / "router.sock"))
        except OSError:
            connection.close()
            raise
        return connection

    def tell(self, wanted: RouterWanted | None = None) -> RouterSeen:
        """What a controller says twice a second."""
        if wanted is not None:
            self.wanted = wanted
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(120)
            connection.connect(str(self.folder / "router-control.sock"))
            connection.sendall(msgspec.json.encode(self.wanted) + b"\n")
            with connection.makefile("rb") as file:
                return msgspec.json.decode(file.readline(), type=RouterSeen)

    def serve(self, *engines: Engine, name: str = "chat", **more: Any) -> RouterSeen:
        replicas = tuple(one.replica for one in engines)
        service = RoutedService(name=name, replicas=replicas, **more)
        others = tuple(one for one in self.wanted.services if one.name != name)
        return self.tell(msgspec.structs.replace(self.wanted, services=(*others, service)))

    def ask(
        self,
        path: str,
        body: object = None,
        *,
        method: str = "",
        service: str = "chat",
        streamed: bool = False,
        **headers: Any,
    ) -> Answer:
        connection = Connection(self.folder / "router.sock")
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        method = method or ("GET" if body is None else "POST")
        kind = {"content-type": "application/json"} if isinstance(body, dict) else {}
        connection.request(method, path, data, {"x-shoal-service": service, **kind, **named})  # type: ignore[arg-type]
        answer = Answer(connection)
        if not streamed:
            answer.body  # noqa: B018  # all of it, and the connection is closed
        return answer

    def stream(self, count: int = 24, prompt: str = "hello", **more: Any) -> Answer:
        headers = more.pop("headers", {})
        body = {"model": "chat", "prompt": prompt, "max_tokens": count, "stream": True, **more}
        if "messages" in more:
            del body["prompt"]
        path = "/v1/chat/completions" if "messages" in more else "/v1/completions"
        return self.ask(path, body, streamed=True, **headers)


class Answer:
    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.connection = connection
        self.response = connection.getresponse()
        self.status = self.response.status
        self._body: bytes | None = None

    @property
    def body(self) -> bytes:
        if self._body is None:
            self._body = self.response.read()
            self.connection.close()
        return self._body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def replica(self) -> str:
        return self.response.headers["x-shoal-replica"]

    def events(self) -> Iterator[dict[str, Any]]:
        """As they come; the last one is {}."""
        while line := self.response.readline():
            if line.startswith(b"data: [DONE]"):
                yield {}
            elif line.startswith(b"data: "):
                yield json.loads(line[6:])
        self.connection.close()

    def hang_up(self) -> None:
        assert self.connection.sock is not None
        self.response.close()
        self.connection.close()


def words_of(event: dict[str, Any]) -> str:
    found = ""
    for choice in event.get("choices", []):
        found += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
