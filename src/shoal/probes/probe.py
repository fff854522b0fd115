"""Measures the machine it runs on and prints one JSON object: `python -m shoal.probes.probe`."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import msgspec

from shoal.model.health import FAULTS_MAX, FIGURES_MAX, TEXT_MAX, CheckResult
from shoal.probes import host, links, nvml, tensor
from shoal.probes import host as disk
from shoal.probes.reading import Reading

NICENESS = 10  # jobs go first, yet it must get somewhere beside them
GPU_RATES_S = 8.0  # most of it is loading torch
NOTES_MAX = 32


def measure(directory: Path, *, id: str, busy: bool, cores: int, gpus: bool) -> CheckResult:  # noqa: A002
    """About three seconds, and some more for the rates of GPUs."""
    began = time.monotonic()
    steal = host.Steal()
    readings = [
        host.one_core(),
        host.all_cores(cores),
        host.memory(),
        disk.disk(directory),
        host.pressure(),
        host.clock(),
        links.links(),
        steal.reading(),
    ]
    if gpus:
        # Rates first, so that clocks, heat and throttling are those of GPUs at work.
        readings.append(tensor.tensors(time.monotonic() + GPU_RATES_S))
        readings.append(nvml.gpus())
    return joined(readings, id, busy, round((time.monotonic() - began) * 1000))


def joined(readings: list[Reading], name: str, busy: bool, took_ms: int) -> CheckResult:
    figures = {key: value for reading in readings for key, value in reading.figures.items()}
    faults = [text[:TEXT_MAX] for reading in readings for text in reading.faults]
    notes = [text[:TEXT_MAX] for reading in readings for text in reading.notes]
    return CheckResult(
        id=name,
        busy=busy,
        figures=dict(list(figures.items())[:FIGURES_MAX]),
        faults=tuple(faults[:FAULTS_MAX]),
        notes=tuple(notes[:NOTES_MAX]),
        took_ms=took_ms,
    )


def cores_here() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--id", default="")
    parser.add_argument("--busy", action="store_true", help="members are running here, too")
    parser.add_argument("--cores", type=int, default=0, help="use at most this many cores; 0: all")
    parser.add_argument("--no-gpus", action="store_true", help="leave the GPUs alone")
    asked = parser.parse_args()
    os.nice(NICENESS)
    cores = min(asked.cores or cores_here(), cores_here())
    found = measure(
        asked.directory, id=asked.id, busy=asked.busy, cores=cores, gpus=not asked.no_gpus
    )
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
