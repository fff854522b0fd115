"""One scheduling cycle: walk the queue in order and place every gang that fits."""

from __future__ import annotations

from shoal.core.scheduling.again import again, kept_from, spares_beside, spares_kept_from
from shoal.core.scheduling.backfill import (
    GAP_TRIES_MAX,
    Reserved,
    delayed_by,
    delays,
    nodes_of,
    reserve,
    set_aside,
)
from shoal.core.scheduling.data import holding_text, near_data
from shoal.core.scheduling.defragment import defragment
from shoal.core.scheduling.elastic import grow, widest
from shoal.core.scheduling.ends import cut_short, must_leave, too_short
from shoal.core.scheduling.fit import GangFit, fit, slices
from shoal.core.scheduling.holding import could_ever, holds_queue
from shoal.core.scheduling.meeting import meeting_points
from shoal.core.scheduling.order import Walk, place_in_line
from shoal.core.scheduling.preempt import PREEMPTORS_MAX, preempt
from shoal.core.scheduling.roots import blind_nodes, where_from
from shoal.core.scheduling.score import look_ahead
from shoal.core.scheduling.sleeping import rouse
from shoal.core.scheduling.spread import spread
from shoal.core.scheduling.wake import Sleepers
from shoal.core.scheduling.weak_links import off_weak
from shoal.core.state.apply_queue import wake_delayed
from shoal.core.state.ends import margin_ms
from shoal.core.state.events.queue import JobPromoted, JobUnclaimed
from shoal.core.state.events.runs import JobPlaced
from shoal.core.state.gpu_caps import capped_by, milli_of
from shoal.core.state.heard import Starting
from shoal.core.state.queue import Gang, Lane, gang_of
from shoal.core.state.room import Room
from shoal.core.state.round import Round
from shoal.core.state.state import Node, Rank, State
from shoal.model.durations import duration_text
from shoal.model.job import Job, Phase
from shoal.model.reason import tenant_part
from shoal.model.resources import Slice, plural

# After this many cycles that look only at changes, one looks at the whole queue.
PARTIAL_MAX = 16
BESIDE_TRIES_MAX = 8  # plans for a job beside the one that holds the queue
SOON_MS = 600_000  # gangs do not grow into room that a job wants within this time

Head = tuple[Rank, Job, Lane]


def schedule(round_: Round) -> None:
    """Jobs that do not fit are passed over, but not for longer than the policy's patience."""
    state = round_.state
    start_claimed(round_)
    wake_delayed(state, round_.now_ms)
    _promote(round_)
    sleepers = Sleepers(round_, whole=_is_due(round_))
    lanes = _lanes_to_try(round_)
    if lanes:
        _walk(round_, lanes, round_.policy.placements_per_step_max, sleepers)
    if not round_.more:  # otherwise jobs that come before them may not have been tried
        sleepers.wake()
    if not state.wakeful and not state.queue.wanting(round_.now_ms + SOON_MS):
        grow(round_)


def _promote(round_: Round) -> None:
    """Name the elder, if the policy has one and the oldest job has waited for too long."""
    state, now_ms = round_.state, round_.now_ms
    number = state.queue.first()
    if number is None or not state.ordering.elders:
        return
    if state.elder is not None and state.jobs[state.elder].number not in state.queue.capped_lane:
        return
    job = state.job_numbered(number)
    patience_ms = state.patience_ms(now_ms)
    if now_ms - job.since_ms > patience_ms:
        old_ms = now_ms - job.since_ms
        why = f"submitted {old_ms / 3_600_000:.1f} h ago, more than {patience_ms / 3_600_000:.1f} h"
        round_.emit(JobPromoted(at_ms=now_ms, job=job.id, why=why))


def _is_due(round_: Round) -> bool:
    """Does this cycle look at the whole queue?"""
    agenda = round_.state.agenda
    due_ms = agenda.look_ms
    return (due_ms is not None and due_ms <= round_.now_ms) or agenda.partial >= PARTIAL_MAX


