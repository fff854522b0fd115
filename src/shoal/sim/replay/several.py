"""Several clusters in one virtual time: each is a whole replay, and jobs that would wait in one of
them may run in another.

The live code decides: the steps of home and host, and the host's own prediction. What is here does
the drivers' part, without faults: it carries questions, hand-overs, and what became of them. Rounds
in which nothing can have changed are left out.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from shoal.core.answers.offer import offer
from shoal.core.features.neighbors import (
    SOON_MS,
    outgoing,
    submission,
    wanted_offers,
    why_not,
)
from shoal.core.state.events.log import Event
from shoal.core.state.events.neighbors import JobHanded, JobReturned, JobSettled, JobWithdrawn
from shoal.core.state.events.queue import JobReserved, JobSubmitted
from shoal.core.state.events.runs import (
    JobCheckpointed,
    JobPlaced,
    JobRequeued,
    JobRunning,
    MembersStarted,
)
from shoal.model.durations import HOUR_MS
from shoal.model.identity import EVERY_TENANT
from shoal.model.job import Job, JobSpec
from shoal.model.ledger import ANY, AccountSum, Price, PriceList
from shoal.model.neighbor import (
    PRICE_UNIT,
    Ending,
    HandedJob,
    Neighbor,
    NeighborReport,
    Offer,
    Outgoing,
    key_of,
    shape_of,
)
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import Answer, Refused, Submit
from shoal.sim.replay.attempts import SimJob
from shoal.sim.replay.clusters import NEVER_MS, Conditions
from shoal.sim.replay.metrics import MILLI, Levels, Outcome, SupplyUse
from shoal.sim.replay.replay import PROGRESS_STEPS, Progress, Replay, ReplayReply
from shoal.sim.replay.traces import Arrival, Trace, TraceError

Fields = TypeVar("Fields", bound=msgspec.Struct)

ROUND_MS = 2_000  # between two rounds of a home, as of the live driver
DECIDED_MS = 200  # after a decision
AGAIN_MS = 60_000  # as time passes, predictions change, too


# What brings no start at a host nearer.
NO_NEARER = (JobSubmitted, JobPlaced, MembersStarted, JobRunning, JobCheckpointed, JobReserved)


class SiteSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`price`: in millionths, per GPU-hour. `shift_ms`: how much later its jobs come than in the
    trace. `share`: of the trace's jobs, against the others' shares. `neighbors`: where they may
    go."""

    name: str
    nodes: list[NodeSpec]
    price: int | None = None
    shift_ms: int = 0
    share: float | None = None
    neighbors: tuple[Neighbor, ...] = ()


class Sites(msgspec.Struct, frozen=True, kw_only=True):
    sites: tuple[SiteSpec, ...]
    currency: str = ""
    round_trip_ms: int = 0  # between any two

    @property
    def nodes(self) -> list[NodeSpec]:
        return [node for site in self.sites for node in site.nodes]

    def alone(self) -> Sites:
        """The same, but nobody hands anything over."""
        apart = [msgspec.structs.replace(site, neighbors=()) for site in self.sites]
        return msgspec.structs.replace(self, sites=tuple(apart))


def divided(trace: Trace, sites: Sites, seed: int) -> list[Trace]:
    """Each cluster's part of the trace: by the trace's own column, or at random by its share. The
    first day that is not shifted begins at 0."""
    names = [site.name for site in sites.sites]
    shares = [site.share for site in sites.sites]
    parts: list[list[Arrival]] = [[] for _ in names]
    rng = random.Random(f"share {seed}")
    own = shares[0] is None and any(arrival.cluster for arrival in trace.arrivals)
    weights = [1.0 if share is None else share for share in shares]
    first_ms = min(site.shift_ms for site in sites.sites)
    for arrival in trace.arrivals:
        if own and arrival.cluster not in names:
            what = f"{arrival.cluster[:40]!r} is not one of the clusters ({', '.join(names)})"
            fix = "name it there, or give each cluster a share"
            raise TraceError(f"{trace.name}: row {arrival.row}: cluster: {what}; {fix}")
        at = names.index(arrival.cluster) if own else rng.choices(range(len(names)), weights)[0]
        submit_ms = arrival.submit_ms + sites.sites[at].shift_ms - first_ms
        parts[at].append(msgspec.structs.replace(arrival, submit_ms=submit_ms))
    return [
        msgspec.structs.replace(trace, name=f"{trace.name}, cluster {name}", arrivals=part)
        for name, part in zip(names, parts, strict=True)
    ]


