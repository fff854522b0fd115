"""Keeps a controller running: starts it again when it dies, until it ends on purpose."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from shoal.files import lock

# A controller that exits with this has said why, and starting it again would not help.
HOPELESS_CODE = 3
DAMAGED_CODE = 4  # the same, and it will not help later either: somebody must act
RESTARTS_ENV = "SHOAL_CONTROLLER_RESTARTS"  # tells a controller how many have died before it
PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 5.0
HEALTHY_AFTER_S = 1.0
STOP_TIMEOUT_S = 5.0


class Supervisor:
    def __init__(self, home: Path) -> None:
        self._command = [sys.executable, "-m", "shoal.main", "controller", str(home)]
        self._stopping = False
        self._restarts = 0
        self._worked = False  # once it did, nothing is hopeless: a port or a disk comes free
        self._controller: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        pause_s = PAUSE_FIRST_S
        while not self._stopping:
            started = time.monotonic()
            env = {**os.environ, RESTARTS_ENV: str(self._restarts)}
            self._controller = subprocess.Popen(self._command, start_new_session=True, env=env)
            code = self._controller.wait()
            lived = time.monotonic() - started > HEALTHY_AFTER_S
            if code in (0, DAMAGED_CODE) or (code == HOPELESS_CODE and not self._worked):
                return code
            self._worked = self._worked or lived
            if lived:
                pause_s = PAUSE_FIRST_S
            if not self._stopping:
                print(f"the controller ended with {code}; starting it again", file=sys.stderr)
                self._restarts += 1
                time.sleep(pause_s)
                pause_s = min(PAUSE_MAX_S, pause_s * 2)
        return 0

    def stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._stopping = True
        controller = self._controller
        if controller is not None and controller.returncode is None:
            controller.send_signal(signal.SIGTERM)
            signal.signal(signal.SIGALRM, self._give_up)
            signal.setitimer(signal.ITIMER_REAL, STOP_TIMEOUT_S)

    def _give_up(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._controller is not None:
            self._controller.kill()


def main() -> int:
    home = Path(sys.argv[1])
    if os.fork():
        return 0  # whoever started us need not wait for our end
    os.setsid()
    handle = lock(home / "supervisor.lock")
    if handle is None:
        print(f"a controller is already kept running in {home}", file=sys.stderr)
        return HOPELESS_CODE
    os.truncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    supervisor = Supervisor(home)
    signal.signal(signal.SIGTERM, supervisor.stop)
    signal.signal(signal.SIGINT, supervisor.stop)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
