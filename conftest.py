"""What holds for every test, of the house and of its benchmarks."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

# A shell starts what it puts into the background with interrupts ignored, and children inherit
# that: the tests that press Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start hundreds of interpreters. Without bytecode each would compile the house again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# DeepSpeed compiles a part of itself when it is first used: `make test` does that while it sets up.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test marked `outside` is tried once more if it fails. Both tries are printed."""
    for item in items:
        mark = item.get_closest_marker("outside")
        if mark is None:
            continue
        if len(mark.args) != 1:
            raise pytest.UsageError(f"{item.nodeid}: say in `outside(...)` what it depends on")
        if config.pluginmanager.hasplugin("rerunfailures"):  # -p no:rerunfailures: no second try
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"tried again: {report.nodeid}")
        terminalreporter.line("\n".join(report.longreprtext.splitlines()[-30:]))
