"""Batch inference, as a user would run it, with a worker killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.waiting import until

from tests.needs import need
from tests.tasks.functions import ROOT, environment

need("torch")


EXAMPLE = ROOT / "examples" / "map"
INPUTS = 1000


def workers(client: int) -> list[int]:
    """A process started by a thread is listed with that thread."""
    tasks = Path(f"/proc/{client}/task")
    found = [(path / "children").read_text().split() for path in tasks.iterdir()]
    return sorted(int(word) for words in found for word in words)


def test_scores_are_complete_in_order_and_once_although_a_worker_was_killed(tmp_path: Path) -> None:
    inputs, output = tmp_path / "inputs.jsonl", tmp_path / "scores.jsonl"
    make = [sys.executable, str(EXAMPLE / "make_inputs.py"), str(INPUTS)]
    with inputs.open("wb") as file:
        subprocess.run(make, stdout=file, check=True)
    words = ["map", f"{EXAMPLE}/score.py:score", str(inputs), "-o", str(output), "--init", "load"]
    command = [sys.executable, "-m", "shoal.main", *words, "--workers", "2", "--json"]
    part = tmp_path / "scores.jsonl.part"
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as client:
        until(lambda: part.exists() and part.stat().st_size, "the first scores")
        victim = workers(client.pid)[0]
        os.kill(victim, signal.SIGKILL)
        told = json.loads(client.communicate(timeout=120)[0])
    assert client.returncode == 0
    assert (told["lines"], told["failed"]) == (INPUTS, 0)
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
