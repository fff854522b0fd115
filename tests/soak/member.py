"""A member of a job: `member.py SECONDS CODE`. It holds a lock for each of its GPUs while it lives,
and notes it if another process has one of them: then a GPU was given twice."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path


def hold_gpus() -> list[int]:
    """The locks are the kernel's, so they are free when the last process that has them is gone."""
    shared, node = Path(os.environ["SOAK_SHARED"]), os.environ["SHOAL_NODE"]
    held = []
    for gpu in filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")):
        lock = os.open(shared / "gpus" / f"{node}.{gpu}", os.O_CREAT | os.O_RDWR, 0o666)
        os.set_inheritable(lock, True)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(lock, 100, 0).decode()
            note(shared / "twice", f"{node} {gpu} {os.environ['SHOAL_REF']} {other}")
        os.ftruncate(lock, 0)
        os.pwrite(lock, os.environ["SHOAL_REF"].encode(), 0)
        held.append(lock)
    return held


def note(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text + "\n")


def main() -> None:
    hold_gpus()
    shared = Path(os.environ["SOAK_SHARED"])
    note(shared / "ran", f"start {os.environ['SHOAL_REF']}")
    time.sleep(float(sys.argv[1]))
    note(shared / "ran", f"end {os.environ['SHOAL_REF']}")
    sys.exit(int(sys.argv[2]))


if __name__ == "__main__":
    main()
