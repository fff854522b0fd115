"""Waits that somebody wants to know about: an event once a job has waited for that long."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from shoal.core.features.notices import rules_about
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.events import JobReleased, JobRequeued, JobSubmitted, JobWaited
from shoal.model.job import Job, Phase
from shoal.model.notice import Rule, wanted_of

SPARE = 1_000  # entries that may be outdated before all are looked at again


def report_waits(round_: Round) -> None:
    """The agenda says when to look at which job, so that a step costs as much as it has to report.
    A new agenda, or a new rule, looks at all jobs once."""
    state, now_ms = round_.state, round_.now_ms
    agenda = state.agenda
    if agenda.waits is None or len(agenda.waits) > agenda.waits_max:
        agenda.waits = []
        _expect(state, (job for job in state.jobs.values() if job.phase is Phase.WAITING))
        agenda.waits_max = 2 * len(agenda.waits) + SPARE
    else:
        begun = (JobSubmitted, JobRequeued, JobReleased)
        names = dict.fromkeys(one.job for one in round_.events if isinstance(one, begun))
        _expect(state, (state.jobs[name] for name in names if name in state.jobs))
    waits = agenda.waits
    while waits and waits[0][0] <= now_ms:
        _, number, since_ms, after_ms = heappop(waits)
        job = state.jobs.get(state.numbers.get(number, ""))
        if job is None or job.phase is not Phase.WAITING or waits_since_ms(job) != since_ms:
            continue
        if after_ms > job.waited_ms:
            round_.emit(JobWaited(at_ms=now_ms, job=job.id, since_ms=since_ms, waited_ms=after_ms))


def next_report_ms(state: State) -> int | None:
    waits = state.agenda.waits
    return waits[0][0] if waits else None


def waits_since_ms(job: Job) -> int:
    """A pause before a retry, or the time before it may begin, is not a wait for room."""
    return max(job.requeued_ms or job.submitted_ms, job.not_before_ms)


def _expect(state: State, jobs: Iterable[Job]) -> None:
    rules = [rule for rule in state.rules.values() if wanted_of(rule.wish).waiting_ms]
    waits = state.agenda.waits
    assert waits is not None, "the caller has made one"
    for job in jobs:
        if not (rules or job.spec.notify) or job.phase is not Phase.WAITING:
            continue
        if job.spec.array or job.awaits:
            continue  # an array has one notice, at its end; others may have to end first
        since_ms = waits_since_ms(job)
        for after_ms in _thresholds(state, job, rules):
            if after_ms > job.waited_ms:
                heappush(waits, (since_ms + after_ms, job.number, since_ms, after_ms))


def _thresholds(state: State, job: Job, rules: list[Rule]) -> list[int]:
    wishes = [*job.spec.notify, *(rule.wish for rule in rules_about(rules, state.identity, job))]
    return sorted({wanted_of(wish).waiting_ms for wish in wishes} - {0})
