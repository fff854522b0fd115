"""The log store stays within its size, and takes from who has most; never from live jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.control.log_room import LogRoom, _aims
from shoal.control.logs import CUT_BYTES, REMOVED, LogStore
from shoal.model.job import MemberRef
from shoal.model.report import LogChunk

BLOCK = 4096


class Shelf:
    def __init__(self, path: Path, most: int, tenant_most: int) -> None:
        self.logs = LogStore(path / "logs")
        self.tenants: dict[str, str] = {}
        self.room = LogRoom(
            self.logs, lambda job: self.tenants.get(job, ""), most * BLOCK, tenant_most * BLOCK
        )

    def wrote(self, number: int, tenant: str, blocks: int) -> None:
        job = f"j{number}"
        self.tenants[job] = tenant
        self.logs.append(LogChunk(MemberRef(job, 1, 0), 0, b"x" * (blocks * BLOCK)))
        for times in (self.logs.root / job).glob("*.times"):  # a block for each log, too
            times.unlink()

    @property
    def left(self) -> list[str]:
        kept = [path.name for path in self.logs.root.iterdir() if path.name != REMOVED]
        return sorted(kept, key=lambda name: int(name[1:]))


def test_nothing_is_removed_while_there_is_room(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 10, 5)
    for number in range(1, 6):
        shelf.wrote(number, "red", 1)
    sizes = shelf.room.look({}, 100)
    assert (sizes.removed, sizes.tenants) == (0, {"red": 5 * BLOCK})
    assert LogRoom(LogStore(tmp_path / "none"), str).look({}, 1).total == 0


def test_a_tenant_over_its_part_loses_its_oldest_and_others_lose_none(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 100, 10)
    shelf.wrote(1, "blue", 3)
    for number in range(2, 14):
        shelf.wrote(number, "red", 1)
    sizes = shelf.room.look({}, 100)
    assert sizes.tenants == {"blue": 3 * BLOCK, "red": 9 * BLOCK}
    assert shelf.left == ["j1", *(f"j{n}" for n in range(5, 14))]
    assert list((shelf.logs.root / REMOVED).iterdir()) == []


def test_when_all_is_full_the_one_who_has_most_gives(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 20, 16)
    for number in range(1, 7):
        shelf.wrote(number, "blue", 1)
    for number in range(7, 22):
        shelf.wrote(number, "red", 1)
    assert shelf.room.look({}, 100).total <= 18 * BLOCK
    assert shelf.left[:6] == [f"j{n}" for n in range(1, 7)], "blue is older but has less"
    assert shelf.left[6] == "j10"


def test_live_jobs_keep_their_logs_but_a_greedy_tenants_are_kept_short(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 100, 10)
    shelf.wrote(1, "red", 12)
    shelf.wrote(2, "red", 2)
    shelf.wrote(3, "blue", 1)
    sizes = shelf.room.look({"j1": "red", "j3": "blue"}, 100)
    assert shelf.left == ["j1", "j3"]
    assert sizes.short == frozenset({"j1"})
    ref = MemberRef("j1", 1, 0)
    end = 12 * BLOCK
    for _ in range(5):
        shelf.logs.append(LogChunk(ref, end, b"y" * CUT_BYTES))
        end += CUT_BYTES
    path = shelf.logs.folder("j1") / "1.0.log"
    assert path.stat().st_size == end
    assert path.stat().st_blocks * 512 <= 3 * CUT_BYTES
    assert b"bytes of output are not kept here" in shelf.logs.read(ref, CUT_BYTES).data
    assert shelf.room.look({"j3": "blue"}, 100).short == frozenset()


def test_jobs_that_came_since_the_look_began_are_left_alone(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 4, 4)
    shelf.wrote(5, "red", 3)
    shelf.wrote(6, "red", 3)
    assert shelf.room.look({}, 6).removed == 1
    assert shelf.left == ["j6"]


def test_a_removal_that_was_interrupted_is_finished_by_the_next_controller(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 4, 4)
    shelf.wrote(5, "red", 3)
    (shelf.logs.root / REMOVED).mkdir()
    shelf.logs.folder("j5").rename(shelf.logs.root / REMOVED / "j5")  # it died here
    again = LogStore(shelf.logs.root)
    assert not (again.root / REMOVED).exists()
    assert again.read(MemberRef("j5", 1, 0), 0).data == b""


@pytest.mark.parametrize(
    ("sizes", "excess", "kept"),
    [
        ({"a": 50, "b": 30, "c": 10}, 20, {"a": 30}),
        ({"a": 50, "b": 30, "c": 10}, 40, {"a": 20, "b": 20}),
        ({"a": 50, "b": 30, "c": 10}, 90, {"a": 0, "b": 0, "c": 0}),
        ({"a": 120, "b": 30}, 0, {"a": 90}),
        ({}, 0, {}),
    ],
)
def test_who_has_most_gives_first(sizes: dict[str, int], excess: int, kept: dict[str, int]) -> None:
    assert _aims(sizes, 100, 90, excess) == kept
