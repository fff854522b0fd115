"""When a waiting job will probably start, as a range: from running jobs and the jobs ahead of it.

There are four ways to look, and the truth is probably between them. The first opening: when it
would fit if it waited alone. Its turn: when all jobs ahead of it have started one after the other,
each as soon as enough GPUs are free anywhere. A claim: others were stopped for it. And jobs that
will be stopped for it as soon as they have run for the policy's minimum, or put to sleep as soon
as they have had their turn.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from shoal.core.scheduling.backfill import NODES_MAX, SAFE, TYPICAL, first_opening
from shoal.core.scheduling.ends import too_short
from shoal.core.scheduling.keep import line_key
from shoal.core.scheduling.order import gpu_milli_of, takes_turns
from shoal.core.scheduling.preempt import PREEMPTORS_MAX, Stops, will_stop
from shoal.core.scheduling.sleeping import cost_ms, sleep_ms, turn_ms
from shoal.core.scheduling.turns import turns_due
from shoal.core.scheduling.victims import Victim
from shoal.core.state.expect import left_ms, run_ms
from shoal.core.state.gpu_caps import cap_left, capped_by, held_by_job, is_under
from shoal.core.state.queue import gang_of
from shoal.core.state.room import Level
from shoal.core.state.state import Node, Rank, State
from shoal.model.job import Job, Phase
from shoal.model.policy import Preempt
from shoal.model.resources import WHOLE_GPU_MILLI, Slice

# When many jobs follow each other, hardly all of them take as long as the 90th percentile.
LONG = 70
TELLING_MS = 60_000  # a shorter run says nothing about the job's end
AHEAD_LOOKED = 16
AHEAD_MAX = 1000  # a job further back gets the range of the job at this place


class Prediction(NamedTuple):
    """The start is probably between these two moments. `stops`: who will be stopped for it."""

    early_ms: int
    late_ms: int
    stops: Stops | None = None


def predict(state: State, job: Job, now_ms: int) -> Prediction | None:
    """None if the run times of the jobs it waits for are unknown, and none is stopped for it."""
    if job.phase is not Phase.WAITING or job.awaits or state.accounts.held_by(job.spec.tenant):
        return None
    if job.id in state.claims:
        return _when_let_go(state, job, now_ms)
    if top := capped_by(state, job.spec.tenant, gang_of(job).gpu_milli):
        return _under_cap(state, job, top, now_ms)
    openings = [first_opening(state, job, now_ms, percent) for percent in (TYPICAL, SAFE)]
    early, late = (None if opening is None else opening.start_ms for opening in openings)
    least_ms = max(now_ms, job.not_before_ms)
    ahead = _ahead(state, job, now_ms)
    stops = will_stop(state, job, least_ms) if _leads(state, job, ahead) else None
    if stops is not None and not ahead:
        gone_ms = stops.at_ms + max(_leaving_ms(state, one) for one in stops.victims)
        ends_ms = [time_ms for time_ms in (early, late) if time_ms is not None and time_ms > now_ms]
        first_ms, last_ms = min([stops.at_ms, *ends_ms]), min([gone_ms, *ends_ms[1:]])
        return Prediction(max(least_ms, first_ms), max(least_ms, first_ms, last_ms), stops)
    if state.policy.preempt is Preempt.RANK and takes_turns(job):
        # Running jobs may be stopped for it as soon as it is its turn; or they end first.
        return None if late is None else Prediction(least_ms, max(least_ms, late), stops)
    return _in_turn(state, job, ahead, now_ms, early, late, stops)


def _leads(state: State, job: Job, ahead: list[Job]) -> bool:
    """Whether others may be stopped for it now, or put to sleep."""
    if job.id in state.jobs and not state.queue.leads(job):  # one that is not there yet may lead
        return False
    if state.policy.turn_cost_percent:  # whoever sleeps next does so for the first in line
        return not ahead
    return len({state.queue.lane[one.number] for one in ahead}) < PREEMPTORS_MAX


def _in_turn(
    state: State,
    job: Job,
    ahead: list[Job],
    now_ms: int,
    early: int | None,
    late: int | None,
    stops: Stops | None,
) -> Prediction | None:
    """`early`, `late`: its first opening if it waited alone."""
    least_ms = max(now_ms, job.not_before_ms)
    turns = [_turn_ms(state, job, ahead, now_ms, percent) for percent in (TYPICAL, LONG)]
    times = [*turns]
    if not state.policy.turn_cost_percent or None in turns:  # nobody sleeps for it
        held = state.reservations.get(job.id)
        times += [late, held.start_ms if held is not None else None]
        if early is not None and least_ms > now_ms:  # there may be room, but it may not start yet
            times.append(max(early, least_ms))
        for other in ahead[:AHEAD_LOOKED]:  # it may fill a gap beside one of these
            reserved = state.reservations.get(other.id)
            times.append(reserved.start_ms if reserved is not None else None)
        if early is not None and early > now_ms:
            times.append(early)  # otherwise it would have started
    if stops is not None:  # for it, or for a job ahead of it
        times.append(max(now_ms + 1, stops.at_ms))
    known = [time_ms for time_ms in times if time_ms is not None and time_ms > now_ms]
    if not known:
        return None
    return Prediction(max(least_ms, min(known)), max(least_ms, *known), stops)


def _when_let_go(state: State, job: Job, now_ms: int) -> Prediction:
    """The jobs in its place are stopping, within their grace time, or fall asleep."""
    names = {slice_.node for slice_ in state.claims[job.id]}
    graces = [
        other.spec.stop_grace_ms if other.phase is Phase.STOPPING else sleep_ms(state, other)
        for node in sorted(names)
        for other in state.placed[node].values()
        if other.phase in (Phase.STOPPING, Phase.DOZING)
    ]
    return Prediction(now_ms, now_ms + max(graces, default=0))


def _leaving_ms(state: State, victim: Victim) -> int:
    asleep = victim.sleeps is not None
    return sleep_ms(state, victim.job) if asleep else victim.job.spec.stop_grace_ms


def _ahead(state: State, job: Job, now_ms: int) -> list[Job]:
    """The jobs before it, the first in line first; where jobs take turns, also sleepers."""
    mine = line_key(state, job, now_ms)
    found: list[tuple[Rank, Job]] = []
    for line in state.queue.lanes.values():
        for _, number in line:
            other = state.job_numbered(number)
            place = line_key(state, other, now_ms)
            if len(found) >= AHEAD_MAX or place >= mine:
                break
            found.append((place, other))
    for job_id in state.wakeful if state.policy.turn_cost_percent else ():
        sleeper = state.jobs[job_id]
        if (place := line_key(state, sleeper, now_ms)) < mine and len(found) < AHEAD_MAX:
            found.append((place, sleeper))
    return [other for _, other in sorted(found, key=lambda entry: entry[0])]


def _turn_ms(state: State, job: Job, ahead: list[Job], now_ms: int, percent: int) -> int | None:
    """When its turn comes if all jobs ahead start in order, with all GPUs pooled (or CPUs, if it
    needs no GPU). In a large cluster this looks at a part of it, and the same part of the queue."""
    counts = _gpus if job.spec.gpus else _cpus
    short = too_short(state, job, now_ms)
    nodes = [node for node in state.order if node.schedulable and node.index not in short]
    seen = nodes[:NODES_MAX]
    free = sum(counts.free(state.rooms[node.index].level) for node in seen)
    lent_ms = _lent_ms(state, job, now_ms)
    ends = _ends(state, seen, counts, now_ms, percent, lent_ms)
    # Whoever gets a turn is taken to have it for as long as the longest of those that run.
    lenders = [state.jobs[job_id] for job_id in lent_ms]
    turn = max((turn_ms(state, one) + cost_ms(state, one) for one in lenders), default=None)
    line = [
        (other, counts.asked(other) * len(seen) // max(1, len(nodes))) for other in (*ahead, job)
    ]
    return _served_ms(state, line, free, ends, now_ms, percent, turn)


def _served_ms(
    state: State,
    line: list[tuple[Job, int]],
    free: int,
    ends: list[tuple[int, int]],
    now_ms: int,
    percent: int,
    turn: int | None = None,
) -> int | None:
    """When the last in the line starts, if each takes so much of what is free and of what becomes
    free. `turn`: how long each runs at most."""
    at_ms = now_ms
    for other, need in line:
        while free < need:
            if not ends:
                return None
            end_ms, amount = heapq.heappop(ends)
            at_ms, free = max(at_ms, end_ms), free + amount
        free -= need
        expected = run_ms(state, other, percent, other.attained_ms)
        lasts = [turn] if expected is None else [expected - other.attained_ms, turn]
        if known := [length_ms for length_ms in lasts if length_ms is not None]:
            heapq.heappush(ends, (at_ms + max(1, min(known)), need))
    return at_ms


def _under_cap(state: State, job: Job, top: str, now_ms: int) -> Prediction | None:
    """Those under the cap of a tenant that come before it start first, as its GPUs come back; and
    there has to be room on the nodes."""
    mine = line_key(state, job, now_ms)
    lanes = [lane for lane in state.queue.capped if is_under(state, lane.tenant, top)]
    numbers = [number for lane in lanes for _, number in state.queue.capped[lane][:AHEAD_MAX]]
    others = [state.job_numbered(number) for number in numbers]
    ahead = [(key, one) for one in others if (key := line_key(state, one, now_ms)) < mine]
    line = [(one, gang_of(one).gpu_milli) for _, one in sorted(ahead, key=lambda entry: entry[0])]
    line.append((job, gang_of(job).gpu_milli))
    times: list[int] = []
    for percent, room_percent in ((TYPICAL, TYPICAL), (LONG, SAFE)):
        ends = [
            (now_ms + left, held_by_job(one))
            for one in state.jobs.values()
            if one.active and is_under(state, one.spec.tenant, top) and held_by_job(one)
            if (left := _left_ms(state, one, now_ms, percent)) is not None
        ]
        heapq.heapify(ends)
        free = cap_left(state, top)
        at_ms = _served_ms(state, line[-AHEAD_MAX:], free, ends, now_ms, percent)
        opening = first_opening(state, job, now_ms, room_percent)
        if at_ms is not None and opening is not None:
            times.append(max(at_ms, opening.start_ms, now_ms, job.not_before_ms))
    return Prediction(min(times), max(times)) if times else None


def _lent_ms(state: State, job: Job, now_ms: int) -> dict[str, int]:
    """By job: when it will have slept for others, where jobs take turns."""
    if not state.policy.turn_cost_percent or job.spec.whole_nodes:
        return {}
    due = turns_due(state, job, now_ms)
    return {one.job.id: over_ms + sleep_ms(state, one.job) - now_ms for over_ms, one in due}


def _ends(
    state: State,
    nodes: list[Node],
    counts: Counts,
    now_ms: int,
    percent: int,
    lent_ms: dict[str, int],
) -> list[tuple[int, int]]:
    """How much becomes free and when, as a heap. `lent_ms`: jobs that sleep by then."""
    found: list[tuple[int, int]] = []
    left: dict[str, int | None] = {}
    for node in nodes:
        for ref, job in state.placed[node.id].items():
            if job.phase is Phase.ASLEEP:
                continue  # it holds no GPU
            if job.id not in left:
                ends_ms = _left_ms(state, job, now_ms, percent), lent_ms.get(job.id)
                left[job.id] = min(
                    (time_ms for time_ms in ends_ms if time_ms is not None), default=None
                )
            left_ms_ = left[job.id]
            if left_ms_ is not None:
                found.append((now_ms + left_ms_, counts.held(job.members[ref.member].slice)))
    heapq.heapify(found)
    return found


def _left_ms(state: State, job: Job, now_ms: int, percent: int) -> int | None:
    """A job that has outlived all of its kind goes on about as long as it has run: half of such
    jobs end within that time, nine of ten within nine times as much. None if nothing is known of
    its kind and it has not run for long enough."""
    expected = left_ms(state, job, now_ms, percent)
    if expected is not None:
        return expected
    ran_ms = now_ms - (job.running_ms if job.running_ms is not None else now_ms)
    if ran_ms < TELLING_MS and run_ms(state, job, percent) is None:
        return None
    return max(1, ran_ms * percent // (100 - percent))


class Counts(NamedTuple):
    """The pooled quantity: of a level, of a waiting job, of a held slice."""

    free: Callable[[Level], int]
    asked: Callable[[Job], int]
    held: Callable[[Slice], int]


_gpus = Counts(
    lambda level: level.gpus * WHOLE_GPU_MILLI + sum(level.shares),
    gpu_milli_of,
    lambda slice_: len(slice_.gpus) * slice_.gpu_milli,
)
_cpus = Counts(
    lambda level: level.cpu_milli,
    lambda job: job.spec.cpu_milli * job.spec.members,
    lambda slice_: slice_.cpu_milli,
)
