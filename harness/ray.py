"""A small, real Ray for tests, with a token and without a dashboard; and nothing left of it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from harness.waiting import WAIT_S
from shoal.machine.kernel import kill_marked, variable

TRIES = 3
READY = b"started. Raylet consists of"
DIED = b"Check failed"
MARK = "RAY_OF_TEST"  # in the environment of its processes; what holders start has no RAY_*
AGENTS = (b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")
# On a busy machine, a raylet may be slow to start and to say that it lives; all of this Ray would
# end with it, and start again from nothing.
PATIENT = {
    "RAY_health_check_timeout_ms": "20000",
    "RAY_health_check_failure_threshold": "10",
    "RAY_raylet_start_wait_time_s": "180",
}
# A raylet gives its agents 15 s to start, whatever else runs. The kernel shares the CPUs between
# sessions, so it is the session that goes first; whoever is not root takes its chance.
NICE = "-15"


class RealRay:
    """One machine of Ray: its head, which also runs actors. For each of its CPUs, it starts a
    worker before anybody asks for one, and each takes two seconds of a real CPU."""

    def __init__(self, scratch: Path, cpus: int = 4, gpus: int = 8) -> None:
        self.scratch = scratch
        self.token_file = scratch / "token"
        self.token_file.write_text(secrets.token_hex(32))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"
        self._amounts = ("--num-cpus", str(cpus), "--num-gpus", str(gpus))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Again if its raylet dies at the start, as it does on a machine that is very busy."""
        for _ in range(TRIES):
            self._launch()
            if self._is_ready():
                return
            self.end()
        raise AssertionError((self.scratch / "ray.log").read_text()[-2000:])

    def _is_ready(self) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + WAIT_S
        said = self.scratch / "tmp" / "session_latest" / "logs" / "raylet.out"
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                told = said.read_bytes()
                if READY in told:
                    return True
                if DIED in told:
                    return False
            time.sleep(0.05)
        return False

    def _launch(self) -> None:
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            **PATIENT,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
            MARK: str(self.scratch),
        }
        with (self.scratch / "ray.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                    *("--port", str(self.port), "--include-dashboard", "false"),
                    *("--min-worker-port", "0", "--max-worker-port", "0"),
                    *("--object-store-memory", "80000000", "--disable-usage-stats"),
                    "--no-monitor",
                    *("--include-log-monitor", "false", "--temp-dir", str(self.scratch / "tmp")),
                    *("--labels", "pool=lent", *self._amounts, *_ports_of_agents()),
                ],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._process.pid}/autogroup").write_text(NICE)

    def kill(self, program: str) -> None:
        """SIGKILL its `gcs_server` or `raylet`; then everything of this Ray ends."""
        for pid in self._pids():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if words[0].endswith(b"/" + program.encode()):
                    os.kill(pid, signal.SIGKILL)
        self._wait()

    def holders(self) -> list[int]:
        return [
            pid
            for pid in self._pids()
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::Holder")
        ]

    def of_a_node(self) -> list[int]:
        """What every node of a Ray has: a raylet and its agents. Its head has more."""
        raylets = [pid for pid in self._pids() if b"/raylet/raylet\0" in _words(pid)]
        children = [child.pid for pid in raylets for child in psutil.Process(pid).children()]
        return raylets + [pid for pid in children if _words(pid).startswith(AGENTS)]

    def end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._wait()

    def _wait(self) -> None:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while kill_marked(MARK, lambda value: value == str(self.scratch)):
            assert time.monotonic() < deadline, "processes of Ray do not end"
            time.sleep(0.05)
        self._process.wait(WAIT_S)
        (self.scratch / "tmp" / "session_latest").unlink(missing_ok=True)

    def _pids(self) -> list[int]:
        numbers = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        return [pid for pid in numbers if variable(pid, MARK) == str(self.scratch)]


@contextmanager
def real_ray(cpus: int = 4, gpus: int = 8) -> Iterator[RealRay]:
    scratch = Path(tempfile.mkdtemp(prefix="sr-", dir="/tmp"))  # short: Ray makes sockets in it
    ray = RealRay(scratch, cpus, gpus)
    try:
        ray.start()
        yield ray
    finally:
        ray.end()
        shutil.rmtree(scratch, ignore_errors=True)


def _words(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _ports_of_agents() -> list[str]:
    """Given ports, because a raylet dies if its agents take more than 15 s to choose theirs."""
    names = (
        "--dashboard-agent-grpc-port",
        "--dashboard-agent-listen-port",
        "--runtime-env-agent-port",
        "--metrics-export-port",
    )
    words: list[str] = []
    with contextlib.ExitStack() as held:
        for name in names:
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            words += [name, str(probe.getsockname()[1])]
    return words
