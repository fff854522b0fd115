"""`shoal.data`: every sample of an epoch once, in the same order, whoever reads it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shoal.data
from shoal.data import DataError
from shoal.data.reading import DEPTH_MIN, Reader
from shoal.data.shards import Place
from shoal.train.context import parts_of
from tests.needs import need
from tests.reading.shards import write_images, write_lines, write_tar, write_volume

COUNTS = (4, 9, 1, 0, 23, 6)
TOTAL = sum(COUNTS)


def number(sample: dict[str, Any]) -> Any:
    return sample["number"]


def opened(folder: Path, **options: Any) -> shoal.data.Data:
    return shoal.data.open(str(folder), **{"buffer": 5, "decode": number, **options})


def test_epochs_are_shuffled_and_hold_every_sample_once(tmp_path: Path) -> None:
    data = opened(write_volume(tmp_path, *COUNTS))
    first, second = list(data), list(data)
    assert sorted(first) == sorted(second) == list(range(TOTAL))
    assert first != second
    assert first == list(opened(tmp_path)) != list(opened(tmp_path, seed=1))
    assert list(opened(tmp_path, shuffle=False)) == list(range(TOTAL))


def test_the_order_is_that_of_earlier_versions(tmp_path: Path) -> None:
    """A checkpoint that was made before an upgrade is continued after it."""
    order = list(opened(write_volume(tmp_path, 4, 9, 1), seed=3))
    assert order == [3, 2, 0, 1, 13, 12, 9, 7, 10, 8, 5, 11, 6, 4]


def test_a_run_that_is_interrupted_anywhere_goes_on_with_any_number_of_members(
    tmp_path: Path,
) -> None:
    write_volume(tmp_path, *COUNTS)
    whole = list(opened(tmp_path))
    for world in (1, 2, 3):
        for taken in range(1, TOTAL // world):
            members = [opened(tmp_path, rank=rank, world=world) for rank in range(world)]
            begun = []
            for data in members:
                samples = iter(data)
                begun.append([next(samples) for _ in range(taken)])
                samples.close()  # type: ignore[attr-defined]
            assert [one for turn in zip(*begun, strict=True) for one in turn] == (
                whole[: taken * world]
            )
            states = [data.state_dict() for data in members]
            assert states == [states[0]] * world
            rest = []
            for rank in range(2):
                data = opened(tmp_path, rank=rank, world=2)
                data.load_state_dict(states[0])
                rest += list(data)
            assert sorted(rest) == sorted(whole[taken * world :])


def test_every_number_of_members_makes_the_same_batches(tmp_path: Path) -> None:
    """As `shoal.train` divides them, also if the number changes with each checkpoint."""
    write_volume(tmp_path, *COUNTS)

    def batches(world: int, at: int, mark: Any, most: int) -> tuple[list[list[Place]], Any]:
        made, streams = [], []
        for rank in range(world):
            stream = opened(tmp_path).follow(0, mark, at, 0, 2)
            loader = SimpleNamespace(drop_last=False)
            parts = parts_of(stream, deque(), at, 6, loader, world, rank)
            made.append(list(itertools.islice(parts, most)))
            streams.append(stream)
        whole = [[place for part in parts for place in part] for parts in zip(*made, strict=True)]
        return whole, streams[0].mark(at + sum(map(len, whole)))

    alone, _ = batches(1, 0, None, 100)
    assert len({place for batch in alone for place in batch}) == TOTAL
    assert sum(map(len, alone)) == 2 * TOTAL
    in_turns, at, mark = [], 0, None
    for world, most in ((2, 5), (3, 4), (1, 3), (2, 100)):
        more, mark = batches(world, at, mark, most)
        in_turns += more
        at += sum(map(len, more))
    assert in_turns == alone


def test_a_volume_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "train" / "0.tar", range(3))
    write_images(tmp_path / "val" / "0.tar", range(3, 5))
    (tmp_path / "README.md").write_text("not a shard")
    monkeypatch.setenv("SHOAL_VOLUME_IMAGENET", str(tmp_path))
    assert list(shoal.data.open("imagenet", match="val/*", shuffle=False)) == [
        {"__key__": "00003", "jpg": b"jpg 3", "cls": b"3"},
        {"__key__": "00004", "jpg": b"jpg 4", "cls": b"4"},
    ]
    assert len(list(shoal.data.open("imagenet"))) == 5


def test_a_url_is_read_like_a_folder(tmp_path: Path) -> None:
    need("fsspec")
    write_volume(tmp_path, *COUNTS)
    options: Any = {"buffer": 5, "decode": number}
    remote = shoal.data.open(f"file://{tmp_path}", **options)
    folder = opened(tmp_path)
    assert list(remote) == list(folder)
    assert remote.state_dict() == folder.state_dict()


def test_names_of_every_length_and_kind_of_header(tmp_path: Path) -> None:
    long = "folder/" + "x" * 150 + "/" + "y" * 120
    tar = write_tar(tmp_path / "a.tar", [(f"{long}.txt", b"1"), ("é.TXT", b"2")], mtime=1.5)
    assert list(shoal.data.open(str(tar), shuffle=False)) == [
        {"__key__": long, "txt": b"1"},
        {"__key__": "é", "txt": b"2"},
    ]
    with __import__("tarfile").open(tar, "w", format=1) as gnu:
        gnu.add(__file__, f"{long}.py")
    assert [sample["__key__"] for sample in shoal.data.open(str(tar))] == [long]


# -- bad input -----------------------------------------------------------------------------


def test_a_tar_that_was_cut_off_is_named(tmp_path: Path) -> None:
    tar = write_images(tmp_path / "a.tar", range(5))
    whole = tar.read_bytes()
    for size in (0, 100, 512 * 5, 512 * 8 + 3, 512 * 20):
        tar.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"^a\.tar is damaged after \d samples: "):
            list(shoal.data.open(str(tmp_path)))
    tar.write_bytes(b"not a tar at all" * 100)
    with pytest.raises(DataError, match=r"a\.tar is damaged after 0 samples: no header at byte 0"):
        list(shoal.data.open(str(tmp_path)))


@pytest.mark.parametrize("name", ["../out.txt", "/etc/out.txt", "a/../../out.txt"])
def test_a_name_out_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [(name, b"")])
    with pytest.raises(DataError, match=r"a\.tar holds a name out of its folder"):
        list(shoal.data.open(str(tmp_path)))


def test_a_shard_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", range(5000))
    samples = iter(shoal.data.open(str(tmp_path), memory=1))
    next(samples)
    write_lines(path, range(5000, 10000))
    with pytest.raises(DataError, match=r"a\.jsonl: it changed while it was read"):
        list(samples)


def test_what_cannot_be_read_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"has no shards \(\.tar, \.jsonl, \.parquet\)"):
        shoal.data.open(str(tmp_path))
    with pytest.raises(DataError, match=r"no volume 'nothing' \(\$SHOAL_VOLUME_NOTHING is not set"):
        shoal.data.open("nothing")
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": \n')
    with pytest.raises(DataError, match=r"a\.jsonl: the line at byte 10 is not JSON"):
        list(shoal.data.open(str(tmp_path)))
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(DataError, match="has no samples in its shards"):
        list(shoal.data.open(str(tmp_path)))
    (tmp_path / "b.parquet").write_text("")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"b\.parquet needs pyarrow: pip install pyarrow"):
        list(shoal.data.open(str(tmp_path / "b.parquet")))
    (tmp_path / "c.tar.gz").write_text("")
    with pytest.raises(DataError, match=r"c\.tar\.gz is compressed as a whole"):
        shoal.data.open(str(tmp_path))


def test_a_checkpoint_of_other_shards_is_refused(tmp_path: Path) -> None:
    state = opened(write_volume(tmp_path, 3, 4)).state_dict()
    opened(tmp_path).load_state_dict(state)
    with pytest.raises(DataError, match="another buffer"):
        opened(tmp_path, buffer=6).load_state_dict(state)
    with pytest.raises(DataError, match="seed"):
        opened(tmp_path, seed=1).load_state_dict(state)
    write_lines(tmp_path / "001.jsonl", range(3, 30))
    with pytest.raises(DataError, match="other shards"):
        opened(tmp_path).load_state_dict(state)


# -- reading ahead -------------------------------------------------------------------------


def test_more_is_read_ahead_while_the_consumer_waits_and_less_when_it_does_not() -> None:
    here = threading.Event()
    reader = Reader(None, 1000)
    reader.__class__ = type("Slow", (Reader,), {"__getitem__": lambda _, place: here.wait()})
    place = Place("", (0, 0), (), 1)
    parts = reader.ahead([place] for _ in range(500))
    threading.Timer(0.01, here.set).start()
    next(parts)
    assert reader.waits == 1
    assert reader.depth == 2 * DEPTH_MIN
    taken: list[int] = []

    def counted() -> Any:
        for part in range(100):
            taken.append(part)
            yield [Place("", (0, 0), (), 300)]

    reader.depth = 50
    next(reader.ahead(counted()))
    assert len(taken) == 4  # of 300 bytes each: the first one that is beyond the bound is the last


def test_reading_needs_neither_torch_nor_the_rest_of_shoal(tmp_path: Path) -> None:
    code = "import sys, shoal.data; print([name for name in sys.modules if name in {'torch', "
    code += "'pyarrow', 'fsspec', 'shoal.train', 'shoal.core', 'shoal.client'}])"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True)
    assert done.stdout == b"[]\n"
