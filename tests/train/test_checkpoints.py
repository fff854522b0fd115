"""Checkpoints are whole or do not count; nothing that was saved is lost; errors are one line."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.train.checkpoints import FORMAT, MANIFEST, PART_BYTES, CheckpointStore, Damage, Manifest
from shoal.train.saver import Summing
from tests.needs import need
from tests.train.gangs import Gang, last_line

need("torch")


def train(directory: Path, world: int = 1, **env: str) -> tuple[list[int], str, str]:
    """One attempt of ten steps; the exit codes, and what member 0 said."""
    told = {"SHOAL_CHECKPOINT_DIR": str(directory), **env}
    with Gang("tiny.py", 20, 4, 2, world=world, env=told) as gang:
        ended = gang.end()
    return [one.code for one in ended], ended[0].out, ended[0].err


def whole(directory: Path) -> list[str]:
    return [one.name for one in CheckpointStore(str(directory)).find() if one.whole]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert train(folder)[0] == [0]
    return folder


@pytest.fixture
def saved(trained: Path, tmp_path: Path) -> Path:
    """A directory with two checkpoints, after steps 8 and 10."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    assert [name.split("-step-")[1].split("-")[0] for name in whole(tmp_path)] == ["10", "8"]
    return tmp_path


def cut(folder: Path) -> None:
    shard = next(folder.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])


