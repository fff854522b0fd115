"""What the rooms of the state promise: caches decide nothing, indexes follow from facts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from storm.fuzz import run_seed

import shoal.tick
from shoal.core.state.agenda import Agenda
from shoal.core.state.image import decoded, encoded
from shoal.core.state.indexes import Indexes
from shoal.core.state.load import restore
from shoal.core.state.state import State
from shoal.core.step import Step, step
from shoal.model.job import Phase

SEEDS = [3, 11, 20, 33]


@pytest.mark.parametrize("seed", SEEDS)
def test_dropping_all_caches_before_each_step_changes_no_event(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_seed(seed, checked=False).digest
    steps = 0

    def without_caches(state: State, *rest: Any) -> Step:
        nonlocal steps
        steps += 1
        state.drop_caches()
        return step(state, *rest)

    monkeypatch.setattr(shoal.tick, "step", without_caches)
    assert run_seed(seed, checked=False).digest == expected
    assert steps > 100


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_with_an_empty_agenda_looks_at_everything_and_breaks_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_agenda(state: State, *rest: Any) -> Step:
        state.agenda = Agenda()
        for job in state.jobs.values():
            state.agenda.stoppable.joins(job, state.policy.run_ms_min)
            if job.phase is not Phase.WAITING:
                state.agenda.attention[job.id] = None
        return step(state, *rest)

    monkeypatch.setattr(shoal.tick, "step", without_agenda)
    run_seed(seed)  # raises if an invariant breaks or the calm does not settle all jobs


@pytest.mark.parametrize("seed", SEEDS)
def test_the_indexes_that_a_snapshot_builds_are_those_that_apply_kept(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(state: State, *rest: Any) -> Step:
        taken = step(state, *rest)
        restored = restore(decoded(encoded(state.snapshot())))
        assert indexes(restored) == indexes(state)
        return taken

    monkeypatch.setattr(shoal.tick, "step", compared)
    run_seed(seed, checked=False)


def indexes(state: State) -> dict[str, Any]:
    """All fields of `Indexes`, in a form that can be compared."""
    found = {name: getattr(state, name) for name in vars(Indexes())}
    for fact in ("jobs", "nodes", "services", "policy", "reservations", "claims"):
        del found[fact]  # a snapshot holds these, and test_apply compares them
    # A group's slow view of run times, and of the mix of jobs, is taken when it is due.
    for learned in ("estimates", "mix", "foresight", "fleet", "failures", "ages", "wear"):
        del found[learned]
    found["accounts"] = {
        name: (account.share, account.gpu_milli) for name, account in state.accounts.sums.items()
    }
    found["order"] = [node.id for node in state.order]
    found["placed"] = {node: set(members) for node, members in state.placed.items()}
    found["capacity"] = +Counter(state.capacity)
    found["open_capacity"] = +Counter(state.open_capacity)
    found["rooms"] = [
        (room.kind, room.gpu_milli, room.cpu_milli, room.memory_mb, room.exclusive, room.level)
        for room in state.rooms
    ]
    found["cluster"] = free_in(state.cluster)
    found["divisions"] = [
        {name: free_in(domain) for name, domain in division.domains.items() if domain.nodes}
        for division in state.divisions
    ]
    # Lanes may differ: a job is put beside those that looked alike when it joined.
    queue = state.queue
    # A delayed job whose time has come is let into its lane by the next step.
    standing = (*queue.lane, *queue.capped_lane)
    due = {number for number in standing if state.job_numbered(number).not_before_ms}
    delayed = sorted({number for _, number in queue.delayed} | due)
    found["queue"] = (sorted(set(queue.lane) - due), delayed, sorted(queue.held))
    found["capped"] = sorted(set(queue.capped_lane) - due)
    found["after"] = (sorted(queue.parked), state.dependents, state.flows)
    found["dues"] = state.dues[:1]
    found["limits"] = sorted(due for due in set(state.limits) if running(state, due))
    found["aging"] = sorted({due[1:] for due in state.aging if running(state, due)})
    return found


def free_in(domain: Any) -> dict[Any, Any]:
    return {kind: index.nodes for kind, index in domain.free.items() if index.nodes}


def running(state: State, due: tuple[int, str, int]) -> bool:
    job = state.jobs.get(due[1])
    return job is not None and job.attempt == due[2] and job.phase is Phase.RUNNING
