"""The bench of sleep runs without a GPU, with real processes that are frozen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_a_job_that_is_interrupted_loses_no_step_if_it_sleeps_and_some_if_it_is_stopped() -> None:
    command = [sys.executable, "-m", "bench.sleep", "--virtual", "--parts", "lend,serve"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    asleep, stopped = found["lend"]["asleep"], found["lend"]["stopped"]
    assert (asleep["steps_lost"], asleep["steps_skipped"]) == (0, 0)
    assert asleep["same_process"]
    assert stopped["steps_lost"] > 0
    assert stopped["steps_skipped"] == 0
    assert not stopped["same_process"]
    assert found["serve"]["woken_s"] > 0
