"""The example that trains, serves and chats does what its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.gateway.binary import GatewayError, find_binary

pytest.importorskip("torch", reason="torch is not installed: nothing can be trained")

ROOT = Path(__file__).parents[2]


def test_what_was_trained_a_moment_ago_is_served_and_answers() -> None:
    try:
        find_binary()
    except GatewayError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_serve_chat.py"), "--steps", "2"],
        env={k: v for k, v in os.environ.items() if not k.startswith("SHOAL_")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"weights": "step 2, from checkpoint-' in done.stdout
    assert "\nchat: " in done.stdout
