"""How long processes have waited for storage, as the kernel counts it (pressure stall information).

The member's own cgroup counts only its own processes, with the workers of its loaders. Without
one, the whole machine's figure is the next best. Where the kernel counts neither, it stays 0.
"""

from __future__ import annotations

import os
from pathlib import Path

MACHINE = Path("/proc/pressure/io")
CGROUPS = Path("/sys/fs/cgroup")
BYTES_MAX = 512


class Stalls:
    """Since this process asked first. The file stays open: reading it costs microseconds."""

    def __init__(self, file: Path | None = None) -> None:
        self._file: int | None = None
        for path in (file,) if file else (_own(), MACHINE):
            try:
                self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path else None
            except OSError:
                continue
            if self._file is not None:
                break
        self._first_us = self._read()

    @property
    def us(self) -> int:
        return max(0, self._read() - self._first_us)

    def _read(self) -> int:
        """'some avg10=0.00 avg60=0.10 avg300=0.28 total=1327347264': the total."""
        if self._file is None:
            return 0
        try:
            words = os.pread(self._file, BYTES_MAX, 0).split(b"\n", 1)[0].split()
            return int(words[-1].removeprefix(b"total="))
        except (OSError, ValueError, IndexError):
            return 0


def _own() -> Path | None:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("0::/") and len(line) > len("0::/"):
            return CGROUPS / line.removeprefix("0::/") / "io.pressure"
    return None
