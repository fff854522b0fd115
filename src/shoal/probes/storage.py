"""Measures a storage from this node: `python -m shoal.probes.storage STORAGE.json`.

It writes, reads and removes files in a new folder of its own, for a bounded time and in bounded
space. If it is killed, the next one on the same node removes what it left.
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from shoal.model.health import TEXT_MAX, CheckResult
from shoal.model.storage import (
    LATE_MS,
    PAUSE_MS,
    READ_MBS,
    SMALL_PER_S,
    WRITE_MBS,
    Storage,
    target_problem,
)
from shoal.probes.storage_place import Count, Place, Problem

NICENESS = 5
PREFIX = ".shoal-check-"  # the folders that probes make
LEFT = "storage-left.json"  # in the node's folder: what may be left to remove
LEFT_MAX = 16
WAIT_S_MAX = 15.0  # for the others; a clock that is wrong must not cost more
LATE_MS_MIN = 300
MB = 1_000_000


def measure(asked: Storage, left: Left) -> CheckResult:
    """Raises Problem."""
    if problem := target_problem(asked.target):
        raise Problem(f"{asked.target[:80]!r} {problem}")
    left.remove()
    name = f"{PREFIX}{secrets.token_hex(8)}"
    left.add(asked.target, name)
    place = opened(asked.target, name, asked.nodes)
    try:
        figures: dict[str, int] = {}
        begin = _start(asked, figures)
        phases: list[tuple[str, Callable[[float], Count], int]] = [
            (WRITE_MBS, place.write, MB),
            (READ_MBS, place.read, MB),
            (SMALL_PER_S, place.small, 1),
        ]
        for number, (figure, phase, unit) in enumerate(phases):
            if begin is not None:  # all nodes begin each phase together
                _wait_until(begin + number * (asked.phase_ms + PAUSE_MS) / 1000)
            done, took_s = phase(asked.phase_ms / 1000)
            figures[figure] = round(done / unit / max(took_s, 1e-6))
    finally:
        place.remove()
    left.forget(name)
    return CheckResult(id="", figures=figures, notes=tuple(place.notes))


def opened(target: str, name: str, nodes: int) -> Place:
    if "://" in target:
        from shoal.probes.storage_url import Objects

        return Objects(target, name)
    from shoal.probes.storage_folder import Folder

    return Folder(target, name, nodes)


def _start(asked: Storage, figures: dict[str, int]) -> float | None:
    """When the first phase begins; the clocks of nodes agree within a second, or it is noted."""
    if not asked.at_ms:
        return None
    late_ms = round(time.time() * 1000) - asked.at_ms
    figures[LATE_MS] = late_ms if late_ms >= LATE_MS_MIN else 0
    wait_s = min(WAIT_S_MAX, max(0.0, -late_ms / 1000))
    return time.monotonic() + wait_s


def _wait_until(moment: float) -> None:
    if (left_s := moment - time.monotonic()) > 0:
        time.sleep(left_s)


class Left:
    """Notes on disk what is made, before it is made: a probe may be killed at any moment."""

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / LEFT
        self._known: list[tuple[str, str]] = []
        if self._path is not None:
            try:
                self._known = msgspec.json.decode(
                    self._path.read_bytes(), type=list[tuple[str, str]]
                )
            except (OSError, msgspec.DecodeError):
                self._known = []

    def add(self, target: str, name: str) -> None:
        self._known = [*self._known, (target, name)][-LEFT_MAX:]
        self._write()

    def forget(self, name: str) -> None:
        self._known = [one for one in self._known if one[1] != name]
        self._write()

    def remove(self) -> None:
        """What earlier probes left; what cannot be removed now is tried again."""
        for target, name in list(self._known):
            if target_problem(target) or not name.startswith(PREFIX) or "/" in name:
                self.forget(name)
                continue
            try:
                _remove_left(target, name)
            except Exception:  # of any library: the next probe tries again
                continue
            self.forget(name)

    def _write(self) -> None:
        if self._path is None:
            return
        part = self._path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(self._known))
        part.replace(self._path)


def _remove_left(target: str, name: str) -> None:
    if "://" in target:
        from shoal.probes.storage_url import remove_left as remove
    else:
        from shoal.probes.storage_folder import remove_left as remove
    remove(target, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("storage", type=Path)
    parser.add_argument("--id", default="")
    parser.add_argument("--directory", type=Path, help="the node's folder")
    parser.add_argument("--busy", action="store_true", help="members are running here, too")
    given = parser.parse_args()
    os.nice(NICENESS)
    asked = msgspec.json.decode(given.storage.read_bytes(), type=Storage)
    began = time.monotonic()
    found: Any = CheckResult(id=given.id)
    try:
        found = measure(asked, Left(given.directory))
    except Problem as problem:
        found = CheckResult(id=given.id, error=str(problem)[:TEXT_MAX])
    except OSError as error:
        why = f"{asked.target}: {error.strerror or error}"
        found = CheckResult(id=given.id, error=why[:TEXT_MAX])
    took_ms = round((time.monotonic() - began) * 1000)
    result = msgspec.structs.replace(found, id=given.id, busy=given.busy, took_ms=took_ms)
    print(msgspec.json.encode(result).decode(), flush=True)
    os._exit(0)  # threads of a library may hang


if __name__ == "__main__":
    main()
