"""Saved work that comes before its job: whole or not at all, in its place, and within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import msgspec
import pytest

from shoal.control.handed_work import LEFT_MS, HandedWork, NotTaken
from shoal.control.outputs import HANDED, Limits, OutputStore
from shoal.model.job import MemberRef
from shoal.model.kept import FilePart, FileWanted, KeptFile, Kind, Snapshot

MARK, OTHER = "0123abcd.j1.2", "0123abcd.j2.2"
BOUND = 1_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OutputStore]:
    made = OutputStore(tmp_path / "outputs", Limits(job=BOUND, total=10_000, spare=0))
    made.root.mkdir(exist_ok=True)
    yield made
    made.close()


@pytest.fixture
def work(store: OutputStore) -> HandedWork:
    return HandedWork(store)


def part(path: str, data: bytes, offset: int = 0, size: int = 0, modified_ms: int = 7) -> FilePart:
    size = size or offset + len(data)
    return FilePart(
        path=path, offset=offset, size=size, modified_ms=modified_ms, version="", data=data
    )


def sent(work: HandedWork, files: dict[str, bytes], mark: str = MARK) -> None:
    for path, data in files.items():
        assert work.write("east", mark, part(path, data), BOUND) == len(data)
    kept = [KeptFile(path, len(data), 7) for path, data in files.items()]
    work.settle("east", mark, kept)


def adopt(store: OutputStore, work: HandedWork, job: str = "j9", mark: str = MARK) -> str:
    said, done = [""], Event()

    def answer(problem: str) -> None:
        said[0] = problem
        done.set()

    store.adopt(job, work.folder("east", mark), answer)
    assert done.wait(60)
    return said[0]


def read(store: OutputStore, path: str, job: str = "j9") -> bytes:
    ref = MemberRef(job, 1, 0)
    return store.sent(FileWanted(ref, Kind.CHECKPOINT, path)).data


def test_a_job_begins_with_what_came_before_it(store: OutputStore, work: HandedWork) -> None:
    sent(work, {"a": b"one", "deep/b": b"two"})
    assert work.waits("east", MARK) and not work.waits("west", MARK)
    assert adopt(store, work) == ""
    assert not work.waits("east", MARK)
    listed = store.sent(FileWanted(MemberRef("j9", 1, 0), Kind.CHECKPOINT))
    assert {file.path: file.size for file in listed.files} == {"a": 3, "deep/b": 3}
    assert (read(store, "a"), read(store, "deep/b")) == (b"one", b"two")
    assert adopt(store, work) == "", "again, it does nothing"
    assert read(store, "a") == b"one"


def test_what_the_job_has_saved_here_is_not_replaced(store: OutputStore, work: HandedWork) -> None:
    sent(work, {"a": b"old"})
    assert adopt(store, work) == ""
    settled = Event()
    snapshot = Snapshot(MemberRef("j9", 1, 0), 1, (KeptFile("a", 3, 7),))
    store.settle(snapshot, "n1", BOUND, lambda _: settled.set(), lambda _: None)
    assert settled.wait(60)
    sent(work, {"a": b"late"}, OTHER)
    assert adopt(store, work, mark=OTHER) == ""
    assert read(store, "a") == b"old"
    assert not work.waits("east", OTHER)


@pytest.mark.parametrize("moved", [False, True])
def test_a_head_that_dies_while_a_job_adopts_its_work(
    store: OutputStore, work: HandedWork, *, moved: bool
) -> None:
    sent(work, {"a": b"one"})
    place = store.root / "j9/snapshots/1"
    place.mkdir(parents=True)
    (place / "left").write_bytes(b"of a transfer before")
    if moved:  # and the list of the job's files was not written
        (store.root / HANDED / "east" / MARK / "files" / "a").rename(place / "a")
        (store.root / HANDED / "east" / MARK / "files").rmdir()
    assert work.waits("east", MARK)
    assert adopt(store, work) == ""
    assert read(store, "a") == b"one"


def test_a_transfer_goes_on_where_it_was(work: HandedWork) -> None:
    assert work.write("east", MARK, part("a", b"12345", size=10), BOUND) == 5
    assert [file.size for file in work.come("east", MARK)] == [5]
    assert work.write("east", MARK, part("a", b"x", 7, size=10), BOUND) == 5, "what is here"
    with pytest.raises(NotTaken, match="not all of it has come: a"):
        work.settle("east", MARK, [KeptFile("a", 10, 7)])
    assert not work.waits("east", MARK)
    assert work.write("east", MARK, part("a", b"67890", 5), BOUND) == 10
    work.settle("east", MARK, [KeptFile("a", 10, 7)])
    assert work.waits("east", MARK)


def test_what_was_adopted_does_not_come_twice(store: OutputStore, work: HandedWork) -> None:
    """The answer to the submission was lost, so home asks what is here, and goes on from that."""
    sent(work, {"a": b"one"})
    assert adopt(store, work) == ""
    assert work.come("east", MARK) == [KeptFile("a", 3, 7)]
    work.settle("east", MARK, [KeptFile("a", 3, 7)])
    assert not work.waits("east", MARK)
    assert adopt(store, work) == "" and read(store, "a") == b"one"


def test_a_part_that_comes_late_again_takes_nothing_away(work: HandedWork) -> None:
    work.write("east", MARK, part("a", b"12345", size=10), BOUND)
    work.write("east", MARK, part("a", b"67890", 5), BOUND)
    work.settle("east", MARK, [KeptFile("a", 10, 7)])
    assert work.write("east", MARK, part("a", b"12345", size=10), BOUND) == 10
    assert [file.size for file in work.come("east", MARK)] == [10]


def test_parts_at_the_same_moment(store: OutputStore, work: HandedWork) -> None:
    """Each four times: home has asked again because an answer was late."""
    data = {f"f{number}": bytes([number]) * 40 for number in range(8)}
    parts = [
        part(path, body[at : at + 10], at, size=40)
        for path, body in data.items()
        for at in range(0, 40, 10)
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: work.write("east", MARK, one, BOUND), parts * 4))
    for path, body in data.items():  # what came before the part ahead of it was not taken
        for at in range(0, 40, 10):
            work.write("east", MARK, part(path, body[at : at + 10], at, size=40), BOUND)
    work.settle("east", MARK, [KeptFile(path, 40, 7) for path in data])
    assert adopt(store, work) == ""
    assert {path: read(store, path) for path in data} == data


def test_a_newer_version_of_a_file_begins_anew(work: HandedWork) -> None:
    work.write("east", MARK, part("a", b"12345", size=10), BOUND)
    assert work.write("east", MARK, part("a", b"9", 5, size=10, modified_ms=8), BOUND) == 0
    assert work.write("east", MARK, part("a", b"new", modified_ms=8), BOUND) == 3
    assert work.come("east", MARK) == [KeptFile("a", 3, 8)]


def test_files_that_home_has_no_more_do_not_count(store: OutputStore, work: HandedWork) -> None:
    sent(work, {"a": b"one"})
    work.write("east", MARK, part("b", b"two"), BOUND)
    work.settle("east", MARK, [KeptFile("b", 3, 7)])
    assert adopt(store, work) == ""
    assert read(store, "b") == b"two" and not read(store, "a")


@pytest.mark.parametrize("path", ["../../x", "/etc/x", "a/../../x", "", ".", "a\n", "x" * 2_000])
def test_paths_that_lead_elsewhere(store: OutputStore, work: HandedWork, path: str) -> None:
    with pytest.raises(NotTaken):
        work.write("east", MARK, part(path, b"x"), BOUND)
    assert [one.name for one in store.root.rglob("*") if one.is_file()] == []


@pytest.mark.parametrize("mark", ["", "..", "j1", "../../east", "0123abcd.v3", MARK + "/x"])
def test_marks_that_are_none(work: HandedWork, mark: str) -> None:
    for ask in (
        lambda: work.come("east", mark),
        lambda: work.write("east", mark, part("a", b"x"), BOUND),
        lambda: work.settle("east", mark, [KeptFile("a", 1, 7)]),
    ):
        with pytest.raises(NotTaken, match="is no hand-over"):
            ask()


def test_no_more_than_may_travel(work: HandedWork) -> None:
    work.write("east", MARK, part("a", b"x" * 600), BOUND)
    with pytest.raises(NotTaken, match="may travel"):
        work.write("east", MARK, part("b", b"x" * 500), BOUND)
    work.write("east", MARK, part("a", b"x" * 900), BOUND)  # in the place of the first
    with pytest.raises(NotTaken, match="cannot be"):
        work.write("east", MARK, part("c", b"xx", size=1), BOUND)
    with pytest.raises(NotTaken, match="cannot be"):
        work.write("east", MARK, part("c", b"x", modified_ms=-1), BOUND)


def test_a_full_disk_is_said(store: OutputStore, work: HandedWork) -> None:
    store.total = store.limits.total
    with pytest.raises(NotTaken, match="no room"):
        work.write("east", MARK, part("a", b"x"), BOUND)
    assert not (store.root / HANDED).exists(), "and nothing is left of it"


def test_a_link_in_its_place_is_not_followed(store: OutputStore, work: HandedWork) -> None:
    work.write("east", MARK, part("a", b"x"), BOUND)
    (store.root / "secret").write_bytes(b"ours")
    (store.root / HANDED / "east" / MARK / "files" / "b").symlink_to(store.root / "secret")
    with pytest.raises(OSError, match="symbolic"):
        work.write("east", MARK, part("b", b"x"), BOUND)
    assert (store.root / "secret").read_bytes() == b"ours"


def test_work_whose_job_never_comes_goes(store: OutputStore, work: HandedWork) -> None:
    sent(work, {"a": b"one"})
    sent(work, {"a": b"two"}, OTHER)
    at_ms = int(work.folder("east", MARK).stat().st_mtime * 1000)
    work.sweep(at_ms + LEFT_MS - 1_000)
    assert work.waits("east", MARK) and work.waits("east", OTHER)
    work.sweep(at_ms + LEFT_MS + 60_000)
    assert not work.waits("east", MARK) and not work.waits("east", OTHER)


def test_a_damaged_list_is_a_problem_and_not_an_end(store: OutputStore, work: HandedWork) -> None:
    sent(work, {"a": b"one"})
    (work.folder("east", MARK) / "whole.json").write_bytes(b"{")
    assert "cannot keep the work" in adopt(store, work)
    sent(work, {"a": b"one"})
    assert adopt(store, work) == "" and read(store, "a") == b"one"
    assert msgspec.json.decode((store.root / "j9" / "index.json").read_bytes())["number"] == 1