def _lanes_to_try(round_: Round) -> list[Lane]:
    """All lanes now and then or on request; otherwise lanes that a job joined, and lanes that are
    not known to lack room."""
    queue, agenda = round_.state.queue, round_.state.agenda
    lanes, agenda.fresh = agenda.fresh, {}
    if _is_due(round_):
        agenda.look_ms = agenda.turn_for = None
        agenda.partial = 0
        return list(queue.lanes)
    if agenda.hopeful is None:
        agenda.hopeful = dict.fromkeys(
            gang for gang in queue.of_gang if gang not in agenda.hopeless
        )
    for gang in agenda.hopeful:
        lanes.update(dict.fromkeys(queue.of_gang[gang]))
    agenda.partial += bool(lanes)
    return list(lanes)


def _walk(round_: Round, lanes: list[Lane], budget: int, sleepers: Sleepers) -> None:
    """Place up to `budget` jobs, and wake sleepers that come before them."""
    state, policy, now_ms = round_.state, round_.policy, round_.now_ms
    whole = len(lanes) == len(state.queue.lanes)
    walk = Walk(state, now_ms, lanes)
    ahead: list[str] = []  # blocked jobs with reservations
    # Reservations of jobs that a walk over parts of the queue does not reach.
    apart = [] if whole else _set_aside(state, now_ms)
    tried = 0
    while (head := walk.next()) is not None:
        place, job, lane = head
        sleepers.wake(job)
        if state.queue.capped and lane not in state.queue.lanes:
            continue  # what has started since uses up a cap on GPUs
        while apart and apart[-1][0] < place:
            other = apart.pop()[1]
            later = place_in_line(state, state.jobs[other], now_ms)
            if later > place:  # jobs of its tenant were placed, and it fell back
                apart.append((later, other))
                apart.sort(reverse=True)
            elif other not in (job.id, *ahead):  # it may have been reached on its own lane
                ahead.append(other)
                if holds_queue(state, state.jobs[other], policy, now_ms):
                    _walk_beside(round_, walk, head, state.jobs[other], ahead, budget)
                    return
        reserved = len(state.reservations)
        if _place_one(round_, lane, ahead):
            budget -= 1
            if not budget:
                round_.more = True
                round_.look_again(now_ms)
                return
            if not whole and len(state.reservations) < reserved:
                # The next job in line gets its reservation before any other job fills a gap.
                _walk(round_, list(state.queue.lanes), budget, sleepers)
                return
            walk.again(lane)
            if _falls_back(state, lane.tenant, ahead):
                round_.more = True  # jobs that avoided their nodes may be ahead of them by now
                round_.look_again(now_ms)
            if state.policy.spares and (tried or not whole):
                round_.more = True  # the spare is another node now: a job kept from it may fit
                round_.look_again(now_ms)
            continue
        tried += 1
        if tried <= PREEMPTORS_MAX and _make_room(round_, job, tried):
            walk.again(lane)  # a gang that shrinks for this job can shrink further for the next
            continue
        in_front = job.id not in ahead and len(ahead) < policy.reservations
        if in_front and could_ever(state, job, now_ms):
            reserve(round_, job)
            ahead.append(job.id)
        if holds_queue(state, job, policy, now_ms):
            _walk_beside(round_, walk, walk.next(), job, ahead, budget)
            return


def _walk_beside(
    round_: Round, walk: Walk, head: Head | None, holder: Job, ahead: list[str], budget: int
) -> None:
    """The queue is held for a job that waits for GPUs: only jobs that need none may overtake it,
    and only where it loses nothing by that. Without patience nobody overtakes at all."""
    queue = round_.state.queue
    if not round_.policy.patience_ms or not holder.spec.gpus or holder.spec.whole_nodes:
        return
    if all(gang.demand.gpus for gang in queue.of_gang):
        return
    while head is not None:
        _, _, lane = head
        if not lane.gang.demand.gpus and not lane.gang.whole_nodes:
            while lane in queue.lanes and _place_beside(round_, lane, holder, ahead):
                budget -= 1
                # The spare may be another node now, and the holder may have fallen back in line.
                moved = round_.policy.spares or _falls_back(round_.state, lane.tenant, ahead)
                if not budget or moved:
                    round_.more = True
                    round_.look_again(round_.now_ms)
                    return
        head = walk.next()


