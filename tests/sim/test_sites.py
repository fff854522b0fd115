"""Three clusters that serve services of each other: one version everywhere in the end, and nothing
is left of a service that was stopped.

A failure names its seed; `python -m storm.sites SEED` tells that history again.
"""

from __future__ import annotations

from collections import Counter

import pytest
from storm.fuzz import SeedFailed
from storm.sites import run_sites

from shoal.core.features.service import sites
from shoal.model.service import Service

SEEDS = (14,)  # in which what is expected happens
CHUNK = 10
EXPECTED = ("SiteAsked", "SiteHeard", "SiteEnded", "SitesTold", "back at a site", "neighbors cut")


def test_some_histories_keep_all_promises_and_hold_what_can_go_wrong() -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        counts += run_sites(seed)
    assert {name for name in EXPECTED if not counts[name]} == set()


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 400, CHUNK))
def test_many_histories_keep_all_promises(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run_sites(seed)


@pytest.mark.soak
def test_the_witness_sees_a_service_that_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant(service: Service, name: str) -> bool:
        return name not in service.spec.clusters

    monkeypatch.setattr(sites, "ends_there", mutant)
    with pytest.raises(SeedFailed, match="stuck"):
        _run_many()


def _run_many() -> None:
    for seed in range(5):
        run_sites(seed)
