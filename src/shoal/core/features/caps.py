"""Caps: how much a tenant may hold, what is refused beyond it, and what waits for it."""

from __future__ import annotations

from collections.abc import Callable

from shoal.core.state.accounts import Accounts
from shoal.core.state.events.queue import JobUnreserved
from shoal.core.state.gpu_caps import cap_text, capped_by
from shoal.core.state.queue import gang_of_spec
from shoal.core.state.round import Round
from shoal.core.state.sizes import Sizes, service_bytes
from shoal.core.state.state import State
from shoal.core.state.tally import EVERYONE, Tally
from shoal.model.identity import EVERY_TENANT
from shoal.model.job import JobSpec
from shoal.model.report import Full, Refused
from shoal.model.resources import WHOLE_GPU_MILLI
from shoal.model.service import ServiceSpec

SHARE = 4
# A live job takes a few kilobytes of the controller's memory, in the state and in its indexes.
# A tenant alone may have 200,000.
CLUSTER_JOBS_MAX = 250_000
# What users chose of the specs of live jobs, arrays, services and schedules. With the part that all
# jobs have, a snapshot must stay below the 1 GB that a value in a database may have.
SPEC_BYTES_MAX = 256 << 20


def unreserve_capped(round_: Round) -> None:
    """Nothing is set aside for jobs that a cap keeps back, whatever in this step made it do so."""
    state = round_.state
    for job_id in list(state.reservations) if state.queue.capped else ():
        job = state.jobs[job_id]
        if job.number in state.queue.capped_lane:
            top = capped_by(state, job.spec.tenant, gang_of_spec(job.spec).gpu_milli)
            why = cap_text(state, top)
            round_.emit(JobUnreserved(at_ms=round_.now_ms, job=job_id, why=why))


def share_left(most: int, everyone: int, own: int) -> int:
    """How much more somebody with `own` may have, when everyone together has `everyone`."""
    return (SHARE * (most - everyone) - own) // (SHARE + 1)


def above_cap(state: State, spec: JobSpec, scope: str) -> Refused | None:
    """`scope`: whose word it is. An admin may ask for more."""
    if scope == EVERY_TENANT:
        return None
    most = state.policy.tenant(spec.tenant).priority_max
    if spec.priority <= most:
        return None
    text = f"is at most {most} for the tenant {spec.tenant}, not {spec.priority}"
    return Refused("priority", f"{text}; an admin may ask for more")


def above_gpus_max(state: State, spec: JobSpec) -> Refused | None:
    """Would the job never start, because of a cap on the GPUs of its tenant or of an ancestor?"""
    capped = [one for one in state.accounts.lineage(spec.tenant) if one.gpus_max]
    if not capped:
        return None
    least = min(capped, key=lambda one: one.gpus_max)
    asked = gang_of_spec(spec).gpu_milli
    may = f"{least.name} may hold {least.gpus_max} at a time (gpus_max in the policy)"
    if asked > least.gpus_max * WHOLE_GPU_MILLI:
        return Refused("gpus", f"asks for {asked / WHOLE_GPU_MILLI:g} GPUs in all, but {may}")
    most = max((kind.gpus for kind in state.capacity if spec.demand.suits(kind)), default=0)
    if spec.whole_nodes and spec.gpus < most:
        fix = f"ask for {most} GPUs per member, or leave whole_nodes out"
        return Refused("whole_nodes", f"takes GPUs that it does not ask for, but {may}; {fix}")
    return None


def too_many(
    tally: Tally, accounts: Accounts, tenant: str, more: int, *, waiting: int = 0, gone: int = 0
) -> Refused | None:
    """Would this many more jobs be too many for the tenant, an ancestor of it, or the cluster?
    `gone`: so many of its waiting jobs leave for them."""
    live, waiting_now = tally.live, tally.waiting
    everyone, own = live.get(EVERYONE, 0) - gone, live.get(tenant, 0) - gone
    if more > share_left(CLUSTER_JOBS_MAX, everyone, own):
        return _full(
            "job", tenant, f"{own:,}", f"{CLUSTER_JOBS_MAX:,} live jobs", 2 * own > everyone
        )
    for one in accounts.lineage(tenant):
        if not one.jobs_max and not one.waiting_max:
            continue
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