def flip(folder: Path) -> None:
    shard = next(folder.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def lose(folder: Path) -> None:
    (folder / ".metadata").unlink()


def garble(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"format": 1, "step"')


def tear(folder: Path) -> None:
    (folder / MANIFEST).unlink()


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (cut, "bytes, not"),
    (flip, "checksum"),
    (lose, ".metadata is missing"),
    (garble, "manifest cannot be read"),
    (tear, ""),
]


@pytest.mark.parametrize(("damage", "why"), DAMAGES, ids=lambda one: getattr(one, "__name__", ""))
def test_a_damaged_or_torn_checkpoint_is_never_used_but_the_one_before_is(
    damage: Callable[[Path], None], why: str, saved: Path
) -> None:
    newest = whole(saved)[0]
    damage(saved / newest)
    codes, out, err = train(saved)
    assert codes == [0], err
    assert "restored 8 after 7" in out
    assert f"used {[2] * 20}" in out
    if why:
        assert f"{newest} is damaged and will not be used" in err and why in err
    assert newest not in whole(saved)


def test_if_all_are_damaged_the_run_ends_in_one_line_and_nothing_is_removed(saved: Path) -> None:
    for name in whole(saved):
        flip(saved / name)
    before = sorted(path for path in saved.rglob("*.distcp"))
    codes, out, err = train(saved)
    assert codes == [1] and "step" not in out
    assert "all 2 checkpoints" in last_line(err) and "Traceback" not in err
    assert sorted(path for path in saved.rglob("*.distcp")) == before


@pytest.mark.parametrize(
    ("env", "why"),
    [({"SEED": "5"}, "seed 5 is not the seed 0"), ({"WIDTH": "9"}, "does not fit the state")],
)
def test_what_does_not_fit_the_checkpoint_ends_in_one_line(
    env: dict[str, str], why: str, saved: Path
) -> None:
    names = whole(saved)
    codes, _, err = train(saved, 1, **env)
    assert codes == [1] and "Traceback" not in err
    assert why in last_line(err)
    assert whole(saved) == names


def test_a_disk_that_takes_no_more_ends_every_member_in_one_line_and_loses_nothing(
    tmp_path: Path,
) -> None:
    assert train(tmp_path, world=2, DIE_AT="6")[0] == [9, 9]
    names, folders = whole(tmp_path), set(tmp_path.iterdir())
    codes, out, err = train(tmp_path, world=2, FILE_BYTES_MAX="8000")
    assert codes == [1, 1] and "Traceback" not in err
    assert f"cannot save into {tmp_path}: File too large" in last_line(err)
    assert "step 9" in out, "only the last save has to be there"
    assert whole(tmp_path) == names
    assert set(tmp_path.iterdir()) == folders, "what was half written is gone"
    codes, out, _ = train(tmp_path, world=2)
    assert codes == [0, 0] and f"used {[2] * 20}" in out


def test_a_disk_that_is_full_for_a_while_costs_the_run_some_saves_and_nothing_else(
    tmp_path: Path,
) -> None:
    codes, out, err = train(tmp_path, world=2, FILE_BYTES_MAX="8000", LARGER_FROM="5")
    assert codes == [0, 0], err
    assert f"used {[2] * 20}" in out
    assert f"step 2 is not saved, and the run goes on: cannot save into {tmp_path}" in err
    assert [name.split("-step-")[1].split("-")[0] for name in whole(tmp_path)] == ["10", "8"]
    assert len(list(tmp_path.iterdir())) == 2, "what was half written is gone"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_is_not_writable_is_told_at_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    codes, _, err = train(tmp_path)
    assert codes == [1]
    assert f"checkpoint directory {tmp_path} cannot be written" in last_line(err)


@pytest.mark.outside("gloo may abort a process whose peer has left")
def test_a_directory_that_is_a_file_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    codes, out, err = train(tmp_path / "file", world=2)
    # Each ends with 1, or is aborted by gloo when its peer has left before it.
    assert set(codes) <= {1, -6} and "step" not in out and "Traceback" not in err
    own = [line for line in err.splitlines() if not line.startswith("terminate called")]  # gloo's
    assert "cannot be written" in own[-1]


def test_who_does_not_restore_may_not_write_over_what_is_there(saved: Path) -> None:
    names = whole(saved)
    codes, _, err = train(saved, FORGET="1")
    assert codes == [1]
    assert "call ctx.restore(state) before the first ctx.save(state)" in last_line(err)
    assert whole(saved) == names


def test_a_batch_smaller_than_the_gang_ends_in_one_line(tmp_path: Path) -> None:
    with Gang("tiny.py", 20, 2, 1, world=3, env={"SHOAL_CHECKPOINT_DIR": str(tmp_path)}) as gang:
        ended = gang.end()
    assert [one.code for one in ended] == [1, 1, 1]
    assert all("batch_size of at least 3, or at most 2 members" in one.err for one in ended)
    assert not any("Traceback" in one.err for one in ended)


# -- the store -----------------------------------------------------------------------------


def test_the_newest_are_kept_and_what_may_still_be_written_is_left_alone(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    names = []
    for step in (10, 20, 15, 30, 40):  # 15: some steps were done again
        names.append(store.new_name(step))
        (tmp_path / names[-1]).mkdir()
        if step not in (20, 40):  # those are torn
            manifest = Manifest(step=step, position=0, seed=0, world=1, files={})
            store.write_manifest(names[-1], manifest)
    (tmp_path / "notes.txt").write_text("not ours")
    store.prune(2)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {names[2], names[3], names[4], "notes.txt"}
    assert [one.step for one in store.find() if one.whole] == [30, 15]
    assert store.manifest(names[3]).format == FORMAT


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, 2 * PART_BYTES + 7])
def test_a_sum_is_that_of_the_parts_and_every_part_counts(size: int, tmp_path: Path) -> None:
    data = random.Random(size).randbytes(size)
    path = tmp_path / "one" / "shard"
    path.parent.mkdir()
    with path.open("wb") as raw:
        summing = Summing(raw)
        for start in range(0, size, 3_000_001):
            summing.write(data[start : start + 3_000_001])
    store, expected = CheckpointStore(str(tmp_path)), summing.sum()
    store.verify("one", {"shard": expected})
    assert (expected.size, path.read_bytes()) == (size, data)
    for start in range(0, size, PART_BYTES):
        spoilt = bytearray(data)
        spoilt[start] ^= 1
        path.write_bytes(spoilt)
        with pytest.raises(Damage, match="checksum"):
            store.verify("one", {"shard": expected})
