"""The head's store of kept files: whole under their names, within bounds, and in their place."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from shoal.control.filedesk import copied_of
from shoal.control.output_room import KEPT_MS, OutputRoom
from shoal.control.outputs import PARTS_MAX, Kept, Limits, OutputStore
from shoal.model.job import Job, JobSpec, MemberRef
from shoal.model.kept import FileAnswer, FilePiece, FileWanted, KeptFile, Kind, Snapshot

REF = MemberRef("j1", 1, 0)
LIMITS = Limits(job=100, total=250, spare=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OutputStore]:
    made = OutputStore(tmp_path / "outputs", LIMITS)
    yield made
    made.close()


def put(
    store: OutputStore,
    path: str,
    data: bytes,
    *,
    ref: MemberRef = REF,
    kind: Kind = Kind.OUTPUT,
    over: bool = True,
    node: str = "n1",
    pieces: int = 1,
    modified_ms: int = 5,
) -> FileAnswer:
    answers: list[FileAnswer] = []
    done = threading.Event()
    cut = max(1, -(-len(data) // pieces))
    for start in range(0, max(1, len(data)), cut):
        part = data[start : start + cut]
        piece = FilePiece(ref, kind, path, hash(path), len(data), start, part, modified_ms)

        def answer(said: FileAnswer) -> None:
            answers.append(said)
            done.set()

        done.clear()
        store.take(piece, node, over=over, answer=answer)
        assert done.wait(120)
    return answers[-1]


def settle(
    store: OutputStore,
    files: dict[str, int],
    ref: MemberRef,
    node: str,
    modified_ms: dict[str, int] | None = None,
) -> FileAnswer:
    answers: list[FileAnswer] = []
    done = threading.Event()
    times = modified_ms or {}
    listed = tuple(KeptFile(path, size, times.get(path, 5)) for path, size in files.items())

    def answer(said: FileAnswer) -> None:
        answers.append(said)
        done.set()

    store.settle(Snapshot(ref, 1, listed), node, 1_000, answer, lambda _: None)
    assert done.wait(120)
    return answers[0]


def names(store: OutputStore, job: str = "j1", kind: Kind = Kind.OUTPUT) -> list[str]:
    return [file.path for file in store.listing(job, kind)]


def test_a_file_has_its_name_when_its_last_piece_has_come(store: OutputStore) -> None:
    first = FilePiece(REF, Kind.OUTPUT, "a/b", 9, 6, 0, b"abc", 5)
    got: list[FileAnswer] = []
    store.take(first, "n1", over=True, answer=got.append)
    assert put(store, "other", b"x").kept == 1  # so the first piece has been written
    assert names(store) == ["other"]
    lost = msgspec.structs.replace(first, offset=4, data=b"ef")
    store.take(lost, "n1", over=True, answer=got.append)
    assert put(store, "a/b", b"whole", pieces=3).kept == 5
    assert got[1].again, "a piece that leaves a gap makes the copy begin again"
    assert names(store) == ["a/b", "other"]


def test_copies_that_never_end_take_a_bounded_place(store: OutputStore) -> None:
    for serial in range(200):
        path = f"f{serial % 150}"
        piece = FilePiece(REF, Kind.OUTPUT, path, serial, 6, 0, b"abc", 5)
        store.take(piece, "n1", over=True, answer=lambda _: None)
    assert put(store, "whole", b"x").kept == 1
    assert len(list((store.root / ".parts").rglob("*.*"))) < PARTS_MAX
    assert names(store) == ["whole"]


def test_a_head_that_was_replaced_and_does_not_know_it_changes_no_file(
    store: OutputStore, tmp_path: Path
) -> None:
    """It was stopped between two pieces, say, and continues."""
    assert put(store, "kept", b"first").kept == 5
    assert put(store, "saved", b"first", kind=Kind.CHECKPOINT).kept == 5
    assert settle(store, {"saved": 5}, REF, "n1").problem == ""
    half = FilePiece(REF, Kind.OUTPUT, "half", hash("half"), 6, 0, b"abc", 5)
    got: list[FileAnswer] = []
    store.take(half, "n1", over=True, answer=got.append)
    assert put(store, "saved", b"stale!", kind=Kind.CHECKPOINT).kept == 6
    after = OutputStore(store.root, LIMITS)
    assert put(after, "half", b"ABC", pieces=1).kept == 3  # the node begins again
    last = msgspec.structs.replace(half, offset=3, data=b"def")
    store.take(last, "n1", over=True, answer=got.append)
    gone = msgspec.structs.replace(half, path="kept", size=-1, data=b"")
    store.take(gone, "n1", over=True, answer=got.append)
    refused = settle(store, {"saved": 6}, REF, "n1")
    store.drop("j1")
    assert "another head keeps these files" in put(store, "new", b"x").problem
    assert "another head keeps these files" in refused.problem
    assert [said.problem for said in got].count("") == 1, got
    assert names(after) == ["half", "kept"]
    assert (after.output("j1") / "half").read_bytes() == b"ABC"
    assert after.sent(FileWanted(REF, Kind.CHECKPOINT, "saved")).data == b"first"
    assert settle(after, {"saved": 6}, REF, "n1").problem == "", "what was staged is not lost"
    after.close()


@pytest.mark.parametrize(
    "path", ["", "..", "../x", "/etc/x", "a//b", "a/./b", "a\nb", "\x1b[2J", "x" * 300, "a/" * 40]
)
def test_names_that_lead_elsewhere_or_garble_a_terminal_are_refused(
    store: OutputStore, path: str
) -> None:
    said = put(store, path, b"x")
    assert said.problem and not said.again
    assert names(store) == []
    with pytest.raises(FileNotFoundError):
        store.open("j1", path)
    with pytest.raises(FileNotFoundError):
        store.open("../j1", "x")


def test_a_job_keeps_what_fits_and_says_what_does_not(store: OutputStore) -> None:
    assert not put(store, "one", bytes(80)).problem
    assert "a job may keep" in put(store, "two", bytes(30)).problem
    assert not put(store, "one", bytes(90)).problem, "the same file again counts once"
    assert names(store) == ["one"]
    assert any(note.startswith("two: ") for note in store.notes("j1"))
    store.total = 240
    assert put(store, "one", bytes(20), ref=MemberRef("j2", 1, 0)).again, "until there is room"


def test_what_an_earlier_attempt_writes_replaces_nothing(store: OutputStore) -> None:
    put(store, "a", b"new")
    assert "later attempt" in put(store, "a", b"old", over=False).problem
    assert not put(store, "b", b"old", over=False).problem


def test_a_snapshot_counts_as_a_whole_and_replaces_those_of_earlier_attempts(
    store: OutputStore,
) -> None:
    kind = Kind.CHECKPOINT
    assert settle(store, {"s": 1}, REF, "n1").again, "a file that has not come is asked for again"
    put(store, "s1", b"one", kind=kind)
    assert names(store, kind=kind) == [], "copied files do not count before their snapshot"
    put(store, "shard", b"two", kind=kind, node="n2")
    assert not settle(store, {"s1": 3}, REF, "n1").problem
    assert not settle(store, {"shard": 3}, MemberRef("j1", 1, 1), "n2").problem
    assert names(store, kind=kind) == ["s1", "shard"], "of both nodes"
    later = MemberRef("j1", 2, 0)
    put(store, "s2", b"next", kind=kind, ref=later, node="n3")
    assert not settle(store, {"s1": 3, "s2": 4}, later, "n3").problem
    assert names(store, kind=kind) == ["s1", "s2"]
    assert "a later attempt" in settle(store, {"s1": 3}, REF, "n1").problem
    sent = store.sent(FileWanted(later, kind))
    assert (sent.attempt, [file.path for file in sent.files]) == (2, ["s1", "s2"])
    assert store.sent(FileWanted(later, kind, "s2", 1)).data == b"ext"
    assert store.sent(FileWanted(later, kind, "../../x")).problem


def test_a_snapshot_replaces_nothing_while_what_counts_cannot_be_read(
    store: OutputStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a disk or a mount that fails for a moment, nobody believes that nothing was kept."""
    kind = Kind.CHECKPOINT
    for node, path in (("n1", "s1"), ("n2", "shard")):
        put(store, path, b"one", kind=kind, node=node)
        assert not settle(store, {path: 3}, REF, node).problem
    put(store, "s2", b"two", kind=kind)
    fails = OSError(errno.EIO, os.strerror(errno.EIO))
    with monkeypatch.context() as broken:
        broken.setattr(Path, "stat", Mock(side_effect=fails))
        with pytest.raises(OSError, match="Input/output error"):
            store.index("j1")
        said = settle(store, {"s2": 3}, REF, "n1")
    assert said.again and "Input/output error" in said.problem
    assert names(store, kind=kind) == ["s1", "shard"]
    assert not settle(store, {"s2": 3}, REF, "n1").problem
    assert names(store, kind=kind) == ["s2", "shard"]


