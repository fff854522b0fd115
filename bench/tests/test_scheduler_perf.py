"""The mirrored cases of scheduler_perf place all that they measure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from bench.scheduler_perf import CASES, Case, measure
from shoal.model.job import JobSpec


def _ends_of(jobs: Sequence[JobSpec]) -> list[JobSpec]:
    return [*jobs[:30], *jobs[30:][-30:]]


# Small ones: what happens beside the measured jobs, too.
SMALL = [
    msgspec.structs.replace(
        case, nodes=60, jobs=case.jobs[:40], before=_ends_of(case.before), every=10
    )
    for case in CASES
    if not case.large and case.jobs[0].members < 100
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_all_measured_jobs_find_room(case: Case) -> None:
    rate = measure(msgspec.structs.replace(case, tainted=0), 1)
    assert rate.members == sum(spec.members for spec in case.jobs)
    assert rate.members_per_s > 0
