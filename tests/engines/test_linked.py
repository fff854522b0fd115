"""The link keeps the contract: real starters and agents dial a real TLS port."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.contract import ProcessContract
from tests.engines.hand import clean
from tests.engines.linked_rig import LinkedRig

pytestmark = pytest.mark.filterwarnings("ignore::litestar.exceptions.LitestarDeprecationWarning")


@pytest.fixture(scope="module")
def rig() -> Iterator[LinkedRig]:
    scratch = Path(tempfile.mkdtemp(prefix="shoal-linked-"))
    made = LinkedRig(scratch)
    try:
        yield made
    finally:
        made.end()
        clean(scratch)


class TestLinked(ProcessContract):
    pass