def test_the_step_of_a_whole_checkpoint_is_known_from_its_name() -> None:
    files = ["checkpoint-000002-step-40-00ff/manifest.json", "checkpoint-000003-step-60-00ff/x"]
    kept = Kept(REF, tuple(KeptFile(path, 1, 7) for path in files))
    assert copied_of(kept).step == 40, "one without a manifest is not whole"


def test_files_of_finished_jobs_go_by_age_and_size_and_those_of_live_ones_stay(
    store: OutputStore,
) -> None:
    ended = {"j1": 1_000, "j2": 2_000, "j3": 3_000}
    for job in (*ended, "j4"):
        put(store, "f", bytes(80), ref=MemberRef(job, 1, 0))

    def record(job: str) -> Job | None:
        at = ended.get(job)
        spec = JobSpec(command=("x",))
        return Job(id=job, number=1, spec=spec, finished_ms=at) if at is not None else None

    room = OutputRoom(store, record)
    sizes = room.look({"j4": "default"}, 5_000)
    put(store, "x", b"")  # the thread has removed them by now
    left = [job for job in (*ended, "j4") if names(store, job) and names(store, job) != ["x"]]
    assert (sizes.removed, left) == (2, ["j3", "j4"]), "320 of 250 bytes: the oldest go"
    assert room.look({"j4": "default"}, KEPT_MS + 3_001).removed >= 1
    put(store, "x", b"")
    assert names(store, "j3") == []
    assert names(store, "j4") == ["f"]


