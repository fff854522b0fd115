"""What holds for every test, of the house and of its benchmarks."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.postgres import Postgres, postgres
from tests.needs import need

# A shell starts what it puts into the background with interrupts ignored, and children inherit
# that: the tests that press Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start hundreds of interpreters. Without bytecode each would compile the house again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# DeepSpeed compiles a part of itself when it is first used: `make test` does that while it sets up.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))

# The longest files run first, so that no worker is left alone with one at the end.
LONGEST = (
    "tests/engines/ray/test_supplier.py",
    "tests/live/test_launchers.py",
    "tests/engines/slurm/test_live.py",
    "tests/netns/test_cluster.py",
    "tests/sim/test_seeds.py",
    "tests/live/test_services.py",
    "tests/netns/test_joined.py",
    "tests/train/test_examples.py",
    "tests/web/test_page.py",
    "bench/tests/test_queueing.py",
    "tests/live/test_boot.py",
    "tests/netns/test_kept.py",
    "tests/sim/test_replay.py",
    "tests/tasks/test_example.py",
    "tests/api/test_fuzz.py",
    "tests/live/test_training_bad_input.py",
    "tests/serve/test_server.py",
    "tests/netns/test_up_hosts.py",
    "tests/train/test_checkpoints.py",
    "tests/live/test_end_to_end.py",
    "tests/live/test_crash.py",
    "tests/live/test_faults.py",
    "tests/live/test_training_chaos.py",
    "tests/live/test_arrays.py",
    "tests/tasks/test_cluster.py",
    "tests/netns/test_from_elsewhere.py",
    "tests/train/test_survive.py",
    "bench/tests/test_autoscale.py",
)


# Tests in these folders compute and nothing else: one that fails there is wrong at once. Elsewhere
# they start real processes, servers or machines, and what they see depends on more than our code,
# as that of a test marked `outside` does.
PURE = ("core", "forms", "ledger", "model", "plan", "sim")
# A run with more second tries than this fails: it is not the machine.
SECOND_TRIES = 6


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that depends on more than our code is tried once more if it fails. Both tries are
    printed."""
    places = {config.rootpath / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))
    pure = tuple(f"{config.rootpath / 'tests' / name}/" for name in PURE)
    for item in items:
        mark = item.get_closest_marker("outside")
        if mark is not None and len(mark.args) != 1:
            raise pytest.UsageError(f"{item.nodeid}: say in `outside(...)` what it depends on")
        if mark is None and str(item.path).startswith(pure):
            continue
        if config.pluginmanager.hasplugin("rerunfailures"):  # -p no:rerunfailures: no second try
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    tried = len(reporter.stats.get("rerun", [])) if reporter else 0
    if tried > SECOND_TRIES and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tried = terminalreporter.stats.get("rerun", [])
    for report in tried:
        terminalreporter.section(f"tried again: {report.nodeid}")
        terminalreporter.line("\n".join(report.longreprtext.splitlines()[-30:]))
    if len(tried) > SECOND_TRIES:
        told = f"{len(tried)} tests were tried again, and {SECOND_TRIES} may be: the run has failed"
        terminalreporter.section(told)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """One for all tests of a process: each takes a database of its own, `.database()`, and leaves
    the server running."""
    need("postgres")
    with postgres() as server:
        yield server
