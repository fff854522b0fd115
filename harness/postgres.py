"""A private, real PostgreSQL on this machine, in one temporary directory and on the loopback
address only. It can be stopped, killed, frozen and started again, and can have a replica. Root
starts it as the user postgres, because PostgreSQL refuses to run as root. At the end all of it is
gone.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

READY_TIMEOUT_S = 60.0
POLL_S = 0.02
USER = "shoal"  # an ordinary role, which owns its databases and no more

CONF = """
listen_addresses = '127.0.0.1'
unix_socket_directories = '{root}'
port = {port}
max_connections = 200
shared_buffers = 32MB
wal_level = replica
max_wal_size = 256MB
hot_standby = on
log_min_messages = warning
fsync = {fsync}
"""


def programs() -> Path | None:
    """Where the server's programs are. Debian keeps them where no path looks."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda one: one.parent.name)
    found = shutil.which("initdb")
    places += [Path(found).resolve().parent] if found else []
    for place in reversed(places):
        if (place / "initdb").exists() and (place / "postgres").exists():
            return place
    return None


def available() -> str | None:
    """Why no private PostgreSQL can run here, in one line; None if it can."""
    if programs() is None:
        return "PostgreSQL is not installed: apt-get install postgresql"
    if os.geteuid() == 0 and _owner() is None:
        return "there is no user postgres: apt-get install postgresql"
    return None


class Postgres:
    """One server. `root` holds all of its files."""

    def __init__(self, root: Path, fsync: bool = False) -> None:
        self.root = root
        self.port = _free_port()
        self._fsync = "on" if fsync else "off"  # off: only a loss of power would show it
        self._data = root / "data"
        self._server: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._bin = programs() or Path()

    def create(self) -> None:
        self._run(
            "initdb", "-D", self._data, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"
        )
        self._configure()
        self.start()
        self.sql(f"CREATE ROLE {USER} LOGIN")

    def database(self, name: str = "") -> str:
        """A database of its own; returns its URL."""
        self._databases += 1
        name = name or f"d{self._databases}"
        self.sql(f"CREATE DATABASE {name} OWNER {USER}")
        return self.url(name)

    def url(self, name: str, *others: Postgres) -> str:
        places = ",".join(f"127.0.0.1:{one.port}" for one in (self, *others))
        return f"postgresql://{USER}@{places}/{name}"

    def sql(self, command: str, database: str = "postgres") -> str:
        """As the server's administrator."""
        place = ("-h", str(self.root), "-p", str(self.port), "-U", _name(), "-d", database)
        return self._run("psql", *place, "-X", "-q", "-A", "-t", "-c", command).strip()

    def start(self) -> None:
        command = [str(self._bin / "postgres"), "-D", str(self._data)]
        with (self.root / "log").open("ab") as log:
            self._server = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.root, user=_owner(), group=_group()
            )
        self._wait_ready()

    def stop(self, fast: bool = True) -> None:
        """As an administrator does: clients are sent away."""
        if self._server is not None:
            self._server.send_signal(signal.SIGINT if fast else signal.SIGTERM)
            self._server.wait(READY_TIMEOUT_S)
            self._server = None

    def kill(self) -> None:
        """As a crash of the machine: nothing is written down, and clients get no word."""
        if self._server is not None:
            others = self._backends()
            self._server.kill()  # first, or it would start others
            for pid in others:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._server.wait()
            self._server = None
            _wait("the end of PostgreSQL", lambda: not any(map(_alive, others)))

    def restart(self) -> None:
        self.stop()
        self.start()

    def freeze(self) -> None:
        """It accepts connections, because the kernel does, and answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def replica(self, root: Path, synchronous: bool = True) -> Postgres:
        """A second server that follows this one. `synchronous`: a commit waits for it."""
        name = root.name.replace("-", "_").lower()
        other = Postgres(root)
        place = ("-h", str(self.root), "-p", str(self.port), "-U", _name())
        self._run(
            "pg_basebackup", *place, "-D", root / "data", "-R", "-X", "stream", "-c", "fast", "-N"
        )
        with (root / "data" / "postgresql.auto.conf").open("a") as file:
            file.write(f"primary_conninfo = '{_conninfo(self, name)}'\n")
        other._configure()
        other.start()
        if synchronous:
            self.sql(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
            self.sql("SELECT pg_reload_conf()")
            query = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
            _wait("a synchronous replica", lambda: self.sql(query) == "1")
        return other

    def promote(self) -> None:
        """A replica becomes a server that can be written."""
        self.sql("SELECT pg_promote(true, 60)")
        self.sql("ALTER SYSTEM RESET synchronous_standby_names")
        self.sql("SELECT pg_reload_conf()")

    def _configure(self) -> None:
        text = CONF.format(root=self.root, port=self.port, fsync=self._fsync)
        (self._data / "postgresql.conf").write_text(text)
        if (owner := _owner()) is not None:
            for path in (self._data / "postgresql.conf", self._data / "postgresql.auto.conf"):
                os.chown(path, owner, _group() or -1)

    def _wait_ready(self) -> None:
        place = ("-h", str(self.root), "-p", str(self.port), "-q")

        def ready() -> bool:
            if self._server is None or self._server.poll() is not None:
                raise RuntimeError(f"PostgreSQL ended:\n{(self.root / 'log').read_text()[-2000:]}")
            argv = [str(self._bin / "pg_isready"), *place]
            return subprocess.run(argv, check=False, capture_output=True).returncode == 0

        _wait("PostgreSQL", ready)

    def _signal(self, number: signal.Signals) -> None:
        assert self._server is not None
        for pid in (self._server.pid, *self._backends()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _backends(self) -> list[int]:
        assert self._server is not None
        pid = self._server.pid
        try:
            text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        except OSError:
            return []
        return [int(one) for one in text.split()]

    def _run(self, program: str, *options: object) -> str:
        argv = [str(self._bin / program), *map(str, options)]
        done = subprocess.run(
            argv,
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
            user=_owner(),
            group=_group(),
            timeout=READY_TIMEOUT_S,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr.strip()}")
        return done.stdout


@contextmanager
def postgres(fsync: bool = False) -> Iterator[Postgres]:
    """A server that runs until the block ends."""
    with folder() as root:
        server = Postgres(root, fsync)
        try:
            server.create()
            yield server
        finally:
            server.kill()


@contextmanager
def folder() -> Iterator[Path]:
    """A short path, because that of a Unix socket must be, which the server's user may enter."""
    root = Path(tempfile.mkdtemp(prefix="shoal-pg-"))
    if (owner := _owner()) is not None:
        os.chown(root, owner, _group() or -1)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _conninfo(primary: Postgres, name: str) -> str:
    words = {"host": primary.root, "port": primary.port, "user": _name(), "application_name": name}
    return " ".join(f"{word}={value}" for word, value in words.items())


def _owner() -> int | None:
    """The user of the server, if it cannot be ours."""
    if os.geteuid() != 0:
        return None
    with suppress(KeyError):
        return pwd.getpwnam("postgres").pw_uid
    return None


def _group() -> int | None:
    owner = _owner()
    return None if owner is None else pwd.getpwuid(owner).pw_gid


def _alive(pid: int) -> bool:
    """A process that only waits for its parent to look is dead."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _name() -> str:
    return pwd.getpwuid(_owner() or os.geteuid()).pw_name


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _wait(what: str, true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while not true():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"waited {READY_TIMEOUT_S:.0f} s for {what} in vain")
        time.sleep(POLL_S)
