"""What is made from the tables of calls, columns and verbs is up to date."""

from __future__ import annotations

import pytest
from harness.generated import FILES, ROOT


@pytest.mark.parametrize("name", FILES)
def test_a_generated_file_is_what_the_table_makes_of_it(name: str) -> None:
    text = (ROOT / name).read_text()
    assert FILES[name](text) == text, f"{name} is out of date; write it again with: make generate"
