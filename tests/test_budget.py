"""What every job and every start costs has a bound: counts of system calls, execs, flushes, bytes,
modules and messages of a real cluster, none of which depends on how fast the machine is."""

from __future__ import annotations

import pytest
from harness.budget import BOUNDS, Section, bounds, measure, missing

KNOWN = bounds()


@pytest.fixture(scope="module")
def measured() -> dict[str, Section]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    return measure()


@pytest.mark.parametrize("section", KNOWN)
def test_no_count_has_risen(section: str, measured: dict[str, Section]) -> None:
    counts, detail = measured[section]
    rose = [
        f"{name} rose from {bound.count:g} to {counts[name]:.4g}: {bound.why}"
        for name, bound in KNOWN[section].items()
        if counts[name] > bound.most
    ]
    advice = (
        "Take the cost away from those who do not use what it is for. If all of them need it, say "
        f"why in the same commit, and raise the count in {BOUNDS.name} "
        "(python -m harness.budget --write)."
    )
    assert not rose, "\n".join([f"{section}:", *rose, advice, f"It now calls:\n    {detail}"])


# Counts that do not depend on how threads take turns, and by how much two runs may differ.
STEADY = ("calls", "messages", "bytes", "execs", "flushes", "commits")
NOISE_SHARE, NOISE = 0.1, 5


def test_what_others_use_costs_a_plain_job_nothing(measured: dict[str, Section]) -> None:
    """Whether its start and its end share a commit is a matter of milliseconds: what a plain job
    costs that shares none is no more."""
    plain, beside, known = measured["job"].counts, measured["job beside features"], KNOWN["job"]
    assert beside.counts["commits"] <= known["commits"].most
    more = {
        name: f"{plain[name]:g}, then {count:g}"
        for name, count in beside.counts.items()
        if name.endswith(STEADY)
        and count > max(plain[name], known[name].count) * (1 + NOISE_SHARE) + NOISE
    }
    assert not more, f"{more}\n{beside.detail}"


def test_every_count_has_a_bound(measured: dict[str, Section]) -> None:
    assert {name: set(section.counts) for name, section in measured.items()} == {
        name: set(known) for name, known in KNOWN.items()
    }
