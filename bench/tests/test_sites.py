"""What `bench/sites.py` counts, on samples made up for it."""

from __future__ import annotations

from bench.gateway_load import Sample
from bench.sites import spread


def test_an_answer_says_by_its_status_which_site_gave_it() -> None:
    samples = [Sample(0.0, 0.1, status) for status in (200, 200, 201, 202, 502, 0, 200, 200)]
    found = spread(samples, "a")
    shares = {name: found[name] for name in ("home", "b", "c")}
    assert shares == {"home": 0.5, "b": 0.125, "c": 0.125}
    assert (found["requests"], found["failed"], found["p50_ms"]) == (8, 2, 100)
