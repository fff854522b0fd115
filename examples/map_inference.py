"""Batch inference on a cluster: train a model, score texts with it, lose a worker on the way.

    python examples/map_inference.py                                100,000 texts
    python examples/map_inference.py --inputs 2000 --steps 20       sooner

A cluster of its own with two virtual nodes in a temporary directory; nothing is left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHOAL = [sys.executable, "-m", "shoal.main"]
PATIENCE_S = 600


def shoal(*words: str) -> str:
    """Run a verb as a person would, and show what was typed."""
    print(f"\n$ shoal {' '.join(words)}", flush=True)
    done = subprocess.run([*SHOAL, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"shoal {words[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        os.environ["SHOAL_HOME"] = f"{folder}/home"
        try:
            train_and_score(Path(folder), options.inputs, options.steps)
        finally:
            print(shoal("down"))


def train_and_score(folder: Path, count: int, steps: int) -> None:
    print(shoal("up", "--nodes", "2", "--port", "0"))
    train = [sys.executable, str(HERE / "train" / "chars.py"), "--steps", str(steps)]
    print(shoal("run", "--wait", "--name", "chars", "--", *train))
    inputs, output = folder / "inputs.jsonl", folder / "scores.jsonl"
    with inputs.open("wb") as file:
        make = [sys.executable, str(HERE / "map" / "make_inputs.py"), str(count)]
        subprocess.run(make, stdout=file, check=True)
    model = f"{os.environ['SHOAL_HOME']}/checkpoints/j1"
    words = ["map", f"{HERE}/map/score.py:score", str(inputs), "-o", str(output), "--init", "load"]
    words += ["--cluster", "-n", "2", "--env", f"MODEL={model}", "--json"]
    print(f"\n$ shoal {' '.join(words)}", flush=True)
    began = time.monotonic()
    with subprocess.Popen([*SHOAL, *words], stdout=subprocess.PIPE) as mapping:
        victim = kill_a_worker(output.with_name("scores.jsonl.part"), mapping)
        told, _ = mapping.communicate(timeout=PATIENCE_S + count / 10)
    if mapping.returncode:
        sys.exit("shoal map failed")
    took_s = time.monotonic() - began
    scores = [json.loads(line) for line in output.read_text().splitlines()]
    assert json.loads(told)["lines"] == count
    assert [score["id"] for score in scores] == list(range(count)), "lost, doubled or out of order"
    mean = sum(score["nats"] for score in scores) / count
    print(f"killed worker {victim} meanwhile; {count:,} scores, each input once and in order")
    print(f"{took_s:.1f} s, {count / took_s:,.0f} texts/s, {mean:.3f} nats per character")


def kill_a_worker(part: Path, mapping: subprocess.Popen[bytes]) -> int:
    """When the first scores are there. Workers carry a mark in their environment."""
    deadline = time.monotonic() + PATIENCE_S
    while not part.exists() or not part.stat().st_size:
        if mapping.poll() is not None or time.monotonic() > deadline:
            sys.exit("shoal map gave no scores")
        time.sleep(0.05)
    for name in os.listdir("/proc"):
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if b"\0SHOAL_TASKS_WORKER=1" in environment and os.fsencode(part.parent) in environment:
            os.kill(int(name), signal.SIGKILL)
            return int(name)
    sys.exit("there is no worker to kill")


if __name__ == "__main__":
    main()
