"""The scripts that are run on hosts do what they say, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from io import BytesIO
from pathlib import Path

import msgspec
import pytest

import shoal
from shoal.hosts import bring
from shoal.hosts.spec import Receipt, Software

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def sh(home: Path, script: str, *arguments: str, stdin: bytes = b"") -> str:
    env = {**os.environ, "SHOAL_HOME": str(home)}
    argv = ["sh", "-c", script, "sh", *arguments]
    return subprocess.run(
        argv, env=env, input=stdin, capture_output=True, check=True
    ).stdout.decode()


def test_a_look_at_a_host_that_has_nothing_yet(tmp_path: Path) -> None:
    facts = bring.read_facts(sh(tmp_path / "not" / "yet", bring.LOOK, VERSION, sys.executable))
    assert (facts.python, facts.version) == (sys.executable, VERSION)
    assert facts.home == str(tmp_path / "not" / "yet")
    assert facts.shoal and facts.free_mb > 0 and facts.receipt is None
    other = bring.read_facts(sh(tmp_path, bring.LOOK, "9.99", ""))
    assert other.python and tuple(map(int, other.version.split("."))) >= (3, 11)


def test_an_interpreter_that_is_too_old_is_named_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "bin" / "python3"
    old.parent.mkdir()
    old.write_text('#!/bin/sh\ncase "$2" in *print*) echo 3.9 ;; *) exit 1 ;; esac\n')
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old.parent}:/usr/bin:/bin")
    facts = bring.read_facts(sh(tmp_path, bring.LOOK, "9.99", ""))
    assert facts.found.startswith("3.9 (python3)") and facts.python != str(old)


def test_a_receipt_is_found_again_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    receipt = Receipt(Software("0.1.0", "abc"), ("join", "a:1"))
    sh(tmp_path, bring.NOTE, stdin=msgspec.json.encode(receipt))
    assert (tmp_path / "host.json").stat().st_mode & 0o777 == 0o600
    assert bring.read_facts(sh(tmp_path, bring.LOOK, VERSION, "")).receipt == receipt
    (tmp_path / "host.json").write_text('{"half')
    assert bring.read_facts(sh(tmp_path, bring.LOOK, VERSION, "")).receipt is None
    sh(tmp_path, bring.FORGET)
    assert not (tmp_path / "host.json").exists()


def test_an_installation_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = pytest.importorskip("pip")
    monkeypatch.setenv("PYTHONPATH", str(Path(pip.__file__).parents[1]))
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "shoal").mkdir()
    (packages / "shoal" / "__init__.py").write_text('__version__ = "0.1.0"\n')
    (tmp_path / "host.json").write_text("{}")
    name = f"shoal-{shoal.__version__}-py3-none-any.whl"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        sh(tmp_path, bring.INSTALL, sys.executable, name, stdin=b"half a wheel")
    assert failed.value.stderr.startswith(b"pip failed there: ERROR: ")
    assert (tmp_path / "host.json").exists() and (packages / "shoal" / "__init__.py").exists()


def test_the_wheel_is_the_running_shoal_and_always_the_same() -> None:
    first, second = bring.build_wheel(shoal.__version__), bring.build_wheel(shoal.__version__)
    assert first == second
    assert first.name == f"shoal-{shoal.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(BytesIO(first.data)) as archive:
        names = archive.namelist()
        metadata = archive.read(f"shoal-{shoal.__version__}.dist-info/METADATA").decode()
    assert "shoal/main.py" in names and "shoal/py.typed" in names
    assert not any("__pycache__" in name for name in names)
    assert "Requires-Dist: msgspec" in metadata
