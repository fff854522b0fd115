"""Heads of test clusters are forks of one process that has loaded their code.

A head's imports take more processor time than the rest of a small cluster's life, and a suite
starts hundreds. The fork is the supervisor's own way to start controllers
(`shoal.machine.template`). The program executes heads, and so do tests that run it.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys

from shoal.control import lifecycle
from shoal.control.home import Home
from shoal.control.supervisor import LOADED
from shoal.machine.template import ORDER_BYTES_MAX, Becoming, Template

ANSWER_S = 60.0


class Heads:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "harness.forked", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        theirs.close()
        ours.settimeout(ANSWER_S)
        self._asking = ours
        atexit.register(self.close)

    def start(self, home: Home) -> None:
        words = [sys.executable, "-m", "shoal.control.supervise", str(home.path)]
        home.controller_log.touch(0o600)
        order = {"words": words, "env": dict(os.environ), "output": str(home.controller_log)}
        self._asking.send(json.dumps(order).encode())
        code = int(self._asking.recv(100) or b"1")
        if code:
            raise subprocess.CalledProcessError(code, words)

    def close(self) -> None:
        self._asking.close()
        self._process.wait()


def fork_heads() -> None:
    """From now on in this process."""
    execute = lifecycle._start
    heads: list[Heads] = []
    before = _surroundings()

    def start(home: Home) -> None:
        if _surroundings() != before:  # which a fork of another process does not have
            execute(home)
            return
        if not heads:
            heads.append(Heads())
        heads[0].start(home)

    lifecycle._start = start


def _surroundings() -> tuple[object, ...]:
    """What a process inherits, and may have changed since."""
    return (
        os.getpid(),
        os.geteuid(),
        os.stat("/proc/self/ns/net").st_ino,
        os.stat("/proc/self/ns/mnt").st_ino,
        {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "LD_"))},
    )


def _serve(orders: socket.socket) -> None:
    template = Template()
    template.load(LOADED)
    sys.path[0] = "/"  # as of a process that was started there
    os.chdir("/")
    while words := orders.recv(ORDER_BYTES_MAX):
        order = json.loads(words)
        with open(order["output"], "ab") as output:
            pid = template.start(order["words"], order["env"], output=output.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        orders.send(str(code).encode())


def main() -> int:
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        try:
            _serve(orders)
            return 0
        except Becoming as fork:
            born = fork.with_traceback(None)
            orders.detach()
    return born.run()


if __name__ == "__main__":
    sys.exit(main())
