"""Longer and larger histories than every test run can afford: `make long`."""

from __future__ import annotations

import pytest
from storm.fuzz import Size, run_seed

pytestmark = pytest.mark.soak

LONG = Size(nodes=6, jobs=150, faults=120, storm_ms=300_000, calm_ms=3_600_000)
WIDE = Size(nodes=60, jobs=400, faults=150, storm_ms=60_000, calm_ms=3_600_000)
CHUNK = 250


@pytest.mark.parametrize("first", [250, *range(10_000, 20_000, CHUNK)])
def test_ten_thousand_more_seeds_keep_all_promises(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run_seed(seed)


@pytest.mark.parametrize("seed", range(20))
def test_long_histories_keep_all_promises(seed: int) -> None:
    assert run_seed(seed, LONG).log == run_seed(seed, LONG, checked=False).log


@pytest.mark.parametrize("seed", range(10))
def test_large_clusters_keep_all_promises(seed: int) -> None:
    run_seed(seed, WIDE)
