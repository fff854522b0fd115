"""The documentation says what the code does, where a test can compare the two."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
VARIABLE = re.compile(r"\bSHOAL_[A-Z0-9_]*[A-Z0-9]\b")


def test_every_variable_of_the_code_is_in_the_table_and_the_other_way_round() -> None:
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    used = set(VARIABLE.findall("\n".join(sources)))
    page = (ROOT / "docs" / "environment.md").read_text()
    product, _, testing = page.partition("Tests and benchmarks have")
    assert set(VARIABLE.findall(product)) == used
    checks = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    assert set(VARIABLE.findall(testing)) <= set(VARIABLE.findall("\n".join(checks)))


def test_links_between_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []
