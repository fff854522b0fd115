"""Every store has a bound and a share rule: docs/limits.md lists them, and the code says which."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from shoal.control.home import Home
from shoal.core.state.facts import Facts
from shoal.core.state.heard import Heard

ROOT = Path(__file__).parent.parent
SHARES = ("gives", "refused", "own", "nobody", "the oldest")
NAMED = re.compile(r"`(table|state|heard|home) (\w+)`")
FIGURE = re.compile(r"([\d,]+(?: [KMG]iB)?)[^(`\d]*\(`([a-z_.]+)\.([A-Z_]+)`\)")
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def rows() -> list[list[str]]:
    """The cells of the table."""
    text = (ROOT / "docs/limits.md").read_text().partition("## Every store")[2]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def stores() -> set[tuple[str, str]]:
    """As the code has them: whoever adds one meets this test."""
    found: set[tuple[str, str]] = set()
    for path in (ROOT / "src/shoal").rglob("*.py"):
        tables = re.findall(r"CREATE TABLE (?:IF NOT EXISTS )?(\w+)", path.read_text())
        found |= {("table", name) for name in tables}
    for kind, owner in (("state", Facts()), ("heard", Heard())):
        values = vars(owner).items()
        found |= {(kind, name) for name, value in values if not isinstance(value, int)}
    home = vars(Home(Path("/nowhere")))
    found |= {("home", name) for name, value in home.items() if isinstance(value, Path)}
    return found - {("home", "path")}


def test_every_store_is_in_the_list_once() -> None:
    named = [one for cells in rows() for one in NAMED.findall(cells[0])]
    assert sorted(stores() - set(named)) == [], "give it a bound, and a line in docs/limits.md"
    assert sorted(set(named) - stores()) == [], "it is gone from the code"
    assert len(set(named)) == len(named)


@pytest.mark.parametrize("cells", rows(), ids=lambda cells: cells[0].partition(":")[0])
def test_a_store_has_a_bound_as_in_the_code_and_a_share(cells: list[str]) -> None:
    _, bound, share = cells
    assert bound
    assert share.startswith(SHARES), share
    text = f"{bound} {share}"
    figures = FIGURE.findall(text)
    assert len(figures) == len(re.findall(r"\(`", text)), "each constant follows its figure"
    for figure, module, name in figures:
        number, _, unit = figure.partition(" ")
        said = int(number.replace(",", "")) * UNITS.get(unit, 1)
        assert getattr(importlib.import_module(f"shoal.{module}"), name) == said, name
