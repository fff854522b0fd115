"""Notices: the rules that people make, and which of them an event concerns."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from heapq import heappop, heappush
from typing import NamedTuple

import msgspec

from shoal.core.features.caps import too_large
from shoal.core.state.events.arrays import ArrayFinished
from shoal.core.state.events.base import EventBase
from shoal.core.state.events.budgets import BudgetEvent, BudgetHeld, BudgetWarned
from shoal.core.state.events.log import Event, Recorded
from shoal.core.state.events.neighbors import JobReturned, JobRunsAway
from shoal.core.state.events.nodes import NodeLost
from shoal.core.state.events.notices import RuleRemoved, RuleSet
from shoal.core.state.events.queue import (
    JobLabelled,
    JobNoted,
    JobReleased,
    JobSubmitted,
    JobWaited,
)
from shoal.core.state.events.runs import JobFinished, JobRequeued, JobRunning
from shoal.core.state.events.schedules import ScheduleMissed
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.durations import duration_text
from shoal.model.identity import EVERY_TENANT, OPERATOR, Identity, role_in
from shoal.model.job import DEFAULT_TENANT, JOB_LABELS_MAX, NOTE_CHARACTERS_MAX, Job, Outcome, Phase
from shoal.model.notice import RULES_MAX, RULES_PER_USER_MAX, Notice, Rule, What, wanted_of
from shoal.model.phrases import nodes_text
from shoal.model.reason import Reader, render
from shoal.model.report import (
    Accepted,
    Answer,
    LabelJob,
    NoteJob,
    NoticeRequest,
    Refused,
    RemoveRule,
    SetRule,
)

SPARE = 1_000  # entries that may be outdated before all are looked at again


def change_notices(round_: Round, request: NoticeRequest) -> Answer:
    match request:
        case LabelJob():
            return _label(round_, request)
        case NoteJob():
            return _note(round_, request)
        case SetRule():
            return _set_rule(round_, request)
        case RemoveRule():
            return _remove_rule(round_, request)


def _label(round_: Round, request: LabelJob) -> Answer:
    job = round_.state.live(request.job)
    if job is None and not request.ended:
        return Refused("job", f"there is no live job {request.job}", missing=True)
    before = job.spec.labels if job is not None else request.before
    merged = {**before, **request.labels}
    labels = {key: value for key, value in sorted(merged.items()) if value is not None}
    if len(labels) > JOB_LABELS_MAX:
        return Refused("labels", f"a job has at most {JOB_LABELS_MAX} of them; remove some: KEY-")
    if labels == before:
        return Accepted(request.job, "no change")
    words = [f"{k}={v}" if v is not None else f"{k}-" for k, v in sorted(request.labels.items())]
    why = f"{', '.join(words)} by {request.who}"
    round_.emit(JobLabelled(at_ms=round_.now_ms, job=request.job, labels=labels, why=why))
    return Accepted(request.job)


def _note(round_: Round, request: NoteJob) -> Answer:
    if round_.state.live(request.job) is None and not request.ended:
        return Refused("job", f"there is no live job {request.job}", missing=True)
    if len(request.text) > NOTE_CHARACTERS_MAX:
        return Refused("text", f"is longer than {NOTE_CHARACTERS_MAX} characters; shorten it")
    job = round_.state.live(request.job)
    if job is not None:
        large = too_large(round_.state.sizes, job.spec.tenant, len(request.text), "text")
        if large is not None:
            return large
    round_.emit(JobNoted(at_ms=round_.now_ms, job=request.job, text=request.text, who=request.who))
    return Accepted(request.job)


def _set_rule(round_: Round, request: SetRule) -> Answer:
    state, rule = round_.state, request.rule
    users, tenants = state.identity.users, state.identity.tenants
    if rule.owner != OPERATOR and rule.owner not in users:
        return Refused("owner", f"there is no user {rule.owner}")
    if rule.tenant not in (DEFAULT_TENANT, EVERY_TENANT, *tenants):
        return Refused("tenant", f"there is no tenant {rule.tenant}")
    for known in state.rules.values():
        if msgspec.structs.replace(known, id=rule.id, since_ms=rule.since_ms) == rule:
            return Accepted(known.id, "this rule already exists")
    own = sum(known.owner == rule.owner for known in state.rules.values())
    if own >= RULES_PER_USER_MAX or len(state.rules) >= RULES_MAX:
        most = RULES_PER_USER_MAX if own >= RULES_PER_USER_MAX else RULES_MAX
        whose = "you have" if own >= RULES_PER_USER_MAX else "the cluster has"
        return Refused("rule", f"{whose} {most} rules, the maximum; remove one")
    made = msgspec.structs.replace(rule, id=f"r{state.next_rule}", since_ms=round_.now_ms)
    round_.emit(RuleSet(at_ms=round_.now_ms, tenant=rule.tenant, rule=made, who=request.who))
    return Accepted(made.id)


def _remove_rule(round_: Round, request: RemoveRule) -> Answer:
    rule = round_.state.rules.get(request.rule)
    if rule is None or request.owner not in ("", rule.owner):
        return Refused("rule", f"there is no rule {request.rule}; see: shoal notify", missing=True)
    round_.emit(RuleRemoved(at_ms=round_.now_ms, tenant=rule.tenant, rule=rule.id, who=request.who))
    return Accepted(rule.id)


# Only these can give rise to a notice.
KINDS: tuple[type[EventBase], ...] = (
    JobRunning,
    JobRunsAway,
    JobFinished,
    ArrayFinished,
    JobWaited,
    BudgetWarned,
    BudgetHeld,
    NodeLost,
    ScheduleMissed,
)


BAD = (Outcome.FAILED, Outcome.TIMED_OUT)


WHY_CHARACTERS_MAX = 500


class Asking(NamedTuple):
    """Who asks for a notice, and where it goes."""

    wish: str
    tenant: str
    trusted: bool


def notices_of(
    recorded: Recorded, rules: Iterable[Rule], identity: Identity, job: Job | None, cluster: str
) -> list[Notice]:
    """`job`: the one that the event is about. Each receiver gets at most one notice about it."""
    event = recorded.event
    about = [rule for rule in rules if rule.since_ms <= event.at_ms]
    if isinstance(event, JobRunning | JobRunsAway | JobFinished | ArrayFinished | JobWaited):
        if job is None or job.spec.service or job.spec.array:
            return []  # replicas come and go as a service wants; an array has one notice
        own = [Asking(w, job.spec.tenant, _alone(identity, job)) for w in job.spec.notify]
        asking = [*own, *(_asking(rule) for rule in rules_about(about, identity, job))]
    elif isinstance(event, BudgetEvent):
        asking = [_asking(rule) for rule in about if _may_hear(rule, identity, event.tenant)]
    elif isinstance(event, ScheduleMissed):
        tenant = event.schedule.partition("/")[0]
        asking = [_asking(rule) for rule in about if _may_hear(rule, identity, tenant)]
    elif isinstance(event, NodeLost):
        asking = [_asking(rule) for rule in about if _sees_all(rule, identity)]
    else:
        return []
    found: dict[tuple[str, str], Notice] = {}
    for one in asking:
        wanted = wanted_of(one.wish)
        what = _what(event, wanted.on, wanted.waiting_ms)
        if what is not None:
            number = hashlib.sha256(f"{cluster}/{recorded.seq}/{one.tenant}/{wanted.to}".encode())
            notice = _notice(event, what, job, f"n_{number.hexdigest()[:24]}", one, wanted.to)
            found.setdefault((one.tenant, wanted.to), notice)
    return list(found.values())


def wishes_of(rules: Iterable[Rule]) -> frozenset[What]:
    """What any of them is about."""
    return frozenset(what for rule in rules for what in wanted_of(rule.wish).on)


def concerns(event: Event, wishes: Collection[What]) -> bool:
    """Whether it can give rise to a notice for somebody with one of these wishes."""
    return _what(event, wishes, event.waited_ms if isinstance(event, JobWaited) else 0) is not None


def rules_about(rules: Iterable[Rule], identity: Identity, job: Job) -> list[Rule]:
    """Nobody gets a notice about a job that they may not see."""
    spec = job.spec
    if spec.service or spec.array:
        return []
    return [
        rule
        for rule in rules
        if rule.tenant in (spec.tenant, EVERY_TENANT)
        and (rule.everyone or rule.owner in (spec.user, OPERATOR))
        and _may_hear(rule, identity, spec.tenant)
    ]


def _may_hear(rule: Rule, identity: Identity, tenant: str) -> bool:
    """Whether the owner may still see what this tenant does."""
    if rule.owner == OPERATOR:
        return rule.tenant in (tenant, EVERY_TENANT)
    user = identity.users.get(rule.owner)
    if user is None or rule.tenant not in (tenant, EVERY_TENANT):
        return False
    return role_in(user, EVERY_TENANT if rule.tenant == EVERY_TENANT else tenant) is not None


def _sees_all(rule: Rule, identity: Identity) -> bool:
    user = identity.users.get(rule.owner)
    return rule.owner == OPERATOR or (user is not None and EVERY_TENANT in user.roles)


def _asking(rule: Rule) -> Asking:
    tenant = DEFAULT_TENANT if rule.tenant == EVERY_TENANT else rule.tenant
    return Asking(rule.wish, tenant, rule.owner == OPERATOR)


def _alone(identity: Identity, job: Job) -> bool:
    """A cluster without tenants and users belongs to its operator, and so does every job."""
    return not identity.tenants and not identity.users and job.spec.tenant == DEFAULT_TENANT


def _what(event: Event, on: Collection[What], waiting_ms: int) -> What | None:
    match event:
        case JobRunning() | JobRunsAway():
            return What.STARTED if What.STARTED in on else None
        case JobFinished() | ArrayFinished():
            if What.FAILED in on and event.outcome in BAD:
                return What.FAILED
            return What.ENDED if What.ENDED in on else None
        case JobWaited():
            return What.WAITING if What.WAITING in on and event.waited_ms == waiting_ms else None
        case BudgetWarned() | BudgetHeld():
            return What.BUDGET if What.BUDGET in on else None
        case ScheduleMissed():
            return What.MISSED_RUN if What.MISSED_RUN in on else None
        case NodeLost():
            return What.NODE_LOST if What.NODE_LOST in on else None
        case _:
            return None


def _notice(
    event: Event, what: What, job: Job | None, number: str, asking: Asking, to: str
) -> Notice:
    reader = job.reader if job is not None else Reader(asking.tenant)
    why = render(getattr(event, "why", ""), reader)[:WHY_CHARACTERS_MAX]
    if hasattr(event, "why"):
        event = msgspec.structs.replace(event, why=why)
    if job is None:
        of_tenant = event.tenant if isinstance(event, BudgetEvent) else ""
        if isinstance(event, ScheduleMissed):
            of_tenant = event.schedule.partition("/")[0]
        return Notice(
            id=number,
            what=what,
            at_ms=event.at_ms,
            text=event.sentence()[:WHY_CHARACTERS_MAX],
            to=to,
            tenant=asking.tenant,
            trusted=asking.trusted,
            node=event.node if isinstance(event, NodeLost) else "",
            of_tenant=of_tenant,
            why=why,
        )
    finished = event if isinstance(event, JobFinished | ArrayFinished) else None
    return Notice(
        id=number,
        what=what,
        at_ms=event.at_ms,
        text=f"{job.title} {event.phrase()}{_more(event, job)}",
        to=to,
        tenant=asking.tenant,
        trusted=asking.trusted,
        job=job.id,
        name=job.spec.name or "",
        user=job.spec.user,
        of_tenant=job.spec.tenant,
        state=finished.outcome.value if finished else _state(event),
        code=finished.code if finished else None,
        why=why,
        labels=job.spec.labels,
    )


def _state(event: Event) -> str:
    return "running" if isinstance(event, JobRunning | JobRunsAway) else "waiting"


def _more(event: Event, job: Job) -> str:
    """What the job knows and the event does not."""
    match event:
        case JobRunning() if job.members:
            return f" on {nodes_text(tuple(member.slice for member in job.members))}"
        case JobFinished() | ArrayFinished() if job.running_ms:
            return f" (after {duration_text(event.at_ms - job.running_ms)})"
        case JobWaited():
            return f"; see: shoal why {job.id}"
        case _:
            return ""


def report_waits(round_: Round) -> None:
    """The agenda says when to look at which job, so that a step costs as much as it has to report.
    A new agenda, or a new rule, looks at all jobs once."""
    state, now_ms = round_.state, round_.now_ms
    agenda = state.agenda
    if agenda.waits is None or len(agenda.waits) > agenda.waits_max:
        agenda.waits = []
        _expect(state, (job for job in state.jobs.values() if job.phase is Phase.WAITING))
        agenda.waits_max = 2 * len(agenda.waits) + SPARE
    else:
        begun = (JobSubmitted, JobRequeued, JobReleased, JobReturned)
        names = dict.fromkeys([one.job for one in round_.events if isinstance(one, begun)])
        if names:
            _expect(state, [state.jobs[name] for name in names if name in state.jobs])
    waits = agenda.waits
    while waits and waits[0][0] <= now_ms:
        _, number, since_ms, after_ms = heappop(waits)
        job = state.jobs.get(state.numbers.get(number, ""))
        if job is None or job.phase is not Phase.WAITING or waits_since_ms(job) != since_ms:
            continue
        if after_ms > job.waited_ms:
            round_.emit(JobWaited(at_ms=now_ms, job=job.id, since_ms=since_ms, waited_ms=after_ms))


def next_report_ms(state: State) -> int | None:
    waits = state.agenda.waits
    return waits[0][0] if waits else None


def waits_since_ms(job: Job) -> int:
    """A pause before a retry, or the time before it may begin, is not a wait for room."""
    return max(job.requeued_ms or job.submitted_ms, job.not_before_ms)


def _expect(state: State, jobs: Iterable[Job]) -> None:
    rules = [rule for rule in state.rules.values() if wanted_of(rule.wish).waiting_ms]
    waits = state.agenda.waits
    assert waits is not None, "the caller has made one"
    for job in jobs:
        if not (rules or job.spec.notify) or job.phase is not Phase.WAITING:
            continue
        if job.spec.array or job.awaits:
            continue  # an array has one notice, at its end; others may have to end first
        since_ms = waits_since_ms(job)
        for after_ms in _thresholds(state, job, rules):
            if after_ms > job.waited_ms:
                heappush(waits, (since_ms + after_ms, job.number, since_ms, after_ms))


def _thresholds(state: State, job: Job, rules: list[Rule]) -> list[int]:
    wishes = [*job.spec.notify, *(rule.wish for rule in rules_about(rules, state.identity, job))]
    return sorted({wanted_of(wish).waiting_ms for wish in wishes} - {0})
