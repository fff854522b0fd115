"""One scheduling cycle: walk the queue in order and place every gang that fits."""

from __future__ import annotations

from shoal.core.explain import holds_queue
from shoal.core.round import Round
from shoal.core.scheduling.fit import fit, slices
from shoal.core.scheduling.order import Order
from shoal.core.state import Shape, State
from shoal.model.events import JobPlaced
from shoal.model.job import Job
from shoal.model.policy import Policy
from shoal.model.resources import plural


def schedule(round_: Round) -> None:
    """A job that does not fit is passed over, until it has been passed over for too long."""
    state = round_.state
    state.queue.wake(round_.now_ms, state.job_numbered)
    order = Order(state.queue)
    budget = round_.policy.placements_per_step_max
    while (head := order.next()) is not None:
        number, shape = head
        job = state.job_numbered(number)
        if _place(round_, job, shape):
            order.again(shape)
            budget -= 1
            if not budget:
                round_.more = True
                return
        elif holds_queue(state, job, round_.policy, round_.now_ms):
            return


def _place(round_: Round, job: Job, shape: Shape) -> bool:
    state = round_.state
    key = (shape.members, shape.demand)
    if key in state.hopeless:
        return False
    plan = fit(state, shape.members, shape.demand)
    if plan is None:
        state.hopeless.add(key)
        return False
    given = slices(state, plan, shape.demand)
    waited_s = (round_.now_ms - job.submitted_ms) / 1000
    round_.emit(
        JobPlaced(
            at_ms=round_.now_ms,
            job=job.id,
            attempt=job.attempt + 1,
            slices=given,
            master=_master(state, round_.policy, given[0].node),
            why=f"{_plan_text(state, plan, shape)}; {waited_s:.1f} s after submission",
        )
    )
    return True


def _plan_text(state: State, plan: list[tuple[int, int]], shape: Shape) -> str:
    names = ", ".join(state.order[index].id for index, _ in plan[:8])
    more = f" and {len(plan) - 8} more" if len(plan) > 8 else ""
    rule = "the tightest node that holds it" if len(plan) == 1 else "the emptiest nodes"
    return f"{plural(shape.members, 'member')} with {shape.demand} on {names}{more}: {rule}"


def _master(state: State, policy: Policy, node_id: str) -> str:
    """A rendezvous point that no live job uses."""
    address = state.nodes[node_id].spec.address
    for offset in range(policy.port_count):
        port = policy.port_first + (state.next_port + offset) % policy.port_count
        master = f"{address}:{port}"
        if master not in state.masters:
            break
    return master
