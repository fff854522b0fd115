"""A gang leaves a node in quarantine if that saves more than the restart costs."""

from __future__ import annotations

from shoal.core.books import moving
from shoal.core.books.moving import Move
from shoal.core.books.numbers import upper_median
from shoal.core.books.quarantine import rule_of
from shoal.core.scheduling.again import beside, taken
from shoal.core.scheduling.ends import too_short
from shoal.core.scheduling.fit import fit, slices
from shoal.core.scheduling.order import gpus_of
from shoal.core.scheduling.preempt import WithoutVictims
from shoal.core.scheduling.victims import victim_of
from shoal.core.scheduling.weak_links import off_weak
from shoal.core.state.events.queue import JobClaimed
from shoal.core.state.events.runs import JobStopping
from shoal.core.state.expect import ran_ms, run_ms
from shoal.core.state.queue import Gang, gang_of
from shoal.core.state.round import Round
from shoal.core.state.saving import unsaved_ms
from shoal.core.state.state import State
from shoal.model.durations import duration_text
from shoal.model.health import Standing
from shoal.model.job import Job, Phase, Restart, StopCause
from shoal.model.node import NodeHealth
from shoal.model.resources import Slice


def leave(round_: Round, job: Job) -> None:
    """It gets a claim on its new place and on what it keeps, so that it cannot lose them."""
    state = round_.state
    if job.phase is not Phase.RUNNING or job.spec.restart is Restart.NEVER:
        return
    if job.id in state.claims or any(member.over for member in job.members):
        return
    bad = [
        number
        for number, member in enumerate(job.members)
        if state.nodes[member.slice.node].record.standing is Standing.QUARANTINED
    ]
    if not bad or any(
        state.nodes[member.slice.node].health is not NodeHealth.READY for member in job.members
    ):
        return  # a silent node would keep it from stopping
    move = _weigh(round_, job, bad)
    if not move.worth:
        return
    found = _elsewhere(round_, job)
    if found is None:
        return
    left = ", ".join(dict.fromkeys(job.members[number].slice.node for number in bad))
    names = ", ".join(dict.fromkeys(found[number].node for number in bad))
    why = f"leaves {left}, which is in quarantine, for {names}: {move.why}"
    now_ms = round_.now_ms
    round_.emit(
        JobStopping(at_ms=now_ms, job=job.id, attempt=job.attempt, cause=StopCause.MOVE, why=why)
    )
    round_.emit(JobClaimed(at_ms=now_ms, job=job.id, slices=found, why=why))


def _weigh(round_: Round, job: Job, bad: list[int]) -> Move:
    """Judged by the slowest of its members there. A node that failed a check, or on which jobs
    fail, may not slow the gang now; it is left if the restart costs little."""
    state, now_ms, policy = round_.state, round_.now_ms, round_.policy
    watch = state.heard.watches.get(job.id)
    cost_ms = policy.move_cost_ms + unsaved_ms(job, now_ms)
    change = max(
        (watch.slow[number] for number in bad if number in watch.slow) if watch else (),
        key=lambda change: change.own_us,
        default=None,
    )
    if watch is None or change is None or not watch.pace.paces_us:
        spared = cost_ms <= 2 * policy.move_cost_ms
        why = f"a restart there or here costs {duration_text(cost_ms)}"
        return Move(worth=spared, gain=0, cost=cost_ms * gpus_of(job), why=why)
    step_us = upper_median(watch.pace.paces_us)
    ran = ran_ms(job, now_ms)
    return moving.consider(
        own_us=change.own_us,
        gang_us=change.gang_us,
        step_us=step_us,
        remaining_ms=moving.remaining_ms(
            step=watch.pace.step,
            steps_total=watch.pace.steps_total,
            step_us=step_us,
            ran_ms=ran,
            expected_ms=run_ms(state, job, 50, ran),
        ),
        restart_ms=policy.move_cost_ms,
        since_checkpoint_ms=unsaved_ms(job, now_ms),
        width=gpus_of(job),
        rule=rule_of(policy),
    )


def _elsewhere(round_: Round, job: Job) -> tuple[Slice, ...] | None:
    """The slices of all members, new ones for members on closed nodes; None without room."""
    state = round_.state
    gang = gang_of(job)
    members = range(len(job.members))
    kept = {
        n: job.members[n].slice
        for n in members
        if not gang.bound and _stays(state, gang, job.members[n].slice.node)
    }
    missing = [number for number in members if number not in kept]
    with WithoutVictims(state) as overlay:
        overlay.give_back(victim_of(job, round_.now_ms, whole=True))
        with taken(state, job, tuple(kept.values())):
            rest = gang._replace(members=len(missing))
            short = too_short(state, job, round_.now_ms)
            avoid = beside(state, gang, kept.values(), short)
            plan = fit(state, rest, avoid, kept.values())
            if plan is not None:
                _, plan = off_weak(state, rest, avoid, plan, kept.values())
            found = slices(state, plan, gang.demand) if plan is not None else ()
    if len(found) < len(missing):
        return None
    kept.update(zip(missing, found, strict=True))
    return tuple(kept[number] for number in members)


def _stays(state: State, gang: Gang, node_id: str) -> bool:
    """The node is open, and its labels still meet the job's conditions."""
    node = state.nodes[node_id]
    return node.schedulable and gang.demand.suits(state.rooms[node.index].kind)
