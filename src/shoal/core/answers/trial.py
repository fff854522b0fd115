"""Would a job start in the next step if something were different? Tried on the books themselves,
and undone: the state is the same when a trial ends (ADR 130).

A trial is cautious. Jobs that come before the job take what they may get first, and it keeps away
from room that is or would be reserved for them. So it may find that a job does not start that
would; but what it says would start, starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.core.scheduling.again import kept_from
from shoal.core.scheduling.backfill import SAFE, TYPICAL, first_opening
from shoal.core.scheduling.elastic import widest
from shoal.core.scheduling.fit import GangFit, fit, slices
from shoal.core.scheduling.holding import could_ever
from shoal.core.scheduling.order import place_in_line
from shoal.core.state.apply_room import Opened, Overlay
from shoal.core.state.expect import run_ms
from shoal.core.state.gpu_caps import capped_by
from shoal.core.state.queue import Gang, Lane, gang_of
from shoal.core.state.state import Node, Rank, State
from shoal.model.array import ELEMENT_NUMBERS
from shoal.model.durations import about
from shoal.model.job import Job, JobSpec
from shoal.model.policy import Preempt

FITS_MAX = 64  # jobs ahead that are placed in one trial; with more, nothing is promised
DELAYED_MAX = 3  # jobs at the front of the queue whose start is compared
LATER_MS = 60_000  # a delay worth a word
TRIALS_MAX = 16  # for one answer: the loop waits for it
Openings = dict[str, int | None]  # by job: when it would fit


class Trials:
    """What the trials for one answer share: how many are left, and when the jobs at the front would
    start as things are."""

    def __init__(self) -> None:
        self.left = TRIALS_MAX
        self.sooner: Openings = {}


class Trial(NamedTuple):
    """The job starts. `before`: jobs that start first. `cost`: jobs that start later."""

    before: list[Job]
    cost: str = ""


def submitted(state: State, spec: JobSpec, now_ms: int) -> Job:
    """The job that such a request would become."""
    return Job(
        id=f"j{state.next_job}",
        number=state.next_job * ELEMENT_NUMBERS,
        spec=spec,
        submitted_ms=now_ms,
    )


def tried(
    state: State,
    job: Job,
    now_ms: int,
    trials: Trials,
    *,
    gone: Job | None = None,
    opened: Sequence[Node] = (),
) -> Trial | None:
    """Would the job, which need not be in the queue yet, start? `gone`: this one leaves the queue
    for it. `opened`: these nodes are opened for it."""
    if not trials.left:
        return None
    trials.left -= 1
    with Opened(state, opened), Overlay(state) as room:
        line = _Line(state, job, now_ms, gone, opened)
        if not line.place_those_ahead(room):
            return None
        avoid = line.reserved()
        if avoid is None:
            return None
        gang = gang_of(job)
        if capped_by(state, job.spec.tenant, line.taking(gang)):
            return None
        plan = fit(state, gang, kept_from(state, job, now_ms) | avoid)
        if plan is None:
            return None
        for slice_ in slices(state, plan, gang.demand):
            room.change(slice_, -1, exclusive=job.spec.whole_nodes)
        later = _openings(state, line.others(), now_ms)
    missing = [state.jobs[other] for other in later if other not in trials.sooner]
    trials.sooner |= _openings(state, missing, now_ms)
    return Trial(line.started, _cost(state, job, later, trials.sooner, now_ms))


class _Line:
    """The jobs that come before one, as a scheduling cycle would meet them."""

    def __init__(
        self, state: State, job: Job, now_ms: int, gone: Job | None, opened: Sequence[Node]
    ) -> None:
        self._state, self._job, self._now_ms = state, job, now_ms
        self._gone, self._opened = gone, opened
        self._mine = place_in_line(state, job, now_ms)
        self.started: list[Job] = []
        self._blocked: list[Job] = []

    def place_those_ahead(self, room: Overlay) -> bool:
        """False if there are too many, or if one of them may get room in another way."""
        state, now_ms, left = self._state, self._now_ms, FITS_MAX
        for _, lane in sorted(self._lanes(), key=lambda entry: entry[0]):
            hopeless = self._hopeless(lane.gang)
            for _, number in state.queue.lanes[lane]:
                other = state.job_numbered(number)
                if self._is_apart(other):
                    continue
                if place_in_line(state, other, now_ms) > self._mine:
                    break
                left -= not hopeless
                if not left:
                    return False
                plan = None if hopeless else self._plan(other, lane.gang)
                if plan is None:
                    self._blocked.append(other)
                    break
                for slice_ in slices(state, plan, lane.gang.demand):
                    room.change(slice_, -1, exclusive=other.spec.whole_nodes)
                self.started.append(other)
        return not (self._blocked and self._opened and _may_stop_others(state))

    def taking(self, gang: Gang) -> int:
        """What it and those before it take of what a cap on GPUs leaves to its tenant."""
        state = self._state
        tops = {one.name for one in state.accounts.lineage(self._job.spec.tenant) if one.gpus_max}
        if not tops or not gang.gpu_milli:
            return 0
        return gang.gpu_milli + sum(
            gang_of(other).gpu_milli * max(1, -(-other.spec.members_max // other.spec.members))
            for other in self.started
            if any(one.name in tops for one in state.accounts.lineage(other.spec.tenant))
        )

    def _plan(self, other: Job, gang: Gang) -> GangFit | None:
        """As much as it may take."""
        kept = kept_from(self._state, other, self._now_ms)
        wide = widest(self._state, other, gang, kept) if other.spec.elastic else None
        return wide or fit(self._state, gang, kept)

    def _lanes(self) -> list[tuple[Rank, Lane]]:
        """Those with a job before this one."""
        state, found = self._state, []
        for lane, line in state.queue.lanes.items():
            place = place_in_line(state, state.job_numbered(line[0][1]), self._now_ms)
            if place < self._mine:
                found.append((place, lane))
        return found

    def _is_apart(self, other: Job) -> bool:
        return other is self._gone or other.id == self._job.id or other.id in self._state.claims

    def _hopeless(self, gang: Gang) -> bool:
        """It is known that it fits nowhere, and the opened nodes do not hold a member either."""
        if gang not in self._state.agenda.hopeless:
            return False
        rooms = self._state.rooms
        return not any(rooms[node.index].holds(gang.demand) for node in self._opened)

    def reserved(self) -> set[int] | None:
        """Nodes that are or would be reserved for those that stay blocked; None if one of them
        holds the queue."""
        state, now_ms, avoid = self._state, self._now_ms, set[int]()
        expected = run_ms(state, self._job, SAFE)
        end_ms = None if expected is None else now_ms + expected
        left = state.policy.reservations
        for other in self._blocked:
            held = state.reservations.get(other.id)
            if (not held and not left) or not could_ever(state, other, now_ms):
                continue
            left = max(0, left - 1)
            since_ms = held.promised_ms if held is not None else now_ms
            if now_ms - since_ms >= state.policy.patience_ms:
                return None
            start_ms = held.start_ms if held is not None else None
            if held is not None and start_ms is not None and _ends_after(start_ms, end_ms):
                avoid |= set(held.nodes)
            if start_ms is None or start_ms <= now_ms:  # it may get another one
                opening = first_opening(state, other, now_ms, TYPICAL)
                if opening is not None and _ends_after(opening.start_ms, end_ms):
                    avoid |= set(opening.nodes)
        return avoid

    def others(self) -> list[Job]:
        """Those at the front of the queue that still wait, also behind this one."""
        state, now_ms = self._state, self._now_ms
        known = {job.id for job in self.started}
        waiting = [state.job_numbered(line[0][1]) for line in state.queue.lanes.values()]
        waiting = [job for job in waiting if not self._is_apart(job) and job.id not in known]
        waiting.sort(key=lambda job: place_in_line(state, job, now_ms))
        return waiting[:DELAYED_MAX]


def _ends_after(start_ms: int, end_ms: int | None) -> bool:
    return end_ms is None or end_ms > start_ms


def _may_stop_others(state: State) -> bool:
    """A job ahead might get an opened node's room together with that of jobs stopped for it."""
    policy = state.policy
    stops = bool(state.preemptible) and policy.preempt is not Preempt.NEVER
    return stops or bool(policy.turn_cost_percent)


