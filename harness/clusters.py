"""Clusters to measure: one head with SQLite, or two with a real PostgreSQL, on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from harness import clocks
from harness.clocks import SteppedClock
from harness.postgres import Postgres, postgres
from harness.relay import Relay, to_file
from shoal.client import Address, Client, transport
from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import bring_up, take_down
from shoal.model.node import NodeSpec

PATIENCE_S = 120.0
GPUS = 8
SHOAL = (sys.executable, "-m", "shoal.main")


class Head:
    """A controller with a home of its own. `relay` is its link to the database. Its clock can be
    set, where there is a C compiler."""

    def __init__(
        self, home: Path, relay: Relay | None = None, clock: SteppedClock | None = None
    ) -> None:
        self.home = home
        self.relay = relay
        self.clock = clock

    def address(self) -> Address:
        return msgspec.json.decode((self.home / "controller.json").read_bytes(), type=Address)

    def controller(self) -> int:
        """The process."""
        return self.address().pid

    def token(self) -> str:
        return (self.home / "token").read_text().strip()


class Measured:
    """A cluster of one head or two. `client` reaches any of them."""

    def __init__(self, heads: list[Head], server: Postgres | None = None) -> None:
        self.heads = heads
        self.server = server
        self.client = self.connect(PATIENCE_S)

    def connect(self, patience_s: float, timeout_s: float = 60) -> Client:
        if len(self.heads) == 1:
            return Client(home=self.heads[0].home, patience_s=patience_s, timeout_s=timeout_s)
        urls = [head.address().url for head in self.heads]
        endpoint = transport.at(urls[0], self.heads[0].token())
        endpoint = msgspec.structs.replace(endpoint, urls=tuple(urls[1:]))
        return Client.to(endpoint, timeout_s=timeout_s, patience_s=patience_s)

    def leader(self) -> Head:
        """Waits for one."""
        if len(self.heads) == 1:
            return self.heads[0]
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(transport.ShoalError):
                for one in self.client.heads():
                    for head in self.heads:
                        if one.role == "leads" and one.url == head.address().url:
                            return head
            time.sleep(0.1)
        raise SystemExit("no head leads")


@contextlib.contextmanager
def one_head() -> Iterator[Measured]:
    """One node with 8 GPUs."""
    path = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
    nodes = (NodeSpec(id="n1", gpus=GPUS, cpu_milli=64_000, memory_mb=64_000),)
    try:
        bring_up(Home(path), ClusterConfig(nodes=nodes, port=0), lambda _: None)
        yield Measured([Head(path)])
    finally:
        take_down(Home(path), lambda _: None)
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def two_heads() -> Iterator[Measured]:
    """The first has a node with 8 GPUs. Each has a link to the database that can be cut, and a
    clock that can be set."""
    path = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
    heads: list[Head] = []
    with postgres() as server:
        server.database("bench")
        try:
            for name in ("a", "b"):
                listening = socket.create_server(("127.0.0.1", 0), backlog=64)
                relay = Relay(listening, to_file(f"{server.root}/.s.PGSQL.{server.port}"))
                clock = None if clocks.missing() else SteppedClock(path, name)
                heads.append(Head(path / name, relay, clock))
                place = f"postgresql://shoal@127.0.0.1:{relay.port}/bench"
                words = ["up", "--port", "0", "--database", place]
                if name == "a":
                    words += ["--shared", str(path / "shared"), "--nodes", "1"]
                    words += ["--gpus", str(GPUS), "--cpus", "64", "--memory", "64G"]
                else:
                    (path / "head.json").write_text(shoal(heads[0], "heads", "invite"))
                    words += ["--head", str(path / "head.json")]
                shoal(heads[-1], *words)
            yield Measured(heads, server)
        finally:
            for head in heads:
                if head.relay is not None:
                    head.relay.mend()
                with contextlib.suppress(RuntimeError):
                    shoal(head, "down")
            for head in heads:
                if head.relay is not None:
                    head.relay.close()
            shutil.rmtree(path, ignore_errors=True)


def shoal(head: Head, *words: str) -> str:
    env = {**os.environ, "SHOAL_HOME": str(head.home)}
    if head.clock is not None:
        env |= head.clock.environment()
    done = subprocess.run([*SHOAL, *words], env=env, capture_output=True, text=True, timeout=180)
    if done.returncode:
        raise RuntimeError(f"shoal {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