# -- one cluster -----------------------------------------------------------------------------------


class Guest:
    """A job at its host, by its hand-over."""

    def __init__(self, home: Site, job: str, attempt: int) -> None:
        self.home, self.job, self.attempt = home, job, attempt
        self.arrival = home.jobs[job].arrival
        self.id = self.refused = self.told = ""
        self.sent: list[Submit] = []
        self.ending: Ending | None = None

    @property
    def key(self) -> str:
        return key_of(self.home.spec.name, self.job, self.attempt)


class Taken(ReplayReply):
    """A refusal is news for home."""

    def __init__(self, guest: Guest) -> None:
        super().__init__(guest.key)
        self._guest = guest

    def set_result(self, answer: Answer) -> None:
        if isinstance(answer, Refused):
            self._guest.refused = answer.message


class Debt(msgspec.Struct):
    """What one cluster owes another: for hand-overs that are over, in millionths."""

    jobs: int = 0
    gpu_ms: int = 0
    money: int = 0

    def add(self, gpu_ms: int, money: int) -> None:
        self.jobs += 1
        self.gpu_ms += gpu_ms
        self.money += money


class Site(Replay):
    def __init__(
        self, several: Several, number: int, trace: Trace, policy: Policy, conditions: Conditions
    ) -> None:
        self.several, self.spec = several, several.sites_.sites[number]
        self.guests: dict[str, Guest] = {}  # by the key
        self.owes: dict[str, Debt] = {}  # by neighbor, as this cluster has it
        self.earned: dict[str, Debt] = {}  # by neighbor, as this cluster has counted it
        self.called = False  # something has come for its next step
        self.round_ms = self.again_ms = NEVER_MS
        self.dues: list[int] = []  # when jobs have waited for long enough to be asked about
        self._living: dict[str, Guest] = {}  # by their names here
        # What jobs of this shape are offered, and when that has to be predicted again.
        self._offers: dict[bytes, tuple[int, int | None]] = {}
        self._offered_at = 0
        self._nearer = self._soon_offers = False
        price, currency = self.spec.price, several.sites_.currency
        gpus = {ANY: Price(per_hour=price / PRICE_UNIT)} if price is not None else {}
        super().__init__(
            trace,
            self.spec.nodes,
            msgspec.structs.replace(policy, neighbors=self.spec.neighbors),
            conditions,
            self.spec.name,
            several.seed + number,
            PriceList(currency=currency, gpus=gpus),
        )
        self._handlers |= {
            JobHanded: self._job_handed,
            JobReturned: self._job_returned,
            JobSettled: self._settle,
            JobWithdrawn: self._job_withdrawn,
        }
        afters = [one.after_ms for one in self.policy.neighbors if one.after_ms]
        self._after_ms = min(afters, default=NEVER_MS)

    @property
    def tenant(self) -> str:
        """Whose its jobs are at others."""
        return f"from-{self.spec.name}"

    def due_ms(self) -> int:
        return min(self._due_ms(), max(self.ledger.next_ms, self.now_ms))

    def step_at(self, now_ms: int) -> bool:
        """Whether anything has changed."""
        before, self.called, self.now_ms = self.outcome.events, False, now_ms
        self._step()
        return self.outcome.events > before

    def end(self, now_ms: int) -> Outcome:
        """All clusters end together."""
        self.now_ms = now_ms
        self.levels.advance(now_ms)
        self.levels.sample()
        return self._close()

    def commit(self, events: Sequence[Event], finished: Sequence[Job]) -> int:
        self._nearer |= any(type(event) not in NO_NEARER for event in events)
        return super().commit(events, finished)

    def keyed(self, key: str) -> str | None:
        return self.guests[key].id or None

    # -- home -----------------------------------------------------------------------------

    def _job_handed(self, event: JobHanded) -> None:
        guest, job = Guest(self, event.job, event.attempt), self.jobs[event.job]
        self.several.site(event.neighbor).guests[guest.key] = guest
        job.predicted = None  # it was told when it would start here
        job.waiting = False
        self.levels.waiting -= job.amount
        self.levels.live -= 1
        self._soon(event.at_ms)

    def _job_withdrawn(self, event: JobWithdrawn) -> None:
        self._soon(event.at_ms)

    def _job_returned(self, event: JobReturned) -> None:
        job = self.jobs[event.job]
        self._settle(event)
        job.waiting = True
        self.levels.waiting += job.amount
        self._asks_after(event.job, event.at_ms, event.away_after_ms)

    def _settle(self, event: JobReturned | JobSettled) -> None:
        host, key = self.several.site(event.neighbor), (event.job, event.attempt)
        guest, job = host.guests.pop(key_of(self.spec.name, *key)), self.jobs[event.job]
        self.owes.setdefault(event.neighbor, Debt()).add(event.gpu_ms, event.money)
        ending = guest.ending
        assert ending is not None, guest.key
        host.earned.setdefault(self.spec.name, Debt()).add(ending.gpu_ms, ending.money)
        self.levels.live += 1
        if type(event) is JobSettled:  # checkpoints do not travel
            self.cluster.lost += job.done_ms * job.amount

    def _job_requeued(self, event: JobRequeued) -> None:
        super()._job_requeued(event)
        if event.job not in self._living:
            self._asks_after(event.job, event.at_ms)

    def _asks_after(self, job_id: str, at_ms: int, least_ms: int = 0) -> None:
        job = self.state.jobs.get(job_id)
        if job is not None and self._after_ms < NEVER_MS:
            due_ms = at_ms + max(self._after_ms, job.attained_ms)
            heapq.heappush(self.dues, max(due_ms, least_ms))

    def _soon(self, now_ms: int) -> None:
        self.round_ms = min(self.round_ms, now_ms + DECIDED_MS)

    def changed(self, now_ms: int) -> None:
        """Something has, here or at a neighbor."""
        if self.policy.neighbors and (self.state.away or self.state.queue.size):
            self.round_ms = min(self.round_ms, _on_grid(now_ms + 1))

    def next_round_ms(self, *, still: bool) -> int:
        due_ms = _on_grid(self.dues[0]) if self.dues else NEVER_MS
        return min(self.round_ms, due_ms, NEVER_MS if still else self.again_ms)

    def plan(self, now_ms: int) -> tuple[dict[str, list[Outgoing]], dict[str, list[Job]]]:
        """What home has at each neighbor, and which jobs it asks each about."""
        self.round_ms = NEVER_MS
        while self.dues and self.dues[0] <= now_ms:
            heapq.heappop(self.dues)
        state, policy = self.state, self.tick.policy
        out: dict[str, list[Outgoing]] = {}
        for one in outgoing(state):
            out.setdefault(one.away.neighbor, []).append(one)
        asked: dict[str, list[Job]] = {}
        for job in wanted_offers(state, policy, now_ms):
            for host in self.several.sites:
                if host is not self and not why_not(state, policy, job, host.spec.name, now_ms):
                    asked.setdefault(host.spec.name, []).append(job)
        late = any(one.away.running_ms is None for one in outgoing(state))
        self.again_ms = now_ms + AGAIN_MS if asked or late else NEVER_MS
        return out, asked

    # -- host -----------------------------------------------------------------------------

    def receive(self, home: Site, outs: Sequence[Outgoing]) -> None:
        for out in outs:
            guest = self.guests.get(key_of(home.spec.name, out.job, out.attempt))
            asked = submission(home.spec.name, home.tenant, out) if guest is not None else None
            if guest is not None and asked is not None and asked not in guest.sent:
                guest.sent.append(asked)
                self.tick.ask(asked, Taken(guest))
                self.called = True

    def report(
        self, home: Site, outs: Sequence[Outgoing], asked: Sequence[Job], now_ms: int
    ) -> NeighborReport:
        found = [self._news(key_of(home.spec.name, out.job, out.attempt)) for out in outs]
        free = max(0, self.levels.up - self.levels.held) // MILLI if self.levels.in_gpus else 0
        offers = [self._offer(job.id, job.spec, home, now_ms) for job in asked]
        return NeighborReport(
            name=self.spec.name,
            clock_ms=now_ms,
            gpus=self.levels.up // MILLI if self.levels.in_gpus else 0,
            gpus_free=free,
            round_trip_ms=self.several.sites_.round_trip_ms,
            offers=tuple(one for one in offers if one.start_ms is not None),
            jobs=tuple(one for one in found if one is not None),
        )

    def _news(self, key: str) -> HandedJob | None:
        """Nothing if home knows it: one that waits may come to be late, and the time of others
        does not matter."""
        guest = self.guests.get(key)
        if guest is None:
            return None
        live = self.state.jobs.get(guest.id) if guest.id else None
        phase = live.phase.value if live is not None else ""
        if guest.told == phase and live is not None and live.members:
            return None
        guest.told = phase
        return HandedJob(
            job=guest.job,
            attempt=guest.attempt,
            id=guest.id,
            phase=phase,
            refused=guest.refused,
            ended=guest.ending,
        )

    def _offer(self, job: str, spec: JobSpec, home: Site, now_ms: int) -> Offer:
        """As this cluster predicts it. It is predicted again when anything has changed here; but a
        start that is far away only comes nearer when something ends here, or as time passes."""
        if self._nearer or (self._soon_offers and self.outcome.events != self._offered_at):
            self._offers, self._nearer, self._soon_offers = {}, False, False
        self._offered_at = self.outcome.events
        shape = shape_of(spec, home.tenant)
        known = self._offers.get(key := msgspec.json.encode(shape))
        if known is None or now_ms >= known[0]:
            found = offer(self.state, shape, EVERY_TENANT, now_ms)
            start_ms = found.start_ms
            far_ms = NEVER_MS if start_ms is None else max(0, start_ms - SOON_MS)
            self._soon_offers |= far_ms < AGAIN_MS
            known = self._offers[key] = (now_ms + max(AGAIN_MS, far_ms), start_ms)
        price = self.spec.price if shape.gpus else None
        return Offer(job=job, start_ms=known[1], price=price)

    def _job_submitted(self, event: JobSubmitted) -> None:
        guest = self.guests.get(event.key)
        if guest is None:
            super()._job_submitted(event)
            self._asks_after(event.job, event.at_ms)
            return
        guest.id = event.job
        self._living[event.job] = guest
        self.jobs[event.job] = job = SimJob(guest.arrival, self.levels.asked(guest.arrival.spec))
        self.levels.waiting += job.amount
        self.levels.live += 1

    def _job_placed(self, event: JobPlaced) -> None:
        super()._job_placed(event)
        if guest := self._living.get(event.job):
            job = guest.home.jobs[guest.job]
            job.placed_ms = self.now_ms if job.placed_ms < 0 else job.placed_ms
            job.attempts += 1

    def _record(self, finished: Job) -> None:
        guest = self._living.pop(finished.id, None)
        if guest is None:
            super()._record(finished)
            return
        job = self.jobs.pop(finished.id)
        self.levels.waiting -= job.amount if job.waiting else 0
        self.levels.live -= 1
        gpu_ms = job.held // MILLI if self.levels.in_gpus else 0
        assert finished.outcome is not None, finished.id
        guest.ending = Ending(
            outcome=finished.outcome,
            code=finished.code or 0,
            started=bool(job.attempts),
            gpu_ms=gpu_ms,
            money=(self.spec.price or 0) * gpu_ms // HOUR_MS,
        )


