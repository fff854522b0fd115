"""Functions that the tests send to workers, and waiting for facts about processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import shoal.tasks

ROOT = Path(__file__).parent.parent.parent


def double(value: int) -> int:
    return 2 * value


def worker_id(_: Any) -> int:
    return os.getpid()


def with_worker(value: int) -> tuple[int, int]:
    return value, os.getpid()


def fail_at(wrong: int, value: int) -> int:
    if value == wrong:
        raise ValueError(f"{value} is wrong")
    return value


def die_at(wrong: int, value: int) -> int:
    if value == wrong:
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def fail_until(folder: str, times: int, value: int) -> int:
    """Fails as often as it is told to, counted by files, which outlive a worker."""
    if value == 7:
        tries = len(list(Path(folder).iterdir()))
        if tries < times:
            (Path(folder) / str(tries)).touch()
            raise OSError("not yet")
    return value


def slow_once(folder: str, value: int) -> int:
    """The first process that gets the last value never comes back."""
    if value == 39:
        try:
            (Path(folder) / "begun").touch(exist_ok=False)
        except FileExistsError:
            return value
        time.sleep(3600)
    return value


def large(size: int) -> bytes:
    return bytes(size)


def from_context(value: int) -> tuple[int, int]:
    return shoal.tasks.context(), value


def build(folder: str) -> int:
    (Path(folder) / str(os.getpid())).touch()
    return os.getpid()


def build_nothing() -> None:
    raise RuntimeError("no such model")


def nested(value: int) -> int:
    return sum(shoal.map(double, range(value), progress=False))


class Awkward(Exception):
    """Cannot be made from its own arguments, as many exceptions."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def awkward(_: Any) -> None:
    raise Awkward("very", "awkward")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, **more}


def python(script: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script)],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=60,
    )
