"""Three clusters that run jobs of each other: no job is lost, and none runs twice.

A failure names its seed; `python -m storm.neighbors SEED` tells that history again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from storm.fuzz import SeedFailed
from storm.neighbors import Length, run_neighbors

from shoal.core.features import neighbors
from shoal.core.phases import admit
from shoal.core.state.round import Round
from shoal.model.away import Away
from shoal.model.job import Job, Outcome
from shoal.model.neighbor import Ending, HandedJob
from shoal.model.report import Accepted, Answer, Submit

SEEDS = 16
CHUNK = 25

Mutate = Callable[[pytest.MonkeyPatch], None]


def test_some_histories_keep_all_promises_and_hold_what_can_go_wrong() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        counts += run_neighbors(seed)
    assert {name for name in EXPECTED if not counts[name]} == set()


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SEEDS, 2_016, CHUNK))
def test_many_histories_keep_all_promises(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run_neighbors(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_long_histories_keep_all_promises(seed: int) -> None:
    run_neighbors(seed, Length(nodes=4, jobs=60, faults=40, storm_ms=3_600_000))


def test_looking_at_a_history_changes_nothing() -> None:
    assert run_neighbors(1) == run_neighbors(1, checked=False)


EXPECTED = (
    *("letter lost", "letter repeated", "letter late", "letter replayed", "neighbors cut"),
    *("host cancelled", "host refused", "job succeeded away", "job failed away"),
    *("job cancelled away", "job timed-out away", "job came back, ended by its host"),
    *("job came back, lease over", "job came back, neighbor gone", "JobGivenUp"),
)


# -- the witness sees what is wrong on purpose -----------------------------------------------------


def _a_refusal_is_believed(patch: pytest.MonkeyPatch) -> None:
    """The submission may have been accepted before it was refused."""
    hear = neighbors._hear

    def mutant(round_: Round, job: Job, away: Away, handed: HandedJob, clock_ms: int) -> None:
        if handed.refused:
            neighbors._return(round_, job, away, "refused")
        else:
            hear(round_, job, away, handed, clock_ms)

    patch.setattr(neighbors, "_hear", mutant)


def _the_host_has_the_whole_lease(patch: pytest.MonkeyPatch) -> None:
    """It stops the job when home starts it, which is too late."""

    def mutant(spec: object, clock_ms: int, now_ms: int) -> tuple[int, int]:
        length_ms = getattr(spec, "if_cut_ms", 0)
        return (clock_ms + 2 * length_ms, now_ms + length_ms) if length_ms else (0, 0)

    patch.setattr(neighbors, "_lease", mutant)


def _a_late_job_is_taken_at_once(patch: pytest.MonkeyPatch) -> None:
    """Before the host has said that it has ended it."""

    def mutant(round_: Round, job: Job, why: str) -> None:
        assert job.away is not None
        neighbors._return(round_, job, job.away, why)

    patch.setattr(neighbors, "withdraw", mutant)


def _a_withdrawal_takes_no_key(patch: pytest.MonkeyPatch) -> None:
    """So the submission that comes after it is accepted."""

    def mutant(_: Round, __: Submit) -> Answer:
        return Accepted("")

    patch.setattr(admit, "_never_runs", mutant)


def _what_ended_well_runs_again(patch: pytest.MonkeyPatch) -> None:
    def mutant(round_: Round, job: Job, away: Away, ended: Ending) -> None:
        assert ended.outcome in Outcome
        neighbors._return(round_, job, away, "once more", neighbors.Owed(ended.gpu_ms))

    patch.setattr(neighbors, "_come_back", mutant)


def _nothing_is_owed_for_what_came_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(neighbors, "_owed", lambda *_: neighbors.NOTHING)


@pytest.mark.parametrize(
    ("mutate", "seen"),
    [
        (_a_refusal_is_believed, "came back, but"),
        (_the_host_has_the_whole_lease, "came back by its lease, but"),
        (_a_late_job_is_taken_at_once, "came back, but"),
        (_a_withdrawal_takes_no_key, "stuck"),
        (_what_ended_well_runs_again, "came back, but"),
        (_nothing_is_owed_for_what_came_back, "is owed to"),
    ],
)
def test_the_witness_sees(mutate: Mutate, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(SeedFailed, match=seen):
        _run_many()


def _run_many() -> None:
    for seed in range(40):
        run_neighbors(seed, Length(calm_ms=1_200_000))