def _place_beside(round_: Round, lane: Lane, holder: Job, ahead: list[str]) -> bool:
    """The first job of the lane, where it does not take what the holder will need."""
    state, now_ms, gang = round_.state, round_.now_ms, lane.gang
    beside = (*ahead, f"beside {holder.id}")
    if gang in state.agenda.hopeless or state.agenda.stuck.get(lane) == beside:
        return False
    job = state.job_numbered(state.queue.lanes[lane][0][1])
    delayed = delayed_by(state, job, ahead, now_ms)
    with set_aside(state, gang, _reserved(round_, delayed)) as aside:
        avoid, found = aside.avoid | kept_from(state, job, now_ms), None
        for _ in range(BESIDE_TRIES_MAX):
            plan = fit(state, gang, avoid)
            if plan is None:
                break
            tight = {
                index for index, count in plan.nodes if delays(state, holder, index, gang, count)
            }
            if not tight:
                found = slices(state, plan, gang.demand), _plan_text(state, plan)
                break
            avoid |= tight
    if found is None:
        state.agenda.stuck[lane] = beside
        return False
    _give(round_, job, *found)
    return True


def _set_aside(state: State, now_ms: int) -> list[tuple[Rank, str]]:
    """Jobs with reservations and their places in the order, the first of them last."""
    return sorted(
        (
            (place_in_line(state, state.jobs[job_id], now_ms), job_id)
            for job_id in state.reservations
            if state.jobs[job_id].number in state.queue.lane
        ),
        reverse=True,
    )


def _falls_back(state: State, tenant: str, ahead: list[str]) -> bool:
    """May this placement have moved a job with a reservation back in the order?"""
    if not ahead or not state.ordering.weighs_tenants:
        return False
    branch = state.accounts.lineage(tenant)[0].name
    return any(
        state.accounts.lineage(state.jobs[other].spec.tenant)[0].name == branch for other in ahead
    )


def _make_room(round_: Round, job: Job, tried: int) -> bool:
    """Stop or move others for it; it then has a claim and starts when they are gone."""
    return preempt(round_, job) or (tried == 1 and defragment(round_, job))


def _place_one(round_: Round, lane: Lane, ahead: list[str]) -> bool:
    """The first job of the lane or, beside reservations and on nodes that end, the first one that
    is short enough: jobs of one lane differ in how long they run."""
    state, now_ms = round_.state, round_.now_ms
    if lane.gang in state.agenda.hopeless:
        return False
    if state.agenda.stuck.get(lane) == tuple(ahead):
        return False
    look_ahead(state)
    plan = fit(state, lane.gang)
    if plan is None:
        state.agenda.despair(lane.gang)
        return False
    # Of jobs that are alike, some may have waited for longer than a sleeper that keeps a node.
    uneven = state.open_endings or state.wakeful or state.heard.hangs
    kept = bool(state.policy.spares or uneven)
    beside = kept or bool(ahead)
    spared, tried = False, set[tuple[tuple[str, ...], frozenset[int]]]()
    for _, number in state.queue.lanes[lane][:GAP_TRIES_MAX]:
        job = state.jobs[state.numbers[number]]
        if not beside and not job.missing_on:  # most jobs: nothing is kept from them
            _give(round_, job, *_slices(round_, job, lane.gang, set(), plan))
            return True
        delayed = delayed_by(state, job, ahead, now_ms) if ahead else ()
        if (lane.gang, delayed) in state.agenda.no_gap:
            continue
        spares, short = spares_kept_from(state, job, now_ms), too_short(state, job, now_ms)
        if not spares:
            if (delayed, short) in tried:
                continue  # like one before it
            tried.add((delayed, short))
        found = _found(round_, job, lane.gang, delayed, spares | short, plan)
        if found is not None:
            _give(round_, job, *found)
            return True
        if spares:
            spared = True  # these nodes change with every job, so the result is not kept
        elif not short:  # a node's end does not get later: what is stuck stays so
            state.agenda.no_gap.add((lane.gang, delayed))
        if not beside and not job.missing_on:
            break  # the jobs behind it are the same
    if not spared:
        state.agenda.stuck[lane] = tuple(ahead)
    return False


