"""Stop jobs to make room for others: as few as possible, tried out before anything is done.

No ping-pong. Every job has an entitlement, (borrowed, -priority) with `borrowed` false for what a
tenant holds within its quota, and under the `rank` rule the job's own rank after that. A victim's
is strictly worse than that of the job it makes room for. A job that started within the quota stays
within it while it runs, and no more is taken from a tenant than it has borrowed. So a victim is not
more entitled when it waits than when it ran (unless other jobs of its tenant end), and cannot
preempt the job that preempted it. Each victim has also run for the policy's minimum, so every job
gets work done even in a chain of ever more entitled jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

from shoal.core.books.stoppable import may_stop_ms
from shoal.core.scheduling.again import kept_from
from shoal.core.scheduling.fit import fit, slices
from shoal.core.scheduling.order import gpu_milli_of
from shoal.core.scheduling.sleeping import Beds, bed, cost_ms, doze, why_not
from shoal.core.scheduling.turns import turns_due, turns_of
from shoal.core.scheduling.victims import (
    VICTIMS_MAX,
    Victim,
    asleep_of,
    of_use,
    scope,
    victim_of,
)
from shoal.core.state.apply_room import Overlay
from shoal.core.state.events.queue import JobClaimed
from shoal.core.state.events.runs import JobStopping
from shoal.core.state.queue import gang_of
from shoal.core.state.round import Round
from shoal.core.state.state import Rank, State
from shoal.model.durations import duration_text
from shoal.model.job import Job, Phase, SleepCause, StopCause
from shoal.model.policy import Preempt
from shoal.model.reason import job_part
from shoal.model.resources import Slice, plural

Find = Callable[[], tuple[Slice, ...] | None]
# At most this many jobs at the front of the queue may have others stopped for them in one cycle.
PREEMPTORS_MAX = 8
NAMED_MAX = 3  # jobs that will be stopped
# In a very large cluster this many jobs that may be stopped are compared, the least entitled.
COMPARED_MAX = 1024


def preempt(round_: Round, job: Job) -> bool:
    """Make room for a blocked job if that is allowed and possible; it then has a claim on it."""
    state, turns = round_.state, bool(round_.policy.turn_cost_percent)
    stops = bool(state.preemptible) and state.policy.preempt is not Preempt.NEVER
    if not turns and not stops:
        return False
    candidates = _candidates(round_, job) if stops else []
    lends = turns and not job.spec.whole_nodes
    over, later = turns_of(round_, job, candidates) if lends else ([], [])
    candidates += over
    if not candidates and not later:
        return False
    find = _find(state, job, round_.now_ms)
    found = _try_out(state, round_.now_ms, job, candidates, find) if candidates else None
    if found is None:
        if later and _try_out(state, round_.now_ms, job, candidates + later, find) is not None:
            state.agenda.turn_for = state.agenda.turn_for or job.id
        return False
    _commit(round_, job, *found)
    round_.judged = False
    return True


class Stops(NamedTuple):
    """Jobs that will be stopped for one that waits, unless they end before, and when."""

    at_ms: int
    victims: list[Victim]

    def __str__(self) -> str:
        names = ", ".join(victim.job.label for victim in self.victims[:NAMED_MAX])
        more = len(self.victims) - NAMED_MAX
        asleep = all(victim.sleeps is not None for victim in self.victims)
        deed = "be put to sleep" if asleep else "make room"
        if all(not victim.shrinks and victim.sleeps is None for victim in self.victims):
            deed = "be stopped"
        return f"{names}{f' and {more} more' if more > 0 else ''} will {deed} for it"


def will_stop(state: State, job: Job, now_ms: int) -> Stops | None:
    """The first moment at which enough jobs may be stopped or put to sleep for this one, if none
    ends before: each has to run for the policy's minimum, or to have its turn. None if there are
    not enough of them."""
    mine = _entitlement(state, job, now_ms, holding=False)
    due = _stops_due(state, job, mine, now_ms)
    takes_turns = state.policy.turn_cost_percent and not job.spec.whole_nodes
    turns = turns_due(state, job, now_ms) if takes_turns else []
    times = sorted({one[0] for one in due} | {one[0] for one in turns})
    known: dict[tuple[str, bool], tuple[Victim, float]] = {}
    found, low, high = None, 0, len(times)
    while low < high:  # the more may be stopped, the sooner it fits
        middle = (low + high) // 2
        may = [(theirs, other) for at_ms, theirs, other in due if at_ms <= times[middle]]
        may.sort(key=lambda entry: (entry[0], entry[1].number), reverse=True)
        victims = _cheapest(state, job, may, mine, now_ms, known)
        already = {victim.job.id for victim in victims}
        over = (victim for at_ms, victim in turns if at_ms <= times[middle])
        victims += [victim for victim in over if victim.job.id not in already]
        room = _try_out(state, now_ms, job, victims, _find(state, job, now_ms)) if victims else None
        if room is None:
            low = middle + 1
        else:
            found, high = Stops(times[middle], room[0]), middle
    return found


def _stops_due(state: State, job: Job, mine: Rank, now_ms: int) -> list[tuple[int, Rank, Job]]:
    if not state.preemptible or state.policy.preempt is Preempt.NEVER:
        return []
    gang, avoid = scope(state, job, now_ms)
    due: list[tuple[int, Rank, Job]] = []
    for job_id in state.preemptible:
        other = state.jobs[job_id]
        if other.phase in (Phase.STARTING, Phase.RUNNING) and not any(
            m.over for m in other.members
        ):
            theirs = _entitlement(state, other, now_ms, holding=True)
            if theirs > mine and of_use(state, other, gang, avoid):
                due.append((_due_ms(state, other, now_ms), theirs, other))
    return due


def _due_ms(state: State, job: Job, now_ms: int) -> int:
    running_ms = now_ms if job.running_ms is None else job.running_ms
    policy = state.policy
    return max(now_ms, may_stop_ms(job, running_ms, policy.run_ms_min, policy.turn_ms_min))


def _find(state: State, job: Job, now_ms: int) -> Find:
    """What looks for room for it."""
    if job.phase is Phase.ASLEEP:
        return lambda: bed(state, job)
    kept, gang = kept_from(state, job, now_ms), gang_of(job)

    def find() -> tuple[Slice, ...] | None:
        plan = fit(state, gang, kept)
        return slices(state, plan, gang.demand) if plan is not None else None

    return find


def _candidates(round_: Round, job: Job) -> list[Victim]:
    """Jobs that may be stopped for this one now."""
    state, now_ms = round_.state, round_.now_ms
    mine = _entitlement(state, job, now_ms, holding=False)
    _catch_up(round_)
    if not state.claims and not state.agenda.stoppable.any_beyond(mine):
        return []
    gang, avoid = scope(state, job, now_ms)
    stoppable = _stoppable(round_, mine, lambda other: of_use(state, other, gang, avoid))
    if round_.victims[0] != len(round_.events):
        round_.victims = len(round_.events), {}
    return _cheapest(state, job, stoppable, mine, now_ms, round_.victims[1])


def _cheapest(
    state: State,
    job: Job,
    stoppable: list[tuple[Rank, Job]],
    mine: Rank,
    now_ms: int,
    known: dict[tuple[str, bool], tuple[Victim, float]],
) -> list[Victim]:
    """The cheapest first: jobs on borrowed GPUs, then those that only have to shrink, then by work
    lost since a checkpoint per GPU freed. `known`: victims and costs of which this was asked."""
    found = []
    whole_nodes = job.spec.whole_nodes
    for theirs, other in stoppable:
        if theirs[:2] == mine[:2] and not other.spec.checkpoint_ms:
            continue  # jobs that start over would take turns forever and get nowhere
        entry = known.get((other.id, whole_nodes))
        if entry is None:
            entry = known[other.id, whole_nodes] = _deed(state, other, whole_nodes, now_ms)
        victim, cost = entry
        found.append(((not theirs[0], not victim.sleeps, not victim.shrinks, cost), victim))
    resizing = _resizing(state) if state.claims else []
    if resizing:
        gang, avoid = scope(state, job, now_ms)
    for victim in resizing:
        theirs = _entitlement(state, victim.job, now_ms, holding=True)
        if theirs > mine and of_use(state, victim.job, gang, avoid):
            found.append(((not theirs[0], False, False, -1.0), victim))
    found.sort(key=lambda entry: entry[0])  # of equal cost the least entitled stays first
    return [victim for _, victim in found[:VICTIMS_MAX]]


def _deed(state: State, other: Job, whole_nodes: bool, now_ms: int) -> tuple[Victim, float]:
    """How it would make room, and what that costs per GPU. `whole_nodes`: all of its nodes."""
    victim = victim_of(other, now_ms)
    stop_ms = victim.lost_ms + state.policy.move_cost_ms
    lends = not whole_nodes and not why_not(state, other)  # a sleeper stays there
    if lends and cost_ms(state, other) < stop_ms:
        victim = asleep_of(state, other, SleepCause.PREEMPT)
    return victim, victim.lost_ms / max(1, gpu_milli_of(other))


def _catch_up(round_: Round) -> None:
    """Rank the running jobs whose rank has changed, or that have now run for long enough."""
    state, now_ms = round_.state, round_.now_ms
    changes_ms = state.ordering.changes_ms
    by_rank = state.policy.preempt is Preempt.RANK

    def judge(job: Job) -> tuple[Rank, int | None]:
        entitlement = _entitlement(state, job, now_ms, holding=True)
        return entitlement, changes_ms(job, now_ms) if by_rank else None

    line = state.agenda.stoppable
    next_ms = line.catch_up(now_ms, state.jobs, judge)
    if next_ms is not None:
        round_.look_again(next_ms)
    if state.accounts.quotas and not round_.judged:
        # What is borrowed changes with every placement of the tenant.
        round_.judged = True
        for job_id in state.preemptible:
            if line.holds(job_id):
                line.rank(state.jobs[job_id], lambda job: (judge(job)[0], None))


def _stoppable(round_: Round, mine: Rank, useful: Callable[[Job], bool]) -> list[tuple[Rank, Job]]:
    """Jobs less entitled than this that have run for long enough, the least entitled first.
    `useful`: is the room of such a job any use?"""
    state, now_ms = round_.state, round_.now_ms
    # Without quotas, what a running job is entitled to stays the same during a step.
    known: dict[str, Rank] = round_.entitled if not state.accounts.quotas else {}
    found: list[tuple[Rank, Job]] = []
    for job_id in state.agenda.stoppable.beyond(mine):
        job = state.jobs[job_id]
        running = job.phase is Phase.RUNNING and not any(member.over for member in job.members)
        if not running or not useful(job):
            continue  # it is about to end anyway, or somewhere else
        theirs = known.get(job_id)
        if theirs is None:
            theirs = known[job_id] = _entitlement(state, job, now_ms, holding=True)
        if theirs > mine:
            found.append((theirs, job))
            if len(found) == COMPARED_MAX:
                break
    return found


def _entitlement(
    state: State, job: Job, now_ms: int, *, holding: bool, freed_milli: int = 0
) -> tuple[float, ...]:
    """`freed_milli`: how much of what its tenant holds is already going to be taken."""
    if holding:
        borrowed = job.borrowed and not state.accounts.within_quota(job.spec.tenant, -freed_milli)
    else:
        more = gpu_milli_of(job) + _claimed_milli(state, job.spec.tenant)
        borrowed = not state.accounts.within_quota(job.spec.tenant, more)
    if state.policy.preempt is not Preempt.RANK:
        return (borrowed, -job.spec.priority)
    # Not the tenant's standing: it changes by the minute, and two jobs would take turns forever.
    rank = state.ordering.rank(state, job, now_ms)
    return (borrowed, -job.spec.priority, not job.elder, *rank)


def _claimed_milli(state: State, tenant: str) -> int:
    """What other jobs under the same quota have claimed and will hold as soon as it is free."""
    guarantor = state.accounts.guarantor(tenant)
    return sum(
        len(slice_.gpus) * slice_.gpu_milli
        for job_id, given in state.claims.items()
        if state.jobs[job_id].phase in (Phase.WAITING, Phase.ASLEEP)
        and state.accounts.guarantor(state.jobs[job_id].spec.tenant) == guarantor
        for slice_ in given
    )


def _resizing(state: State) -> list[Victim]:
    """Jobs already stopping to change their size: a smaller size costs no further restart."""
    found = []
    for job_id, given in state.claims.items():
        job = state.jobs[job_id]
        resized = job.phase is Phase.STOPPING and job.stop_cause is StopCause.RESIZE
        if resized and job.spec.yields and len(given) > job.spec.members:
            found.append(Victim(job, given[job.spec.members :], True, 0, claimed=True))
    return found


def _try_out(
    state: State, now_ms: int, job: Job, candidates: list[Victim], find: Find
) -> tuple[list[Victim], tuple[Slice, ...]] | None:
    """Remove victims one by one until the gang fits, then put back, in reverse, those that were not
    needed. The state is unchanged when this returns. `find`: room for the gang, if there is any."""
    mine = _entitlement(state, job, now_ms, holding=False)
    freed_milli: dict[str, int] = {}  # by the tenant whose quota it is
    with WithoutVictims(state) as overlay:
        taken: list[Victim] = []
        beds = Beds(state)
        for candidate in candidates:
            victim = candidate
            if victim.sleeps is not None and not beds.take(victim.job):
                if victim.sleeps is SleepCause.TURN:
                    continue
                victim = victim_of(victim.job, now_ms)
            guarantor = state.accounts.guarantor(victim.job.spec.tenant)
            if guarantor is not None and victim.sleeps is not SleepCause.TURN:
                freed = freed_milli.get(guarantor.name, 0)
                if mine >= _entitlement(state, victim.job, now_ms, holding=True, freed_milli=freed):
                    continue  # the rest of what its tenant holds is within the quota
                freed_milli[guarantor.name] = freed + sum(
                    len(slice_.gpus) * slice_.gpu_milli for slice_ in victim.given_up
                )
            overlay.give_back(victim)
            taken.append(victim)
            if find() is not None:
                break
        else:
            return None
        for victim in reversed(taken[:-1]):
            overlay.take_again(victim)
            if find() is None:
                overlay.give_back(victim)
            else:
                taken.remove(victim)
        taken = [
            overlay.spare(victim, lambda: find() is not None) if victim.shrinks else victim
            for victim in taken
        ]
        given = find()
        assert given is not None, "it fitted a moment ago"
        return taken, given


class WithoutVictims(Overlay):
    """The room that would be free if these jobs gave up the given slices."""

    def give_back(self, victim: Victim) -> None:
        self._give_up(victim, +1)

    def take_again(self, victim: Victim) -> None:
        self._give_up(victim, -1)

    def spare(self, victim: Victim, fits: Callable[[], bool]) -> Victim:
        """Keep as many of its members as possible: a gang that shrinks too far would need another
        restart to grow again."""

        def try_without(given_up: list[tuple[Slice, ...]]) -> bool:
            nonlocal victim
            self.take_again(victim)
            less = victim._replace(given_up=tuple(chain.from_iterable(given_up)))
            self.give_back(less)
            if fits():
                victim = less
                return True
            self.take_again(less)
            self.give_back(victim)
            return False

        needed: list[tuple[Slice, ...]] = []  # cannot be kept
        parts = [_units(victim)]
        while parts:
            part = parts.pop()
            if try_without([*needed, *chain.from_iterable(parts)]):
                continue
            if len(part) == 1:
                needed += part
            else:  # the last members of a gang go first
                parts += [part[len(part) // 2 :], part[: len(part) // 2]]
        return victim

    def _give_up(self, victim: Victim, sign: int) -> None:
        if victim.sleeps is not None:
            self._lend(victim, sign)
            return
        held = Counter(m.slice for m in victim.job.members if not m.over) if victim.claimed else ()
        for slice_ in victim.given_up:
            self.change(slice_, sign, exclusive=victim.job.spec.whole_nodes)
            if slice_ in held:  # taken twice: by the holder and by the claim
                self.change(slice_, sign, exclusive=victim.job.spec.whole_nodes)

    def _lend(self, victim: Victim, sign: int) -> None:
        """It holds memory only, and more of it."""
        for member, given in zip(victim.job.members, victim.given_up, strict=True):
            self.change(member.slice, sign, exclusive=victim.job.spec.whole_nodes)
            memory_mb = member.slice.memory_mb - given.memory_mb
            bed_ = Slice(given.node, memory_mb=memory_mb, gpu_milli=given.gpu_milli)
            self.change(bed_, -sign, asleep=True)


def _units(victim: Victim) -> list[tuple[Slice, ...]]:
    """What it gives up together: one member, or all on a node if members per node are fixed."""
    if not victim.job.spec.members_per_node:
        return [(slice_,) for slice_ in victim.given_up]
    by_node: dict[str, list[Slice]] = {}
    for slice_ in victim.given_up:
        by_node.setdefault(slice_.node, []).append(slice_)
    return [tuple(slices_) for slices_ in by_node.values()]


def _kept(held: tuple[Slice, ...], victim: Victim) -> tuple[Slice, ...]:
    """The slices it keeps. Equal slices are interchangeable."""
    left = Counter(victim.given_up)
    kept = []
    for slice_ in reversed(held):
        if left[slice_]:
            left[slice_] -= 1
        else:
            kept.append(slice_)
    return tuple(reversed(kept))


def _commit(round_: Round, job: Job, victims: list[Victim], given: tuple[Slice, ...]) -> None:
    now_ms = round_.now_ms
    for victim in victims:
        _stop(round_, job, victim)
    names = ", ".join(victim.job.label for victim in victims[:5])
    more = f" and {len(victims) - 5} more" if len(victims) > 5 else ""
    round_.emit(
        JobClaimed(
            at_ms=now_ms,
            job=job.id,
            slices=given,
            why=f"starts when {names}{more} {_gone(victims)}",
        )
    )


def _gone(victims: list[Victim]) -> str:
    asleep = sum(victim.sleeps is not None for victim in victims)
    if asleep == len(victims):
        return "is asleep" if asleep == 1 else "are asleep"
    return "have stopped for it" if not asleep else "have stopped for it or are asleep"


def _named(job: Job) -> str:
    text = f"{job.title} (priority {job.spec.priority}, tenant {job.spec.tenant})"
    return job_part(job.spec.tenant, job.id, text)


def _stop(round_: Round, job: Job, victim: Victim) -> None:
    other, now_ms = victim.job, round_.now_ms
    if victim.sleeps is not None:
        turn = victim.sleeps is SleepCause.TURN
        if not why_not(round_.state, other):
            deed = "its time slice is over" if turn else "sleeps"
            why = f"{deed} to make room for {_named(job)}; nothing is lost"
            doze(round_, other, victim.sleeps, why)
            return
        victim = victim_of(other, now_ms)
    held = tuple(member.slice for member in other.members)
    if victim.claimed:
        held = round_.state.claims[other.id]
    kept = _kept(held, victim)
    size = plural(len(kept), "member")
    if not victim.claimed:
        lost = f"{duration_text(victim.lost_ms)} of work since its last checkpoint may be lost"
        deed = f"shrinks to {size}" if victim.shrinks else "is preempted"
        if other.refused:
            lost += f"; {other.refused}"
        round_.emit(
            JobStopping(
                at_ms=now_ms,
                job=other.id,
                attempt=other.attempt,
                cause=StopCause.RESIZE if victim.shrinks else StopCause.PREEMPT,
                why=f"{deed} to make room for {_named(job)}; {lost}",
            )
        )
    if victim.shrinks:
        why = f"restarts with {size} when it has stopped"
        if victim.claimed:
            why += f", so that there is room for {job.label} too"
        round_.emit(JobClaimed(at_ms=now_ms, job=other.id, slices=kept, why=why))
