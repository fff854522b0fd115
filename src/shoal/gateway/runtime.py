"""HAProxy's runtime socket: commands in, tables out."""

from __future__ import annotations

import csv
import io
import socket
from collections.abc import Iterable
from pathlib import Path

import msgspec

from shoal.gateway.binary import GatewayError

ANSWER_TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 64 << 20
BATCH = 50  # commands on one line; the proxy's buffer holds the line

MAINTENANCE = 0x01 | 0x02 | 0x04
DRAINING = 0x08 | 0x10


class RuntimeFailure(GatewayError):
    """The socket does not answer."""


class WorkerOver(RuntimeFailure):
    """The worker has exited."""


class ActualServer(msgspec.Struct, frozen=True):
    """A server in the proxy's tables."""

    service: str
    replica: str
    address: str
    port: int
    weight: int
    draining: bool
    maintenance: bool


class Runtime:
    """One process behind one socket; the proxy wants a new connection for each command."""

    def __init__(self, path: Path, target: str = "") -> None:
        self._path = path
        self._target = target  # on the master's socket: which worker to ask

    def worker(self, pid: int) -> Runtime:
        return Runtime(self._path, f"@!{pid} ")

    def ask(self, command: str) -> str:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.connect(str(self._path))
            connection.sendall(f"{self._target}{command}\n".encode())
            connection.shutdown(socket.SHUT_WR)  # else a master waits for the next command
            return _all_of(connection)
        except OSError as error:
            raise RuntimeFailure(f"{self._path}: {error}") from None
        finally:
            connection.close()

    def tell(self, commands: Iterable[str]) -> list[str]:
        """Send commands in order; returns the answers that are not empty."""
        waiting = list(commands)
        answers: list[str] = []
        for start in range(0, len(waiting), BATCH):
            answer = self.ask("; ".join(waiting[start : start + BATCH]))
            answers += [line for line in answer.splitlines() if line.strip()]
        return answers

    def info(self) -> dict[str, str]:
        pairs = (line.partition(":") for line in self.ask("show info").splitlines())
        return {key.strip(): value.strip() for key, _, value in pairs}

    def table(self) -> list[dict[str, str]]:
        """`show stat` as rows of named columns."""
        return parse_table(self.ask("show stat"))

    def servers(self) -> list[ActualServer]:
        return parse_servers(self.ask("show servers state"))

    def old_workers(self) -> list[int]:
        """From the master's socket: workers of an earlier configuration that still finish."""
        return parse_old_workers(self.ask("show proc"))


def parse_table(text: str) -> list[dict[str, str]]:
    if text.startswith("Can't"):  # "connect to" or "find the target", in the master's words
        raise WorkerOver(text.strip())
    if not text.startswith("# "):
        raise RuntimeFailure(f"not a table: {text[:80]!r}")
    return list(csv.DictReader(io.StringIO(text[2:].strip() + "\n")))


def parse_servers(text: str) -> list[ActualServer]:
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2 or not lines[1].startswith("# "):
        raise RuntimeFailure(f"not a list of servers: {text[:80]!r}")
    names = lines[1][2:].split()
    servers = []
    for line in lines[2:]:
        row = dict(zip(names, line.split(), strict=False))
        admin = int(row["srv_admin_state"])
        servers.append(
            ActualServer(
                service=row["be_name"],
                replica=row["srv_name"],
                address=row["srv_addr"],
                port=int(row["srv_port"]),
                weight=int(row["srv_uweight"]),
                draining=bool(admin & DRAINING),
                maintenance=bool(admin & MAINTENANCE),
            )
        )
    return servers


def parse_old_workers(text: str) -> list[int]:
    old = False
    found = []
    for line in text.splitlines():
        if line.startswith("#"):
            old = "old workers" in line
        elif old and line.split()[1:2] == ["worker"]:
            found.append(int(line.split()[0]))
    return found


def _all_of(connection: socket.socket) -> str:
    parts: list[bytes] = []
    size = 0
    while data := connection.recv(1 << 16):
        parts.append(data)
        size += len(data)
        if size > ANSWER_BYTES_MAX:
            raise OSError("the answer is too long")
    return b"".join(parts).decode(errors="replace")