def _on_grid(now_ms: int) -> int:
    return -(-now_ms // ROUND_MS) * ROUND_MS


# -- all clusters ----------------------------------------------------------------------------------


class Visit(NamedTuple):
    """A home's question has reached a host; the answer leaves when the host has stepped."""

    home: Site
    host: Site
    outs: list[Outgoing]
    asked: list[Job]


class Several:
    def __init__(
        self,
        sites: Sites,
        traces: Sequence[Trace],
        policy: Policy,
        conditions: Conditions | None = None,
        *,
        name: str = "",
        seed: int = 0,
    ) -> None:
        self.name, self.sites_, self.seed = name, sites, seed
        self.now_ms = 0
        self._way_ms = sites.round_trip_ms // 2
        self._letters: list[tuple[int, int, Callable[[], None]]] = []
        self._posted = 0
        self._visits: list[Visit] = []
        numbered = enumerate(traces)
        world = conditions or Conditions()
        self.sites = [Site(self, number, trace, policy, world) for number, trace in numbered]
        self._by_name = {site.spec.name: site for site in self.sites}

    def site(self, name: str) -> Site:
        return self._by_name[name]

    def run(self, check_every: int = 0, progress: Progress | None = None) -> Outcome:
        """Of all clusters together; those of each are with the sites."""
        steps = 0
        for site in self.sites:
            site._check_every = check_every
        while not all(site._is_over() for site in self.sites):
            still = all(site._is_still() for site in self.sites)
            self.now_ms = now_ms = self._next_time(still=still)
            self._deliver()
            changed = [self._step(site) for site in self.sites]
            self._answer()
            for home in self.sites:
                if any(changed):
                    home.changed(now_ms)
                if home.next_round_ms(still=still) <= now_ms:
                    self._round(home)
            steps += 1
            if progress is not None and steps % PROGRESS_STEPS == 0:
                progress(sum(len(site.outcome.records) for site in self.sites), now_ms)
        return merged(self.name, [site.end(self.now_ms) for site in self.sites])

    def _next_time(self, *, still: bool) -> int:
        next_ms = self._letters[0][0] if self._letters else NEVER_MS
        for site in self.sites:
            next_ms = min(next_ms, site.next_round_ms(still=still))
            if not still or site._budgets_renew():
                next_ms = min(next_ms, site.due_ms())
        if next_ms >= NEVER_MS:
            raise next(site for site in self.sites if not site._is_over())._stuck()
        return max(next_ms, self.now_ms)

    def _step(self, site: Site) -> bool:
        return (site.called or site.due_ms() <= self.now_ms) and site.step_at(self.now_ms)

    def _post(self, deliver: Callable[[], None]) -> None:
        self._posted += 1
        heapq.heappush(self._letters, (self.now_ms + self._way_ms, self._posted, deliver))

    def _deliver(self) -> None:
        while self._letters and self._letters[0][0] <= self.now_ms:
            heapq.heappop(self._letters)[2]()

    def _round(self, home: Site) -> None:
        out, asked = home.plan(self.now_ms)
        for host in self.sites:
            name = host.spec.name
            if name in out or name in asked:
                visit = Visit(home, host, out.get(name, []), asked.get(name, []))
                self._post(partial(self._arrive, visit))

    def _arrive(self, visit: Visit) -> None:
        visit.host.receive(visit.home, visit.outs)
        self._visits.append(visit)

    def _answer(self) -> None:
        visits, self._visits = self._visits, []
        for home, host, outs, asked in visits:
            report = host.report(home, outs, asked, self.now_ms)
            if report.offers or report.jobs:
                self._post(partial(self._hear, home, report))

    def _hear(self, home: Site, report: NeighborReport) -> None:
        home.tick.neighbors([report])
        home.called = True


# -- the figures of all clusters -------------------------------------------------------------------


def merged(name: str, outcomes: Sequence[Outcome]) -> Outcome:
    """As if all were one cluster that had these nodes."""
    whole = Outcome(name, Levels([]), Counter())
    levels, supplies = whole.levels, dict[str, SupplyUse]()
    levels.in_gpus, levels.now_ms = outcomes[0].levels.in_gpus, outcomes[0].levels.now_ms
    views = [one.ledger for one in outcomes if one.ledger is not None]
    for one in outcomes:
        levels.sums.update(one.levels.sums)
        whole.records.extend(one.records)
        whole.requeues.update(one.requeues)
        whole.failures.update(one.failures)
        whole.events += one.events
        whole.step_ns.extend(one.step_ns)
        whole.sleep = _added(whole.sleep, one.sleep)
        for use in one.supply:
            known = supplies.get(use.name)
            supplies[use.name] = _added(known, use) if known is not None else use
    whole.supply = list(supplies.values())
    capacity = sum(view.capacity_gpu_us for view in views)
    accounts: dict[str, AccountSum] = {}
    for row in [row for view in views for row in view.accounts]:
        before = accounts.get(row.account)
        summed = _added(before, row) if before is not None else row
        share = summed.gpu_us / capacity if capacity else 0.0
        accounts[row.account] = msgspec.structs.replace(summed, share=share)
    costs = [view.cost for view in views if view.cost is not None]
    whole.ledger = msgspec.structs.replace(
        views[0],
        capacity_gpu_us=capacity,
        accounts=list(accounts.values()),
        cost=sum(costs) if len(costs) == len(views) else None,
        notes=list(dict.fromkeys(note for view in views for note in view.notes)),
    )
    return whole


def _added(one: Fields, other: Fields) -> Fields:
    """Numbers add up; known plus unknown is unknown; words are those of both."""
    changes = {}
    for field in msgspec.structs.fields(one):
        first, second = getattr(one, field.name), getattr(other, field.name)
        if not isinstance(first, str):
            changes[field.name] = None if None in (first, second) else first + second
    return msgspec.structs.replace(one, **changes)
