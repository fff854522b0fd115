"""Reads latencies from the end of the access log."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

READ_BYTES_MAX = 1 << 20  # per call; the end of a longer log is a fair sample


class Line(msgspec.Struct, frozen=True):
    """The fields of a log line that we use."""

    service: str
    replica: str
    status: int
    connect_ms: int
    response_ms: int


class AccessLog:
    """Remembers how far it has read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset, self._number = _size_and_number(path.stat()) if path.exists() else (0, 0)
        self._decode = msgspec.json.Decoder(Line).decode

    def fresh(self) -> list[Line]:
        """The lines since the last call, at most READ_BYTES_MAX of them."""
        try:
            with self.path.open("rb") as file:
                size, number = _size_and_number(os.fstat(file.fileno()))
                if number != self._number:
                    self._offset, self._number = 0, number  # the writer began the next file
                start = max(self._offset, size - READ_BYTES_MAX)
                file.seek(start)
                data = file.read(size - start)
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        begin = data.find(b"\n") + 1 if start > self._offset else 0  # skip the partial line
        self._offset = start + whole
        return list(self._lines(data[begin:whole]))

    def _lines(self, data: bytes) -> Iterable[Line]:
        for text in data.splitlines():
            try:
                yield self._decode(text)
            except msgspec.DecodeError:
                continue  # a partial line, or one of the proxy's own messages


def _size_and_number(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_ino


def latencies(lines: Iterable[Line]) -> dict[tuple[str, str], list[int]]:
    """(service, replica) -> milliseconds until each answer began."""
    found: dict[tuple[str, str], list[int]] = {}
    for line in lines:
        if line.response_ms >= 0 and 0 <= line.status < 500:
            key = (line.service, line.replica)
            found.setdefault(key, []).append(line.response_ms + max(0, line.connect_ms))
    return found
