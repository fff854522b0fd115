"""Index upkeep for jobs: the queue, claims, time limits, and what run times teach."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from shoal.core.books.stoppable import Stoppable
from shoal.core.state.apply_array import drop_from, element_added, element_dropped, element_placed
from shoal.core.state.apply_labels import ask, ask_no_more
from shoal.core.state.apply_room import change, hold
from shoal.core.state.estimates import SPANS, begin_ms, key_of, octave, span
from shoal.core.state.gpu_caps import capped_by, is_under, room_under_caps
from shoal.core.state.queue import Lane
from shoal.core.state.state import Functions, State
from shoal.core.state.tally import Tally
from shoal.model.job import Job, Phase
from shoal.model.neighbor import wish_of
from shoal.model.policy import Policy
from shoal.model.resources import Slice


def adopt_policy(state: State, policy: Policy) -> None:
    """File again only what the change concerns."""
    before, state.policy = state.policy, policy
    state.accounts.obey(policy)
    if before.tenants != policy.tenants:
        _count_again(state)
        judge_caps(state)
    _obey_order(state)
    agenda = state.agenda
    agenda.hope()
    agenda.other_gaps()
    agenda.look_ms = agenda.ends_ms = 0
    if _stops(before) != _stops(policy):
        agenda.stoppable = Stoppable()
        for job_id in state.preemptible:
            agenda.stoppable.joins(state.jobs[job_id], policy.run_ms_min, policy.turn_ms_min)


def _count_again(state: State) -> None:
    """Another tree of tenants has other branches and quotas."""
    state.tally = Tally()
    for array in state.arrays.values():
        state.tally.array(state.accounts, array, 1)
    for job in state.jobs.values():
        job.borrowed = job.active and not state.accounts.within_quota(job.spec.tenant, 0)
        state.tally.job(state.accounts, job, 1)
    for service in state.services.values():
        state.tally.service(state.accounts, service.spec, 1)


def _stops(policy: Policy) -> tuple[object, ...]:
    """What decides when a running job may be stopped for others, and which of them first."""
    return (
        policy.run_ms_min,
        policy.turn_ms_min,
        policy.preempt,
        policy.order,
        policy.tenants,
    )


def adopt_functions(state: State, functions: Functions) -> None:
    state.functions = functions
    _obey_order(state)


def _obey_order(state: State) -> None:
    ordering = state.functions.order(state.policy.order)
    if ordering != state.ordering:
        state.ordering = ordering
        _reorder(state)


def _reorder(state: State) -> None:
    """Every waiting job gets a new place."""
    queue = state.queue
    # Those that are outbound have no order.
    numbers = [*queue.lane, *queue.held, *queue.capped_lane]
    queue.lanes, queue.of_gang, queue.lane, queue.oldest, queue.held = {}, {}, {}, [], {}
    queue.capped, queue.capped_lane, queue.wishing = {}, {}, {}
    state.agenda.fresh, state.agenda.hopeful = {}, None
    for number in sorted(numbers):
        _stand(state, state.job_numbered(number))


def join_queue(state: State, job: Job) -> None:
    if job.awaits:
        state.queue.park(job)
    elif job.not_before_ms:
        state.queue.delay(job)
    else:
        _stand(state, job)


def _stand(state: State, job: Job) -> None:
    if state.accounts.held_by(job.spec.tenant):
        state.queue.hold(job)
        return
    if job.spec.cluster and wish_of(job.spec.cluster).only:
        state.queue.outbound[job.number] = None
        return
    ordering = state.ordering
    kin = ordering.kin(state, job)
    spec = job.spec
    lane = Lane(spec.tenant, spec.priority, state.caches.specs.gang(spec), kin, job.elder)
    queue = state.queue
    queue.stand(job, lane, ordering.job(job))
    if queue.capped and lane in queue.capped:
        return
    state.agenda.joined(lane)
    if state.accounts.caps and capped_by(state, spec.tenant, lane.gang.gpu_milli):
        _hold_back(state, lane)


def leave_queue(state: State, job: Job) -> None:
    lane = state.queue.remove(job, state.ordering.job(job))
    if lane is not None:
        queue = state.queue
        state.agenda.left(lane, empty=lane not in queue.lanes, last=lane.gang not in queue.of_gang)


def wake_delayed(state: State, now_ms: int) -> None:
    """Time passes: delayed jobs whose time has come join those that may start."""
    for number in state.queue.take_due(now_ms):
        _stand(state, state.job_numbered(number))


def judge_holds(state: State) -> None:
    """A job on hold is not in the queue and has no reservation."""
    queue = state.queue
    if not state.accounts.budgets and not queue.held:
        return
    waiting = [job for job in state.jobs.values() if job.phase is Phase.WAITING]
    sleepers = [state.jobs[job_id] for job_id in state.wakeful if job_id in state.claims]
    for job in (*waiting, *sleepers):
        if state.accounts.held_by(job.spec.tenant):
            if job.id in state.claims:
                unclaim(state, job)
            forget_reservation(state, job)
    for job in waiting:
        stands = job.number in queue.lane or job.number in queue.capped_lane
        if stands or job.number in queue.held or job.number in queue.outbound:
            leave_queue(state, job)
            _stand(state, job)
    state.agenda.other_gaps()
    state.agenda.look_ms = 0


def judge_caps(state: State, tenant: str = "") -> None:
    """What a tenant holds has changed, or with no tenant anything: hold back the lanes whose gangs
    are too large for what is left, and let the others stand again. It costs nothing without caps,
    and with them as much as there are lanes."""
    queue, accounts = state.queue, state.accounts
    if not accounts.caps and not queue.capped:
        return
    tops = [one.name for one in accounts.lineage(tenant) if one.gpus_max] if tenant else []
    if tenant and not tops:
        return
    rooms: dict[str, int | None] = {}
    for lane in (*queue.lanes, *queue.capped):
        if lane.tenant not in rooms:
            beside = not tenant or any(is_under(state, lane.tenant, top) for top in tops)
            rooms[lane.tenant] = room_under_caps(state, lane.tenant) if beside else None
        room = rooms[lane.tenant]
        if room is None and tenant:
            continue  # it is not under these caps
        fits = room is None or lane.gang.gpu_milli <= max(0, room)
        if fits and lane in queue.capped:
            queue.stand_again(lane, lambda number: state.job_numbered(number).submitted_ms)
            state.agenda.joined(lane)
        elif not fits and lane in queue.lanes:
            _hold_back(state, lane)


def _hold_back(state: State, lane: Lane) -> None:
    """Reservations of its jobs end by an event, in the same step."""
    state.queue.hold_back(lane)
    state.agenda.left(lane, empty=True, last=lane.gang not in state.queue.of_gang)


def add_job(state: State, job: Job) -> None:
    state.jobs[job.id] = job
    state.numbers[job.number] = job.id
    state.births_ms += job.submitted_ms
    state.accounts.meet(job.spec.tenant)
    state.tally.job(state.accounts, job, 1)
    weigh(state, job)
    if job.spec.service:
        state.replicas.setdefault(job.spec.service, {})[job.id] = None
    if job.spec.array:
        element_added(state, job)
    if job.elder:
        state.elder = job.id
    for other in job.awaits:
        state.dependents.setdefault(other, {})[job.id] = None
    if job.spec.workflow:
        state.flows.setdefault(job.spec.workflow, {})[job.id] = None
    if job.key:
        state.keys[job.key] = job.id
    ask(state, job)
    if job.until_ms:
        lease(state, job)
    if job.phase is Phase.WAITING:
        join_queue(state, job)
    elif job.phase is Phase.AWAY:
        state.away[job.id] = None
    else:
        if job.napping:
            state.napping[job.id] = None
            heed(state, job)
        hold(state, job)
        runs_on(state, job)
        state.agenda.attention[job.id] = None


def weigh(state: State, job: Job) -> None:
    """Count its bytes. From now on it shares its spec with jobs that have an equal one."""
    job.spec, size = state.caches.specs.share(job.spec)
    state.sizes.job(job, size)


def heed(state: State, job: Job) -> None:
    """Keep track of whether it sleeps and is to be woken."""
    if job.phase is Phase.ASLEEP and job.wants:
        state.wakeful[job.id] = state.agenda.beds[job.id] = None
    else:
        state.wakeful.pop(job.id, None)
        state.agenda.beds.pop(job.id, None)


def drop_job(state: State, job: Job) -> None:
    del state.jobs[job.id]
    del state.numbers[job.number]
    state.births_ms -= job.submitted_ms
    state.heard.warm.pop(job.id, None)
    state.heard.copied.pop(job.id, None)
    state.heard.down_ms.pop(job.id, None)
    state.heard.starts.pop(job.id, None)
    if job.spec.service:
        of_service = state.replicas[job.spec.service]
        del of_service[job.id]
        if not of_service:
            del state.replicas[job.spec.service]
    for other in job.awaits:
        drop_from(state.dependents, other, job.id)
    if job.spec.workflow:
        drop_from(state.flows, job.spec.workflow, job.id)
    if job.spec.array:
        element_dropped(state, job)
    state.away.pop(job.id, None)
    if state.elder == job.id:
        state.elder = None
    state.agenda.attention.pop(job.id, None)
    forget_reservation(state, job)
    if job.key:
        del state.keys[job.key]
    ask_no_more(state, job)


def release_after(state: State, job: Job, other: str, at_ms: int) -> None:
    """It no longer waits for this job; without any to wait for, it joins the queue."""
    leave_queue(state, job)
    drop_from(state.dependents, other, job.id)
    job.awaits = tuple(one for one in job.awaits if one != other)
    if not job.awaits:
        job.released_ms = at_ms
    join_queue(state, job)


def claim(state: State, job: Job, slices: tuple[Slice, ...]) -> None:
    """Take the promised room, though some of it is still held, so that no other job gets it. A job
    with a claim is not in the queue; one being resized may claim less later."""
    if job.id in state.claims:
        unclaim(state, job)
    state.claims[job.id] = slices
    for slice_ in slices:
        change(state, slice_, -1, exclusive=job.spec.whole_nodes)
    if job.phase is Phase.WAITING:
        leave_queue(state, job)
    judge_caps(state, job.spec.tenant)


def unclaim(state: State, job: Job) -> None:
    for slice_ in state.claims.pop(job.id):
        change(state, slice_, +1, exclusive=job.spec.whole_nodes)
    judge_caps(state, job.spec.tenant)
    if job.phase is Phase.WAITING:
        join_queue(state, job)


def unclaim_on(state: State, node_id: str) -> None:
    """No claim outlives its node."""
    for job_id in [j for j, given in state.claims.items() if any(s.node == node_id for s in given)]:
        unclaim(state, state.jobs[job_id])


def leave_waiting(state: State, job: Job) -> None:
    """It starts: drop its claim, its place in the queue and its reservation."""
    if job.id in state.claims:
        unclaim(state, job)
    leave_queue(state, job)
    state.tally.wait(state.accounts, job, -1)
    if job.spec.array:
        element_placed(state, job)
    forget_reservation(state, job)


def forget_reservation(state: State, job: Job) -> None:
    agenda = state.agenda
    if state.reservations.pop(job.id, None) is not None:
        agenda.other_gaps()
        agenda.look_ms = 0
    agenda.looked_ms.pop(job.id, None)
    agenda.moves_ms.pop(job.id, None)


def let_go(state: State, job: Job) -> None:
    """The attempt is over; it holds nothing any more."""
    state.agenda.stoppable.drop(job.id)
    if job.master:
        state.masters.difference_update((job.master, job.serves_at))
    state.heard.watches.pop(job.id, None)
    state.preemptible.pop(job.id, None)
    state.elastic.pop(job.id, None)
    state.awake.pop(job.id, None)


def runs_on(state: State, job: Job) -> None:
    """Start a running job's clocks: its time limit, its age, and when it may be stopped for
    others."""
    if job.phase is not Phase.RUNNING or job.running_ms is None:
        return
    if job.spec.time_limit_ms:
        deadline_ms = job.running_ms + job.spec.time_limit_ms
        state.limits = _pushed(state, state.limits, (deadline_ms, job.id, job.attempt), _due)
    _watch_age(state, job, job.running_ms)
    state.agenda.stoppable.joins(job, state.policy.run_ms_min, state.policy.turn_ms_min)
    if job.awake_ms is not None:
        state.awake.pop(job.id, None)
        state.awake[job.id] = None
        if state.policy.turn_cost_percent:
            state.agenda.look_again(job.awake_ms + state.policy.turn_ms_min)


def runs_no_more(state: State) -> None:
    """The first time limit always belongs to a running job, and the first lease to one that it has
    to end."""
    while state.limits and not _due(state, *state.limits[0]):
        heapq.heappop(state.limits)
    while state.leases and not _leased(state, *state.leases[0]):
        heapq.heappop(state.leases)


def lease(state: State, job: Job) -> None:
    """Its lease was set or renewed."""
    state.leases = _pushed(state, state.leases, (job.until_ms, job.id, 0), _leased)
    runs_no_more(state)


def _leased(state: State, until_ms: int, job_id: str, _: int) -> bool:
    job = state.jobs.get(job_id)
    ends = job is None or (job.stop_cause is not None and job.stop_cause.final)
    return job is not None and not ends and job.until_ms == until_ms


def _running(state: State, job_id: str, attempt: int) -> bool:
    job = state.jobs.get(job_id)
    return job is not None and job.attempt == attempt and job.phase is Phase.RUNNING


def _due(state: State, at_ms: int, job_id: str, attempt: int) -> bool:
    """One that has slept is due later than it was."""
    job = state.jobs.get(job_id)
    if job is None or job.running_ms is None or not _running(state, job_id, attempt):
        return False
    return job.running_ms + job.spec.time_limit_ms == at_ms


Due = tuple[int, str, int]  # (when, job, attempt)


def _pushed(
    state: State, heap: list[Due], entry: Due, holds: Callable[[State, int, str, int], bool]
) -> list[Due]:
    """`holds`: whether an entry still says when it is due."""
    heapq.heappush(heap, entry)
    if len(heap) > 2 * len(state.jobs) + 64:  # most belong to jobs long finished, or that slept
        heap = [due for due in heap if holds(state, *due)]
        heapq.heapify(heap)
    return heap


def _watch_age(state: State, job: Job, running_ms: int) -> None:
    """A running job enters one span of run time after another: see `grow_older`."""
    when_ms = _older_ms(job, running_ms)
    if when_ms is not None:
        state.aging = _pushed(state, state.aging, (when_ms, job.id, job.attempt), _ages)


def _older_ms(job: Job, running_ms: int) -> int | None:
    """Once an octave; the spans entered since the last time are learned then."""
    known_ms = max(job.attained_ms, begin_ms(max(0, job.told)))
    if span(known_ms) >= SPANS - 4:
        return None
    return running_ms + (4096 << octave(known_ms)) - job.attained_ms


def _ages(state: State, at_ms: int, job_id: str, attempt: int) -> bool:
    """One that has slept enters its next span later than it would have."""
    job = state.jobs.get(job_id)
    if job is None or job.running_ms is None or not _running(state, job_id, attempt):
        return False
    return _older_ms(job, job.running_ms) == at_ms


def grow_older(state: State, now_ms: int) -> None:
    """Learn from running jobs that they are not shorter than their time so far."""
    while state.aging and state.aging[0][0] <= now_ms:
        at_ms, job_id, attempt = heapq.heappop(state.aging)
        if _ages(state, at_ms, job_id, attempt):
            job = state.jobs[job_id]
            assert job.running_ms is not None, "a running job knows since when"
            learn_run(state, job, job.attained_ms + now_ms - job.running_ms)
            _watch_age(state, job, job.running_ms)


def learn_run(state: State, job: Job, ran_ms: int) -> None:
    """It has run for `ran_ms` over all attempts; each span is learned once."""
    now, before = span(ran_ms), job.told
    if before < now:
        state.agenda.stuck.clear()  # a job that seemed too long for a gap may seem shorter now
        if before < 0:
            state.estimates.began(key_of(job))
        if now:
            state.estimates.survived(key_of(job), begin_ms(max(0, before)), begin_ms(now))
        job.told = now
