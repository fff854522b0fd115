"""A running cluster's state as events, for a ledger that begins with it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shoal.core.state.state import State
from shoal.model import events as ev
from shoal.model.budget import BudgetLevel
from shoal.model.job import Job, Phase, SleepCause, StopCause
from shoal.model.node import NodeHealth


def events_of(state: State, now_ms: int) -> Iterator[ev.Event]:
    """The present state, as if all of it happened now."""
    yield ev.PolicyChanged(at_ms=now_ms, policy=state.policy)
    for tenant, level in state.accounts.budgets.items():
        if level is BudgetLevel.HELD:
            yield ev.BudgetHeld(at_ms=now_ms, tenant=tenant)
    for node in state.order:
        yield ev.NodeJoined(
            at_ms=now_ms, node=node.id, spec=node.spec, incarnation=node.incarnation
        )
        if node.health is not NodeHealth.JOINING:
            yield ev.NodeReady(at_ms=now_ms, node=node.id)
        yield ev.NodeIntended(at_ms=now_ms, node=node.id, intent=node.intent)
        yield ev.NodeJudged(at_ms=now_ms, node=node.id, record=node.record)
    for job in state.jobs.values():
        yield ev.JobSubmitted(
            at_ms=now_ms, job=job.id, spec=job.spec, key=job.key, awaits=job.awaits
        )
        yield from _attempt(job, now_ms)
        if job.id in state.reservations:
            nodes = tuple(state.order[index].id for index in state.reservations[job.id].nodes)
            yield ev.JobReserved(at_ms=now_ms, job=job.id, start_ms=None, nodes=nodes, why="")
    for job_id, slices in state.claims.items():
        yield ev.JobClaimed(at_ms=now_ms, job=job_id, slices=slices, why="")
    for service in state.services.values():
        for job_id in service.ready:
            name = service.spec.name
            yield ev.ReplicaReady(at_ms=now_ms, service=name, job=job_id)
    for node in state.order:  # last, because no job is placed on a lost node
        if node.health is NodeHealth.SILENT:
            yield ev.NodeSilent(at_ms=now_ms, node=node.id)
        elif node.health is NodeHealth.LOST:
            dead, life = node.dead, node.incarnation
            yield ev.NodeLost(at_ms=now_ms, node=node.id, incarnation=life, dead=dead)


def _attempt(job: Job, now_ms: int) -> Iterator[ev.Event]:
    if not job.members or not job.active:
        return
    slices = tuple(
        msgspec.structs.replace(member.slice, gpus=()) if member.over else member.slice
        for member in job.members
    )
    yield ev.JobPlaced(
        at_ms=now_ms, job=job.id, attempt=job.attempt, slices=slices, master="", why=""
    )
    for number, member in enumerate(job.members):
        if member.over:
            yield ev.MemberExited(
                at_ms=now_ms,
                job=job.id,
                attempt=job.attempt,
                member=number,
                node=member.slice.node,
                code=member.code or 0,
            )
    if job.phase is not Phase.STARTING:
        yield ev.JobRunning(at_ms=now_ms, job=job.id, attempt=job.attempt)
    yield from _nap(job, now_ms)
    if job.phase is Phase.STOPPING:
        cause = job.stop_cause or StopCause.CANCEL
        yield ev.JobStopping(at_ms=now_ms, job=job.id, attempt=job.attempt, cause=cause, why="")


def _nap(job: Job, now_ms: int) -> Iterator[ev.Event]:
    """One that sleeps has lent its GPUs, perhaps to others that come before it here."""
    lent = any(member.lent and not member.over for member in job.members)
    if not lent and not job.napping:
        return
    cause = job.sleep_cause or SleepCause.USER
    charges = tuple(member.host_mb for member in job.members)
    yield ev.JobDozing(
        at_ms=now_ms, job=job.id, attempt=job.attempt, cause=cause, host_mb=charges, why=""
    )
    if lent:
        yield ev.JobAsleep(
            at_ms=now_ms, job=job.id, attempt=job.attempt, took_ms=0, memory_mb=0, why=""
        )
