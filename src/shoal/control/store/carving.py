"""Finds rows in the pages of an SQLite file that SQLite itself cannot read any more.

A lost header, root page or tail makes whole tables unreadable, although most of their pages are
there. Every row of ours has a checksum over its number and body, so a row that is found anywhere in
the file, and matches, is one that was written. (The format: sqlite.org/fileformat2.html.)
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator
from pathlib import Path

from shoal.control.store.rows import checksum

PAGE_BYTES = 4096  # if the header does not say
PAYLOAD_BYTES_MAX = 1 << 30
LEAF = 0x0D  # a page with rows of a table
FILE_HEADER, JOURNAL_HEADER, FRAME_HEADER = 100, 32, 24
MAGIC = b"SQLite format 3\0"
INTEGER_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}

Rows = Iterator[tuple[int, bytes, int]]


def carve(path: Path, journal: bytes = b"") -> Rows:
    """Number, body and checksum of every row whose checksum matches. Some may be older than what
    replaced them, or may have been removed."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            yield from _Pages(b"", journal).rows()
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield from _Pages(content, journal).rows()


class _Pages:
    """The pages of the file, and those in the journal that take their place."""

    def __init__(self, content: mmap.mmap | bytes, journal: bytes) -> None:
        self._content = content
        self._size = PAGE_BYTES
        if content[: len(MAGIC)] == MAGIC:
            said = int.from_bytes(content[16:18], "big")
            said = 65_536 if said == 1 else said
            self._size = said if said >= 512 and not said & (said - 1) else PAGE_BYTES
        self._newer = self._of(journal)
        self._last = max([-(-len(content) // self._size), *self._newer])

    def _of(self, journal: bytes) -> dict[int, bytes]:
        """What was committed; the pages of an earlier round have another salt."""
        salt, place = journal[16:24], JOURNAL_HEADER
        newer: dict[int, bytes] = {}
        waiting: dict[int, bytes] = {}
        while place + FRAME_HEADER + self._size <= len(journal):
            head = journal[place : place + FRAME_HEADER]
            if head[8:16] != salt:
                break
            place += FRAME_HEADER
            waiting[int.from_bytes(head[:4], "big")] = journal[place : place + self._size]
            place += self._size
            if any(head[4:8]):  # the last page of a commit
                newer.update(waiting)
                waiting = {}
        return newer

    def page(self, number: int) -> bytes:
        if number in self._newer:
            return self._newer[number]
        return bytes(self._content[(number - 1) * self._size : number * self._size])

    def rows(self) -> Rows:
        for number in range(1, self._last + 1):
            page = self.page(number)
            start = FILE_HEADER if number == 1 else 0
            if len(page) <= start + 8 or page[start] != LEAF:
                continue
            cells = int.from_bytes(page[start + 3 : start + 5], "big")
            for cell in range(min(cells, self._size // 4)):
                at = start + 8 + 2 * cell
                try:
                    row = self._row(page, int.from_bytes(page[at : at + 2], "big"))
                except (IndexError, ValueError):
                    continue
                if row is not None:
                    yield row

    def _row(self, page: bytes, at: int) -> tuple[int, bytes, int] | None:
        length, at = _varint(page, at)
        number, at = _varint(page, at)
        if length > PAYLOAD_BYTES_MAX:
            return None
        columns = _columns(self._payload(page, at, length))
        for body, crc in itertools.pairwise(columns):
            if isinstance(body, bytes) and isinstance(crc, int) and checksum(number, body) == crc:
                return number, body, crc
        return None

    def _payload(self, page: bytes, at: int, length: int) -> bytes:
        """A long row continues in pages of its own."""
        most = self._size - 35
        if length <= most:
            return page[at : at + length]
        least = (self._size - 12) * 32 // 255 - 23
        local = least + (length - least) % (self._size - 4)
        local = local if local <= most else least
        parts = [page[at : at + local]]
        following = int.from_bytes(page[at + local : at + local + 4], "big")
        left = length - local
        while left > 0 and following:
            more = self.page(following)
            if len(more) < 4:
                break
            following = int.from_bytes(more[:4], "big")
            parts.append(more[4 : 4 + left])
            left -= len(parts[-1])
        return b"".join(parts)


def _columns(record: bytes) -> list[bytes | int | None]:
    """Text is left out: None."""
    end, at = _varint(record, 0)
    kinds = []
    while at < end:
        kind, at = _varint(record, at)
        kinds.append(kind)
    found: list[bytes | int | None] = []
    for kind in kinds:
        if kind in INTEGER_BYTES:
            size = INTEGER_BYTES[kind]
            found.append(int.from_bytes(record[at : at + size], "big", signed=True))
        elif kind in (8, 9):
            size = 0
            found.append(kind - 8)
        else:
            size = 8 if kind == 7 else max(0, (kind - 12) // 2)
            blob = kind >= 12 and not kind % 2
            found.append(record[at : at + size] if blob else None)
        at += size
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(at, at + 8):
        byte = data[place]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, place + 1
    return value << 8 | data[at + 8], at + 9
