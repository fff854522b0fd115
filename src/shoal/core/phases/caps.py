"""Caps on the jobs that a tenant, or the whole cluster, may have at a time."""

from __future__ import annotations

from shoal.core.state.accounts import Accounts
from shoal.core.state.state import State
from shoal.core.state.tally import EVERYONE, Tally
from shoal.model.report import Full, Refused
from shoal.model.service import ServiceSpec

# A live job takes a few kilobytes of the controller's memory, in the state and in its indexes.
CLUSTER_JOBS_MAX = 200_000


def too_many(
    tally: Tally, accounts: Accounts, tenant: str, more: int, *, waiting: int = 0, gone: int = 0
) -> Refused | None:
    """Would this many more jobs be too many for the tenant, an ancestor of it, or the cluster?
    `gone`: so many of its waiting jobs leave for them."""
    live, waiting_now = tally.live, tally.waiting
    if live.get(EVERYONE, 0) - gone + more > CLUSTER_JOBS_MAX:
        text = f"the cluster takes at most {CLUSTER_JOBS_MAX:,} live jobs"
        return Refused("job", f"{text}; try again when some have ended", full=Full.CLUSTER)
    for one in accounts.lineage(tenant):
        for counts, change, most, what in (
            (live, more, one.jobs_max, "live jobs (jobs_max"),
            (waiting_now, waiting, one.waiting_max, "waiting jobs (waiting_max"),
        ):
            have = counts.get(one.name, 0)
            if change > 0 and most and have - gone + change > most:
                text = f"{one.name} has {have} of at most {most} {what} in the policy)"
                return Refused(
                    "tenant", f"{text}; try again when some have ended", full=Full.TENANT
                )
    return None


def room_for(tally: Tally, accounts: Accounts, tenant: str, *, counted: bool) -> int:
    """How many more waiting jobs of the tenant may come by themselves, as elements of arrays do.
    They leave half of the cluster's places to jobs that are submitted. `counted`: one of them is
    among the live jobs already, so it may come even if a cap was lowered since."""
    least = int(counted)
    rooms = [max(least, CLUSTER_JOBS_MAX // 2 - tally.live.get(EVERYONE, 0) + counted)]
    for one in accounts.lineage(tenant):
        if one.jobs_max:
            rooms.append(max(least, one.jobs_max - tally.live.get(one.name, 0) + counted))
        if one.waiting_max:
            rooms.append(one.waiting_max - tally.waiting.get(one.name, 0))
    return max(0, min(rooms))


def too_many_replicas(state: State, spec: ServiceSpec) -> Refused | None:
    """A service counts as the most replicas that it may have; one that is known counts already."""
    known = state.services.get(spec.name)
    tenant = spec.replica.tenant
    same = known is not None and known.spec.replica.tenant == tenant
    before = known.spec.scale.most if known is not None and same else 0
    more = spec.scale.most - before
    return too_many(state.tally, state.accounts, tenant, more) if more > 0 else None
