"""When the next step is due even if nothing is reported."""

from __future__ import annotations

from shoal.core.features.health import next_look_ms
from shoal.core.features.neighbors import next_neighbor_ms
from shoal.core.features.notices import next_report_ms
from shoal.core.phases.observe import fence_ms_of
from shoal.core.state.round import Round
from shoal.model.node import NodeHealth


def next_wake(round_: Round) -> int | None:
    """The earliest of: more work now, a retry, a time limit, a node that has been silent, a job
    that has run long enough to be stopped, moved or grown."""
    state, policy, now_ms = round_.state, round_.policy, round_.now_ms
    if round_.more:
        return now_ms
    times = [] if state.agenda.look_ms is None else [state.agenda.look_ms]
    others = (next_look_ms(state, policy), state.agenda.serve_ms, next_report_ms(state))
    times += [ms for ms in others if ms is not None]
    if state.agenda.supply_ms is not None and (policy.supply or state.orders):
        times.append(state.agenda.supply_ms)
    if state.endings and state.agenda.ends_ms is not None:
        times.append(state.agenda.ends_ms)
    if state.queue.delayed:
        times.append(state.queue.delayed[0][0])
    if state.away and (due_ms := next_neighbor_ms(state)) is not None:
        times.append(due_ms)
    if state.dues:
        times.append(state.dues[0][0])
    if state.limits:
        times.append(state.limits[0][0])
    if state.leases:
        times.append(state.leases[0][0])
    for node_id, heard_ms in state.heard.contacts.items():  # silent ones lead
        node = state.nodes[node_id]
        silent = node.health is NodeHealth.SILENT
        due_ms = heard_ms + (policy.grace_ms if silent else policy.silent_after_ms)
        times.append(due_ms if due_ms > now_ms else due_ms + fence_ms_of(state, node))
        if not silent:
            break
    return max(now_ms + 1, min(times)) if times else None
