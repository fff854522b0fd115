"""A roll-out on a full cluster: which old replicas leave first, so that new ones find room."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from shoal.core.scheduling.again import kept_from
from shoal.core.scheduling.fit import GangFit, fit, slices
from shoal.core.scheduling.spread import apart
from shoal.core.state.apply_room import Overlay
from shoal.core.state.gpu_caps import capped_by, held_by_job
from shoal.core.state.queue import Gang, gang_of
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.job import Job, Phase
from shoal.model.service import Rollout, Service, ServiceSpec

PART = 4  # a quarter of the replicas (one at least) at a time, unless the service says otherwise
TRIES_MAX = 64  # old replicas that are looked at for one that waits
TRIED_MS = 2_000  # it takes a few looks until an old replica leaves for a new one


def at_a_time(spec: ServiceSpec, wanted: int) -> int:
    """How many replicas may be replaced at a time."""
    return spec.at_a_time or max(1, wanted // PART)


def leave_first(
    round_: Round, service: Service, jobs: list[Job], ready_old: list[Job]
) -> list[Job]:
    """Old replicas to drain before a new one answers, if the service is rolled out by replacing and
    new ones have no room beside the old. None leaves in vain: what waits fits in its place. At most
    `at_a_time` of the replicas that are wanted may be missing."""
    state = round_.state
    old = [job for job in ready_old if job.spec.version != service.version]
    if service.spec.rollout is not Rollout.REPLACE or not old:
        return []
    serving = [job for job in jobs if job.id in service.ready and job.id not in service.draining]
    spare = at_a_time(service.spec, service.wanted) - (service.wanted - len(serving))
    waiting = [job for job in jobs if _lacks_room(round_, service, job)]
    if spare <= 0 or not waiting:
        return []
    leaving = [job for job in jobs if job.id in service.draining or job.phase is Phase.STOPPING]
    found: list[Job] = []
    freed_milli = sum(map(held_by_job, leaving))
    with Overlay(state) as overlay:
        _free(overlay, leaving)
        for job in waiting:
            staying = [one for one in old if one not in found][:TRIES_MAX]
            need_milli = gang_of(job).gpu_milli - freed_milli
            going = _room_instead(round_, overlay, job, staying, spare - len(found), need_milli)
            if going is None:
                break  # the others are like it
            found += going
            freed_milli = sum(map(held_by_job, going)) - need_milli
    return found


def _lacks_room(round_: Round, service: Service, job: Job) -> bool:
    """It was tried and not placed. One that waits for its budget, or for room that is being made
    by stopping other jobs, does not need that of an old replica."""
    return (
        job.phase is Phase.WAITING
        and job.spec.version == service.version
        and job.submitted_ms < round_.now_ms
        and job.id not in round_.state.claims
        and (job.number in round_.state.queue.lane or job.number in round_.state.queue.capped_lane)
    )


def _room_instead(
    round_: Round, overlay: Overlay, job: Job, staying: list[Job], most: int, need_milli: int
) -> list[Job] | None:
    """Old replicas in whose place it fits: none, one, or several of them. None: it never fits.
    `need_milli`: GPUs that caps must leave to it, beside those of replicas that leave anyway."""
    state, gang = round_.state, gang_of(job)
    avoid = kept_from(state, job, round_.now_ms)
    alone = [[one] for one in staying] if most else []
    groups = [staying[at : at + most] for at in range(max(0, len(staying) - most) + 1)]
    nobody: list[list[Job]] = [[]]
    for tries in (nobody, alone, groups if most > 1 else []):
        found = [
            (plan, going)
            for going in tries
            if not capped_by(state, job.spec.tenant, need_milli - sum(map(held_by_job, going)))
            and (plan := _plan_without(state, overlay, gang, going, avoid)) is not None
        ]
        if found:
            plan, going = min(found, key=lambda entry: apart(state, entry[0]))
            used = {state.order[index].id for index, _ in plan.nodes}
            if not capped_by(state, job.spec.tenant, need_milli):
                going = [one for one in going if any(m.slice.node in used for m in one.members)]
            _free(overlay, going)
            for slice_ in slices(state, plan, gang.demand):
                overlay.change(slice_, -1, exclusive=gang.whole_nodes)
            return going
    return None


def _plan_without(
    state: State, overlay: Overlay, gang: Gang, going: list[Job], avoid: Collection[int]
) -> GangFit | None:
    _free(overlay, going)
    plan = fit(state, gang, avoid)
    _free(overlay, going, undo=True)
    return plan


def side_by_side(state: State, service: Service, old: list[Job]) -> list[Job]:
    """In the order in which they leave. If the new replicas are gangs, neighbors leave together,
    so that a gang finds its nodes near each other."""
    if service.spec.replica.members == 1:
        return old
    return sorted(old, key=lambda job: (_place(state, job), job.number))


def by_rack(state: State, jobs: list[Job], busy: list[Job], drained: list[Job]) -> list[Job]:
    """Which of the drained replicas may stop now. While a gang waits for their room, those of one
    rack stop together, and one rack after the other: a gang takes the first nodes that are free, so
    it would otherwise be divided between racks by chance. `busy`: those that still drain."""
    if not any(job.phase is Phase.WAITING and job.spec.members > 1 for job in jobs):
        return drained
    stopping = {_place(state, job) for job in jobs if job.phase is Phase.STOPPING} - {""}
    waited_for = {_place(state, job) for job in busy}
    places = {_place(state, job) for job in drained}
    if len(places | stopping | waited_for) == 1:
        return drained
    ripe = sorted(place for place in places - waited_for if place and stopping <= {place})
    return [job for job in drained if _place(state, job) in ("", *ripe[:1])]


def _place(state: State, job: Job) -> str:
    if not job.members:
        return ""
    return "/".join(state.rooms[state.nodes[job.members[0].slice.node].index].domains[-1:])


def _free(overlay: Overlay, jobs: Iterable[Job], *, undo: bool = False) -> None:
    for job in jobs:
        for member in job.members:
            if not member.over:
                sign = -1 if undo else 1
                alone = job.spec.whole_nodes and not member.lent
                overlay.change(member.held, sign, exclusive=alone, asleep=member.lent)


def stalled(state: State, service: Service, now_ms: int, explain: Callable[[Job], str]) -> str:
    """Why a roll-out does not go on; empty unless a new replica waits while old ones serve.
    `explain`: why a job waits."""
    jobs = [state.jobs[job_id] for job_id in state.replicas.get(service.spec.name, {})]
    old = [job for job in jobs if job.id in service.ready and job.spec.version != service.version]
    waiting = [
        job
        for job in jobs
        if job.spec.version == service.version
        and job.phase is Phase.WAITING
        and job.submitted_ms + TRIED_MS < now_ms
    ]
    if not old or not waiting:
        return ""
    job, leaving = waiting[0], [one for one in old if one.id in service.draining]
    who = f"{job.mention} of version {service.version}"
    if leaving:
        return (
            f"{who} waits until {leaving[0].mention} of version {leaving[0].spec.version} has left"
        )
    why = explain(job)
    if service.spec.rollout is Rollout.SURGE:
        help_ = "to drain an old replica first, serve it again with --rollout replace"
        return f"{who} waits for room beside version {old[0].spec.version}: {why}; {help_}"
    serving = [job_id for job_id in service.ready if job_id not in service.draining]
    if len(serving) < service.wanted:
        stay = f"{len(serving)} of {service.wanted} replicas are ready, so the old ones stay"
        return f"{who} waits for room: {why}; {stay}"
    more = "; --at-a-time lets more of them leave" if len(old) > 1 else ""
    return f"{who} does not fit in place of an old replica: {why}{more}"
