"""The examples of docs/python.md, run as they are written."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import shoal
from tests.live.cluster import Live
from tests.needs import need

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text()


def test_the_examples_of_the_page_run_one_after_the_other(
    live: Live,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    need("joblib")
    monkeypatch.setenv("SHOAL_HOME", str(live.home.path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trained')\n")
    (tmp_path / "train.yaml").write_text(
        "command: sh -c 'echo $SEED > $SHOAL_OUTPUT/model.txt'\nmemory: 64M\n"
    )
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        exec(compile(block, "docs/python.md", "exec"), names)
    assert capsys.readouterr().out.splitlines() == [
        "2.0",
        "['digits 1', 'digits 2', 'digits 3']",
        "trained",
        "succeeded 0 every member exited 0",
        "64",
        "memory - 512 of what? Write 512M or 512G",
        "['succeeded', 'succeeded', 'succeeded']",
        "0",
        "[0, 1, 4, 9, 16]",
    ]
    assert (tmp_path / "best.txt").read_text() == "7\n"


def test_every_call_that_the_page_names_exists() -> None:
    table = PAGE.split("| call | what it does |")[1].split("\n\n")[0]
    first = "".join(line.split("|")[1] for line in table.splitlines()[2:])
    missing = {n for n in re.findall(r"`(\w+)`", first) if not hasattr(shoal.Client, n)}
    assert missing == set()