def _found(
    round_: Round, job: Job, gang: Gang, delayed: tuple[str, ...], kept: set[int], plan: GangFit
) -> tuple[tuple[Slice, ...], str] | None:
    """What it gets: apart from the nodes of those that it might delay or, if there is no room
    elsewhere, beside what is set aside for them. `plan`: where it would fit without them."""
    state = round_.state
    avoid = nodes_of(state, delayed) | kept
    apart = fit(state, gang, avoid) if avoid else plan
    if apart is not None:
        return _slices(round_, job, gang, avoid, apart)
    if not delayed:
        return None
    with set_aside(state, gang, _reserved(round_, delayed)) as aside:
        beside = fit(state, gang, aside.avoid | kept) if aside.any else None
        if beside is None:
            return None
        return _slices(round_, job, gang, aside.avoid | kept, beside)


def _reserved(round_: Round, delayed: tuple[str, ...]) -> Reserved:
    """Many lanes are tried beside the same jobs."""
    found: Reserved | None = round_.reserved.get(delayed)
    if found is None or not found.valid:
        found = round_.reserved[delayed] = Reserved(round_.state, delayed, round_.now_ms)
    return found


def _slices(
    round_: Round, job: Job, gang: Gang, avoid: set[int], apart: GangFit
) -> tuple[tuple[Slice, ...], str]:
    """What it gets, preferably on nodes that see its checkpoints and live until it is done, and the
    reason for them."""
    state = round_.state
    if job.attempt or state.open_endings:
        for worse in (blind_nodes(state, job), cut_short(state, job, round_.now_ms)):
            better = fit(state, gang, avoid | worse) if worse - avoid else None
            if better is not None:
                avoid, apart = avoid | worse, better
    data = bool(job.spec.volumes and state.heard.holders)
    if data:
        apart = near_data(state, job, gang, avoid, apart)
    without, apart = off_weak(state, gang, avoid, apart)
    avoid = set(without)
    before = again(state, job, gang, avoid) if job.attempt else None
    if before is not None:
        return before
    wider = None
    if job.spec.elastic:
        wider = widest(state, job, gang, avoid | spares_beside(state, job, round_.now_ms))
    plan = wider or spread(state, job, gang, avoid, apart) or apart
    held = holding_text(state, job, plan) if data else ""
    return slices(state, plan, gang.demand), _plan_text(state, plan) + held


def _give(round_: Round, job: Job, given: tuple[Slice, ...], where: str) -> None:
    waited_ms = round_.now_ms - job.since_ms
    found = where_from(round_.state, job, given) if job.attempt else ""
    if job.attempt:
        when = f"restarted {duration_text(waited_ms)} after submission"
    else:
        when = f"waited {duration_text(waited_ms)}" if waited_ms >= 1000 else "started at once"
    promise = round_.state.reservations.get(job.id)
    master, door = meeting_points(round_, job, given)
    attempt = round_.state.next_attempt(job)
    if job.spec.service:
        round_.state.heard.starts[job.id] = Starting(attempt, round_.now_ms)
    round_.emit(
        JobPlaced(
            predicted_ms=promise.start_ms if promise is not None else None,
            at_ms=round_.now_ms,
            job=job.id,
            attempt=attempt,
            slices=given,
            master=master,
            door=door,
            why=f"{where}; {when}{found}",
        )
    )


