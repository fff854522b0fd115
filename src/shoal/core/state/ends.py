"""When jobs have to leave nodes that end, and when somebody has to look."""

from __future__ import annotations

from shoal.core.books.scale import START_MS
from shoal.core.state.expect import ran_ms, run_ms
from shoal.core.state.state import Node, State
from shoal.model.job import Job, Phase, Restart
from shoal.model.node import NodeIntent
from shoal.model.policy import Policy

GUESS_MS = 3_600_000
SAFE = 90  # percent of jobs like it are done by then


def margin_ms(policy: Policy) -> int:
    """Before a node's end, for commands and reports that are late: as long as two silences."""
    return 2 * policy.silent_after_ms


def stop_ms(state: State, job: Job) -> int:
    """So long before the end it must be asked to stop, to end well there."""
    return margin_ms(state.policy) + job.spec.stop_grace_ms


def lead_ms(state: State, job: Job) -> int:
    """So long before the end it begins to leave: a replica first needs another that is ready, and
    time to finish its requests."""
    service = state.services.get(job.spec.service)
    if service is None:
        return stop_ms(state, job)
    recent = state.heard.recent_work.get(job.spec.service)
    start_ms = recent.start_ms if recent is not None else START_MS
    return stop_ms(state, job) + start_ms + service.spec.drain_ms


def finishes_ms(state: State, node: Node, job: Job) -> int | None:
    """When a sleeper that must not run twice is woken, to finish before its node is gone."""
    if job.spec.restart is not Restart.NEVER or job.phase not in (Phase.DOZING, Phase.ASLEEP):
        return None
    if node.intent is NodeIntent.DRAINING:
        return 0
    if node.end is None:
        return None
    total = run_ms(state, job, SAFE, ran := ran_ms(job, job.dozed_ms or 0))
    left = GUESS_MS if total is None else max(1, total - ran)
    return node.end.at_ms - lead_ms(state, job) - left


def leaving_times(state: State, node: Node) -> list[tuple[int, str]]:
    """When something has to happen before the node's end: to one of its jobs, or to all ("")."""
    if node.end is None:
        return []
    at_ms = node.end.at_ms
    times = [(at_ms - margin_ms(state.policy), "")] if node.closed_from is None else []
    for job in {job.id: job for job in state.placed[node.id].values()}.values():
        finish_ms = finishes_ms(state, node, job)
        if finish_ms is not None:
            times.append((finish_ms, job.id))
        if job.phase is not Phase.STOPPING and job.spec.restart is not Restart.NEVER:
            times.append((at_ms - lead_ms(state, job), job.id))
            if job.spec.service:
                times.append((at_ms - stop_ms(state, job), job.id))
    return times
