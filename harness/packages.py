"""Installs packages for tests as pip would: modules and metadata with entry points."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any


def install(source: Path, target: Path) -> None:
    """The project in `source`, into a folder that is on `sys.path`."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    for module in source.glob("*.py"):
        shutil.copy(module, target)
    describe(project, target)


def describe(project: dict[str, Any], target: Path) -> None:
    """The metadata alone, from the table `project` of a pyproject.toml."""
    name, version = project["name"], project.get("version", "1.0")
    info = target / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = project["entry-points"].items()
    lines = [
        line
        for group, entries in groups
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
