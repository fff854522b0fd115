"""Heads of one cluster on this machine, each with a home of its own, started as a user starts them;
and a wire between a head and its database that can be cut."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from harness.postgres import Postgres, postgres
from harness.waiting import WAIT_S, until
from shoal.client import Client
from shoal.control.home import Home
from shoal.control.lifecycle import take_down


def off_by(seconds: int, folder: Path) -> dict[str, str]:
    """The environment of a process whose clock is off. Needs a C compiler."""
    library = folder / "off_clock.so"
    source = Path(__file__).with_name("off_clock.c")
    argv = ["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(argv, check=True)
    return {"LD_PRELOAD": str(library), "CLOCK_OFF_S": str(seconds)}


class Head:
    def __init__(self, path: Path, env: dict[str, str] | None = None) -> None:
        self.home = Home(path)
        self._env = env or {}

    @cached_property
    def client(self) -> Client:
        """Through the socket file, which stays the same."""
        return Client.at_home(self.home.path, patience_s=WAIT_S)

    def shoal(self, *words: str) -> str:
        env = {**os.environ, **self._env, "SHOAL_HOME": str(self.home.path)}
        argv = [sys.executable, "-m", "shoal.main", *words]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"shoal {' '.join(words)}: {done.stderr}")
        return done.stdout

    @property
    def name(self) -> str:
        config = self.home.read_config()
        return config.head if config is not None else ""

    @property
    def url(self) -> str:
        return str(json.loads(self.home.address.read_bytes())["url"])

    def pids(self) -> tuple[int, int]:
        """Of the supervisor and of the controller."""
        controller = json.loads(self.home.address.read_bytes())["pid"]
        return int(self.home.supervisor_lock.read_text().split()[0]), int(controller)

    def kill(self) -> None:
        """As a loss of power: both at once. The nodes of this machine go on."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def said(self) -> str:
        return self.home.controller_log.read_text(errors="replace")


class Pair:
    """Two heads. The first reaches the database through a wire; the second has `env`."""

    def __init__(
        self,
        root: Path,
        server: Postgres,
        env: dict[str, str],
        nodes: int,
        shared: tuple[Path, ...],
    ) -> None:
        self.server = server
        url = server.database("shoal")
        self.wire = Wire(server.port)
        self.first, self.second = Head(root / "a"), Head(root / "b", env)
        mine, others = (("--shared", str(path)) for path in shared or (root / "shared",) * 2)
        options = ("--database", self.wire.url(url), *mine)
        self.first.shoal("up", "--port", "0", "--nodes", str(nodes), "--gpus", "8", *options)
        invitation = root / "head.json"
        invitation.write_text(self.first.shoal("heads", "invite"))
        self.second.shoal(
            "up", "--port", "0", "--head", str(invitation), "--database", url, *others
        )

    @property
    def heads(self) -> tuple[Head, Head]:
        return self.first, self.second

    def other(self, head: Head) -> Head:
        return self.second if head is self.first else self.first

    def roles(self) -> dict[str, str]:
        """As the database says, which both of them see."""
        sql = (
            "SELECT h.name, CASE WHEN l.holder = h.name AND l.until_ms > "
            "extract(epoch FROM clock_timestamp()) * 1000 THEN 'leads' ELSE 'standby' END "
            "FROM shoal.heads h, shoal.lease l"
        )
        rows = self.server.sql(sql, "shoal").splitlines()
        return dict(row.split("|", 1) for row in rows if row)

    def leader(self) -> Head:
        """As soon as there is one."""
        found: list[Head] = []

        def known() -> bool:
            roles = self.roles()
            found[:] = [head for head in self.heads if roles.get(head.name) == "leads"]
            return bool(found)

        until(known, "a head that leads")
        return found[0]

    def wait_for_leader(self, head: Head) -> None:
        until(lambda: self.roles().get(head.name) == "leads", f"{head.name} to lead")

    def term(self) -> int:
        return int(self.server.sql("SELECT term FROM shoal.lease", "shoal"))


@contextmanager
def pair(
    env: dict[str, str] | None = None, nodes: int = 1, shared: tuple[Path, ...] = ()
) -> Iterator[Pair]:
    """Whatever happens, nothing of it stays. `shared`: the shared folder as each head sees it."""
    root = Path(tempfile.mkdtemp(prefix="shoal-heads-"))
    try:
        with postgres() as server:
            made = Pair(root, server, env or {}, nodes, shared)
            try:
                yield made
            finally:
                for head in made.heads:
                    print(f"{head.name}:\n{head.said()[-6000:]}")
                made.wire.close()
                for head in made.heads:
                    head.client.close()
                    take_down(head.home, lambda _: None)
    finally:
        for name in ("a", "b"):
            with contextlib.suppress(Exception):
                take_down(Home(root / name), lambda _: None)
        shutil.rmtree(root, ignore_errors=True)


class Wire:
    """Carries connections to a port of this machine, until it is cut: then nothing gets through,
    and nobody is told."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._cut = threading.Event()
        self._over = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._links: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, url: str) -> str:
        """The same database, through the wire."""
        parts = urlsplit(url)
        place = f"{parts.username}@127.0.0.1:{self.port}"
        return urlunsplit(parts._replace(netloc=place))

    def cut(self) -> None:
        self._cut.set()

    def mend(self) -> None:
        """Connections from before are broken."""
        links, self._links = self._links, []
        for link in links:
            for end in link:
                end.close()
        self._cut.clear()

    def close(self) -> None:
        self._over.set()
        self._listening.close()
        self.mend()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                if self._over.is_set():
                    return
                with contextlib.suppress(UnboundLocalError, OSError):
                    near.close()
                continue
            self._links.append((near, far))
            threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        other: dict[Any, socket.socket] = {near: far, far: near}
        try:
            while not self._over.is_set():
                ready, _, _ = select.select([near, far], [], [], 0.05)
                if self._cut.is_set():
                    time.sleep(0.02)
                    continue
                for end in ready:
                    data = end.recv(65_536)
                    if not data:
                        return
                    other[end].sendall(data)
        except (OSError, ValueError):
            pass
        finally:
            near.close()
            far.close()
