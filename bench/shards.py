"""How long a loop waits for its samples: `python -m bench.shards [--read-ms 2] [--step-ms 20]`.

Steps of 16 samples from tar shards in a temporary folder. Each sample takes `read-ms` to read, as
from storage on a network, and each step works for `step-ms` (it sleeps, so that no core decides).
"""

from __future__ import annotations

import argparse
import io
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import shoal.data
from shoal.data.order import Mark, Order
from shoal.data.reading import Reader, _strides

BATCH, STEPS, SHARDS = 16, 100, 4


def write(folder: Path) -> None:
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(BATCH * STEPS // SHARDS):
                info = tarfile.TarInfo(f"{shard}-{number:05}.bin")
                info.size = 4096
                tar.addfile(info, io.BytesIO(bytes(4096)))


def waited(batches: Iterable[Any], step_s: float) -> tuple[float, float]:
    """The share of the time that the loop waits, and steps per second."""
    began, waits, steps = time.perf_counter(), 0.0, 0
    source: Iterator[Any] = iter(batches)
    while True:
        asked = time.perf_counter()
        if next(source, None) is None:
            break
        waits += time.perf_counter() - asked
        time.sleep(step_s)
        steps += 1
    took = time.perf_counter() - began
    return waits / took, steps / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--read-ms", type=float, default=2.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    options = parser.parse_args()
    step_s = options.step_ms / 1000

    def slow(sample: dict[str, Any]) -> dict[str, Any]:
        time.sleep(options.read_ms / 1000)
        return sample

    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
        data = shoal.data.open(name, decode=slow)

        def parts() -> Iterator[list[Any]]:
            return _strides(Order(data._source, 0, 10_000, Mark(0, 0, 0, 0), 1), 0, 0, 1)

        reader = Reader(slow, 256 << 20)
        ways: dict[str, Iterable[Any]] = {
            "one after the other": ([reader[place] for place in part] for part in parts()),
            "read ahead": reader.ahead(parts()),
        }
        for way, batches in ways.items():
            share, speed = waited(batches, step_s)
            print(f"{way:20} {share:6.1%} of the time waiting, {speed:5.1f} steps/s")
        print(f"depth at the end: {reader.depth}, waits: {reader.waits} of {STEPS}")


if __name__ == "__main__":
    main()
