"""The help: quick, true, and with examples."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import shoal as package
from shoal.cli.app import shoal as group
from shoal.cli.command import Option
from shoal.cli.first_page import FIRST, OPTIONS, THEMES, VERBS
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


def test_the_first_page_begins_with_ten_verbs_and_names_the_others_by_topic(shoal: Shoal) -> None:
    result = shoal("--help")
    assert result.code == 0
    start, others = result.out.split("More verbs by topic")
    assert len(FIRST) == 10 and all(
        f"  {name} " in start and VERBS[name] in start for name in FIRST
    )
    assert set(VERBS) - set(FIRST) <= set(others.partition("Options:")[0].split())
    assert "Exit codes" in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    assert shoal().out == shoal("help").out == result.out


def test_a_topic_lists_its_verbs_with_an_example_each(shoal: Shoal) -> None:
    for topic, verbs in THEMES.items():
        result = shoal("help", topic)
        assert result.code == 0
        for name in verbs:
            assert f"  {name} " in result.out and VERBS[name] in result.out
            assert f"$ shoal {name}" in result.out
        assert max(map(len, result.out.splitlines())) <= 80
        assert result.out.strip() in shoal("help", "all").out
    assert shoal("help", "run").out.strip() == shoal("run", "--help").out.strip()
    assert json.loads(shoal("help", "people", "--json").out)["people"]["user"] == VERBS["user"]
    unknown = shoal("help", "job")
    assert unknown.code == 2 and unknown.err.strip().endswith("did you mean: shoal help jobs")
    assert "topics: jobs, " in shoal("help", "xyzzy").err


def test_the_first_page_lists_the_options_of_all_verbs() -> None:
    listed = OPTIONS.splitlines()[1:]
    assert len(listed) == len(group.params) + 1
    for param in group.params:
        assert isinstance(param, Option)
        assert any(line.split()[0] in param.opts and f"  {param.help}" in line for line in listed)


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


def test_a_standby_loads_neither_planner_nor_measurements_nor_simulator() -> None:
    """As tests/test_processes.py has it of other processes."""
    script = "import sys, shoal.head.standby, shoal.api.app\nprint(*sys.modules)\n"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    extras = ("shoal.plan", "shoal.probes", "shoal.sim")
    assert "shoal.model" in run.stdout.split()
    assert [name for name in run.stdout.split() if name.startswith(extras)] == []
