"""Any part of what members wrote: in order, from any place, forward and backward."""

from __future__ import annotations

import os
import random
from contextlib import closing
from pathlib import Path

import pytest

from shoal.api import log_find, logs
from shoal.api.log_find import Search, find
from shoal.api.logs import Together
from shoal.control.logs import MARK, LogStore
from shoal.machine.kernel import punch_hole
from shoal.model.job import MemberRef
from shoal.model.report import LogChunk
from shoal.model.views import LogPiece

REFS = [(MemberRef("j1", 1, member), True) for member in range(3)]


def written(root: Path, outputs: dict[int, list[tuple[int, bytes]]]) -> LogStore:
    """What each member wrote, and when; the marks as the store would write them."""
    store = LogStore(root)
    for member, output in outputs.items():
        whole = b"".join(data for _, data in output)
        store.append(LogChunk(MemberRef("j1", 1, member), 0, whole))
        marks, size = b"", 0
        for at_ms, data in output:
            if at_ms:
                marks += MARK.pack(at_ms, size)
            size += len(data)
        (root / "j1" / f"1.{member}.times").write_bytes(marks)
    return store


def told(pieces: list[LogPiece]) -> list[tuple[int, bytes]]:
    """Pieces of one member that follow each other are one."""
    found: list[tuple[int, bytes]] = []
    for piece in pieces:
        if found and found[-1][0] == piece.member:
            found[-1] = (piece.member, found[-1][1] + piece.data)
        else:
            found.append((piece.member, piece.data))
    return found


def test_members_are_interleaved_by_time_and_what_has_none_comes_first(tmp_path: Path) -> None:
    outputs = {
        0: [(1_000, b"a1\n"), (3_000, b"a3\n")],
        1: [(2_000, b"b2\n"), (3_000, b"b3\nb3 again\n")],
        2: [(0, b"c\n")],
    }
    wanted = [(2, b"c\n"), (0, b"a1\n"), (1, b"b2\n"), (0, b"a3\n"), (1, b"b3\nb3 again\n")]
    with closing(Together(written(tmp_path, outputs), REFS)) as shown:
        assert told(shown.forward([0, 0, 0]).pieces) == wanted
        assert told(shown.backward(shown.sizes).pieces) == wanted
        assert told(shown.forward(shown.at_line(1, 0)).pieces) == wanted[2:]
        assert shown.span_ms() == (1_000, 3_000)


@pytest.mark.parametrize("seed", range(4))
def test_small_parts_give_the_same_bytes_in_both_directions_and_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(logs, "PART_BYTES", 300)
    outputs: dict[int, list[tuple[int, bytes]]] = {}
    for member in range(3):
        at_ms, outputs[member] = 1_000, []
        for number in range(rng.randrange(1, 80)):
            at_ms += rng.choice((1_000, 1_000, 60_000))
            data = b"%d of %d %s" % (number, member, b"x" * rng.randrange(30))
            outputs[member].append((at_ms, data + rng.choice((b"\n", b"\n", b""))))
    whole = {m: b"".join(data for _, data in output) for m, output in outputs.items()}
    with closing(Together(written(tmp_path, outputs), REFS)) as shown:
        for back in (False, True):
            places = shown.sizes if back else [0, 0, 0]
            read: dict[int, bytes] = dict.fromkeys(range(3), b"")
            for _ in range(1_000):
                part = shown.backward(places) if back else shown.forward(places)
                mine = dict.fromkeys(range(3), b"")
                for piece in part.pieces:
                    mine[piece.member] += piece.data
                for m in range(3):
                    read[m] = mine[m] + read[m] if back else read[m] + mine[m]
                    begin = part.starts[m]
                    if back and begin:
                        assert whole[m][begin - 1 : begin] == b"\n", "it begins with a line"
                places = part.starts if back else part.ends
                if not part.pieces:
                    break
            assert read == whole
        assert all(
            data[:at][-1:] in (b"", b"\n")
            for data, at in zip(whole.values(), shown.at_share(0.5), strict=True)
        )


def test_a_gap_is_one_line_from_both_sides(tmp_path: Path) -> None:
    """A log of a gigabyte: its middle is not kept."""
    store, ref = LogStore(tmp_path), REFS[0][0]
    store.append(LogChunk(ref, 0, b"first\n" * 1_000))
    path = tmp_path / "j1" / "1.0.log"
    with path.open("r+b") as log:
        log.truncate(1 << 30)
        log.seek(1 << 30)
        log.write(b"\nlast\n" * 1_000)
        punch_hole(log.fileno(), 8192, 1 << 30)
    assert os.stat(path).st_blocks < 1_000
    with closing(Together(store, REFS[:1])) as shown:
        places, pieces = shown.sizes, list[LogPiece]()
        for _ in range(10):
            part = shown.backward(places)
            pieces, places = part.pieces + pieces, part.starts
        assert places == [0] and len(pieces) < 8
        assert sum(b"not kept" in piece.data for piece in pieces) == 1
        forward = shown.forward(shown.at_share(0.5)).pieces
        assert b"not kept" in forward[0].data and forward[-1].data.endswith(b"last\n")
        lines = shown.matching([0], Search(b"LAST"), back=False)
        assert len(lines.pieces) == 1_000 and lines.pieces[0].data == b"last\n"


@pytest.mark.parametrize("back", [False, True])
def test_lines_with_a_text_are_found_once_wherever_chunks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    monkeypatch.setattr(log_find, "CHUNK_BYTES", 128)
    monkeypatch.setattr(log_find, "SEARCHED_MAX", 700)
    outputs = {
        member: [
            (
                1_000 * n + member,
                b"%d of %d%s\n" % (n, member, b" \x1b[1mLo\x1b[0mSS" * (n % 3 > 1)),
            )
            for n in range(60)
        ]
        for member in range(3)
    }
    wanted = [
        (member, b"%d of %d \x1b[1mLo\x1b[0mSS\n" % (n, member))
        for n in range(60)
        for member in range(3)
        if n % 3 > 1
    ]
    with closing(Together(written(tmp_path, outputs), REFS)) as shown:
        places, found = shown.sizes if back else [0, 0, 0], list[LogPiece]()
        for _ in range(200):
            part = shown.matching(places, Search(b"loss"), back=back)
            found = part.pieces + found if back else found + part.pieces
            places = part.starts if back else part.ends
        assert [(piece.member, piece.data) for piece in found] == wanted
        assert places == ([0, 0, 0] if back else shown.sizes)


def test_the_first_error_of_each_member_is_found_and_progress_is_none(tmp_path: Path) -> None:
    outputs = {
        0: [
            (
                5_000,
                b"NCCL INFO fine\nloss error 0.1\nno errors\nTraceback (most recent call last):\n",
            )
        ],
        1: [(1_000, b"well\n\x1b[31mRuntimeError\x1b[0m: CUDA error: x\nValueError: y\n")],
        2: [(1_000, b"0 errors\nwell\n")],
    }
    store = written(tmp_path, outputs)
    found = find(store, REFS, b"", 0, 0)
    assert [(hit.member, hit.offset, hit.at_ms) for hit in found.hits] == [
        (0, 40, 5_000),
        (1, 5, 1_000),
    ]
    assert found.at == len(REFS), "all was searched"
    assert [hit.member for hit in find(store, REFS, b"WELL", 0, 0).hits] == [1, 2]
