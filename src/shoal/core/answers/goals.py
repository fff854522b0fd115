"""Which goal of a service is missed, by how much, and what would help. Computed on request."""

from __future__ import annotations

from collections.abc import Callable

from shoal.core.books.goals import LEAST_PART, missed
from shoal.core.state.state import State
from shoal.model.durations import duration_text
from shoal.model.job import Job, Phase
from shoal.model.resources import plural
from shoal.model.service import Service, ServiceLoad
from shoal.model.tokens import MILLI, Goals, TokenLoad


def missed_text(service: Service, load: ServiceLoad) -> str:
    """Empty unless its goals are missed at this moment, by more than chance."""
    goals, tokens = service.spec.goals, load.tokens
    if not goals or tokens is None or not missed(goals, tokens):
        return ""
    part = min(tokens.good * MILLI // tokens.judged, goals.share_milli - 1)
    should = f"{goals.share_milli / 10:g} % should"
    text = f"goal missed: {part / 10:.1f} % of requests meet it, {should}"
    return "; ".join((text, *_beyond(goals, tokens)))


def _beyond(goals: Goals, tokens: TokenLoad) -> list[str]:
    times = (
        ("time to the first token", tokens.ttft_p99_ms, goals.ttft_ms),
        ("time between tokens", tokens.itl_p99_ms, goals.itl_ms),
    )
    return [
        f"the {what} is {_ms(p99)} (p99), {p99 / goal:.1f} times the goal of {_ms(goal)}"
        for what, p99, goal in times
        if goal and p99 > goal
    ]


def _ms(ms: int) -> str:
    return f"{ms / 1000:.1f}s" if ms >= 1000 else f"{ms}ms"


def help_texts(
    state: State,
    service: Service,
    load: ServiceLoad,
    waits: Callable[[Job], str],
    holders: Callable[[Job], str],
) -> list[str]:
    """While the goals are missed. `waits`: why a job waits; `holders`: who has the room for it."""
    jobs = [state.jobs[job_id] for job_id in state.replicas.get(service.spec.name, {})]
    waiting = [job for job in jobs if job.phase is Phase.WAITING]
    coming = [
        job
        for job in jobs
        if job.phase in (Phase.STARTING, Phase.RUNNING, Phase.WAKING)
        and job.id not in service.ready
    ]
    found = []
    if coming:
        recent = state.heard.recent_work.get(service.spec.name)
        took = f"; the last one took {duration_text(recent.start_ms)}" if recent else ""
        found.append(f"{plural(len(coming), 'replica')} more, on the way{took}")
    if waiting:
        found += _room(state, waiting, waits, holders)
    if found:
        return found
    least, most = service.spec.scale.target // LEAST_PART, service.spec.scale.most
    if load.work <= max(1, least) * len(load.ready):
        return ["an engine or a model that is faster: its replicas have few requests each"]
    if service.wanted >= most:
        return [f"more than the {plural(most, 'replica')} that it may have: --replicas"]
    return ["a replica more: it is asked for if the next requests miss the goal, too"]


def _room(
    state: State, waiting: list[Job], waits: Callable[[Job], str], holders: Callable[[Job], str]
) -> list[str]:
    job = waiting[0]
    more = f" ({plural(len(waiting) - 1, 'other')} too)" if len(waiting) > 1 else ""
    who = holders(job)
    found = [f"room for {job.mention}{more}: {waits(job)}{f'; {who}' if who else ''}"]
    demand, rooms = job.spec.demand, state.rooms
    above = [
        owner.spec.priority
        for node in state.order
        if node.schedulable and demand.suits(rooms[node.index].kind)
        for owner in (state.jobs[ref.job] for ref in state.placed[node.id])
        if owner.spec.service != job.spec.service and owner.spec.yields
    ]
    if above and min(above) >= job.spec.priority:
        found.append(
            f"a priority above {min(above)} (--priority): jobs that may be stopped for others have "
            f"that much, and this service {job.spec.priority}"
        )
    return found
