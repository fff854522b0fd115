"""Turns a stored snapshot into a state: takes over the facts and builds the indexes from them."""

from __future__ import annotations

from shoal.core.books.foresight import Foresight, Mix
from shoal.core.state.accounts import Accounts
from shoal.core.state.apply_array import add_array
from shoal.core.state.apply_labels import look_at
from shoal.core.state.apply_queue import add_job, adopt_policy, claim, judge_caps
from shoal.core.state.apply_room import add_node
from shoal.core.state.estimates import Estimates
from shoal.core.state.events.schedules import add_schedule
from shoal.core.state.state import Functions, Snapshot, State
from shoal.model.job import Phase


def restore(snapshot: Snapshot, functions: Functions | None = None) -> State:
    state = State(functions)
    state.epoch, state.next_job = snapshot.epoch, snapshot.next_job
    state.next_port, state.drift_ms = snapshot.next_port, snapshot.drift_ms
    state.restored_job = snapshot.restored_job
    state.restored_attempt = snapshot.restored_attempt
    state.submitted, state.finished = snapshot.submitted, snapshot.finished
    state.accounts = Accounts(snapshot.policy, snapshot.accounts)
    state.accounts.budgets = snapshot.budgets
    state.accounts.held_keys = snapshot.held_keys
    state.estimates = Estimates(snapshot.estimates)
    state.ages, state.wear, state.fleet = snapshot.ages, snapshot.wear, snapshot.fleet
    state.failures, state.reservations = snapshot.failures, snapshot.reservations
    state.identity = snapshot.identity
    state.next_order, state.setbacks = snapshot.next_order, snapshot.setbacks
    state.orders = {order.id: order for order in snapshot.orders}
    state.next_rule, state.rules = snapshot.next_rule, {rule.id: rule for rule in snapshot.rules}
    state.fabric, state.strays = snapshot.fabric, snapshot.strays
    state.mix = Mix(dict(snapshot.mix))
    state.foresight = Foresight(1000, state.mix)
    adopt_policy(state, snapshot.policy)
    state.services = {service.spec.name: service for service in snapshot.services}
    for service in snapshot.services:
        state.sizes.service(service.spec)
        state.tally.service(state.accounts, service.spec, 1)
    look_at(state, dict.fromkeys(snapshot.asked))
    for node in sorted(snapshot.nodes, key=lambda node: node.index):
        add_node(state, node)
    state.nodes = {node.id: node for node in snapshot.nodes}  # in the order in which they joined
    for array in snapshot.arrays:
        add_array(state, array)
    for job in snapshot.jobs:
        add_job(state, job)
    state.awake = dict(
        sorted(state.awake.items(), key=lambda entry: state.jobs[entry[0]].awake_ms or 0)
    )
    state.wakeful = dict(
        sorted(state.wakeful.items(), key=lambda entry: state.jobs[entry[0]].wanted_ms or 0)
    )
    for schedule in snapshot.schedules:
        add_schedule(state, schedule, schedule.next_ms)
    for job_id, slices in snapshot.claims.items():
        claim(state, state.jobs[job_id], slices)
    judge_caps(state)
    return state


def raise_numbers(
    state: State, next_job: int, epoch: int = 0, attempt: int = 0, order: int = 0
) -> None:
    """For a log with gaps: no job number or epoch is given out twice, nor an attempt of these jobs
    or an order up to these, if some were."""
    state.next_job, state.epoch = max(state.next_job, next_job), max(state.epoch, epoch)
    state.next_order = max(state.next_order, order + 1)
    if attempt:
        state.restored_job = state.next_job
        state.restored_attempt = max(state.restored_attempt, attempt + 1)


def raise_attempt(state: State, job_id: str, attempt: int) -> None:
    """For a log with gaps: no attempt of a waiting job begins twice."""
    job = state.jobs.get(job_id)
    if job is not None and job.phase is Phase.WAITING:
        job.attempt = max(job.attempt, attempt)
