"""What holds for every test, of the house and of its benchmarks."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from harness import packages
from harness.forked import fork_heads
from harness.postgres import Postgres, postgres
from tests.needs import need
from tests.skips import is_expected, must_run_everything

# A shell starts what it puts into the background with interrupts ignored, and children inherit
# that: the tests that press Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start hundreds of interpreters. Without bytecode each would compile the house again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def _see_this_checkout() -> None:
    """An editable install knows the entry points of the day it was made. If `pyproject.toml` has
    others, the tests, and the processes that they start, see those."""
    project = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["project"]
    installed = metadata.distribution("shoal").entry_points
    known = {(entry.group, entry.name) for entry in installed}
    missing = {
        group: {name: value for name, value in entries.items() if (group, name) not in known}
        for group, entries in project["entry-points"].items()
    }
    if any(missing.values()):
        beside = Path(tempfile.mkdtemp(prefix="shoal-entry-points-"))
        atexit.register(shutil.rmtree, beside, ignore_errors=True)
        packages.describe({**project, "name": "shoal-checkout", "entry-points": missing}, beside)
        beside.chmod(0o755)  # also for processes of other users
        sys.path.append(str(beside))
        given = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (given, str(beside))))


_see_this_checkout()
fork_heads()

# The longest files run first, so that no worker is left alone with one at the end.
LONGEST = (
    "tests/live/test_launchers.py",
    "tests/engines/ray/test_supplier.py",
    "tests/engines/slurm/test_live.py",
    "tests/netns/test_cluster.py",
    "tests/live/test_services.py",
    "tests/sim/test_seeds.py",
    "tests/web/test_page.py",
    "tests/web/test_notebook.py",
    "tests/tasks/test_cluster.py",
    "tests/web/test_open_to_all.py",
    "tests/netns/test_up_hosts.py",
    "tests/live/test_boot.py",
    "tests/web/test_jobs.py",
    "tests/web/test_redraw.py",
    "tests/api/test_fuzz.py",
    "tests/cli/test_demo.py",
    "tests/netns/test_joined.py",
    "tests/netns/test_from_elsewhere.py",
    "tests/live/test_training_chaos.py",
    "tests/live/test_several_heads.py",
    "tests/live/test_services_survive.py",
    "tests/live/test_scheduling.py",
    "tests/tasks/test_meeting.py",
    "tests/web/test_job.py",
    "tests/web/test_policy.py",
    "tests/web/test_time.py",
    "tests/web/test_logs.py",
    "tests/sim/test_replay.py",
    "tests/live/test_crash.py",
    "tests/engines/kubernetes/test_live.py",
    "tests/live/test_faults.py",
    "tests/web/test_curves.py",
    "tests/web/test_map.py",
    "tests/web/test_network.py",
    "tests/sdk/test_joblib.py",
    "tests/train/test_examples.py",
    "tests/train/test_survive.py",
    "tests/web/test_forms.py",
    "tests/web/test_node.py",
    "tests/live/test_sessions.py",
    "tests/netns/test_fabric.py",
    "tests/netns/test_kept.py",
    "tests/database/test_every_query.py",
    "bench/tests/test_queueing.py",
    "bench/tests/test_autoscale.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only a test that is marked `outside` is tried once more if it fails."""
    places = {config.rootpath / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))
    for item in items:
        mark = item.get_closest_marker("outside")
        if mark is not None and config.pluginmanager.hasplugin("rerunfailures"):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _unexpected_skips(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    again = terminalreporter.stats.get("rerun", [])
    terminalreporter.section(f"second tries: {len(again)}")
    for report in again:
        terminalreporter.line(f"{report.nodeid}\n" + "\n".join(_end_of(report.longreprtext)))
    if skips := _unexpected_skips(terminalreporter.config):
        terminalreporter.section("skipped, which tests/skips.py does not allow: the run has failed")
        terminalreporter.line("\n".join(skips))


def _end_of(text: str) -> list[str]:
    return text.splitlines()[-30:]


def _unexpected_skips(config: pytest.Config) -> list[str]:
    """Of a run of all tests, on a machine like CI's. The workers of a run do not know them."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    if reporter is None or not whole or not must_run_everything():
        return []
    skipped = [(report.nodeid, _reason(report)) for report in reporter.stats.get("skipped", [])]
    return [f"{test}: {why}" for test, why in skipped if not is_expected(test, why)]


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    place = report.longrepr  # of a skip: file, line and "Skipped: ..."
    return str(place[2]).removeprefix("Skipped: ") if isinstance(place, tuple) else str(place)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """One for all tests of a process: each takes a database of its own, `.database()`, and leaves
    the server running."""
    need("postgres")
    with postgres() as server:
        yield server