def start_claimed(round_: Round) -> None:
    """Start jobs with claims once their room is free. If one of their nodes was closed, or no job
    is being stopped for them any more, they go back to the queue."""
    state = round_.state
    for job_id, given in list(state.claims.items()):
        job = state.jobs[job_id]
        nodes = [state.nodes[slice_.node] for slice_ in given]
        rooms = [state.rooms[node.index] for node in nodes]
        stopping = any(
            other.phase in (Phase.STOPPING, Phase.DOZING)
            or (other.phase is Phase.WAKING and other.refused)  # it is stopped when it is awake
            for node in nodes
            for other in state.placed[node.id].values()
        )
        if not all(node.schedulable for node in nodes):
            _unclaim(round_, job_id, "a node with room for it was closed")
        elif state.endings and (short := _ends_first(round_, job, nodes)):
            _unclaim(round_, job_id, f"{short} ends too early for it")
        elif not _as_asked(state, job, nodes):
            _unclaim(round_, job_id, "a node with room for it has other labels or taints now")
        elif job.phase not in (Phase.WAITING, Phase.ASLEEP):
            continue  # it is being resized and has not stopped yet
        elif top := capped_by(state, job.spec.tenant, milli_of(given), without=job_id):
            _unclaim(round_, job_id, f"{tenant_part(top)} may hold no more GPUs")
        elif not any(map(_short, rooms, given)) and not (
            _in_use(state, job, nodes)
            if job.spec.whole_nodes
            else any(room.exclusive for room in rooms)
        ):
            if job.phase is Phase.ASLEEP:
                rouse(round_, job, given)
            else:
                _give(round_, job, given, "in the room made for it")
        elif not stopping:
            _unclaim(round_, job_id, "no job is being stopped for it any more")


def _in_use(state: State, job: Job, nodes: list[Node]) -> bool:
    """Does another job hold something there, or want it for itself? One that could not be put to
    sleep still does. A sleeper that is to wake holds its own memory there."""
    for node in nodes:
        for ref, other in state.placed[node.id].items():
            if other.id == job.id:
                continue
            member = other.members[ref.member]
            held = member.held
            if held.gpus or held.cpu_milli or held.memory_mb:
                return True
            if other.spec.whole_nodes and not member.lent:
                return True
    return False


def _ends_first(round_: Round, job: Job, nodes: list[Node]) -> str:
    """A node with room for it that ends too early. The margin was for what took time since."""
    state, now_ms = round_.state, round_.now_ms
    if job.phase is not Phase.WAITING:
        return ""
    short = too_short(state, job, now_ms - margin_ms(round_.policy))
    return next(
        (node.id for node in nodes if node.index in short or must_leave(state, node, job, now_ms)),
        "",
    )


def _as_asked(state: State, job: Job, nodes: list[Node]) -> bool:
    """Labels and taints may have changed since these nodes were claimed."""
    gang = gang_of(job)
    return all(gang.demand.suits(state.rooms[node.index].kind) for node in nodes) and (
        not gang.together or len({node.labels.get(gang.together) for node in nodes}) == 1
    )


def _unclaim(round_: Round, job_id: str, why: str) -> None:
    round_.emit(JobUnclaimed(at_ms=round_.now_ms, job=job_id, why=why))


def _short(room: Room, slice_: Slice) -> bool:
    return (
        room.cpu_milli < 0
        or room.memory_mb < 0
        or any(room.gpu_milli[gpu] < 0 for gpu in slice_.gpus)
    )


def _plan_text(state: State, plan: GangFit) -> str:
    if len(plan.nodes) == 1:
        return f"{plan.rule} on {state.order[plan.nodes[0][0]].id}{plan.off}"
    names = ", ".join(state.order[index].id for index, _ in plan.nodes[:8])
    more = f" and {len(plan.nodes) - 8} more" if len(plan.nodes) > 8 else ""
    members = sum(count for _, count in plan.nodes)
    return f"{plural(members, 'member')} on {names}{more}: {plan.rule}{plan.off}"
