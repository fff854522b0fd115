"""Takes the proxy's log lines out of a pipe and keeps the last of them in two files.

A small process of its own, `python logkeeper.py FILE_BYTES_MAX` in the proxy's directory, so that
the log has no gap while no controller is there. It ends when the proxy does. It needs nothing but
the standard library. When it cannot follow, the pipe is full and the proxy drops lines rather than
wait.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path

PIPE_BYTES = 1 << 20
PAUSE_S = 0.02  # so that many lines are taken at once, and the proxy wakes us rarely


def main() -> None:
    lock = os.open("access.lock", os.O_RDWR | os.O_CREAT, 0o600)
    # Not to wait for a writer: if there is none, the proxy is gone already.
    pipe = os.open("access.fifo", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(pipe, True)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another one is at it
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    keep(pipe, Path("access.log"), int(sys.argv[1]))


def keep(pipe: int, path: Path, most: int) -> None:
    """Until the last writer is gone. A file ends with a whole line."""
    file = path.open("ab", buffering=0)
    rest = b""
    while data := os.read(pipe, PIPE_BYTES):
        end = data.rfind(b"\n") + 1
        file.write(rest + data[:end])
        rest = data[end:][-PIPE_BYTES:]
        if file.tell() > most:
            file.close()
            path.replace(path.with_name(f"{path.name}.1"))
            file = path.open("ab", buffering=0)
        time.sleep(PAUSE_S)
    file.close()


if __name__ == "__main__":
    main()
