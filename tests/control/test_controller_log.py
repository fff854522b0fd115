"""The controller's own log does not fill the disk."""

from __future__ import annotations

from pathlib import Path

from shoal.head.controller import bound


def test_a_full_log_becomes_the_one_before_and_writers_go_on(tmp_path: Path) -> None:
    path = tmp_path / "controller.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"x" * 100)
        assert not bound(path, 100)
        writer.write(b"y")
        assert bound(path, 100)
        writer.write(b"new")
    assert path.read_bytes() == b"new"
    assert (tmp_path / "controller.log.1").read_bytes() == b"x" * 100 + b"y"
    assert (tmp_path / "controller.log.1").stat().st_mode & 0o777 == 0o600
    assert not bound(tmp_path / "gone", 1)
