"""The access log: its end is read for latencies, and it is cut before it grows too long."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

READ_BYTES_MAX = 1 << 20  # at one look; of more, the end is a fair sample
LOG_BYTES_MAX = 64 << 20  # then it becomes the one before, of which one is kept


class Line(msgspec.Struct, frozen=True):
    """What is used of a line."""

    service: str
    replica: str
    status: int
    connect_ms: int
    response_ms: int
    total_ms: int


class AccessLog:
    """Remembers up to where it was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._decode = msgspec.json.Decoder(Line).decode

    def fresh(self) -> list[Line]:
        """The lines since the last call, or the last of them if they are very many."""
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:
                    self._offset = 0  # it was cut
                start = max(self._offset, size - READ_BYTES_MAX)
                file.seek(start)
                data = file.read(size - start)
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        begin = data.find(b"\n") + 1 if start > self._offset else 0  # not in the middle of a line
        self._offset = start + whole
        return list(self._lines(data[begin:whole]))

    def rotate(self) -> None:
        """Copy and cut: the proxy goes on appending to the same file. Lines that are written
        between the two are lost, and that is the only moment at which any is."""
        if self.path.exists() and self.path.stat().st_size > LOG_BYTES_MAX:
            shutil.copyfile(self.path, self.path.with_name(f"{self.path.name}.1"))
            os.truncate(self.path, 0)
            self._offset = 0

    def _lines(self, data: bytes) -> Iterable[Line]:
        for text in data.splitlines():
            try:
                yield self._decode(text)
            except msgspec.DecodeError:
                continue  # a line that was cut, or one of the proxy's own messages


def latencies(lines: Iterable[Line]) -> dict[tuple[str, str], list[int]]:
    """(service, replica) -> milliseconds until an answer began, of those that were answered."""
    found: dict[tuple[str, str], list[int]] = {}
    for line in lines:
        if line.response_ms >= 0 and 0 <= line.status < 500:
            key = (line.service, line.replica)
            found.setdefault(key, []).append(line.response_ms + max(0, line.connect_ms))
    return found
