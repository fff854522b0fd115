"""A policy: frozen data that names pure functions and the numbers they obey."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from shoal.model.budget import BudgetPeriod
from shoal.model.job import JOB_NAME_PATTERN

Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)]


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who submits. Its quota is guaranteed; what is idle beyond it may be borrowed and is given
    back when its owner wants it. Siblings share what their parent has by weight."""

    name: Annotated[str, msgspec.Meta(max_length=63, pattern=JOB_NAME_PATTERN)]
    parent: str = ""
    weight: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    quota_gpus: Count = 0
    # What it and its branches may use in a period; 0: as much as they get.
    budget_gpu_hours: Count = 0
    budget_money: Count = 0  # in the currency of the price list
    budget_period: BudgetPeriod = BudgetPeriod.MONTH

    @property
    def has_budget(self) -> bool:
        return bool(self.budget_gpu_hours or self.budget_money)


class Preempt(enum.StrEnum):
    """For whose sake running, preemptible jobs may be stopped."""

    NEVER = "never"
    PRIORITY = "priority"  # for higher priority, and for tenants within their quota
    RANK = "rank"  # also for whoever comes before them in the policy's order


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults suit one machine; a silent node is given up only after `grace_ms`."""

    name: str = "fair"
    order: str = "fair"
    placement: str = "shoal"
    preempt: Preempt = Preempt.RANK
    # Blocked jobs, from the front of the queue, for which room is set aside in time.
    reservations: Annotated[int, msgspec.Meta(ge=0, le=64)] = 2
    # A blocked job at the front may be overtaken for this long, from when it came there or from
    # when it was promised to start; then the queue is held for it.
    patience_ms: Count = 3_600_000
    # In `fair`: who has waited longer than this, and than 16 times the mean age of the jobs here,
    # comes first, one job at a time.
    elder_ms: Count = 24 * 3_600_000
    # Usage of an hour ago counts half of usage now, by default of a week's half-life.
    half_life_ms: Annotated[int, msgspec.Meta(ge=1)] = 7 * 24 * 3_600_000
    # What a start counts at once, so that a burst cannot outrun the accounts.
    entry_penalty_ms: Count = 60_000
    run_ms_min: Count = 300_000  # nobody is preempted before it ran this long
    # What moving a job elsewhere costs, beside the work since its last checkpoint.
    move_cost_ms: Count = 60_000
    # So many nodes are kept for gangs that lose one; only preemptible jobs may use them meanwhile.
    spares: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    # A gang that counts steps hangs when it makes none for this long, and for 20 usual ones.
    hang_after_ms: Count = 60_000
    hangs_max: Count = 3  # a job that hung so often is given up
    # A job whose GPUs are all unused for so long is warned, then gives them back; 0: never.
    idle_warn_ms: Count = 0
    idle_reclaim_ms: Count = 0
    idle_ends: bool = True  # it is over then; else it waits, to run again
    retest_ms: Annotated[int, msgspec.Meta(ge=1)] = 600_000  # of a node in quarantine, at first
    tenants: tuple[Tenant, ...] = ()
    budget_stops: bool = False  # whose budget is used up is stopped, too, and waits

    suspect_after_ms: Count = 5_000
    grace_ms: Count = 60_000
    # Node losses do not use up a job's retries, but nothing is retried without a bound.
    losses_max: Count = 100
    backoff_ms_max: Count = 300_000
    # Rendezvous ports lie below the range that Linux hands out to outgoing connections.
    port_first: Annotated[int, msgspec.Meta(ge=1024, le=65_535)] = 20_000
    port_count: Annotated[int, msgspec.Meta(ge=1, le=64_000)] = 12_000
    # One step places at most this many jobs and asks to be called again, so that no step is long.
    placements_per_step_max: Annotated[int, msgspec.Meta(ge=1)] = 200

    def tenant(self, name: str) -> Tenant:
        """One that the policy does not name stands by itself, with nothing guaranteed."""
        for tenant in self.tenants:
            if tenant.name == name:
                return tenant
        return Tenant(name=name)

    def lineage(self, name: str) -> tuple[Tenant, ...]:
        """From the root of the tree down to the tenant; a policy that was checked has no cycle."""
        chain = [self.tenant(name)]
        while chain[-1].parent and len(chain) <= len(self.tenants):
            chain.append(self.tenant(chain[-1].parent))
        return tuple(reversed(chain))


def problem_with(policy: Policy) -> str | None:
    """What the types cannot say about the tree of tenants, in one sentence; None if it is sound."""
    names = [tenant.name for tenant in policy.tenants]
    for name in names:
        if names.count(name) > 1:
            return f"tenants: {name!r} is named twice"
    for tenant in policy.tenants:
        if tenant.parent and tenant.parent not in names:
            return f"tenants: the parent {tenant.parent!r} of {tenant.name!r} is not named"
        if len(policy.lineage(tenant.name)) > len(policy.tenants):
            return f"tenants: {tenant.name!r} is its own ancestor"
    return None