def too_large(sizes: Sizes, tenant: str, more: int, field: str = "job") -> Refused | None:
    """Would specs with this many more bytes be too much for the controller's memory?"""
    everyone, own = sizes.held.get(EVERYONE, 0), sizes.held.get(tenant, 0)
    if more <= 0 or more <= share_left(SPEC_BYTES_MAX, everyone, own):
        return None
    most = f"{SPEC_BYTES_MAX >> 20} MiB of commands, variables and the like of live jobs"
    if more > share_left(SPEC_BYTES_MAX, 0, 0):
        text = f"has {_mib(more)} MiB of commands, variables and the like, which is too much"
        return Refused(field, f"{text} at any time; put large values into files or a package")
    return _full(field, tenant, f"{_mib(own)} MiB", most, 2 * own > everyone, _LARGE)


_LARGE = "put large values into files or a package, or try again when some jobs have ended"


def _full(
    field: str,
    tenant: str,
    own: str,
    most: str,
    mostly: bool,
    fix: str = "try again when some have ended",
) -> Refused:
    """`mostly`: it is the tenant itself that takes the room."""
    who = f"; {tenant} has {own} of them, its share" if mostly else ""
    full = Full.TENANT if mostly else Full.CLUSTER
    return Refused(field, f"the cluster takes at most {most}{who}; {fix}", full=full)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f}"


def room_for(tally: Tally, accounts: Accounts, tenant: str, *, counted: bool) -> int:
    """How many more waiting jobs of the tenant may come by themselves, as elements of arrays do.
    They leave half of the cluster's places to jobs that are submitted. `counted`: one of them is
    among the live jobs already, so it may come even if a cap was lowered since."""
    least = int(counted)
    everyone, own = tally.live.get(EVERYONE, 0) - counted, tally.live.get(tenant, 0) - counted
    rooms = [max(least, share_left(CLUSTER_JOBS_MAX // 2, everyone, own))]
    for one in accounts.lineage(tenant):
        if one.jobs_max:
            rooms.append(max(least, one.jobs_max - tally.live.get(one.name, 0) + counted))
        if one.waiting_max:
            rooms.append(one.waiting_max - tally.waiting.get(one.name, 0))
    return max(0, min(rooms))


def bytes_left(sizes: Sizes, tenant: str) -> bool:
    """May one more job of the tenant come by itself? They leave half of the room, as above."""
    everyone, own = sizes.held.get(EVERYONE, 0), sizes.held.get(tenant, 0)
    return share_left(SPEC_BYTES_MAX // 2, everyone, own) > 0


def too_many_replicas(state: State, spec: ServiceSpec) -> Refused | None:
    """A service counts as the most replicas that it may have; one that is known counts already."""
    known = state.services.get(spec.name)
    tenant = spec.replica.tenant
    same = known.spec if known is not None and known.spec.replica.tenant == tenant else None
    more = spec.scale.most - (same.scale.most if same is not None else 0)
    large = service_bytes(spec) - (service_bytes(same) if same is not None else 0)
    many = too_many(state.tally, state.accounts, tenant, more) if more > 0 else None
    return many or too_large(state.sizes, tenant, large, "service")


LINES_MAX = 10  # a policy may name thousands of tenants


def caps_of(state: State, sees: Callable[[str], bool]) -> list[str]:
    """One line for each tenant with a cap that the reader may see, the fullest first."""
    lines: list[tuple[int, str]] = []
    for tenant in state.policy.tenants:
        held = state.accounts.sums.get(tenant.name)
        gpus = -(-held.gpu_milli // WHOLE_GPU_MILLI) if held is not None else 0
        parts = [
            (counts.get(tenant.name, 0), most, noun)
            for counts, most, noun in (
                (state.tally.live, tenant.jobs_max, "live jobs"),
                (state.tally.waiting, tenant.waiting_max, "waiting jobs"),
                ({tenant.name: gpus}, tenant.gpus_max, "GPUs"),
            )
            if most
        ]
        if parts and sees(tenant.name):
            text = ", ".join(f"{have} of at most {most} {noun}" for have, most, noun in parts)
            lines.append(
                (max(1000 * have // most for have, most, _ in parts), f"{tenant.name}: {text}")
            )
    lines.sort(key=lambda line: (-line[0], line[1]))
    return [text for _, text in lines[:LINES_MAX]]
