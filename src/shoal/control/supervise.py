"""The program that keeps a cluster's controller running, and the exit codes by which a controller
says how to go on. It holds its lock before it loads the rest (`supervisor.py`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shoal.machine.bytecode import keep_bytecode
from shoal.machine.files import SUPERVISOR_LOCK, lock

# A controller that exits with this code has said why, and starting it again would not help.
HOPELESS_CODE = 3
DAMAGED_CODE = 4  # the same, and waiting does not help either: a person must act
# Another head leads by now, or the database was away: the next controller begins as a standby.
STAND_BY_CODE = 5
RESTARTS_ENV = "SHOAL_CONTROLLER_RESTARTS"  # how many controllers have died before this one


def main() -> int:
    home = Path(sys.argv[1]).absolute()
    handle = lock(home / SUPERVISOR_LOCK)
    if os.fork():
        return 0  # the process that started us need not wait for our end
    keep_bytecode(home)
    from shoal.control.supervisor import supervise
    from shoal.machine.leave import end_as
    from shoal.machine.template import Becoming

    try:
        code = supervise(home, handle)
    except Becoming as fork:
        born = fork.with_traceback(None)
    else:
        end_as(lambda: sys.exit(code))
    return born.run()


if __name__ == "__main__":
    sys.exit(main())
