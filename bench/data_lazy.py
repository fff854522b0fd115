"""Measures what reading a volume as it arrives saves: `python -m bench.data_lazy [--turns 3]`.

A cluster of one node, whose fetches the policy bounds to `--mbit`; the origin is a folder on the
same disk, read as a `file://` URL. A job reads tar shards with `shoal.data`, in steps of 16 samples
that work for 20 ms (they sleep, so that no core decides). Each turn runs four jobs: on a set that
has to come, as a whole and as it is read; on one that the node has; and on the folder itself. The
table has medians over the turns; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from bench.figures import machine, table

SHOAL = (sys.executable, "-m", "shoal.main")
SHARDS, SAMPLES, SAMPLE_BYTES, BATCH, BUFFER = 16, 256, 32 << 10, 16, 512
STEP_S = 0.02
WAYS = ("whole, first run", "lazy, first run", "second run", "local folder")
JOB = """
import itertools, json, sys, time
import shoal.data
samples = iter(shoal.data.open(sys.argv[1], buffer=%d))
waits, steps, first = 0.0, 0, 0.0
while True:
    asked = time.time()
    if not list(itertools.islice(samples, %d)):
        break
    first = first or time.time()
    waits += time.time() - asked if steps else 0.0
    time.sleep(%f)
    steps += 1
took = time.time() - first
print(json.dumps({"first": first, "end": time.time(), "steps": steps, "waits": waits / took}))
"""


class Bench:
    def __init__(self, scratch: Path, mbit: int) -> None:
        self._scratch = scratch
        self._env = {**os.environ, "SHOAL_HOME": str(scratch / "home"), "HOME": str(scratch)}
        self.shoal("up", "--nodes", "1", "--gpus", "1")
        policy = scratch / "policy.yaml"
        policy.write_text(f"data_mbit_s: {mbit}\n")
        self.shoal("policy", "set", str(policy))
        (scratch / "job.py").write_text(JOB % (BUFFER, BATCH, STEP_S))

    def shoal(self, *words: str) -> str:
        words = (*SHOAL, *words)
        done = subprocess.run(
            words, env=self._env, cwd=self._scratch, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout} {done.stderr}"
        return done.stdout

    def write(self, name: str) -> Path:
        folder = self._scratch / name
        folder.mkdir()
        for shard in range(SHARDS):
            with tarfile.open(folder / f"{shard:03}.tar", "w") as tar:
                for number in range(SAMPLES):
                    info = tarfile.TarInfo(f"{shard:03}-{number:04}.bin")
                    info.size = SAMPLE_BYTES
                    tar.addfile(info, io.BytesIO(os.urandom(SAMPLE_BYTES)))
        return folder

    def run(self, place: str, *flags: str) -> tuple[float, float, float, float]:
        """Seconds from the submission to the first step and to the end, the share of the loop's
        time that it waited after the first step, and its steps per second."""
        began = time.time()
        words = ("run", "--wait", *flags, "--", sys.executable, "job.py", place)
        out = self.shoal(*words)
        said = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
        first, end = said["first"] - began, said["end"] - began
        return first, end, said["waits"], said["steps"] / (end - first)

    def turn(self, number: int) -> dict[str, tuple[float, float, float, float]]:
        found = {}
        for way in WAYS[:2]:
            folder = self.write(f"{way.partition(',')[0]}-{number}")
            lazy = ("--volume-lazy", "data") if way.startswith("lazy") else ()
            volume = ("--volume", f"file://{folder}:data")
            found[way] = self.run("data", *volume, *lazy)
        found[WAYS[2]] = self.run("data", *volume)
        found[WAYS[3]] = self.run(str(folder))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=80)
    asked = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="sl-"))
    bench = Bench(scratch, asked.mbit)
    try:
        size = SHARDS * SAMPLES * SAMPLE_BYTES / 1e6
        print(f"{machine()}; {size:.0f} MB in {SHARDS} shards, {asked.mbit} Mbit/s")
        turns = [bench.turn(number) for number in range(asked.turns)]
        rows: list[tuple[str, ...]] = []
        found: dict[str, float] = {}
        for way in WAYS:
            figures = zip(*(turn[way] for turn in turns), strict=True)
            first, end, waits, speed = map(statistics.median, figures)
            rows.append((way, f"{first:.1f}", f"{end:.1f}", f"{waits:.0%}", f"{speed:.1f}"))
            name = way.partition(",")[0].replace(" ", "_")
            found |= {f"{name}_first_s": round(first, 1), f"{name}_end_s": round(end, 1)}
            found |= {f"{name}_waits": round(waits, 2), f"{name}_steps_s": round(speed, 1)}
        heads = ("way", "s to the first step", "s to the end", "waited after it", "steps/s")
        print(table(heads, rows))
        print(json.dumps(found))
    finally:
        bench.shoal("down")
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
