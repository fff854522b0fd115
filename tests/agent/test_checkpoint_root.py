"""The name of a place for checkpoints: the same for all who see it, and for nobody else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal.agent.agent import NAME_FILE, root_name


def test_all_who_look_at_once_read_one_name(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = set(pool.map(root_name, [str(tmp_path / "shared")] * 32))
    assert len(names) == 1 and len(names.pop()) == 32
    assert [path.name for path in (tmp_path / "shared").iterdir()] == [NAME_FILE]


def test_another_place_has_another_name_and_an_address_is_its_own(tmp_path: Path) -> None:
    assert root_name(str(tmp_path / "a")) != root_name(str(tmp_path / "b"))
    assert root_name("s3://bucket/runs") == "s3://bucket/runs"


def test_a_place_that_cannot_be_made_has_no_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert root_name(str(tmp_path / "file" / "below")) == ""
