"""Keeps a machine in the cluster: starts its agent, starts it again when it ends, reports its end.

Run as `python -m shoal.agent.starter DIRECTORY [--foreground] [--take-over] [--grace SECONDS]`.
DIRECTORY is the folder of a node, with `spec.json` and `link.json`. It lives until the node has
left or it gets SIGTERM; then it ends the agent, whose members get their grace time, but no more
than --grace seconds. With --take-over it replaces a starter that runs, and the agent lives on. It
imports little, because it waits on every node for as long as the node lives.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

from shoal.machine.files import AGENT_LOCK, LEAVING, STARTER_LOCK, held, lock

# How long members may take to end: in an agent's environment, and in ours if an engine limits it.
GRACE = "SHOAL_END_GRACE_S"
CHECKPOINT_ROOT = "SHOAL_CHECKPOINT_ROOT"
AGENT_MARK = "SHOAL_AGENT_DIR"
GRACE_S = 20.0
SWEEP_S = 10.0  # for the keeper, after the members' grace time
LOOK_S = 1.0  # at an agent that another starter started; the end of our own wakes us
PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 60.0
HEALTHY_AFTER_S = 30.0
LOG_BYTES_MAX = 16 * 1024 * 1024
ALREADY_CODE = 3


class Starter:
    def __init__(self, directory: Path, grace_s: float) -> None:
        self._directory = directory
        self._grace_s = grace_s
        self._keeper = 0
        self._stopping = False
        self._ears, mouth = os.pipe()
        for end in (self._ears, mouth):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def run(self) -> int:
        pause_s, started, due = PAUSE_FIRST_S, 0.0, 0.0
        while not self._stopping:
            now = time.monotonic()
            if self._agent_runs():
                if started and now - started > HEALTHY_AFTER_S:
                    pause_s = PAUSE_FIRST_S
                due = 0.0
            elif (self._directory / LEAVING).exists():
                _say("the node leaves")
                break
            elif not started or (due and now >= due):
                started, due = now, 0.0
                self._start()
            elif not due:
                self._end_left()
                due = now + pause_s
                pause_s = min(PAUSE_MAX_S, pause_s * 2)
            self._sleep(min(LOOK_S, due - now) if due else LOOK_S)
        if self._stopping:
            self._end_agent()
        if not self._agent_runs() and self._end_left():
            self._report_death()
            (self._directory / LEAVING).unlink(missing_ok=True)
        return 0

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _sleep(self, seconds: float) -> None:
        """Until a signal comes, or for so long."""
        if select.select([self._ears], [], [], max(0.0, seconds))[0]:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._ears, 512):
                    pass

    def _agent_runs(self) -> bool:
        """The keeper holds the lock until every process of the node is gone."""
        if self._keeper:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self._keeper, os.WNOHANG) == (0, 0):
                    return True
            self._keeper = 0
        return held(self._directory / AGENT_LOCK)

    def _start(self) -> None:
        _say("starting the agent")
        output = self._directory / "agent.log"
        with contextlib.suppress(OSError):
            if output.stat().st_size > LOG_BYTES_MAX:
                output.replace(output.with_name("agent.log.1"))
        env = {
            CHECKPOINT_ROOT: str(self._directory.parent.parent / "checkpoints"),
            **os.environ,
            AGENT_MARK: str(self._directory),
            GRACE: str(self._grace_s),
        }
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            self._keeper = os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", "shoal.agent", str(self._directory)],
                env,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, str(output), append, 0o600),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsid=True,
            )
        except OSError as error:
            _say(f"the agent cannot be started: {error}")

    def _end_agent(self) -> None:
        """Through its keeper, which forwards the signal, and then ends what is left."""
        keeper, agent = self._pids()
        if not self._agent_runs() or not keeper:
            return
        _say("ending the agent")
        for pid, number, within_s in (
            (keeper, signal.SIGTERM, self._grace_s + SWEEP_S),
            (agent, signal.SIGKILL, SWEEP_S),
        ):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            deadline = time.monotonic() + within_s
            while self._agent_runs() and time.monotonic() < deadline:
                self._sleep(0.05)

    def _pids(self) -> tuple[int, int]:
        """Of the keeper and the agent, if they are this node's: the file may be old."""
        import json

        from shoal.machine.kernel import variable

        with contextlib.suppress(OSError, ValueError, KeyError):
            said = json.loads((self._directory / "agent.json").read_bytes())
            pids = int(said["keeper"]), int(said["pid"])
            if all(variable(pid, AGENT_MARK) == str(self._directory) for pid in pids):
                return pids
        return self._keeper, self._keeper

    def _end_left(self) -> bool:
        """If the keeper was killed, nobody has done so, and members may have leases. False: an
        agent lives."""
        from shoal.machine.leftovers import end_node

        return end_node(self._directory)

    def _report_death(self) -> None:
        from shoal.agent.last_report import report_death

        said = report_death(self._directory)
        _say("the head knows that this node has ended" if not said else f"not reported: {said}")


def _end_other(directory: Path) -> None:
    """End the starter that runs here. It gets no chance to end its agent, which becomes ours."""
    deadline = time.monotonic() + SWEEP_S
    while held(directory / STARTER_LOCK) and time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            pid = int((directory / STARTER_LOCK).read_text())
            if b"shoal.agent.starter" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


def main(words: list[str]) -> int:
    foreground, takes_over = "--foreground" in words, "--take-over" in words
    words = [word for word in words if word not in ("--foreground", "--take-over")]
    grace_s = float(os.environ.get(GRACE) or GRACE_S)
    if "--grace" in words:
        at = words.index("--grace")
        grace_s = float(words[at + 1])
        del words[at : at + 2]
    directory = Path(words[0]).absolute()
    if not foreground:
        if os.fork():
            return 0
        os.setsid()
        output = os.open(directory / "starter.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(output, number)
    if takes_over:
        _end_other(directory)
    handle = lock(directory / STARTER_LOCK)
    if handle is None:
        print(f"a starter already runs in {directory}", file=sys.stderr)
        return ALREADY_CODE
    os.truncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    os.chdir("/")
    return Starter(directory, grace_s).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