def test_outputs_of_one_tenant_do_not_push_out_those_of_others(store: OutputStore) -> None:
    for number in range(1, 6):
        put(store, "f", bytes(40), ref=MemberRef(f"j{number}", 1, 0))
    for number in range(6, 9):
        put(store, "f", bytes(40), ref=MemberRef(f"j{number}", 1, 0))

    def record(job: str) -> Job | None:
        number = int(job[1:])
        spec = JobSpec(command=("x",), tenant="blue" if number == 1 else "red")
        return Job(id=job, number=number, spec=spec, finished_ms=number) if number < 6 else None

    room = OutputRoom(store, record)
    live = {"j6": "red", "j7": "red", "j8": "red", "j9": "blue"}
    sizes = room.look(live, 100)
    put(store, "x", b"", ref=MemberRef("j9", 1, 0))  # the thread has removed them by now
    assert sizes.removed == 3
    assert names(store, "j1") == ["f"], "the oldest of all is another tenant's"
    assert [n for n in range(2, 6) if names(store, f"j{n}")] == [5]
    assert store.crowded == frozenset()
    for number in (6, 7, 8):
        put(store, "g", bytes(20), ref=MemberRef(f"j{number}", 1, 0))
    room.look(live, 100)
    assert store.crowded == {"j6", "j7", "j8"}, "its live jobs alone take its share"
    put(store, "h", b"1", ref=MemberRef("j6", 1, 0))
    put(store, "h", b"1", ref=MemberRef("j9", 1, 0))
    assert "h" not in names(store, "j6")
    assert "h" in names(store, "j9")