def _openings(state: State, jobs: Sequence[Job], now_ms: int) -> Openings:
    found: Openings = {}
    for job in jobs:
        opening = first_opening(state, job, now_ms, TYPICAL)
        found[job.id] = None if opening is None else opening.start_ms
    return found


def _cost(state: State, job: Job, later: Openings, sooner: Openings, now_ms: int) -> str:
    """How much later those at the front start than they would without it."""
    expected = run_ms(state, job, SAFE)
    delays: dict[str, int | None] = {}
    for other, at_ms in later.items():
        before_ms = sooner[other]
        if before_ms is None:
            continue
        if expected is not None:
            end_ms = max(before_ms, now_ms + expected)
            at_ms = end_ms if at_ms is None else min(at_ms, end_ms)
        if at_ms is None or at_ms - before_ms >= LATER_MS:
            delays[other] = None if at_ms is None else at_ms - before_ms
    if not delays:
        return ""
    names = " and ".join(state.jobs[other].mention for other in delays)
    verb = "starts" if len(delays) == 1 else "start"
    known = [delay for delay in delays.values() if delay is not None]
    if len(known) < len(delays):
        return f"{names} may have to wait for it to end"
    upto = "about" if len(known) == 1 else "up to"
    return f"{names} {verb} {upto} {about(max(known))} later"
