"""The files around the code agree with the code and with each other."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import shoal

ROOT = Path(__file__).parent.parent
SECOND_TRIES_MAX = 25
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements.lock").read_text()
YAML_FILES = sorted([*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"])


def normalized(requirement: str) -> str:
    """The name in a requirement, as packages are compared."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def workflow(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def commands(job: Any) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_every_forge_file_is_yaml(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_the_forge_runs_make_test_on_every_python_that_the_package_claims() -> None:
    test = workflow("test")["jobs"]["test"]
    assert "make test" in commands(test)
    claimed = [
        version
        for line in PROJECT["classifiers"]
        if re.fullmatch(r"3\.\d+", version := line.rpartition(" :: ")[2])
    ]
    assert test["strategy"]["matrix"]["python"] == claimed
    assert PROJECT["requires-python"] == f">={claimed[0]}"


def test_every_make_target_that_the_forge_calls_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in ("test", "audit", "release"):
        for job in workflow(name)["jobs"].values():
            for command in commands(job):
                if command.startswith("make "):
                    assert set(command.split()[1:]) <= targets, command


def test_the_newest_changelog_entry_is_the_version_and_every_entry_has_a_date() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    entries = [heading for heading in headings if heading != "Unreleased"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", entry) for entry in entries)
    assert entries[0].split(" - ")[0] == shoal.__version__


def test_the_lock_names_every_dependency_with_one_version_and_nothing_else() -> None:
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    locked = [normalized(line) for line in lines]
    assert len(locked) == len(set(locked))
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(name for extra in extras.values() for name in extra)]
    assert {normalized(name) for name in wanted} - set(locked) == set()


def test_the_lock_keeps_to_the_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    assert {line for line in constraints if not line.startswith("#")} <= set(LOCK.splitlines())


def test_second_tries_are_few_each_has_a_reason_and_none_covers_a_whole_file() -> None:
    marked = []
    for path in sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]):
        tree = ast.parse(path.read_text())
        marks = [one for one in ast.walk(tree) if isinstance(one, ast.Attribute)]
        marks = [one for one in marks if ast.unparse(one) == "pytest.mark.outside"]
        on_tests = [
            mark
            for test in ast.walk(tree)
            if isinstance(test, ast.FunctionDef)
            for mark in test.decorator_list
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.outside"
        ]
        assert len(on_tests) == len(marks), f"{path}: mark its tests one by one"
        assert all(len(mark.args) == 1 for mark in on_tests), f"{path}: outside of what?"
        marked += [path] * len(marks)
    assert len(marked) <= SECOND_TRIES_MAX
