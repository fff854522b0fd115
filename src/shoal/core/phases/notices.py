"""Requests that change rules for notices, and labels and notes of jobs."""

from __future__ import annotations

import msgspec

from shoal.core.phases.caps import too_large
from shoal.core.phases.round import Round
from shoal.model.events import JobLabelled, JobNoted, RuleRemoved, RuleSet
from shoal.model.identity import EVERY_TENANT, OPERATOR
from shoal.model.job import DEFAULT_TENANT, JOB_LABELS_MAX, NOTE_CHARACTERS_MAX
from shoal.model.notice import RULES_MAX, RULES_PER_USER_MAX
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
        return Accepted(request.job, "it already has them so")
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
            return Accepted(known.id, "there is such a rule already")
    own = sum(known.owner == rule.owner for known in state.rules.values())
    if own >= RULES_PER_USER_MAX or len(state.rules) >= RULES_MAX:
        most = RULES_PER_USER_MAX if own >= RULES_PER_USER_MAX else RULES_MAX
        whose = "you have" if own >= RULES_PER_USER_MAX else "the cluster has"
        return Refused("rule", f"{whose} {most} rules, which is the most; remove one")
    made = msgspec.structs.replace(rule, id=f"r{state.next_rule}", since_ms=round_.now_ms)
    round_.emit(RuleSet(at_ms=round_.now_ms, tenant=rule.tenant, rule=made, who=request.who))
    return Accepted(made.id)


def _remove_rule(round_: Round, request: RemoveRule) -> Answer:
    rule = round_.state.rules.get(request.rule)
    if rule is None or request.owner not in ("", rule.owner):
        return Refused("rule", f"there is no rule {request.rule}; see: shoal notify", missing=True)
    round_.emit(RuleRemoved(at_ms=round_.now_ms, tenant=rule.tenant, rule=rule.id, who=request.who))
    return Accepted(rule.id)
