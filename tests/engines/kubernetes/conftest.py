"""A Kubernetes for the tests of this folder, one for each file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.kubernetes.kube import Kube


@pytest.fixture
def kube(tmp_path: Path) -> Iterator[Kube]:
    made = Kube(tmp_path)
    try:
        yield made
        if not made.real:
            assert made.server.invalid == [], "requests that the OpenAPI definitions do not allow"
    finally:
        made.end()
