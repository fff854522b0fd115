"""Measures the machine it runs on and prints one JSON object: `python -m shoal.probes.probe`."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import msgspec

from shoal import extensions
from shoal.model.health import FAULTS_MAX, FIGURES_MAX, TEXT_MAX, CheckResult
from shoal.probes.reading import Asked, Probe, Reading, joined

NICENESS = 10  # jobs go first, yet it must get somewhere beside them
NOTES_MAX = 32


def measure(asked: Asked, *, id: str, busy: bool) -> CheckResult:  # noqa: A002
    """About three seconds, and some more for the rates of GPUs and the probes of other packages. If
    a probe fails, the check says nothing about the node."""
    began = time.monotonic()
    readings = []
    names = extensions.names(extensions.PROBE)
    for name in names:
        try:
            probe: Probe = extensions.load(extensions.PROBE, name)
            readings.append(probe(asked))
        except extensions.Missing as error:
            return _failed(id, busy, str(error))
        except Exception as error:
            return _failed(id, busy, f"the probe {name} failed: {type(error).__name__}: {error}")
    if not names:
        return _failed(id, busy, "there is no probe at all; install Shoal again")
    return bounded(joined(*readings), id, busy, round((time.monotonic() - began) * 1000))


def _failed(check: str, busy: bool, why: str) -> CheckResult:
    return CheckResult(id=check, busy=busy, error=why[:TEXT_MAX])


def bounded(reading: Reading, name: str, busy: bool, took_ms: int) -> CheckResult:
    return CheckResult(
        id=name,
        busy=busy,
        figures=dict(list(reading.figures.items())[:FIGURES_MAX]),
        faults=tuple(text[:TEXT_MAX] for text in reading.faults[:FAULTS_MAX]),
        notes=tuple(text[:TEXT_MAX] for text in reading.notes[:NOTES_MAX]),
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
    words = parser.parse_args()
    os.nice(NICENESS)
    cores = min(words.cores or cores_here(), cores_here())
    asked = Asked(words.directory, cores, not words.no_gpus)
    print(msgspec.json.encode(measure(asked, id=words.id, busy=words.busy)).decode())


if __name__ == "__main__":
    main()
