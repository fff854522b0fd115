"""A folder that is used again is as good as a new one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.machine.spares import Spares
from tests.needs import need_root


@pytest.fixture
def spares(tmp_path: Path) -> Spares:
    os.umask(0o022)
    return Spares(tmp_path / "spare", 0o755, ("output",))


def made(spares: Spares, path: Path) -> int:
    """Its inode."""
    spares.make(str(path))
    handle = os.open(path / "output", os.O_WRONLY | os.O_CREAT, 0o600)
    assert os.fstat(handle).st_size == 0
    os.write(handle, b"hello")
    os.close(handle)
    return path.stat().st_ino


def test_a_folder_without_a_trace_is_the_next_ones(spares: Spares, tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("a", "b", "c"))
    inode = made(spares, first)
    assert spares.take(str(first)) and not first.exists()
    assert made(spares, second) == inode
    assert made(spares, third) != inode
    assert list(second.iterdir()) == [second / "output"]


def test_nothing_of_an_earlier_life_is_used(spares: Spares, tmp_path: Path) -> None:
    made(spares, tmp_path / "a")
    spares.take(str(tmp_path / "a"))
    Spares(tmp_path / "spare", 0o755, ("output",))
    assert not (tmp_path / "spare").exists()


def _link(output: Path) -> None:
    output.unlink()
    output.symlink_to(output.parent.parent / "target")


TRACES: dict[str, Callable[[Path], object]] = {
    "another file": lambda path: (path / "left").touch(),
    "another mode": lambda path: path.chmod(0o777),
    "another owner": lambda path: os.chown(path, 1, 1),
    "a second name": lambda path: os.link(path / "output", path.parent / "second"),
    "an output for all": lambda path: (path / "output").chmod(0o666),
    "no output": lambda path: (path / "output").unlink(),
    "a link": lambda path: _link(path / "output"),
}


@pytest.mark.parametrize("trace", TRACES)
def test_one_with_a_trace_is_not(spares: Spares, tmp_path: Path, trace: str) -> None:
    if trace == "another owner" and os.geteuid():
        return
    folder = tmp_path / "a"
    made(spares, folder)
    (tmp_path / "target").write_text("precious")
    TRACES[trace](folder)
    assert not spares.take(str(folder)) and folder.is_dir()


def test_what_is_there_stays(spares: Spares, tmp_path: Path) -> None:
    made(spares, tmp_path / "a")
    spares.take(str(tmp_path / "a"))
    there = tmp_path / "there"
    there.mkdir()
    (there / "checkpoint").touch()
    spares.make(str(there))
    assert (there / "checkpoint").exists()
    spares.make(str(tmp_path / "new" / "deep"))
    assert (tmp_path / "new" / "deep").is_dir(), "with the folders around it"


MINE, OTHERS = 61_911, 61_912


def tenants(spares: Spares, path: Path, user: int) -> int:
    """As the agent makes it for a member of this user; its inode."""
    spares.make(str(path), user)
    for folder in (path / "scratch", path / "tmp"):
        folder.mkdir(mode=0o700, exist_ok=True)
        os.chown(folder, user, user)
    (path / "tmp" / "home").mkdir(mode=0o700, exist_ok=True)
    (path / "output").touch(0o600)
    os.chown(path / "output", user, user)
    return path.stat().st_ino


def _link_folder(folder: Path) -> None:
    folder.rmdir()
    folder.symlink_to("/etc")


OF_TENANTS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda _: None,
    "a hidden file": lambda path: (path / "scratch" / ".left").touch(),
    "a file in its /tmp": lambda path: (path / "tmp" / "left").touch(),
    "an open folder": lambda path: (path / "scratch").chmod(0o777),
    "a folder of another": lambda path: os.chown(path / "tmp", OTHERS, OTHERS),
    "a folder of ours": lambda path: os.chown(path / "scratch", 0, 0),
    "a link": lambda path: _link_folder(path / "scratch"),
    "its own in the place of ours": lambda path: os.chown(path / "tmp" / "home", MINE, MINE),
    "a link in the place of ours": lambda path: _link_folder(path / "tmp" / "home"),
    "another of ours": lambda path: (path / "tmp" / "other").mkdir(mode=0o700),
    "an output of another": lambda path: os.chown(path / "output", OTHERS, OTHERS),
}


@pytest.mark.parametrize("trace", OF_TENANTS)
def test_a_tenants_folder_is_used_again_by_that_tenant_only(tmp_path: Path, trace: str) -> None:
    need_root()
    os.umask(0o022)
    spares = Spares(tmp_path / "spare", 0o755, ("output",), {"scratch": (), "tmp": ("home",)})
    inode = tenants(spares, tmp_path / "a", MINE)
    OF_TENANTS[trace](tmp_path / "a")
    whole = trace == "nothing"
    assert not spares.take(str(tmp_path / "a"), OTHERS) and not spares.take(str(tmp_path / "a"))
    assert spares.take(str(tmp_path / "a"), MINE) is whole
    assert tenants(spares, tmp_path / "b", OTHERS) != inode
    assert made(spares, tmp_path / "c") != inode
    assert (tenants(spares, tmp_path / "d", MINE) == inode) is whole


def test_a_kept_folder_of_a_tenant_is_used_again_by_that_tenant_only(tmp_path: Path) -> None:
    need_root()
    spares, first = Spares(tmp_path / "spare"), tmp_path / "a"
    spares.make(str(first), MINE)
    os.chown(first, MINE, MINE)
    inode = first.stat().st_ino
    assert not spares.take(str(first), OTHERS) and not spares.take(str(first))
    assert spares.take(str(first), MINE)
    for name, user in (("b", OTHERS), ("c", 0), ("d", MINE)):
        spares.make(str(tmp_path / name), user)
        assert ((tmp_path / name).stat().st_ino == inode) is (user == MINE)
