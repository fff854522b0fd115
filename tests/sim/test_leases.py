"""Leases in the storm: nobody lives after one. Without the code for that, the storm sees it."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest
from storm.fuzz import SeedFailed, Size, run_seed

from shoal.core.features import lease
from shoal.core.leasebook import Kept, LeaseBook
from shoal.core.nodebook import NodeBook
from shoal.core.phases import heal, observe
from shoal.core.state.ending import stop
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.commands import Lease
from shoal.model.job import Job, MemberRef, Phase, StopCause

SEEDS = 6
EARLY = (6, 23)  # they show what few others do
SEEDS_MAX = 60
SIZE = Size(leases_part=1, sleep_part=0, liars_part=0, data_part=0, hangs_part=0, calm_ms=300_000)

Mutate = Callable[[pytest.MonkeyPatch], None]


def test_no_member_outlives_its_lease_whoever_is_dead_or_cut_off() -> None:
    for seed in range(SEEDS):
        run_seed(seed, SIZE)


def leave_it_to_the_head(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NodeBook, "end_leases", lambda _: [])


def count_from_when_the_command_came(patch: pytest.MonkeyPatch) -> None:
    def take(book: LeaseBook, ref: MemberRef, given: Lease | msgspec.UnsetType) -> bool:
        if given is not msgspec.UNSET:
            book._kept[ref] = Kept(given.until_ms, book.clock() + given.for_ms)
        return True

    patch.setattr(LeaseBook, "take", take)


def count_from_now_instead_of_from_the_report(patch: pytest.MonkeyPatch) -> None:
    honest = lease.lease_of

    def late(state: State, job: Job, node: str) -> Lease | None:
        found = honest(state, job, node)
        return found and msgspec.structs.replace(found, for_ms=found.for_ms + 4_000)

    patch.setattr(lease, "lease_of", late)
    patch.setattr("shoal.core.phases.reconcile.lease_of", late)


def run_again_after_a_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(heal, "AGAIN", (*heal.AGAIN, StopCause.LEASE))
    patch.setattr(heal, "ENDS_FOR_GOOD", (StopCause.CANCEL,))


def take_every_end_by_a_node_for_the_last(patch: pytest.MonkeyPatch) -> None:
    """Though the job was renewed, and only this node did not hear of it."""

    def ended(round_: Round, job: Job, _: int) -> None:
        if job.phase is not Phase.STOPPING:
            stop(round_, job, StopCause.LEASE, "its lease ended")

    patch.setattr(observe, "lease_ended", ended)


@pytest.mark.parametrize(
    ("mutate", "words"),
    [
        (leave_it_to_the_head, "and the lease of"),
        (count_from_when_the_command_came, "and the lease of|too late"),
        (count_from_now_instead_of_from_the_report, "and the lease of|too late"),
        (run_again_after_a_lease, "runs again after|placed after its lease"),
        (take_every_end_by_a_node_for_the_last, "but its lease is not over"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_really_happened_catches(
    mutate: Mutate, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    assert re.search(words, first_failure())


def first_failure() -> str:
    for seed in (*EARLY, *range(SEEDS_MAX)):
        try:
            run_seed(seed, SIZE, checked=False)
        except SeedFailed as failure:
            return f"{failure}"
    return "nothing noticed"
