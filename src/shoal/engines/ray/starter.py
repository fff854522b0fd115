"""Keeps a machine in the cluster: its Ray processes and its agent, each started again if it ends.

The two know nothing of each other, so a raylet that ends leaves the agent and its jobs alone. Run
as `python -m shoal.engines.ray.starter HOME`; it has a session of its own and lives until SIGTERM.
Then it ends Ray, but not the agent: the sender of the signal decides about the jobs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec

from shoal.engines.agentlink import start_agent
from shoal.engines.ray.render import RayNode, arguments, environment, temp_dir, without_ray
from shoal.files import held, lock
from shoal.kernel import RAY_MARK, kill_marked
from shoal.wire import CHECKPOINT_ROOT

# The one that belongs to this interpreter: another version could not talk to ours. By its module:
# its program may lie anywhere, or nowhere.
RAY = (sys.executable, "-m", "ray.scripts.scripts")
POLL_S = 0.2
PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 5.0
CONNECT_TIMEOUT_S = 2.0
HEAD_LOOK_S = 1.5  # less than a head needs to start again
HEALTHY_AFTER_S = 30.0
END_TIMEOUT_S = 3.0
FAREWELL_S = 3.0
ALREADY_CODE = 3
LOG_BYTES_MAX = 16 * 1024 * 1024
SESSIONS_KEPT = 3


LEAVING = "leaving"  # a file in the node's directory: it wants to go


class Kept:
    """One process that should run: restarted when it ends, later and later if it keeps ending."""

    def __init__(self, runs: Callable[[], bool], start: Callable[[], None]) -> None:
        self._runs = runs
        self._start = start
        self._pause_s = PAUSE_FIRST_S
        self._started = self._due = 0.0

    def look(self, now: float) -> None:
        if self._runs():
            if now - self._started > HEALTHY_AFTER_S:
                self._pause_s = PAUSE_FIRST_S
            self._due = 0.0
        elif not self._started or (self._due and now >= self._due):
            self._started, self._due = now, 0.0
            self._start()
        elif not self._due:
            self._due = now + self._pause_s
            self._pause_s = min(PAUSE_MAX_S, self._pause_s * 2)


class Starter:
    def __init__(self, home: Path, node: RayNode) -> None:
        self._home = home
        self._node = node
        self._directory = home / "nodes" / node.node
        self._env = without_ray(dict(os.environ))
        self._temp_dir = temp_dir(home, Path(tempfile.gettempdir()))
        self._ray: subprocess.Popen[bytes] | None = None
        self._agent: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._look_at_head = 0.0
        self._head_away = False

    def run(self) -> int:
        kept = [Kept(self._ray_runs, self._start_ray)]
        if self._node.node:
            kept.append(Kept(self._agent_runs, self._start_agent))
        while not self._stopping.wait(POLL_S) and not self._has_left():
            now = time.monotonic()
            for thing in kept:
                thing.look(now)
            if not self._node.leads and now >= self._look_at_head:
                self._look_at_head = now + HEAD_LOOK_S
                self._follow_head()
        self._end_ray()
        if not self._temp_dir.is_relative_to(self._home):  # nobody would find it there
            shutil.rmtree(self._temp_dir, ignore_errors=True)
        return 0

    def _has_left(self) -> bool:
        """The node wanted to leave and its agent is gone, dismissed or dead: the rest goes too, as
        soon as the mailbox has had the time to tell of it."""
        flag = self._directory / LEAVING
        if not self._node.node or not flag.exists() or self._agent_runs():
            return False
        print(f"{_now()} {self._node.node} leaves", flush=True)
        self._stopping.wait(FAREWELL_S)
        flag.unlink(missing_ok=True)
        return True

    def stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._stopping.set()

    # -- Ray -------------------------------------------------------------------------------

    def _ray_runs(self) -> bool:
        return self._ray is not None and self._ray.poll() is None

    def _start_ray(self) -> None:
        """End what an earlier Ray left, because it would hold the ports."""
        self._sweep_ray()
        if not self._node.leads and not _knock(self._node.head):
            return  # `ray start` would wait for long; look again soon
        stamp = str(time.time_ns() // 1_000_000)
        command = [*RAY, *arguments(self._node, self._temp_dir, stamp)]
        path = self._home / "ray" / "ray.log"
        with contextlib.suppress(OSError):
            if path.stat().st_size > LOG_BYTES_MAX:
                path.replace(path.with_name("ray.log.1"))
        self._tidy_sessions()
        print(f"{_now()} starting Ray", flush=True)
        with path.open("ab") as output:
            self._ray = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd="/",
                env={**self._env, **environment(self._home, self._node.node)},
            )

    def _follow_head(self) -> None:
        """A head that was restarted no longer knows its members, and Ray takes most of a minute to
        notice. Only a head that is certainly down counts: its machine refuses the connection. A
        cut link leaves the head as it is."""
        answer = _knock(self._node.head)
        if answer is False:
            self._head_away = True
        elif answer and self._head_away:
            self._head_away = False
            if self._ray_runs():
                print(f"{_now()} the head is back, and new", flush=True)
                self._sweep_ray()

    def _end_ray(self) -> None:
        if self._ray is not None and self._ray.poll() is None:
            self._ray.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._ray.wait(END_TIMEOUT_S)
        self._sweep_ray()

    def _sweep_ray(self) -> None:
        while kill_marked(RAY_MARK, lambda value: value == str(self._home)):
            time.sleep(0.01)

    def _tidy_sessions(self) -> None:
        """Ray leaves a directory of logs at each start; the last few are enough. And it remembers
        where a head was, and takes members that still look for it for the head itself."""
        (self._temp_dir / "ray_current_cluster").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            sessions = sorted(p for p in self._temp_dir.glob("session_2*") if not p.is_symlink())
            for old in sessions[:-SESSIONS_KEPT]:
                shutil.rmtree(old, ignore_errors=True)

    # -- the agent -------------------------------------------------------------------------

    def _agent_runs(self) -> bool:
        starting = self._agent is not None and self._agent.poll() is None
        return starting or held(self._directory / "agent.lock")

    def _start_agent(self) -> None:
        print(f"{_now()} starting the agent of {self._node.node}", flush=True)
        checkpoints = {CHECKPOINT_ROOT: str(self._home / "checkpoints")}
        self._agent = start_agent(self._directory, {**checkpoints, **self._env})


def _knock(head: str) -> bool | None:
    """Does something answer there? None if that cannot be known."""
    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def main() -> int:
    home = Path(sys.argv[1])
    if os.fork():
        return 0
    os.setsid()
    handle = lock(home / "ray" / "starter.lock")
    if handle is None:
        print(f"a starter already runs in {home}", file=sys.stderr)
        return ALREADY_CODE
    os.truncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    node = msgspec.json.decode((home / "ray" / "node.json").read_bytes(), type=RayNode)
    starter = Starter(home, node)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, starter.stop)
    return starter.run()


if __name__ == "__main__":
    sys.exit(main())
