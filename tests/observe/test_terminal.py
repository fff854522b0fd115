"""`shoal top`, `status` and `run --wait` in a real terminal (a pty), against a real cluster."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest
from harness.waiting import WAIT_S, until

from tests.cli.test_top import shown
from tests.observe.conftest import BEATER, SOURCE, Observed

ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]")


class Terminal:
    """A program in a terminal of a given size."""

    def __init__(self, observed: Observed, *args: str, columns: int = 80, lines: int = 24) -> None:
        command = [sys.executable, "-m", "shoal.main", args[0], "--home", str(observed.home.path)]
        self._parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(child)
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [*command, *args[1:]],
            stdin=child,
            stdout=child,
            stderr=child,
            env={**env, "TERM": "xterm-256color", "PYTHONPATH": str(SOURCE)},
            start_new_session=True,
        )
        self._child = child
        self.raw = ""

    def press(self, keys: str) -> None:
        os.write(self._parent, keys.encode())

    def read_until(self, text: str) -> str:
        """What was shown since the last call, up to and with this."""
        begin, deadline = len(self.raw), time.monotonic() + WAIT_S
        while text not in ESCAPE.sub("", self.raw[begin:]):
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} never came: {ESCAPE.sub('', self.raw[begin:])[-3000:]!r}"
            ready, _, _ = select.select([self._parent], [], [], min(left, 0.5))
            if ready:
                with contextlib.suppress(OSError):
                    self.raw += os.read(self._parent, 65536).decode("utf-8", "replace")
        return ESCAPE.sub("", self.raw[begin:])

    def end(self) -> int:
        code = self.process.wait(timeout=WAIT_S)
        while select.select([self._parent], [], [], 0.1)[0]:
            self.raw += os.read(self._parent, 65536).decode("utf-8", "replace")
        return code

    def as_before(self) -> bool:
        return termios.tcgetattr(self._child) == self.before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=WAIT_S)
        os.close(self._parent)
        os.close(self._child)


@contextlib.contextmanager
def terminal(observed: Observed, *args: str, **size: int) -> Iterator[Terminal]:
    one = Terminal(observed, *args, **size)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture(scope="module")
def job(observed: Observed) -> Iterator[str]:
    job = observed.train(100_000, members=2, pace_s=0.02, SLOW="0")
    until(lambda: len(observed.client.job_series(job).points) >= 2)
    yield job
    observed.client.cancel(job)
    observed.wait(job)


def test_top_shows_jobs_nodes_and_services_and_gives_the_terminal_back(
    observed: Observed, job: str
) -> None:
    with terminal(observed, "top") as top:
        assert "GPUs" in top.read_until("/100000")
        top.read_until("loss ")  # the curve of the job that the cursor is on
        top.press("n")
        top.read_until("NODE")
        top.press("s")
        top.read_until("SERVICE")
        top.press("j")
        top.read_until(job)
        top.press("q")
        assert top.end() == 0
        assert "\x1b[?1049h" in top.raw and "\x1b[?1049l" in top.raw
        assert top.as_before()


def test_top_is_ended_by_ctrl_c_too(observed: Observed, job: str) -> None:
    with terminal(observed, "top", "--view", "nodes", columns=140, lines=40) as top:
        top.read_until("n1")
        os.killpg(top.process.pid, 2)
        assert top.end() in (0, 130)
        assert "\x1b[?1049l" in top.raw
        assert top.as_before()
        assert "Traceback" not in top.raw


def test_without_a_terminal_top_prints_once(observed: Observed, job: str) -> None:
    command = [sys.executable, "-m", "shoal.main", "top", "--home", str(observed.home.path)]
    for view, word in (("jobs", job), ("nodes", "n1"), ("services", "SERVICE")):
        said = subprocess.run(
            [*command, "--view", view], capture_output=True, text=True, timeout=60, check=True
        )
        assert word in said.stdout
        assert "\x1b" not in said.stdout
    told = json.loads(
        subprocess.run(
            [*command, "--json"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    )
    assert told["status"]["gpus"] == 8
    assert told["jobs"][0]["id"] == job
    wrong = subprocess.run(
        [*command, "--view", "moon"], capture_output=True, text=True, timeout=60, check=False
    )
    assert wrong.returncode == 2
    assert wrong.stderr == "error: --view: 'moon' is not one of jobs, nodes, services\n"


def test_run_tells_how_far_the_job_is_without_disturbing_its_output(observed: Observed) -> None:
    command = [sys.executable, str(BEATER), "150"]
    env = ["--env", f"PYTHONPATH={SOURCE}", "--env", "PACE_S=0.05"]
    with terminal(observed, "run", "--wait", *env, "--", *command) as run:
        told = run.read_until("left; ")
        assert re.search(r"j\d+ ■+□+ \d+%  step \d+/150, loss [\d.e-]+, ", told), told
        run.read_until("done 150")
        assert run.end() == 0
        assert shown(run.raw)[-1] == "done 150", "nothing of the line is left"


def test_without_a_terminal_run_prints_the_output_alone(observed: Observed) -> None:
    command = [sys.executable, "-m", "shoal.main", "run", "--home", str(observed.home.path)]
    said = subprocess.run(
        [*command, "--wait", "--", "sh", "-c", "echo one; sleep 3; echo two"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout == "one\ntwo\n"
    assert "\x1b" not in said.stderr and said.stderr.count("\n") == 1


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (140, 40)])
def test_status_is_one_screen(observed: Observed, job: str, columns: int, lines: int) -> None:
    observed.client.submit(observed.spec("true", gpus=4, members=2, name="does-not-fit-beside-it"))
    with terminal(observed, "status", columns=columns, lines=lines) as status:
        assert status.end() == 0
        text = ESCAPE.sub("", status.raw)
        shown = [line for line in text.split("\n") if line.strip()]
        assert len(shown) <= lines - 1
        assert max(len(line.rstrip("\r")) for line in shown) <= columns
        assert re.search(r"GPUs +■+□+  2 of 8 in use, 6 free", text)
        assert re.search(rf"^{job} ", text, re.M), "a job's id is never cut away"
        assert re.search(r"\d+ jobs? waits? ", text)
    waiting = next(row.id for row in observed.client.jobs() if row.state == "waiting")
    observed.client.cancel(waiting)
