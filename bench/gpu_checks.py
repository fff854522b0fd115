"""`make gpu`: tries on this machine's GPU what Shoal promises about GPUs, and keeps a dated result.

Run with `python -m bench.gpu_checks [--limit 540] [--only train,sleep] [--out docs/gpu-results]`.
It needs nothing from outside the machine. Checks come in parts, the most valuable first; each part
is a process of its own with a bound of its own. The result is written after each check, so a time
limit loses only what it cut short. A check that cannot run says why, and does not count as passed.
A part that is run again on the same day replaces its lines.

With `--virtual` the same parts run anywhere on a GPU that exists only in the books, to try the
checks themselves; what needs a driver does not run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.figures import machine
from shoal.control.home import Home
from shoal.control.lifecycle import take_down

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "gpu-results"
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
LINE = "row "  # how a part begins the line in which it reports one check
READ_S = 5.0  # what it left behind may hold its output open
LAST_LINES = 30  # of a part that broke, for whoever reads the terminal
HEADER = ("check", "what it met", "outcome", "figure")


class Row(msgspec.Struct):
    """One check. `figure` is what was measured, or why it failed or did not run."""

    check: str
    met: str
    outcome: str
    figure: str = ""


class Part(NamedTuple):
    """`checks`: what it reports, in this order. `seconds`: more than it needs."""

    name: str
    seconds: int
    checks: tuple[str, ...]


OF_A_JOB = ("use and memory of a job", "start-up learned", "device rules")
PARTS = (
    Part("job", 60, ("GPU found", "tree", "variables of a member", *OF_A_JOB)),
    Part("sleep", 110, ("lent and returned", "sharing refused", "killed asleep", "killed awake")),
    Part("train", 90, ("DDP, killed", "FSDP2, killed")),
    Part("frameworks", 45, ("accelerate", "Lightning", "NCCL")),
    Part("shares", 75, ("MPS limit", "MPS limit, plain CUDA", "torch's limit", "agent's limit")),
    Part("energy", 60, ("energy of jobs", "energy of the node")),
    Part("bound", 70, ("rate of sleep", "what bounds it", "with huge pages")),
    Part("tests", 60, ("tests that need a GPU",)),
    Part("warm", 45, ("warm start",)),
    Part("turns", 90, ("turns",)),
    Part("container", 30, ("GPU in a container",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit", type=float, default=540.0, help="seconds in all")
    parser.add_argument("--only", default="", help="these parts, in this order")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--virtual", action="store_true")
    asked = parser.parse_args()
    by_name = {part.name: part for part in PARTS}
    if unknown := [name for name in filter(None, asked.only.split(",")) if name not in by_name]:
        parser.error(f"--only: {', '.join(unknown)} is not one of {', '.join(by_name)}")
    gpu = "a virtual GPU" if asked.virtual else described()
    if not gpu:
        sys.exit("no NVIDIA GPU here: `--virtual` tries the checks themselves")
    parts = [by_name[name] for name in asked.only.split(",")] if asked.only else list(PARTS)
    result = Result(asked.out / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.md", gpu)
    sys.exit(not run(parts, result, asked.limit, virtual=asked.virtual))


def described() -> str:
    """The GPU and its driver; empty if there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        driver = pynvml.nvmlSystemGetDriverVersion()
        count = pynvml.nvmlDeviceGetCount()
        return f"{count} x {pynvml.nvmlDeviceGetName(gpu)}, driver {driver}"
    except Exception:  # not installed, or no driver: NVML has an exception for each
        return ""


def run(parts: Sequence[Part], result: Result, limit_s: float, *, virtual: bool) -> bool:
    """Whether nothing failed. What does not fit into the limit is not begun."""
    until = time.monotonic() + limit_s
    for part in parts:
        left_s = until - time.monotonic()
        if left_s < part.seconds / 2:
            for check in part.checks:
                result.add(part, Row(check, "", NOT_RUN, f"the limit of {limit_s:.0f} s was near"))
            continue
        seconds, began = min(part.seconds, left_s), time.monotonic()
        missing = list(part.checks)
        for row in rows_of(part, command_of(part, virtual=virtual), seconds):
            if row.check in missing:
                missing.remove(row.check)
            result.add(part, row)
        for check in missing:
            why = f"its part ended without it, or took more than {seconds:.0f} s"
            result.add(part, Row(check, "", FAILED, why))
        print(f"{part.name}: {time.monotonic() - began:.1f} s", flush=True)
    return not any(row.outcome == FAILED for _, row in result.rows)


def command_of(part: Part, *, virtual: bool) -> list[str]:
    return [sys.executable, "-m", "bench.gpu_parts", part.name, *["--virtual"] * virtual]


def rows_of(part: Part, command: Sequence[str], seconds: float) -> Iterator[Row]:
    """What a process of its own reports. All that it started ends with it."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-gpu-"))
    path = (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH"))
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = ":".join(filter(None, path))
    process = subprocess.Popen(
        command,
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    other: list[str] = []
    until = time.monotonic() + seconds
    try:
        while (line := lines.get(timeout=max(0.0, until - time.monotonic()))) is not None:
            if line.startswith(LINE):
                yield msgspec.json.decode(line.removeprefix(LINE), type=Row)
            else:
                other.append(line)
    except queue.Empty:
        other.append(f"{part.name} was stopped after {seconds:.0f} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(READ_S)
        print("\n".join(other[-LAST_LINES:]), file=sys.stderr, flush=True)
        _clear(folder)


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            lines.put(line.rstrip("\n"))
    lines.put(None)


def _clear(folder: Path) -> None:
    """A part that was stopped may have left clusters."""
    for config in folder.rglob("cluster.json"):
        with contextlib.suppress(Exception):
            take_down(Home(config.parent), lambda _: None)
    shutil.rmtree(folder, ignore_errors=True)


class Result:
    """The file of a day. Rows of parts that are not run again stay as they were."""

    def __init__(self, file: Path, gpu: str) -> None:
        self._file = file
        self._gpu = gpu
        self.rows: list[tuple[str, Row]] = _read_rows(file)
        self._again: set[str] = set()

    def add(self, part: Part, row: Row) -> None:
        if part.name not in self._again:
            self._again.add(part.name)
            self.rows = [(name, one) for name, one in self.rows if name != part.name]
        self.rows.append((part.name, row))
        print(f"{row.outcome:8}{part.name}: {row.check}: {row.figure}", flush=True)
        self._write()

    def _write(self) -> None:
        order = [part.name for part in PARTS]
        self.rows.sort(key=lambda pair: order.index(pair[0]))
        counts = [
            f"{sum(row.outcome == outcome for _, row in self.rows)} {outcome}"
            for outcome in (PASSED, FAILED, NOT_RUN)
        ]
        cells = [
            (f"{name}: {row.check}", row.met, row.outcome, row.figure) for name, row in self.rows
        ]
        lines = [
            f"# Checks on a GPU, {self._file.stem}",
            "",
            f"`make gpu` on {self._gpu}; {machine()}. {', '.join(counts)}.",
            "",
            _line(HEADER),
            _line(["---"] * len(HEADER)),
            *map(_line, cells),
        ]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self._file)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |"


def _read_rows(file: Path) -> list[tuple[str, Row]]:
    if not file.exists():
        return []
    found = []
    for line in file.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name, _, check = cells[0].partition(": ")
        if len(cells) == len(HEADER) and any(part.name == name for part in PARTS):
            found.append((name, Row(check, *cells[1:])))
    return found


if __name__ == "__main__":
    main()
