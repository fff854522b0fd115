"""The help: quick, true, and with examples."""

from __future__ import annotations

import subprocess
import sys

import pytest

import shoal as package
from shoal.cli.app import VERBS
from tests.cli.conftest import Shoal

# Whatever is in here would make every help page wait.
HEAVY = (
    "rich",
    "yaml",
    "msgspec",
    "psutil",
    "shoal.client",
    "shoal.core",
    "shoal.model.job",
)


def test_the_verbs_are_all_there(shoal: Shoal) -> None:
    result = shoal("--help")
    assert result.code == 0
    for name, summary in VERBS.items():
        assert f"  {name} " in result.out
        assert summary in result.out
    assert "Exit codes" in result.out
    assert shoal().out == result.out


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_says_what_it_is_for_and_shows_examples(name: str, shoal: Shoal) -> None:
    result = shoal(name, "--help")
    assert result.code == 0
    assert result.out.splitlines()[2] == VERBS[name]
    assert f"\nExamples:\n  shoal {name}" in result.out
    assert "--json" in result.out
    assert all(len(line) <= 100 for line in result.out.splitlines())


def test_the_version_is_told(shoal: Shoal) -> None:
    assert shoal("--version") == (0, f"shoal {package.__version__}\n", "")


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["demo", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(args: list[str]) -> None:
    script = (
        "import sys\n"
        "from shoal.cli.app import call\n"
        f"call({args!r})\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(run.stderr.split())
    assert not loaded & {*HEAVY, "shoal.plan", "shoal.probes", "shoal.sim"}


@pytest.mark.parametrize(
    "program", ["shoal.head.controller, shoal.api.app, shoal.head.standby", "shoal.agent.agent"]
)
def test_head_and_agent_load_neither_planner_nor_measurements_nor_simulator(program: str) -> None:
    script = f"import sys, {program}\nprint(*sys.modules)\n"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    extras = ("shoal.plan", "shoal.probes", "shoal.sim")
    assert "shoal.model" in run.stdout.split()
    assert [name for name in run.stdout.split() if name.startswith(extras)] == []


def test_listing_jobs_loads_nothing_that_only_a_screen_needs() -> None:
    script = (
        "import sys\n"
        "from shoal.cli.app import call\n"
        "call(['ps', '--home', '/nowhere', '--limit', '5'])\n"
        "assert 'rich' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
