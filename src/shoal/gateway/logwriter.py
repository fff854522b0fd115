"""Reads the proxy's log lines from a pipe and keeps the newest in two files.

It is a process of its own, `python logwriter.py FILE_BYTES_MAX` in the proxy's directory, so that
the log has no gap while the controller is down. It ends when the proxy does, and uses only the
standard library. If it falls behind, the pipe fills up and the proxy drops lines instead of
waiting.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path

PIPE_BYTES = 1 << 20
PAUSE_S = 0.02  # read many lines at once, so that the proxy wakes us rarely


def main() -> None:
    lock = os.open("access.lock", os.O_RDWR | os.O_CREAT, 0o600)
    # Do not wait for a writer: without one, the proxy is gone already.
    pipe = os.open("access.fifo", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(pipe, True)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another log writer runs
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    keep(pipe, Path("access.log"), int(sys.argv[1]))


def keep(pipe: int, path: Path, most: int) -> None:
    """Runs until the last writer is gone. Each file ends with a whole line."""
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
