"""What a job that sleeps means for everything else, decided in one place (ADR 92).

- A supplied node on which all jobs sleep is not in use: it is given back like an idle one.
- A sleeper whose node is drained or ends soon is woken if it saves its work, to save it and stop;
  otherwise it is stopped. It runs again elsewhere.
- One that must not run twice (`restart: never`) is woken to finish, as if it had never slept.
- One that slept because it was idle ends with a node that is given back, as if it could not sleep.
- One whose tenant has used up its budget stays asleep, but for what it needs to leave its node.
- One whose tenant may hold no more GPUs stays asleep, whatever happens to its node.
- One whose node is lost is lost with it.
- One whose GPU somebody else fills stays asleep, and is tried again later.
"""

from __future__ import annotations

from shoal.core.state.ends import finishes_ms
from shoal.core.state.gpu_caps import capped_by, milli_of
from shoal.core.state.state import Node, State
from shoal.model.durations import duration_text
from shoal.model.job import Job, Phase, Restart, SleepCause


def in_use(state: State, node: Node) -> bool:
    """Does anybody on it do more than sleep?"""
    return any(job.phase is not Phase.ASLEEP for job in state.placed[node.id].values())


def has_to_finish(state: State, job: Job, now_ms: int) -> str:
    """The node for which the sleeper has to be woken, so that it can finish; empty if none."""
    for member in job.members:
        node = state.nodes[member.slice.node]
        at_ms = None if member.over else finishes_ms(state, node, job)
        if at_ms is not None and at_ms <= now_ms:
            return node.id
    return ""


def budget_of(state: State, job: Job, now_ms: int) -> str:
    """The tenant whose budget keeps it asleep; empty if none."""
    tenant = state.accounts.held_by(job.spec.tenant)
    return "" if tenant and has_to_finish(state, job, now_ms) else tenant


def cap_of(state: State, job: Job) -> str:
    """The tenant that may hold no more GPUs, so that the sleeper cannot wake; empty if none."""
    if not state.accounts.caps:
        return ""
    needs = milli_of(tuple(member.slice for member in job.members if not member.over))
    return capped_by(state, job.spec.tenant, needs, without=job.id)


def idle_on_given_back(state: State, job: Job) -> str:
    """The node that is given back under a sleeper nobody used; empty if there is none."""
    if job.phase is not Phase.ASLEEP or job.sleep_cause is not SleepCause.IDLE or job.wants:
        return ""
    for member in job.members:
        node = state.nodes[member.slice.node]
        order = state.orders.get(node.spec.order)
        if not member.over and order is not None and order.release:
            return node.id
    return ""


def beforehand(state: State, job: Job, cause: SleepCause) -> str:
    """What a sleeper has to expect of its nodes, to say when it falls asleep."""
    nodes = [state.nodes[member.slice.node] for member in job.members]
    order = next((state.orders[n.spec.order] for n in nodes if n.spec.order in state.orders), None)
    if order is None:
        return ""
    then = "ends" if cause is SleepCause.IDLE else "runs again elsewhere"
    if cause is SleepCause.USER and job.spec.restart is Restart.NEVER:
        then = "is woken to finish"
    idle = duration_text(order.supply.idle_ms)
    return f"; if nothing else runs there for {idle}, its node is given back and it {then}"
