"""Checks of this node, each in a process of its own, always with a time limit.

Code that waits for the agent's children must skip those in `pids()` and pass them to `ended`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from shoal.machine.files import write_private
from shoal.machine.kernel import NODE_MARK
from shoal.model.commands import Check
from shoal.model.health import TEXT_MAX, CheckResult
from shoal.model.node import NodeSpec

PROBE = (sys.executable, "-m", "shoal.probes.probe")
TOUR = (sys.executable, "-m", "shoal.probes.tour")
STORAGE = (sys.executable, "-m", "shoal.probes.storage")
PROBE_S_MAX = 60.0
TOUR_S_MORE = 5.0  # a tour ends by itself when its time is up


class Checks:
    """The checks of one agent. A check requested again while it runs is measured once. A tour does
    not wait for a check of the node, nor the other way round, because its peers wait for it."""

    def __init__(
        self,
        directory: Path,
        spec: NodeSpec,
        on_result: Callable[[CheckResult], None],
        probe: Sequence[str] = PROBE,
        tour: Sequence[str] = TOUR,
    ) -> None:
        self._directory = directory
        self._spec = spec
        self._probe, self._tour = tuple(probe), tuple(tour)
        environment = {**os.environ, NODE_MARK: str(directory)}
        self._node = _Lane(directory / "check.json", environment, self._command, on_result)
        self._tours = _Lane(directory / "tour-check.json", environment, self._command, on_result)

    def ask(self, check: Check, *, busy: bool) -> None:
        """`busy`: members are running on the node."""
        lane, other = self._node, self._tours
        if check.tour is not None:
            lane, other = other, lane
        if check.id == lane.running:
            return
        if check.tour is not None:
            lane.end()  # the controller has given that one up
        lane.ask(check, busy or bool(other.running))
        other.busy |= bool(lane.running)  # they disturb each other

    def pids(self) -> set[int]:
        return self._node.pids() | self._tours.pids()

    def ended(self, pid: int, code: int) -> bool:
        """The process was reaped. Returns whether it was one of ours."""
        return self._node.ended(pid, code) or self._tours.ended(pid, code)

    def tend(self) -> None:
        """Called regularly: kill a probe that takes too long (a hanging disk, a lost GPU)."""
        self._node.tend()
        self._tours.tend()

    def _command(self, check: Check, busy: bool) -> list[str]:
        more = ["--busy"] if busy else []
        if check.tour is not None:
            tour = self._directory / "tour.json"
            write_private(tour, msgspec.json.encode(check.tour))  # it has a key
            return [*self._tour, "--id", check.id, str(tour), *more]
        if check.storage is not None:
            asked = self._directory / "storage.json"
            asked.write_bytes(msgspec.json.encode(check.storage))
            return [
                *STORAGE,
                "--id",
                check.id,
                "--directory",
                str(self._directory),
                str(asked),
                *more,
            ]
        cores = max(1, self._spec.cpu_milli // 1000)
        more += ["--directory", str(self._directory), "--id", check.id, "--cores", str(cores)]
        more += [] if self._spec.gpus else ["--no-gpus"]
        return [*self._probe, *more]


class _Lane:
    """One probe at a time; the newest that is wanted comes next."""

    def __init__(
        self,
        output: Path,
        environment: dict[str, str],
        command: Callable[[Check, bool], list[str]],
        on_result: Callable[[CheckResult], None],
    ) -> None:
        self.running = ""
        self.busy = False
        self._output = output
        self._environment = environment
        self._command = command
        self._on_result = on_result
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0
        self._limit_s = PROBE_S_MAX
        self._given_up = False
        self._next: tuple[Check, bool] | None = None

    def ask(self, check: Check, busy: bool) -> None:
        if self._process is not None:
            self._next = (check, busy)
        else:
            self._start(check, busy)

    def pids(self) -> set[int]:
        return set() if self._process is None else {self._process.pid}

    def ended(self, pid: int, code: int) -> bool:
        if self._process is None or self._process.pid != pid:
            return False
        self._process.returncode = code
        self._process = None
        self._on_result(self._read(code))
        if self._next is not None:
            (check, busy), self._next = self._next, None
            self._start(check, busy)
        return True

    def tend(self) -> None:
        if self._process is not None and time.monotonic() > self._deadline:
            self._kill(self._process)

    def end(self) -> None:
        if self._process is not None:
            self._given_up = True
            self._kill(self._process)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def _start(self, check: Check, busy: bool) -> None:
        limit_s = PROBE_S_MAX
        if check.tour is not None:
            limit_s = check.tour.limit_ms / 1000 + TOUR_S_MORE
        if check.storage is not None:
            limit_s = check.storage.limit_ms / 1000 + TOUR_S_MORE
        try:
            with self._output.open("wb") as output:
                self._process = subprocess.Popen(
                    self._command(check, busy),
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            why = f"the probe cannot start: {error.strerror}"
            self._on_result(CheckResult(id=check.id, error=why))
            return
        self.running, self.busy, self._limit_s = check.id, busy, limit_s
        self._given_up = False
        self._deadline = time.monotonic() + limit_s

    def _read(self, code: int) -> CheckResult:
        """A probe that hangs in the kernel is the node's fault; a probe that fails is not."""
        check, late = self.running, time.monotonic() > self._deadline
        self.running = ""
        if self._given_up:
            return CheckResult(id=check, busy=self.busy, error="a later tour has begun")
        if late:
            fault = f"the probe did not end within {self._limit_s:.0f} s"
            return CheckResult(id=check, busy=self.busy, faults=(fault,))
        try:
            found = msgspec.json.decode(self._output.read_bytes(), type=CheckResult)
            return msgspec.structs.replace(found, id=check, busy=self.busy)
        except (OSError, msgspec.DecodeError) as error:
            why = f"the probe ended with code {code}: {error}"[:TEXT_MAX]
            return CheckResult(id=check, busy=self.busy, error=why)
