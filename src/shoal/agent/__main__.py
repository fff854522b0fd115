"""The keeper: the agent's parent, which outlives it just long enough to leave nothing behind.

An agent that is killed can clean nothing up, so its parent does. The keeper is a subreaper:
whatever the agent leaves behind becomes its child, however deep it was and whatever session it
made for itself. The keeper imports little. It holds the node's lock together with the
agent and releases it only when every process of the node is gone: a free lock means a dead node.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from shoal.machine.bytecode import keep_bytecode
from shoal.machine.cgroups import end_groups
from shoal.machine.files import AGENT_LOCK, lock
from shoal.machine.kernel import children, die_with_parent, reap_orphans
from shoal.machine.leftovers import sweep


def main() -> int:
    directory = Path(sys.argv[1])
    if lock(directory / AGENT_LOCK) is None:
        print(f"an agent already runs in {directory}", file=sys.stderr)
        return 4
    reap_orphans()
    keeper = os.getpid()
    agent = os.fork()
    if agent == 0:
        die_with_parent()
        if os.getppid() != keeper:  # it died before we could ask to die with it
            return 1
        keep_bytecode(directory)
        from shoal.agent.startup import run

        return run(directory, keeper)

    def forward(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        os.kill(agent, number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    status = _wait_for(agent)
    end_groups(directory)
    _sweep()
    sweep(directory)
    return os.waitstatus_to_exitcode(status)


def _wait_for(agent: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == agent:
            return status


def _sweep() -> None:
    """Kill until nothing is left. As parents die, their children become ours. One that waits for a
    mount that hangs dies when that answers, and the node's lock is not free before."""
    pause_s = 0.002
    while True:
        for pid in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(pause_s)
            pause_s = min(0.1, pause_s * 1.1)


if __name__ == "__main__":
    sys.exit(main())
