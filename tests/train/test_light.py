"""Who does not train pays nothing for it, and is told what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.gangs import clean_environment, last_line


def python(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("module", ["shoal", "shoal.main", "shoal.train"])
def test_importing_shoal_does_not_import_torch(module: str, tmp_path: Path) -> None:
    done = python(f"import sys, {module}; print('torch' in sys.modules)", tmp_path)
    assert done.stdout == "False\n", done.stderr


def test_without_torch_init_ends_in_one_line(tmp_path: Path) -> None:
    # A None in sys.modules is how Python itself marks what cannot be imported.
    code = "import sys; sys.modules['torch'] = None\nimport shoal.train; shoal.train.init()"
    done = python(code, tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip() == "shoal.train: shoal.train needs torch: pip install 'shoal[train]'"
    assert last_line(done.stdout) == ""
