"""A home is our own folder, closed to everybody else, and its token is never empty."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shoal.api.access import Access
from shoal.client import Client, Unreachable
from shoal.control.home import Home
from shoal.control.lifecycle import LifecycleError, bring_up, take_down
from shoal.machine.files import write_private
from tests.cli.conftest import Shoal, assert_one_clear_line

STRANGER = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to own files as another user")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def planted(path: Path) -> Path:
    """A home as somebody else would lay it out, with a token they know."""
    path.mkdir()
    for name, text in (
        ("token", "known"),
        ("controller.json", '{"url": "http://127.0.0.1:1", "pid": 1}'),
        ("cluster.json", '{"nodes": []}'),
    ):
        (path / name).write_text(text)
        os.chown(path / name, STRANGER, STRANGER)
    os.chown(path, STRANGER, STRANGER)
    return path


@as_root
@pytest.mark.parametrize(
    "verb", [["up", "--nodes", "1", "--port", "0"], ["down"], ["ps"], ["leave"], ["page"]]
)
def test_no_verb_uses_a_home_that_somebody_else_made(
    verb: list[str], shoal: Shoal, tmp_path: Path
) -> None:
    home = planted(tmp_path / "try")
    result = shoal(*verb, home=home)
    assert_one_clear_line(result)
    assert f"{home}: belongs to another user (uid {STRANGER})" in result.err
    assert (home / "token").read_text() == "known"
    for act in (
        lambda: Client.at_home(home),
        lambda: bring_up(Home(home), None, lambda _: None),
        lambda: take_down(Home(home), lambda _: None),
    ):
        with pytest.raises((Unreachable, LifecycleError), match="belongs to another user"):
            act()


@as_root
def test_a_strangers_token_in_our_own_home_is_refused(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.path.mkdir(mode=0o777)
    home.token.write_text("known")
    os.chown(home.token, STRANGER, STRANGER)
    with pytest.raises(PermissionError, match="belongs to another user"):
        home.create()
    home.address.write_text('{"url": "http://127.0.0.1:1", "pid": 1}')
    with pytest.raises(Unreachable, match=r"token: belongs to another user"):
        Client.at_home(home.path)


@as_root
def test_a_strangers_link_and_a_strangers_folder_above_are_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(real)
    Home(link).create()  # our own link is our own business
    os.lchown(link, STRANGER, STRANGER)
    with pytest.raises(PermissionError, match="is a link that another user"):
        Home(link).create()
    with pytest.raises(PermissionError, match="is a link that another user"):
        Home(link / "below").create()
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, STRANGER, STRANGER)
    with pytest.raises(PermissionError, match="could replace"):
        Home(theirs / "home").create()
    assert not (theirs / "home").exists()


def test_a_folder_above_that_everybody_may_change_is_refused_unless_it_is_sticky(
    tmp_path: Path,
) -> None:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    with pytest.raises(PermissionError, match="writable for others"):
        Home(above / "home").create()
    above.chmod(0o1777)
    Home(above / "home").create()


def test_an_open_home_of_ours_is_closed_with_all_that_is_in_it(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.path.mkdir()
    home.path.chmod(0o755)
    files = [home.database, home.path / "shoal.db-wal", home.path / "shoal.db-shm", home.ledger]
    for file in files:
        file.write_bytes(b"x")
        file.chmod(0o644)
    home.logs.mkdir()
    home.logs.chmod(0o755)
    home.create()
    assert mode(home.path) == 0o700
    assert [mode(file) for file in files] == [0o600] * 4
    assert [mode(folder) for folder in (home.logs, home.nodes)] == [0o700] * 2
    assert mode(home.token) == 0o600


@pytest.mark.parametrize("verb", [["up", "--nodes", "1", "--port", "0"], ["ps"], ["down"]])
def test_a_folder_in_which_all_users_work_is_left_as_it_is(
    verb: list[str], shoal: Shoal, tmp_path: Path
) -> None:
    """`--home /tmp` as root must not close /tmp to everybody else."""
    home = tmp_path / "all"
    home.mkdir()
    home.chmod(0o1777)
    result = shoal(*verb, home=home)
    assert_one_clear_line(result)
    assert f"{home}: is open to all users; choose a folder in it" in result.err
    assert mode(home) == 0o777


@pytest.mark.parametrize("empty", ["", "\n", "  \n"])
def test_an_empty_token_is_no_token(empty: str, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.path.mkdir(mode=0o700)
    home.token.write_text(empty)
    home.address.write_text('{"url": "http://127.0.0.1:1", "pid": 1}')
    with pytest.raises(Unreachable, match="token is empty"):
        Client.at_home(home.path)
    home.create()
    assert len(home.read_token()) >= 32
    with pytest.raises(ValueError, match="empty token"):
        Access(empty.strip(), lambda: 0)


def test_a_token_that_is_a_link_is_refused(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.path.mkdir(mode=0o700)
    (tmp_path / "elsewhere").write_text("known")
    home.token.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="is a link"):
        home.create()


def test_a_disk_that_takes_a_part_of_a_file_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cluster.json"
    write_private(path, b"before")
    taken: list[int] = []

    def nearly_full(handle: int, data: bytes) -> int:
        if taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken.append(real(handle, bytes(data[:3])))
        return taken[0]

    real = os.write
    monkeypatch.setattr("shoal.machine.files.os.write", nearly_full)
    with pytest.raises(OSError, match="No space left"):
        write_private(path, b"after this")
    monkeypatch.undo()
    assert path.read_bytes() == b"before"
    assert [one.name for one in tmp_path.iterdir()] == ["cluster.json"]
