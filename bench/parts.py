"""Runs the parts of a benchmark one after the other: each in a process of its own, with a limit on
its time, so that the whole always ends."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

ROOT = Path(__file__).parent.parent
CLEAN_UP_S = 30.0  # a part that is interrupted takes its cluster down


class Part(NamedTuple):
    """`module` is run; its last line is a JSON object. `quick_s` is the limit in a quick run, and 0
    leaves it out there."""

    name: str
    module: str
    words: tuple[str, ...]
    quick_s: int
    full_s: int


def limit_of(parts: Sequence[Part], *, quick: bool) -> float:
    """Seconds after which the whole has ended, even if no part ends by itself."""
    limits_s = [part.quick_s if quick else part.full_s for part in parts]
    return sum(limit_s + CLEAN_UP_S for limit_s in limits_s if limit_s)


def run_all(parts: Sequence[Part], *, quick: bool) -> dict[str, Any]:
    """What a part could not measure is {"absent": why}."""
    figures = {}
    minutes = limit_of(parts, quick=quick) / 60
    print(f"it ends within {minutes:.0f} minutes, and on a quiet machine long before", flush=True)
    for number, part in enumerate(parts, 1):
        print(f"{number} of {len(parts)}, {part.name}: ", end="", flush=True)
        started = time.monotonic()
        figures[part.name] = run(part, quick=quick)
        print(figures[part.name].get("absent") or f"{time.monotonic() - started:.0f} s", flush=True)
    return figures


def run(part: Part, *, quick: bool, place: Path = ROOT) -> dict[str, Any]:
    limit_s = part.quick_s if quick else part.full_s
    if not limit_s:
        return {"absent": "left out by --quick"}
    if not module_exists(part.module, place):
        return {"absent": f"{part.module} does not exist"}
    words = [*part.words, "--quick"] if quick and part.words else part.words
    return last_line([sys.executable, "-m", part.module, *words], limit_s, place)


def module_exists(module: str, place: Path) -> bool:
    return place.joinpath(*module.split(".")).with_suffix(".py").exists()


def last_line(argv: Sequence[str], limit_s: float, place: Path) -> dict[str, Any]:
    """PYTHONPATH comes before the checkout that is installed, in all processes that it starts."""
    env = {**os.environ, "PYTHONPATH": f"{place / 'src'}{os.pathsep}{place}"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # every commit has its bytecode
    before_s = _cpu_s()
    # A shell starts what it puts into the background with interrupts ignored, and a part inherits
    # that: it would not take its cluster down when its time is over.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        argv, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=CLEAN_UP_S)
        process.kill()
        process.wait()
        # Little of it means that others had the machine.
        return {"absent": f"not done after {limit_s:.0f} s ({_cpu_s() - before_s:.0f} s of CPU)"}
    if process.returncode:
        return {"absent": f"failed: {_error(errors)}"}
    return msgspec.json.decode(out.splitlines()[-1], type=dict[str, Any])


def _cpu_s() -> float:
    """Of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _error(text: str) -> str:
    """The line that names the exception: its message may go on with logs."""
    lines = text.strip().splitlines() or ["it says nothing"]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit): ", line)]
    return (named or lines)[-1]
