"""Bytecode of our own is kept where there would be none, and only there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

PROGRAM = """
import sys
from pathlib import Path
from shoal.machine.bytecode import keep_bytecode
sys.dont_write_bytecode &= NOT_DENIED
keep_bytecode(Path(sys.argv[1]))
import shoal.cli.first_page
print(shoal.cli.first_page.__cached__)
"""
ALLOWED = "NOT_DENIED = True\n"
# To root, everything is allowed.
DENIED = """
import os, sys
os.access = lambda *_: False
sys.dont_write_bytecode, NOT_DENIED = True, False
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """As it comes without bytecode, or a part of it."""
    source = Path(shoal.__file__).parent
    for name in ("", "machine", "cli"):
        (tmp_path / "code/shoal" / name).mkdir(parents=True)
        shutil.copy(source / name / "__init__.py", tmp_path / "code/shoal" / name)
    for name in ("machine/bytecode.py", "cli/first_page.py"):
        shutil.copy(source / name, tmp_path / "code/shoal" / name)
    return tmp_path / "code"


def cached(code: Path, first: str = ALLOWED, **variables: str) -> Path:
    """Where the process looks for bytecode, and has written it if it may."""
    env = {"PYTHONPATH": str(code), **variables}
    words = [sys.executable, "-c", first + PROGRAM, str(code.parent / "home")]
    run = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return Path(run.stdout.strip())


def test_it_is_kept_in_the_home_if_none_may_be_written_beside_the_code(code: Path) -> None:
    before = cached(code, PYTHONDONTWRITEBYTECODE="1")
    assert before.is_file()
    assert before.is_relative_to(code.parent / "home/bytecode")
    assert not list(code.rglob("*.pyc"))
    written = before.stat().st_mtime_ns
    assert cached(code, PYTHONDONTWRITEBYTECODE="1") == before
    assert before.stat().st_mtime_ns == written, "it is read, not written again"


def test_it_is_kept_in_the_home_if_the_code_is_in_a_folder_of_another_user(code: Path) -> None:
    assert cached(code, DENIED).is_relative_to(code.parent / "home/bytecode")


def test_it_is_beside_the_code_if_it_may_be_or_is(code: Path) -> None:
    beside = cached(code)
    assert beside.is_file()
    assert beside.is_relative_to(code)
    assert cached(code, PYTHONDONTWRITEBYTECODE="1") == beside
    assert not (code.parent / "home").exists()
