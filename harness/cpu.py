"""CPU time of test files and tests with all that they start, to make the suite quicker: as root,
`python -m pytest -p harness.cpu FOLDER`, without workers.

A control group counts also what left its parent, as controllers and nodes do. Unlike the time on a
clock, CPU time hardly depends on what else the machine does."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")
GROUP = (ROOT / "cpuacct" if (ROOT / "cpuacct").exists() else ROOT) / f"tests-{os.getpid()}"
SHOWN = 40

used: Counter[str] = Counter()  # milliseconds, by file
used_by_test: Counter[str] = Counter()


def pytest_configure() -> None:
    GROUP.mkdir()
    (GROUP / "cgroup.procs").write_text(str(os.getpid()))


def pytest_unconfigure() -> None:
    (GROUP.parent / "cgroup.procs").write_text(str(os.getpid()))
    with contextlib.suppress(OSError):  # something that a test has started is still there
        GROUP.rmdir()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = used_ms()
    try:
        return (yield)
    finally:
        used_by_test[item.nodeid] += used_ms() - before
        used[item.nodeid.partition("::")[0]] += used_by_test[item.nodeid]


def used_ms() -> int:
    if (count := GROUP / "cpuacct.usage").exists():
        return int(count.read_text()) // 1_000_000
    return int((GROUP / "cpu.stat").read_text().split()[1]) // 1_000


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section(f"CPU time: {sum(used.values()) / 1000:.0f} s")
    for name, count in (*used.most_common(SHOWN), *used_by_test.most_common(SHOWN)):
        terminalreporter.line(f"{count / 1000:8.1f} s  {name}")
