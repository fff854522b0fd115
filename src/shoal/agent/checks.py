"""Checks of this node: one probe at a time, in a process of its own, always with a time limit.

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

from shoal.kernel import NODE_MARK
from shoal.model.commands import Check
from shoal.model.health import TEXT_MAX, CheckResult
from shoal.model.node import NodeSpec

PROBE = (sys.executable, "-m", "shoal.probes.probe")
PROBE_S_MAX = 60.0


class Checks:
    """The checks of one agent. A check requested again while it runs is measured once."""

    def __init__(
        self,
        directory: Path,
        spec: NodeSpec,
        on_result: Callable[[CheckResult], None],
        probe: Sequence[str] = PROBE,
    ) -> None:
        self._directory = directory
        self._spec = spec
        self._on_result = on_result
        self._probe = tuple(probe)
        self._process: subprocess.Popen[bytes] | None = None
        self._running = ""
        self._busy = False
        self._deadline = 0.0
        self._next: tuple[str, bool] | None = None

    def ask(self, check: Check, *, busy: bool) -> None:
        """`busy`: members are running on the node."""
        if check.id == self._running:
            return
        if self._process is not None:
            self._next = (check.id, busy)
        else:
            self._start(check.id, busy)

    def pids(self) -> set[int]:
        return set() if self._process is None else {self._process.pid}

    def ended(self, pid: int, code: int) -> bool:
        """The process was reaped. Returns whether it was one of ours."""
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
        """Called regularly: kill a probe that takes too long (a hanging disk, a lost GPU)."""
        if self._process is not None and time.monotonic() > self._deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self, check: str, busy: bool) -> None:
        cores = max(1, self._spec.cpu_milli // 1000)
        more = ["--directory", str(self._directory), "--id", check, "--cores", str(cores)]
        more += ["--busy"] if busy else []
        more += [] if self._spec.gpus else ["--no-gpus"]
        try:
            with self._output.open("wb") as output:
                self._process = subprocess.Popen(
                    [*self._probe, *more],
                    env={**os.environ, NODE_MARK: str(self._directory)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            why = f"the probe cannot start: {error.strerror}"
            self._on_result(CheckResult(id=check, error=why))
            return
        self._running, self._busy = check, busy
        self._deadline = time.monotonic() + PROBE_S_MAX

    def _read(self, code: int) -> CheckResult:
        """A probe that hangs in the kernel is the node's fault; a probe that fails is not."""
        check, late = self._running, time.monotonic() > self._deadline
        self._running = ""
        if late:
            fault = f"the probe did not end within {PROBE_S_MAX:.0f} s"
            return CheckResult(id=check, busy=self._busy, faults=(fault,))
        try:
            found = msgspec.json.decode(self._output.read_bytes(), type=CheckResult)
            return msgspec.structs.replace(found, id=check)
        except (OSError, msgspec.DecodeError) as error:
            why = f"the probe ended with code {code}: {error}"[:TEXT_MAX]
            return CheckResult(id=check, busy=self._busy, error=why)

    @property
    def _output(self) -> Path:
        return self._directory / "check.json"
