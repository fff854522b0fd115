"""What holds for every test."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

# A shell starts what it puts into the background with interrupts ignored, and children inherit
# that: the tests that press Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests of these run real processes against a clock, beside whatever else the machine does. One that
# fails is tried once more, and both tries are counted and printed: what was tried again is worth a
# look. Everything else is the same each time, and gets no second try.
REAL = (
    "agent",
    "attack",
    "benchmarks",
    "cli",
    "control",
    "engines",
    "gateway",
    "hosts",
    "live",
    "netns",
    "observe",
    "serve",
    "tasks",
    "train",
    "web",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return  # somebody wants to see every failure: -p no:rerunfailures
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).parts[0] in REAL:
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"tried again: {report.nodeid}")
        terminalreporter.line("\n".join(report.longreprtext.splitlines()[-30:]))
