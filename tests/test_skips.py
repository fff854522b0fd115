"""In CI, a skip that nobody has declared fails the run, and a line names it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import BY_NAME, BY_REASON, is_expected, must_run_everything

ROOT = Path(__file__).parent.parent
SKIPS = """import pytest
def test_of_a_promise():
    pytest.skip("nobody declared this")
def test_of_a_machine():
    pytest.skip({declared!r})
"""


def test_each_test_that_may_be_skipped_exists() -> None:
    for name in BY_NAME:
        path, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / path).read_text(), name
    assert not is_expected("tests/live/test_crash.py::test_no_job_is_lost", "not today")


def test_a_skip_that_nobody_declared_fails_a_run_in_ci(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    if not must_run_everything():
        pytest.skip("only root on Debian has to run everything")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = here\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "test_it.py").write_text(SKIPS.format(declared=BY_REASON[0]))
    paths = os.pathsep.join((str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", paths)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "here/test_it.py::test_of_a_promise: nobody declared this" in done.stdout
    assert "test_of_a_machine" not in done.stdout
