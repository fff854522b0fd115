"""Keeps a controller running: starts it again when it dies, until it ends on purpose. It holds the
sockets that controllers listen on, so that the sockets outlive each controller."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

from shoal.control.home import Home
from shoal.control.sockets import SUPERVISOR_ENV, Doors, hold_gate, open_doors
from shoal.control.supervise import DAMAGED_CODE, HOPELESS_CODE, RESTARTS_ENV, STAND_BY_CODE
from shoal.machine.template import ORDER_BYTES_MAX, TEMPLATE_ENV, Becoming, Template
from shoal.ports import EngineError

PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 5.0
HEALTHY_AFTER_S = 1.0
STOP_TIMEOUT_S = 5.0
# What controllers and agents need from their first moment: loaded here once, and forked.
LOADED = (
    "shoal.head.controller",
    "shoal.api.app",
    "shoal.api.forwarding",
    "shoal.api.server",
    "shoal.agent.startup",
    "uvicorn.lifespan.off",
)


def supervise(folder: Path, handle: int | None) -> int:
    """`handle` is its lock, if no other process holds that."""
    home = Home(folder)
    os.setsid()
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
    code = Supervisor(home, doors).run()
    with contextlib.suppress(OSError):
        if code == 0:  # it ended on purpose, which `shoal up --foreground` reads here
            os.pwrite(handle, b"0".ljust(20), 0)
    return code


class Supervisor:
    def __init__(self, home: Home, doors: Doors) -> None:
        self._home = home
        self._command = [sys.executable, "-m", "shoal.main", "controller", str(home.path)]
        self._doors = doors  # held for as long as this process lives
        self._gate: socket.socket | None = None  # the same, of the gateway
        self._stopping = False
        self._restarts = 0
        self._worked = False  # once one did, a failure may pass: a port or a disk becomes free
        self._controller = 0
        self._template = Template()
        self._ears, mouth = os.pipe()  # a signal wakes us
        for end in (self._ears, mouth):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGUSR1, self._hold)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)

    def run(self) -> int:
        self._template.load(LOADED)
        pause_s = PAUSE_FIRST_S
        while not self._stopping:
            started = time.monotonic()
            self._gate = self._gate or hold_gate(self._home)
            code = self._live()
            lived = time.monotonic() - started > HEALTHY_AFTER_S
            if code in (0, DAMAGED_CODE) or (code == HOPELESS_CODE and not self._worked):
                return int(code)
            if code == STAND_BY_CODE and not self._stopping:
                say("the controller no longer leads; starting it again as a standby")
                time.sleep(PAUSE_FIRST_S)
                continue
            self._worked = self._worked or lived
            if not self._stopping:
                say(f"the controller ended with {code}; starting it again")
                self._restarts += 1
            if lived:  # the next one starts at once
                pause_s = PAUSE_FIRST_S
            elif not self._stopping:
                time.sleep(pause_s)
                pause_s = min(PAUSE_MAX_S, pause_s * 2)
        return 0

    def _live(self) -> int | str:
        """One controller, from its start to its end: its exit code, or why it could not start."""
        ours, asking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        held = [*self._doors.descriptors, *([self._gate.fileno()] if self._gate else [])]
        words = [*self._command, *map(str, held)]
        env = {
            **os.environ,
            RESTARTS_ENV: str(self._restarts),
            SUPERVISOR_ENV: str(os.getpid()),
            TEMPLATE_ENV: str(asking.fileno()),
        }
        with ours:
            try:
                with asking:
                    self._controller = self._begin(words, env, asking)
            except OSError as error:  # no memory or no process available: that passes
                return str(error)
            asks = True
            while True:
                select.select([self._ears, *([ours.fileno()] if asks else [])], [], [])
                with contextlib.suppress(BlockingIOError):
                    while os.read(self._ears, 512):
                        pass
                if (code := self._ended()) is not None:
                    return code
                asks = asks and self._answer(ours)

    def _begin(self, words: list[str], env: dict[str, str], asking: socket.socket) -> int:
        kept = [*self._doors, *([self._gate] if self._gate else []), asking]
        try:
            return self._template.start(words, env, [one.fileno() for one in kept])
        except Becoming:
            for one in kept:  # the controller goes by their numbers
                one.detach()
            raise

    def _ended(self) -> int | None:
        """How the controller has ended, if it has. The keepers of agents are our children, too."""
        with contextlib.suppress(ChildProcessError):
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                if child[0] == self._controller:
                    self._controller = 0
                    return os.waitstatus_to_exitcode(child[1])
        return None

    def _answer(self, asked: socket.socket) -> bool:
        """Start the agent that the controller asks for. False: it will not ask any more."""
        try:
            words = asked.recv(ORDER_BYTES_MAX, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not words:
            return False
        order = json.loads(words)
        try:
            with open(order["output"], "ab") as output:
                env = {**os.environ, **order["env"]}
                pid = self._template.start(order["words"], env, output=output.fileno())
            answer: dict[str, int | str] = {"pid": pid}
        except OSError as error:
            answer = {"errno": error.errno or 0, "why": error.strerror or str(error)}
        with contextlib.suppress(OSError):
            asked.send(json.dumps(answer).encode())
        return True

    def _hold(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The controller has chosen the gateway's port, and holds it."""
        self._gate = self._gate or hold_gate(self._home, shared=True)

    def _stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._stopping = True
        if self._controller:
            os.kill(self._controller, signal.SIGTERM)
            signal.signal(signal.SIGALRM, self._give_up)
            signal.setitimer(signal.ITIMER_REAL, STOP_TIMEOUT_S)

    def _give_up(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._controller:
            os.kill(self._controller, signal.SIGKILL)


def say(line: str) -> None:
    """Write to the log, if there is room. A full disk must not end the supervisor."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{line}\n".encode(errors="replace"))
