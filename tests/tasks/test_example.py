"""Batch inference, as a user would run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import need
from tests.tasks.functions import ROOT, environment

need("torch")


EXAMPLE = ROOT / "examples" / "map"
INPUTS = 100


def test_scores_are_complete_in_order_and_once(tmp_path: Path) -> None:
    """One worker: each imports torch. tests/tasks/test_map.py kills workers, without it."""
    inputs, output = tmp_path / "inputs.jsonl", tmp_path / "scores.jsonl"
    make = [sys.executable, str(EXAMPLE / "make_inputs.py"), str(INPUTS)]
    with inputs.open("wb") as file:
        subprocess.run(make, stdout=file, check=True)
    words = ["map", f"{EXAMPLE}/score.py:score", str(inputs), "-o", str(output), "--init", "load"]
    command = [sys.executable, "-m", "shoal.main", *words, "--workers", "1", "--json"]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, timeout=120)
    assert done.returncode == 0
    summary = json.loads(done.stdout)
    assert (summary["lines"], summary["failed"]) == (INPUTS, 0)
    scores = [json.loads(line) for line in output.read_text().splitlines()]
    assert [score["id"] for score in scores] == list(range(INPUTS))
    assert all(3.0 < score["nats"] < 6.0 for score in scores)  # untrained: about log(80)


@pytest.mark.soak
def test_a_trained_model_scores_on_a_cluster_and_loses_a_worker(tmp_path: Path) -> None:
    words = [str(ROOT / "examples" / "map_inference.py"), "--inputs", "600", "--steps", "2"]
    done = subprocess.run(
        [sys.executable, *words],
        env={**environment(), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "600 scores, each input once and in order" in done.stdout
    assert "killed worker " in done.stdout
