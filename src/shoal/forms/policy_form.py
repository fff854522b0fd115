"""What the fields of a policy mean, for a form on the page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from shoal.core.scheduling.functions import FUNCTIONS
from shoal.forms.policy import ABOUT, CHOICES, FIELDS, IDLE, TENANT_FIELDS, as_written, scalar
from shoal.model.budget import BudgetPeriod
from shoal.model.policy import Policy, Tenant
from shoal.model.policy_views import PolicyField

# Of one tenant, in `tenants`.
TENANT_ABOUT = {
    "parent": "the tenant whose share, quota and budget it is part of",
    "weight": "its share beside its siblings",
    "quota_gpus": "GPUs it is guaranteed; idle ones beyond that may be borrowed",
    "budget_gpu_hours": "GPU-hours that it and its branches may use in a period; 0: no limit",
    "budget_money": "what they may cost in a period, by the price list; 0: no limit",
    "budget_period": "month: a calendar month (UTC); total: for ever",
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
    """All fields but tenants and supplies."""
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
        if name not in ("tenants", "supply")
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
