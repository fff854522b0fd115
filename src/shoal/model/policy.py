"""A policy: frozen data that names pure functions and the numbers they obey."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from shoal.model.budget import BudgetPeriod
from shoal.model.job import JOB_NAME_PATTERN

Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)]
Span = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000_000)]  # in ms, about 30 years at most
FunctionName = Annotated[str, msgspec.Meta(max_length=200)]
PORTS_END = 65_536
SILENT_AFTER_MS_MIN = 1_500  # nodes report every second
TENANTS_MAX = 10_000


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who submits. Its quota is guaranteed; what is idle beyond it may be borrowed and is given
    back when its owner wants it. Siblings share what their parent has by weight."""

    name: Annotated[str, msgspec.Meta(max_length=63, pattern=JOB_NAME_PATTERN)]
    parent: Annotated[str, msgspec.Meta(max_length=63)] = ""
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

    name: Annotated[str, msgspec.Meta(max_length=63)] = "fair"
    order: FunctionName = "fair"
    placement: FunctionName = "shoal"
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
    half_life_ms: Span = 7 * 24 * 3_600_000
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
    retest_ms: Span = 600_000  # of a node in quarantine, at first
    tenants: Annotated[tuple[Tenant, ...], msgspec.Meta(max_length=TENANTS_MAX)] = ()
    budget_stops: bool = False  # whose budget is used up is stopped, too, and waits

    # Stored under its name before 0.2.
    silent_after_ms: Count = msgspec.field(default=5_000, name="suspect_after_ms")
    grace_ms: Count = 60_000
    # Node losses do not use up a job's retries, but nothing is retried without a bound.
    losses_max: Count = 100
    backoff_ms_max: Count = 300_000
    # Rendezvous ports lie below the range that Linux hands out to outgoing connections.
    port_first: Annotated[int, msgspec.Meta(ge=1024, le=65_535)] = 20_000
    port_count: Annotated[int, msgspec.Meta(ge=1, le=64_000)] = 12_000
    # One step places at most this many jobs and asks to be called again, so that no step is long.
    placements_per_step_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 200

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
    if policy.port_first + policy.port_count > PORTS_END:
        most = PORTS_END - policy.port_first
        return f"port_count: ports end at 65535, so from {policy.port_first} on there are {most}"
    if policy.silent_after_ms < SILENT_AFTER_MS_MIN:
        why = f"nodes report every second; ask for at least {SILENT_AFTER_MS_MIN} ms"
        return f"silent_after_ms: every node would be silent, because {why}"
    names: set[str] = set()
    for tenant in policy.tenants:
        if tenant.name in names:
            return f"tenants: {tenant.name!r} is named twice"
        names.add(tenant.name)
    parents = {tenant.name: tenant.parent for tenant in policy.tenants}
    for tenant in policy.tenants:
        if tenant.parent and tenant.parent not in names:
            return f"tenants: the parent {tenant.parent!r} of {tenant.name!r} is not named"
    for name in _own_ancestors(parents):
        return f"tenants: {name!r} is its own ancestor"
    return None


def _own_ancestors(parents: dict[str, str]) -> list[str]:
    """Those from whom no way up ends. Each tenant is looked at once."""
    rooted: set[str] = {""}
    for start in parents:
        way: list[str] = []
        name = start
        while name not in rooted:
            if len(way) > len(parents):
                return [start]
            way.append(name)
            name = parents[name]
        rooted.update(way)
    return []
