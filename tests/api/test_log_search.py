"""Searching a member's output, and where it begins at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.api.log_find import matching
from shoal.control import logs
from shoal.control.logs import LogStore
from shoal.model.job import MemberRef
from shoal.model.report import LogChunk

REF = MemberRef("j1", 1, 0)


def found(store: LogStore, text: bytes, *, over: bool) -> tuple[bytes, int]:
    data, offset = b"", 0
    for _ in range(1_000):
        read = matching(store, REF, offset, text, over=over)
        data += read.data
        if read.next == offset:
            break
        offset = read.next
    return data, offset


@pytest.mark.parametrize("size", [7, 64, 1 << 18])
def test_every_line_with_the_text_is_found_once_wherever_reads_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(logs, "READ_BYTES_MAX", size if size > 64 else 64)
    store = LogStore(tmp_path)
    lines = [b"step %d loss\n" % n if n % 3 else b"step %d\n" % n for n in range(200)]
    body = b"".join(lines) + b"last loss"
    store.append(LogChunk(REF, 0, body))
    wanted = b"".join(line for line in lines if b"loss" in line)
    assert found(store, b"loss", over=False) == (wanted, len(body) - len(b"last loss"))
    assert found(store, b"loss", over=True) == (wanted + b"last loss", len(body))
    assert found(store, b"nothing", over=True) == (b"", len(body))


def test_output_since_a_time_begins_where_it_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now_ms, offset = LogStore(tmp_path), 0, 0
    monkeypatch.setattr("shoal.control.logs.time.time", lambda: now_ms / 1000)
    for at_ms, text in ((1_000, b"one\n"), (1_500, b"two\n"), (3_600_000, b"three\n")):
        now_ms = at_ms
        store.append(LogChunk(REF, offset, text))
        offset += len(text)
        marks = tmp_path / "j1" / "1.0.times"
        os.utime(marks, (now_ms / 1000, now_ms / 1000) if marks.stat().st_size % 32 else None)
    assert store.offset_at(REF, 500) == 0
    assert store.offset_at(REF, 2_000) == 0, "within the spacing of marks, rather too much"
    assert store.offset_at(REF, 1_800_000) == len(b"one\ntwo\n")
    assert store.offset_at(REF, 7_200_000) == offset, "nothing came since then"
    assert store.offset_at(MemberRef("j1", 1, 9), 5) == 0
