"""No pattern lets a line break in: a name ends where it seems to end."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
import shoal.hosts.spec
import shoal.model.job
import shoal.model.node
import shoal.model.service

SAFE = r'(?!\n)$"'
MODULES = (shoal.hosts.spec, shoal.model.job, shoal.model.node, shoal.model.service)
PATTERNS = {
    f"{module.__name__}.{name}": value
    for module in MODULES
    for name, value in vars(module).items()
    if name.endswith("_PATTERN")
}


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_a_pattern_admits_has_no_line_break(data: st.DataObject, pattern: str) -> None:
    text = data.draw(st.from_regex(pattern))
    assert "\n" not in text
    admits = msgspec.json.Decoder(_typed(pattern)).decode
    assert admits(msgspec.json.encode(text)) == text
    for more in ("\n", "\r\n", "\nx"):
        with pytest.raises(msgspec.ValidationError):
            admits(msgspec.json.encode(text + more))


def test_every_pattern_of_the_code_that_ends_in_a_dollar_is_one_of_these() -> None:
    found = []
    for path in Path(shoal.__file__).parent.rglob("*.py"):
        for line in path.read_text().splitlines():
            if re.search(r'pattern=r"|_PATTERN = r"', line) and re.search(
                r'(?<!\(\?!\\n\))\$"', line
            ):
                found.append(f"{path.name}: {line.strip()}")
    assert found == []


def _typed(pattern: str) -> object:
    from typing import Annotated

    return Annotated[str, msgspec.Meta(pattern=pattern)]
