"""Keeps a controller running: starts it again when it dies, until it ends on purpose. It holds the
sockets that controllers listen on, so that the sockets outlive each controller."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from shoal.control.home import Home
from shoal.control.sockets import SUPERVISOR_ENV, Doors, hold_gate, open_doors
from shoal.machine.files import lock
from shoal.ports import EngineError

# A controller that exits with this code has said why, and starting it again would not help.
HOPELESS_CODE = 3
DAMAGED_CODE = 4  # the same, and waiting does not help either: a person must act
# Another head leads by now, or the database was away: the next controller begins as a standby.
STAND_BY_CODE = 5
RESTARTS_ENV = "SHOAL_CONTROLLER_RESTARTS"  # how many controllers have died before this one
PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 5.0
HEALTHY_AFTER_S = 1.0
STOP_TIMEOUT_S = 5.0


class Supervisor:
    def __init__(self, home: Home, doors: Doors) -> None:
        self._home = home
        self._command = [sys.executable, "-m", "shoal.main", "controller", str(home.path)]
        self._doors = doors  # held for as long as this process lives
        self._gate: socket.socket | None = None  # the same, of the gateway
        self._stopping = False
        self._restarts = 0
        self._worked = False  # once one did, a failure may pass: a port or a disk becomes free
        self._controller: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        pause_s = PAUSE_FIRST_S
        while not self._stopping:
            started = time.monotonic()
            restarts, own = str(self._restarts), str(os.getpid())
            env = {**os.environ, RESTARTS_ENV: restarts, SUPERVISOR_ENV: own}
            self._gate = self._gate or hold_gate(self._home)
            held = [*self._doors.descriptors, *([self._gate.fileno()] if self._gate else [])]
            try:
                self._controller = subprocess.Popen(
                    [*self._command, *map(str, held)],
                    start_new_session=True,
                    env=env,
                    pass_fds=held,
                )
                code: int | str = self._controller.wait()
            except OSError as error:  # no memory or no process available: that passes
                code = str(error)
            lived = time.monotonic() - started > HEALTHY_AFTER_S
            if code in (0, DAMAGED_CODE) or (code == HOPELESS_CODE and not self._worked):
                return int(code)
            if code == STAND_BY_CODE and not self._stopping:
                say("the controller no longer leads; starting it again as a standby")
                time.sleep(PAUSE_FIRST_S)
                continue
            self._worked = self._worked or lived
            if lived:
                pause_s = PAUSE_FIRST_S
            if not self._stopping:
                say(f"the controller ended with {code}; starting it again")
                self._restarts += 1
                time.sleep(pause_s)
                pause_s = min(PAUSE_MAX_S, pause_s * 2)
        return 0

    def hold(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The controller has chosen the gateway's port, and holds it."""
        self._gate = self._gate or hold_gate(self._home, shared=True)

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


def say(line: str) -> None:
    """Write to the log, if there is room. A full disk must not end the supervisor."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{line}\n".encode(errors="replace"))


def main() -> int:
    home = Home(Path(sys.argv[1]))
    if os.fork():
        return 0  # the process that started us need not wait for our end
    os.setsid()
    handle = lock(home.supervisor_lock)
    if handle is None:
        say(f"another supervisor already runs in {home.path}")
        return HOPELESS_CODE
    try:
        # The same length as the last one, so that it fits on a full disk.
        os.pwrite(handle, f"{os.getpid():<20}".encode(), 0)
        doors = open_doors(home)
    except (EngineError, OSError) as error:
        say(f"shoal: {error}")
        return HOPELESS_CODE
    supervisor = Supervisor(home, doors)
    signal.signal(signal.SIGUSR1, supervisor.hold)
    signal.signal(signal.SIGTERM, supervisor.stop)
    signal.signal(signal.SIGINT, supervisor.stop)
    code = supervisor.run()
    with contextlib.suppress(OSError):
        if code == 0:  # it ended on purpose, which `shoal up --foreground` reads here
            os.pwrite(handle, b"0".ljust(20), 0)
    return code


if __name__ == "__main__":
    sys.exit(main())
