"""The API of the policy: shown with what its fields mean, tried as a draft, set, and its past."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta

from shoal.api.handling import aside, handles
from shoal.api.problems import Refusal, accepted
from shoal.api.reach import Reach
from shoal.calls.cluster import ClusterCalls
from shoal.calls.page import PageCalls
from shoal.control import tryout
from shoal.control.loop import ControlLoop
from shoal.control.plugins import problem
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state.events.cluster import PolicyChanged
from shoal.core.state.events.log import Recorded
from shoal.forms import policy as forms
from shoal.forms.failure import BadField
from shoal.forms.policy import (
    ABOUT,
    CHOICES,
    FIELDS,
    IDLE,
    TABLES,
    TENANT_FIELDS,
    as_written,
    scalar,
)
from shoal.model.budget import BudgetPeriod
from shoal.model.policy import (
    CHANGES_MAX,
    RECORDS_MAX,
    VERSION_LETTERS,
    Policy,
    PolicyChange,
    PolicyDiff,
    PolicyDraft,
    PolicyField,
    PolicyForm,
    PolicyRecord,
    Tenant,
    version_of,
)
from shoal.model.report import SetPolicy

Version = Annotated[str, Meta(max_length=VERSION_LETTERS)]
Limit = Annotated[int, Meta(ge=1, le=RECORDS_MAX)]


class Policies:
    @handles(ClusterCalls.policy)
    def policy(self, reach: Reach) -> Policy:
        return reach.policy()

    @handles(ClusterCalls.set_policy)
    async def set_policy(self, reach: Reach, data: Policy, expected: Version = "") -> Policy:
        loop = reach.loop
        await _tried(loop, data)
        accepted(await loop.request(SetPolicy(data, reach.name, expected)))
        loop.look_at_policy()  # functions that were lost may be there again
        return loop.policy

    @handles(PageCalls.policy_form)
    async def form(self, reach: Reach) -> PolicyForm:
        shown, whole = reach.policy(), reach.who.sees_all
        return await asyncio.to_thread(lambda: _form(shown, version_of(shown) if whole else ""))

    @handles(PageCalls.policy_draft)
    async def draft(self, reach: Reach, data: PolicyDraft) -> PolicyDiff:
        loop, now = reach.loop, reach.loop.policy
        try:
            wanted = await asyncio.to_thread(lambda: _read(data, now))
        except BadField as error:
            raise Refusal(422, error.message, error.field) from None
        await _tried(loop, wanted)
        return await asyncio.to_thread(lambda: _diff(now, wanted))

    @handles(PageCalls.policy_history)
    async def history(self, reach: Reach, limit: Limit = 20) -> list[PolicyRecord]:
        store = reach.loop.store

        def read() -> list[PolicyRecord]:
            found = store.policies(limit + 1)
            told = [_record(one, before) for one, before in pairwise([*found, None]) if one]
            return told[:limit]

        return await aside(read)

    @handles(PageCalls.earlier_policy)
    async def earlier(self, reach: Reach, seq: int) -> PolicyForm:
        loop = reach.loop

        def read() -> PolicyForm:
            event = _set_by(loop, seq)
            return _form(event.policy, version_of(event.policy), seq, event)

        return await aside(read)

    @handles(PageCalls.policy_diff)
    async def compared(self, reach: Reach, before: int = 0, after: int = 0) -> PolicyDiff:
        loop, now = reach.loop, reach.loop.policy

        def read() -> PolicyDiff:
            one, other = (_set_by(loop, seq).policy if seq else now for seq in (before, after))
            return _diff(one, other)

        return await aside(read)


def _set_by(loop: ControlLoop, seq: int) -> PolicyChanged:
    found = loop.store.events(seq - 1, 1) if 0 < seq < 2**53 else []
    event = found[0].event if found and found[0].seq == seq else None
    if not isinstance(event, PolicyChanged):
        raise Refusal(404, f"the log has no policy that was set by event {seq}", "seq")
    return event


async def _tried(loop: ControlLoop, policy: Policy) -> None:
    """Raises a Refusal if the policy could not be obeyed."""
    wrong = problem(policy) or await tryout.problem(policy, loop.state, loop.clock.now_ms())
    await loop.settled()
    if wrong is not None:
        field, _, message = wrong.partition(": ")
        raise Refusal(422, message, field)


def _form(
    policy: Policy, version: str, seq: int = 0, event: PolicyChanged | None = None
) -> PolicyForm:
    return PolicyForm(
        version=version,
        policy=policy,
        text=forms.to_text(policy),
        fields=described(policy),
        tenant_fields=described_tenant(),
        seq=seq,
        at_ms=event.at_ms if event else 0,
        who=event.who if event else "",
    )


def _read(draft: PolicyDraft, now: Policy) -> Policy:
    if draft.text is None:
        return forms.changed(now, forms.with_tenants(now, draft.changes), now.name)
    if draft.changes:
        raise BadField("changes", "cannot be given beside a text; leave one of them out")
    return forms.parse(draft.text, f".{draft.ending}")


def _diff(now: Policy, wanted: Policy) -> PolicyDiff:
    changes = _changes(now, wanted)
    return PolicyDiff(
        policy=wanted,
        version=version_of(wanted),
        expected=version_of(now),
        text=forms.to_text(wanted),
        changes=changes[:CHANGES_MAX],
        left_out=max(0, len(changes) - CHANGES_MAX),
    )


def _changes(one: Policy, other: Policy) -> list[PolicyChange]:
    return [
        PolicyChange(field=field, before=before, after=after, about=about(field))
        for field, before, after in forms.differences(one, other)
    ]


def _record(one: Recorded, before: Recorded | None) -> PolicyRecord:
    event = one.event
    assert isinstance(event, PolicyChanged)
    changes: list[PolicyChange] | None = None
    if before is not None:
        assert isinstance(before.event, PolicyChanged)
        changes = _changes(before.event.policy, event.policy)
    return PolicyRecord(
        seq=one.seq,
        at_ms=event.at_ms,
        who=event.who,
        name=event.policy.name,
        changes=changes[:CHANGES_MAX] if changes is not None else None,
        left_out=max(0, len(changes or ()) - CHANGES_MAX),
    )


# What the fields of a policy mean, for a form on the page.


# Of one tenant, in `tenants`.
TENANT_ABOUT = {
    "parent": "the tenant whose share, quota and budget it is part of",
    "weight": "its share beside its siblings",
    "quota_gpus": "GPUs it is guaranteed; idle ones beyond that may be borrowed",
    "gpus_max": "GPUs that it and its branches may hold at a time; 0: no limit of its own",
    "budget_gpu_hours": "GPU-hours that it and its branches may use in a period; 0: no limit",
    "budget_money": "what they may cost in a period, by the price list; 0: no limit",
    "budget_tokens": "tokens that its keys may use in a period; 0: no limit",
    "budget_period": "month: a calendar month (UTC); total: forever",
    "jobs_max": "jobs it may have at a time; 0: no limit of its own",
    "waiting_max": "jobs of these that may wait; 0: no limit of its own",
    "priority_max": "the highest priority that its members may ask for",
    "hosts": "host names that its services may have, e.g. *.lab.example.com; *: any",
    "ports": "ports of their own that they may have, e.g. 8443, 9000-9099; *: any",
}
TEXTS = ("parent", "hosts", "ports")
# What a form shows first.
COMMON = (
    *("order", "placement", "preempt", "reservations", "patience", "half_life", "spares"),
    *("idle_warn", "idle_reclaim", "idle", "sleep", "budget_stops", "others"),
)


def about(field: str) -> str:
    """What a field means, also one of a tenant, as `tenants.lab.weight`."""
    if field.startswith("tenants."):
        return TENANT_ABOUT.get(field.rpartition(".")[2], "")
    return ABOUT.get(field, "")


def described(policy: Policy) -> list[PolicyField]:
    """All fields but tenants, supplies and neighbors."""
    values, usual = as_written(policy), as_written(Policy())
    return [
        PolicyField(
            name=name,
            about=ABOUT[name],
            kind=_kind(name),
            value=values[name],
            usual=usual[name],
            choices=_choices(name),
            common=name in COMMON,
        )
        for name in FIELDS
        if name not in TABLES
    ]


def described_tenant() -> list[PolicyField]:
    periods = [one.value for one in BudgetPeriod]
    usual = Tenant(name="usual")
    return [
        PolicyField(
            name=name,
            about=TENANT_ABOUT[name],
            kind="choice" if name == "budget_period" else "text" if name in TEXTS else "count",
            usual=scalar(getattr(usual, name)) if name not in TEXTS else "",
            choices=periods if name == "budget_period" else [],
        )
        for name in TENANT_FIELDS
    ]


def _kind(name: str) -> Literal["time", "count", "flag", "choice", "text"]:
    if name in CHOICES or name == "idle":
        return "choice"
    if name != FIELDS[name]:
        return "time"
    usual = getattr(Policy(), name)
    return "flag" if isinstance(usual, bool) else "count" if isinstance(usual, int) else "text"


def _choices(name: str) -> list[str]:
    if name in CHOICES:
        return [one.value for one in CHOICES[name]]
    known: dict[str, Iterable[str]] = {
        "idle": IDLE,
        "order": FUNCTIONS.orders,
        "placement": FUNCTIONS.placements,
    }
    return list(known.get(name, ()))
