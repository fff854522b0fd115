"""Events without what their reader may not see: other tenants' jobs, services and budgets, and who
may do what."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.api.reach import Reach
from shoal.model.events import (
    BudgetEvent,
    Event,
    IdentityEvent,
    JobEvent,
    NodeJudged,
    OrderEvent,
    PolicyChanged,
    Recorded,
    ReplicaDraining,
    ReplicaReady,
    RuleEvent,
    ScheduleEvent,
    ServiceEvent,
    ServiceSet,
)
from shoal.model.health import Record


def seen_events(
    reach: Reach, found: list[Recorded], owners: dict[str, str] | None = None
) -> list[Recorded]:
    """Without what the sender may not see, also in the reasons. `owners`: tenants of jobs, as far
    as they were looked up before."""
    if reach.who.admin:
        return found
    seen = []
    for recorded in found:
        event = _seen_event(reach, recorded.event, owners or {})
        if event is not None:
            seen.append(Recorded(recorded.seq, event))
    return seen


def _seen_event(reach: Reach, event: Event, owners: dict[str, str]) -> Event | None:
    who = reach.who
    if isinstance(event, IdentityEvent):
        return None
    if who.sees_all:
        return event
    match event:
        case JobEvent():
            tenant = owners.get(event.job)
            own = who.sees_job(tenant, event.job) if tenant else reach.find(event.job) is not None
        case ServiceSet():
            own = who.sees(event.spec.replica.tenant) and event.at_ms >= who.since_ms
        case ReplicaReady() | ReplicaDraining():
            own = reach.find(event.job) is not None
        case ServiceEvent():  # the name may have been another tenant's before
            service = reach.loop.state.services.get(event.service)
            own = (
                service is not None
                and who.sees(service.spec.replica.tenant)
                and event.at_ms >= service.since_ms
            )
        case OrderEvent():
            own = False
        case ScheduleEvent():
            own = who.sees(event.schedule.partition("/")[0]) and event.at_ms >= who.since_ms
        case BudgetEvent() | RuleEvent():
            own = who.sees(event.tenant) and event.at_ms >= who.since_ms
        case PolicyChanged():
            return msgspec.structs.replace(event, policy=reach.policy(event.policy), who="")
        case NodeJudged():
            return _seen_judgement(reach, event)
        case _:
            own = True
    return _concealed(reach, event) if own else None


def _seen_judgement(reach: Reach, event: NodeJudged) -> NodeJudged | None:
    """A node's standing may quote anybody's jobs: shown if the sender's own led to it."""
    record = event.record
    own = tuple(one for one in record.suspicions if one.job and reach.find(one.job))
    if not own:
        return None
    why = reach.text(record.why) if own[-1].why in record.why else ""
    shown = Record(standing=record.standing, since_ms=record.since_ms, why=why, suspicions=own)
    return msgspec.structs.replace(event, record=shown, why=why)


def _concealed(reach: Reach, event: Event) -> Event:
    why: Any = getattr(event, "why", "")
    told = reach.text(why)
    return event if told == why else msgspec.structs.replace(event, why=told)
