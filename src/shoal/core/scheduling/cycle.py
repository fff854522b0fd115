"""One scheduling cycle: walk the queue in order and place every gang that fits."""

from __future__ import annotations

from shoal.core.explain import holds_queue
from shoal.core.queue import Lane
from shoal.core.round import Round
from shoal.core.scheduling.fit import Plan, fit, slices
from shoal.core.scheduling.order import Walk
from shoal.core.state import State
from shoal.model.events import JobPlaced
from shoal.model.job import Job
from shoal.model.policy import Policy
from shoal.model.resources import plural


def schedule(round_: Round) -> None:
    """A job that does not fit is passed over, until it has been passed over for too long."""
    state = round_.state
    state.queue.wake(round_.now_ms, state.job_numbered)
    walk = Walk(state, round_.now_ms)
    budget = round_.policy.placements_per_step_max
    while (head := walk.next()) is not None:
        job, lane = head
        if _place(round_, job, lane):
            walk.again(lane)
            budget -= 1
            if not budget:
                round_.more = True
                return
        elif holds_queue(state, job, round_.policy, round_.now_ms):
            return


def _place(round_: Round, job: Job, lane: Lane) -> bool:
    state = round_.state
    if lane.gang in state.hopeless:
        return False
    plan = fit(state, lane.gang)
    if plan is None:
        state.hopeless.add(lane.gang)
        return False
    given = slices(state, plan, lane.gang.demand)
    waited_s = (round_.now_ms - job.submitted_ms) / 1000
    round_.emit(
        JobPlaced(
            at_ms=round_.now_ms,
            job=job.id,
            attempt=job.attempt + 1,
            slices=given,
            master=_master(state, round_.policy, given[0].node),
            why=f"{_plan_text(state, plan, lane)}; {waited_s:.1f} s after submission",
        )
    )
    return True


def _plan_text(state: State, plan: Plan, lane: Lane) -> str:
    names = ", ".join(state.order[index].id for index, _ in plan.nodes[:8])
    more = f" and {len(plan.nodes) - 8} more" if len(plan.nodes) > 8 else ""
    gang = f"{plural(lane.gang.members, 'member')} with {lane.gang.demand}"
    return f"{gang} on {names}{more}: {plan.rule}"


def _master(state: State, policy: Policy, node_id: str) -> str:
    """A rendezvous point that no live job uses."""
    address = state.nodes[node_id].spec.address
    for offset in range(policy.port_count):
        port = policy.port_first + (state.next_port + offset) % policy.port_count
        master = f"{address}:{port}"
        if master not in state.masters:
            break
    return master
