"""Sleepers that are to wake: each in its place in line, as soon as its nodes have room, or room can
be made."""

from __future__ import annotations

import heapq

from shoal.core.scheduling.again import kept_from
from shoal.core.scheduling.backfill import Reserved, delayed_by, set_aside
from shoal.core.scheduling.beds import behind
from shoal.core.scheduling.fit import fit, slices
from shoal.core.scheduling.keep import line_key
from shoal.core.scheduling.order import takes_turns
from shoal.core.scheduling.preempt import preempt
from shoal.core.scheduling.sleepers import budget_of, cap_of
from shoal.core.scheduling.sleeping import bed, rouse
from shoal.core.state.events.base import NodeEvent
from shoal.core.state.events.budgets import BudgetFreed
from shoal.core.state.events.queue import JobClaimed
from shoal.core.state.events.runs import JobStopping
from shoal.core.state.queue import gang_of
from shoal.core.state.round import Round
from shoal.core.state.saving import unsaved_ms
from shoal.model.durations import duration_text
from shoal.model.job import Job, SleepCause, StopCause

LENDS = (SleepCause.PREEMPT, SleepCause.TURN)  # it sleeps for others
LOOKED_MAX = 64  # sleepers whose nodes have not changed, in one cycle
MAKERS_MAX = 8  # at most so many sleepers have room made for them in one cycle


class Sleepers:
    """Those that one cycle looks at: those whose nodes have changed and, if it looks at the whole
    queue, the first of the others: room may be made for them, or be found elsewhere."""

    def __init__(self, round_: Round, *, whole: bool) -> None:
        self._round = round_
        self._made = 0  # sleepers for which room was sought
        self._line: list[Job] = []  # the first in line last
        state, now_ms = round_.state, round_.now_ms
        if not state.wakeful:
            return
        chosen = dict(state.agenda.beds)
        if any(isinstance(event, NodeEvent | BudgetFreed) for event in round_.events):
            chosen = dict(state.wakeful)
        if whole:
            firsts = heapq.nsmallest(LOOKED_MAX, map(state.jobs.__getitem__, state.wakeful), _first)
            chosen.update(dict.fromkeys(job.id for job in firsts))
        self._line = [state.jobs[job_id] for job_id in chosen]
        self._line.sort(key=lambda job: line_key(state, job, now_ms), reverse=True)

    def wake(self, before: Job | None = None) -> None:
        """Those that come before this job; without one, all that are left."""
        state, now_ms = self._round.state, self._round.now_ms
        if not self._line:
            return
        place = None if before is None else line_key(state, before, now_ms)
        while self._line and (place is None or line_key(state, self._line[-1], now_ms) < place):
            self._try(self._line.pop())

    def _try(self, job: Job) -> None:
        state = self._round.state
        if job.id not in state.wakeful:
            return  # it was stopped for another in this cycle
        state.agenda.beds.pop(job.id, None)
        if job.id in state.claims or budget_of(state, job, self._round.now_ms):
            return
        if cap_of(state, job):
            state.agenda.beds[job.id] = None  # what others hold may change on any node
            return
        if job.full_ms > self._round.now_ms:
            state.agenda.beds[job.id] = None
            self._round.look_again(job.full_ms)
            return
        given = bed(state, job)
        if given is None:
            self._made += 1
            if self._made > MAKERS_MAX or not preempt(self._round, job):
                _go_elsewhere(self._round, job)
        elif behind(state, job, self._round.policy, self._round.now_ms):
            state.agenda.beds[job.id] = None  # what is ahead of it may change with time alone
            if job.wanted_ms is not None:
                self._round.look_again(job.wanted_ms + self._round.policy.patience_ms)
        else:
            rouse(self._round, job, given)


def _go_elsewhere(round_: Round, job: Job) -> None:
    """A sleeper can wake on its own nodes only. When it has waited for them for as long as a
    restart costs, it is restarted where there is room: it then loses no more than it has slept."""
    state, now_ms = round_.state, round_.now_ms
    if job.sleep_cause not in LENDS or not takes_turns(job) or job.dozed_ms is None:
        return
    lost_ms = unsaved_ms(job, job.dozed_ms)
    due_ms = job.dozed_ms + lost_ms + state.policy.move_cost_ms
    if due_ms > now_ms:
        round_.look_again(due_ms)
        return
    gang = gang_of(job)
    if gang in state.agenda.hopeless:
        return
    delayed = delayed_by(state, job, state.reservations, now_ms)
    with set_aside(state, gang, Reserved(state, delayed, now_ms)) as aside:
        plan = fit(state, gang, kept_from(state, job, now_ms) | aside.avoid)
        found = slices(state, plan, gang.demand) if plan is not None else ()
    if not found:
        return
    nodes = ", ".join(dict.fromkeys(slice_.node for slice_ in found))
    why = (
        f"restarts on {nodes}, because its own nodes have had no room for it for "
        f"{duration_text(now_ms - job.dozed_ms)}; {duration_text(lost_ms)} of work since its last "
        "checkpoint is lost"
    )
    round_.emit(
        JobStopping(at_ms=now_ms, job=job.id, attempt=job.attempt, cause=StopCause.MOVE, why=why)
    )
    round_.emit(JobClaimed(at_ms=now_ms, job=job.id, slices=found, why=why))


def _first(job: Job) -> tuple[int, bool, int, int]:
    return (-job.spec.priority, not job.elder, job.wanted_ms or 0, job.number)
