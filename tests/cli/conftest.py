"""Calling the command line in this process, and a real cluster for those tests that need one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.cli.app import call
from tests.live.cluster import Live, live_cluster


class Result(NamedTuple):
    code: int
    out: str
    err: str


Shoal = Callable[..., Result]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Live]:
    with live_cluster(nodes=4, gpus=8) as live:
        yield live


@pytest.fixture
def shoal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Shoal:
    """The command line with an empty home, unless `home` names one."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)

    def run(*args: str, home: Path | None = None) -> Result:
        monkeypatch.setenv("SHOAL_HOME", str(home or tmp_path / "home"))
        capsys.readouterr()
        code = call(list(args))
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def live_shoal(shoal: Shoal, cluster: Live) -> Shoal:
    """The command line at home in the real cluster."""
    return lambda *args: shoal(*args, home=cluster.home.path)


def assert_one_clear_line(result: Result) -> None:
    """What every refusal looks like."""
    assert result.code != 0
    assert result.out == ""
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("error: ")
    assert lines[0].isprintable()
    assert len(lines[0]) < 500
    assert "should not happen" not in lines[0]
    assert "Traceback" not in lines[0]
