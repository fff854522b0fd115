"""One neighbor: what of ours is sent to it, and what it says of that.

Everything here follows from the state and may be done again: a submission carries the key of its
hand-over, a file that has come is not fetched twice. What is remembered saves only calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from shoal.calls.cluster import ClusterCalls
from shoal.calls.jobs import JobCalls
from shoal.client.transport import ShoalError, Unreachable
from shoal.control.loop import ControlLoop, Unreadable
from shoal.control.neighboring.carrying import Carrier, Incomplete
from shoal.control.neighboring.known import Known, problem_with_version
from shoal.control.neighboring.services import Abroad, ServiceOut
from shoal.control.neighboring.wire import Anything, Wire, one_line
from shoal.core.features.neighbors import outgoing
from shoal.model.away import Away
from shoal.model.durations import HOUR_MS
from shoal.model.finding import JobFilter
from shoal.model.job import (
    DEFAULT_TENANT,
    JOB_LABELS_MAX,
    JobSpec,
    MemberRef,
    Outcome,
    Phase,
)
from shoal.model.ledger import CostView
from shoal.model.neighbor import (
    HOME,
    PRICE_UNIT,
    TEXT_MAX,
    Ending,
    HandedJob,
    NeighborReport,
    Offer,
    key_of,
    mark_of,
    marked,
    shape_of,
    spec_there,
)
from shoal.model.offers import OffersView

if TYPE_CHECKING:
    from shoal.control.neighboring.crossing import Crossings

log = logging.getLogger("shoal.neighbors")

ROUND_S_MAX = 60.0
AT_ONCE = 8  # calls to one neighbor
FOLLOWED_MAX = 256  # hand-overs in one round; the others are next
LISTED_MAX = 1_000  # the others are asked about one by one
FAILURES_MAX = 200  # to fetch what a job left, while its neighbor answers
SAVED_S = 30.0  # between two looks at what a job there has saved
STRANGERS_S = 30.0  # between two looks for jobs of ours there that we do not know
PAUSE_S, PAUSE_S_MAX = 1.0, 15.0  # after a failure
LABELS_MAX = 32
AMOUNT_MAX = 10**15  # of whatever a neighbor counts
PRICE_MAX = 10**12  # in millionths
ATTEMPTS_MAX = 10_000  # of a job there


Kind = TypeVar("Kind")


class Out(NamedTuple):
    """A job that the state has at this neighbor. `hidden`: its secrets as they are named there,
    with where their values are here. `stray`: nobody waits for what it leaves."""

    job: str
    attempt: int
    away: Away
    spec: JobSpec
    hidden: dict[str, tuple[str, int, str]]
    stray: bool = False


class Plan(NamedTuple):
    """What the state wants of a neighbor at one moment."""

    asked: list[tuple[str, JobSpec]]
    out: list[Out]
    services: list[ServiceOut]


class Seen(msgspec.Struct):
    """A job there, or its lease."""

    id: str
    state: str = ""
    why: str = ""
    code: int | None = None
    attempt: int = 0
    running_ms: int | None = None
    finished_ms: int | None = None
    until_ms: int = 0
    labels: dict[str, str] = {}


class There:
    """What is known of a hand-over."""

    def __init__(self) -> None:
        self.id = ""
        self.phase = ""
        self.attempt = 0
        self.until_ms = 0
        self.refused = ""
        self.followed = 0.0  # when it was looked at last
        self.failures = 0  # to fetch what it left
        self.ended: Ending | None = None
        self.left = False  # what it left is here
        self.ready: asyncio.Task[None] | None = None  # its package and secrets are on their way
        self.fetched: asyncio.Task[str] | None = None  # what it left is on its way
        self.saving: asyncio.Task[None] | None = None  # what it saves is on its way
        self.saved = 0.0  # when that was looked at last

    def stop(self) -> None:
        for task in (self.ready, self.fetched, self.saving):
            if task is not None:
                task.cancel()


class Site:
    def __init__(self, loop: ControlLoop, cluster: str, name: str, known: Known) -> None:
        self.name, self.known = name, known
        self.wire = Wire(known.url, known.token, known.certificate)
        self.carrier = Carrier(loop, cluster, name, self.wire)
        self.abroad = Abroad(loop, cluster, name, self.wire, self.carrier)
        self._crossings: Crossings | None = None
        self.task: asyncio.Task[NeighborReport] | None = None
        self.offers: OffersView | None = None  # the newest
        self.heard_ms = self.round_trip_ms = 0
        self.problem = ""
        self.there: dict[tuple[str, int], There] = {}
        self._loop, self._cluster = loop, cluster
        self._few = asyncio.Semaphore(AT_ONCE)
        self._carries = asyncio.Semaphore(AT_ONCE)  # what takes longer than a round
        self._looked = 0.0  # for strangers
        self._pause_s = self._not_before = 0.0

    def close(self) -> None:
        for there in self.there.values():
            there.stop()
        self.abroad.close()
        if self.task is not None:
            self.task.cancel()
        if self._crossings is not None:
            self._crossings.close()
        self.wire.close()

    @property
    def crossings(self) -> Crossings:
        if self._crossings is None:
            from shoal.control.neighboring.crossing import Crossings

            self._crossings = Crossings(self.wire)
        return self._crossings

    @property
    def silent(self) -> bool:
        """It has failed several times in a row."""
        return self._pause_s > 2 * PAUSE_S

    @property
    def due(self) -> bool:
        """No round is under way, and none has just failed."""
        return self.task is None and time.monotonic() >= self._not_before

    async def round(self, plan: Plan) -> NeighborReport:
        try:
            async with asyncio.timeout(ROUND_S_MAX):
                if self.offers is None:  # nothing is sent to a stranger
                    await self._offers([])
                jobs = await self._follow(plan)
                assert self.offers is not None, "they have just come"
                price = price_of(self.offers.price)
                services = await self.abroad.round(plan.services, price)
                offers = await self._offers(plan.asked)
        except (ShoalError, TimeoutError) as error:
            return self.failed(str(error) or "it has not answered in time")
        self._pause_s, self.problem = 0.0, ""
        self.heard_ms = self._loop.clock.now_ms()
        self.round_trip_ms, self.wire.fastest_ms = self.wire.fastest_ms, 0
        return NeighborReport(
            name=self.name,
            clock_ms=self.offers.now_ms,
            gpus=self.offers.gpus,
            gpus_free=self.offers.gpus_free,
            round_trip_ms=self.round_trip_ms,
            shoal=self.offers.version,
            offers=offers,
            jobs=tuple(jobs),
            price=price,
            services=services,
        )

    def failed(self, problem: str) -> NeighborReport:
        """It is asked again after a pause."""
        self._pause_s = min(PAUSE_S_MAX, self._pause_s * 2 or PAUSE_S)
        self._not_before = time.monotonic() + self._pause_s
        self.problem = one_line(problem, TEXT_MAX)
        return NeighborReport(name=self.name, problem=self.problem)

    # -- what it would do ------------------------------------------------------------------------

    async def _offers(self, asked: Sequence[tuple[str, JobSpec]]) -> tuple[Offer, ...]:
        shapes = [shape_of(spec, DEFAULT_TENANT) for _, spec in asked]
        found = await offers_of(self.wire, shapes)
        if problem := problem_with_version(found.version):
            raise ShoalError(problem)
        if self.known.cluster != found.cluster:
            text = f"{self.known.url} is another cluster now"
            raise ShoalError(f"{text}; add it again, or declare {self.name} gone")
        self.offers = found
        return tuple(
            Offer(
                job=job,
                start_ms=None if one.start_ms is None else amount(one.start_ms),
                price=price_of(one.price),
                why=one_line(one.why, TEXT_MAX),
            )
            for (job, _), one in zip(asked, found.offers, strict=False)
        )

    # -- what it has -----------------------------------------------------------------------------

    async def _follow(self, plan: Plan) -> list[HandedJob]:
        outs, services = plan.out, [one for one in plan.services if not one.work.ends]
        current = {(out.job, out.attempt) for out in outs}
        for gone in [key for key in self.there if key not in current]:
            self.there.pop(gone).stop()
        look = time.monotonic() - self._looked >= STRANGERS_S
        rows: dict[str, Seen] = {}
        if look or any(out.away.id for out in outs):
            rows = await self._rows()
        if look:
            await self._withdraw_strangers(rows.values())
            self._looked = time.monotonic()
        hidden = [out.hidden for out in outs if not out.away.withdrawn]
        await self.carrier.hide([*hidden, *(one.hidden for one in services)])
        packages = {out.spec.package for out in outs}
        self.carrier.keep_packages(packages | {one.package for one in services})
        there = self.there
        for out in outs:
            there.setdefault((out.job, out.attempt), There())
        turns = sorted(outs, key=lambda out: there[out.job, out.attempt].followed)
        works = [self._of_few(out, rows) for out in turns[:FOLLOWED_MAX]]
        found = await asyncio.gather(*works, return_exceptions=True)
        heard = [one for one in found if isinstance(one, HandedJob)]
        for one in found:  # one that fails does not hold up the others
            if isinstance(one, BaseException) and (not heard or not isinstance(one, Unreachable)):
                raise one
        return heard

    async def _of_few(self, out: Out, rows: dict[str, Seen]) -> HandedJob:
        async with self._few:
            return await self._one(out, rows)

    async def _rows(self) -> dict[str, Seen]:
        wanted = JobFilter(labels=(HOME,))
        found = await self.wire.ask(list[Seen], JobCalls.jobs, limit=LISTED_MAX, wanted=wanted)
        return {one.id: one for one in found}

    async def _one(self, out: Out, rows: dict[str, Seen]) -> HandedJob:
        there = self.there[out.job, out.attempt]
        there.id, there.followed = there.id or out.away.id, time.monotonic()
        there.refused, seen = "", None
        if out.stray:  # its job may run here by now, and writes what this would write over
            there.stop()
            there.ready = there.fetched = there.saving = None
        try:
            if there.ended is None:
                seen = await self._look(out, there, rows)
        except Unreachable:
            raise
        except ShoalError as error:
            there.refused = one_line(str(error), TEXT_MAX)
            there.ready = None
        if seen is not None:
            there.id = one_line(seen.id, 64)
            there.attempt = min(ATTEMPTS_MAX, amount(seen.attempt))
            there.phase = one_line(seen.state, 32)
            there.until_ms = max(there.until_ms, amount(seen.until_ms))
            if seen.finished_ms is not None:
                there.ended = await self._ending(out, seen)
            elif seen.state == Phase.RUNNING and not out.away.withdrawn:
                self._save(out, there)
        return HandedJob(
            job=out.job,
            attempt=out.attempt,
            id=there.id,
            phase=there.phase,
            why=one_line(seen.why, TEXT_MAX) if seen is not None else "",
            until_ms=there.until_ms,
            refused=there.refused,
            ended=await self._left(out, there) if there.ended is not None else None,
        )

    async def _look(self, out: Out, there: There, rows: dict[str, Seen]) -> Seen | None:
        row = rows.get(there.id) if there.id else None
        if out.away.withdrawn:
            if row is not None and row.state == Phase.STOPPING:
                return row
            there.stop()
            return await self._submit(out, cancelled=True)
        if not there.id:
            if not await self._ready(out, there):
                return None
            return await self._submit(out)
        seen = row or await self.wire.find(Seen, JobCalls.job, there.id)
        if seen is None or seen.labels.get(HOME) != mark_of(self._cluster, out.job, out.attempt):
            raise ShoalError(f"it does not know {there.id} any more")
        if out.away.until_there_ms > there.until_ms and seen.finished_ms is None:
            await self._renew(there, out.away.until_there_ms)
        return seen

    async def _renew(self, there: There, until_ms: int) -> None:
        try:
            lease = await self.wire.ask(Seen, JobCalls.renew_lease, there.id, until_ms)
            there.until_ms = amount(lease.until_ms)
        except Unreachable:
            raise
        except ShoalError as error:  # it has just ended, or is about to: the next look shows that
            log.info("the lease of %s at %s: %s", there.id, self.name, error)

    async def _submit(self, out: Out, *, cancelled: bool = False) -> Seen:
        self._loop.check()
        key = key_of(self._cluster, out.job, out.attempt)
        if cancelled:  # it is never run, so it needs nothing that the neighbor could lack
            never = JobSpec(command=("true",), name=out.spec.name)
            never = self._marked(never, out)
            return await self.wire.ask(Seen, JobCalls.submit, never, key, cancelled=True)
        spec = self._marked(
            self.carrier.renamed(spec_there(out.spec, DEFAULT_TENANT), out.hidden), out
        )
        more = {"until_ms": out.away.until_there_ms} if out.away.until_there_ms else {}
        return await self.wire.ask(Seen, JobCalls.submit, spec, key, **more)

    def _marked(self, spec: JobSpec, out: Out) -> JobSpec:
        labels = dict(list(spec.labels.items())[: JOB_LABELS_MAX - 1])
        labels[HOME] = mark_of(self._cluster, out.job, out.attempt)
        return msgspec.structs.replace(spec, labels=labels)

    async def _ready(self, out: Out, there: There) -> bool:
        """What it needs is there; otherwise it is on its way."""
        works = await self.carrier.has_work(out.job, out.attempt)
        if not works and self.carrier.has_all(out.spec.package, out.hidden):
            return True
        if there.ready is None:
            there.ready = asyncio.create_task(self._carry(self._bring(out, works=works)))
        await asyncio.wait([there.ready], timeout=1.0)
        if not there.ready.done():
            return False
        done, there.ready = there.ready, None
        await done  # raises what went wrong
        return True

    async def _bring(self, out: Out, *, works: bool) -> None:
        await self.carrier.bring(out.spec.package, out.hidden)
        if works:
            await self.carrier.bring_work(out.job, out.attempt)

    async def _carry(self, work: Coroutine[Any, Any, Kind]) -> Kind:
        async with self._carries:
            return await work

    # -- what it leaves --------------------------------------------------------------------------

    def _save(self, out: Out, there: There) -> None:
        """Its newest checkpoint comes here from time to time: its host may be gone tomorrow."""
        if there.saving is not None and not there.saving.done():
            return
        if time.monotonic() - there.saved >= SAVED_S:
            there.saved = time.monotonic()
            there.saving = asyncio.create_task(self._carry(self._saved(out, there)))

    async def _saved(self, out: Out, there: There) -> None:
        try:
            await self.carrier.fetch_work(MemberRef(out.job, out.attempt, 0), there.id)
        except (ShoalError, Incomplete) as error:
            log.info("what %s has saved at %s: %s", out.job, self.name, error)

    async def _fetch(self, out: Out, there: There) -> str:
        """What could not be had, and why; empty: nothing. Output first: the nodes that hold the
        checkpoint may be gone. Who is done needs none."""
        assert there.ended is not None
        missing = await self.carrier.fetch(out.job, out.attempt, out.spec, there.id, there.attempt)
        if there.ended.outcome is Outcome.SUCCEEDED or out.away.cancelled:
            return missing
        try:
            await self.carrier.fetch_work(MemberRef(out.job, out.attempt, 0), there.id)
        except Unreachable:
            raise
        except ShoalError as error:
            missing = "; ".join(filter(None, (missing, f"its checkpoint is not here: {error}")))
        return missing

    async def _ending(self, out: Out, seen: Seen) -> Ending:
        try:
            outcome = Outcome(seen.state)
        except ValueError:
            raise Unreachable(f"{self.name} says that {seen.id} is {seen.state[:20]!r}") from None
        gpu_ms = money = 0
        began = bool(seen.attempt) or seen.running_ms is not None
        if began:
            try:
                cost = await self.wire.ask(CostView, JobCalls.cost, seen.id)
                gpu_ms, money = amount(cost.gpu_ms), amount((cost.cost or 0) * PRICE_UNIT)
            except Unreachable:
                raise  # it is asked again
            except ShoalError as error:
                log.info("what %s has cost at %s: %s", out.job, self.name, error)
        if not money and out.away.price:
            money = out.away.price * gpu_ms // HOUR_MS
        # Another record than the one that was known: nobody can say what that one has done.
        lost = bool(out.away.id) and out.away.id != seen.id
        return Ending(
            outcome=outcome,
            code=max(-255, min(255, seen.code or 0)),
            why=one_line(seen.why, TEXT_MAX),
            started=began or lost or out.away.running_ms is not None,
            gpu_ms=gpu_ms,
            money=money,
        )

    async def _left(self, out: Out, there: There) -> Ending | None:
        """The end, once all that the job left there is here."""
        assert there.ended is not None
        if out.stray or there.left or not there.ended.started or not there.attempt:
            return there.ended
        if there.fetched is None:
            if there.saving is not None:
                there.saving.cancel()
            there.fetched = asyncio.create_task(self._carry(self._fetch(out, there)))
        await asyncio.wait([there.fetched], timeout=1.0)
        if not there.fetched.done():
            return None
        done, there.fetched = there.fetched, None
        try:
            missing = one_line(await done)
        except (Unreachable, Incomplete) as error:
            log.warning("what %s left at %s: %s", out.job, self.name, error)
            there.failures += 1
            if there.failures < FAILURES_MAX:
                return None  # in the next round
            missing = f"what it left could not be fetched: {error}"
        if missing:
            why = "; ".join(filter(None, (there.ended.why, missing)))[:TEXT_MAX]
            there.ended = msgspec.structs.replace(there.ended, why=why)
        there.left = True
        return there.ended

    async def _withdraw_strangers(self, rows: Iterable[Seen]) -> None:
        """Jobs of ours there that the state does not have there: this cluster was restored from a
        backup, say. They were listed before the state is read here, and a hand-over is stored
        before it is sent, so nobody is about to claim them."""
        found = [(one, mark) for one in rows if (mark := marked(one.labels.get(HOME, "")))]
        ours = [(one, mark) for one, mark in found if mark[0] == self._cluster]
        if not ours:
            return
        try:
            await self._loop.settled()
        except Unreadable:
            return
        told = [one for one in outgoing(self._loop.state) if one.away.neighbor == self.name]
        here = {(one.job, one.attempt) for one in told}
        for one, (_, job, attempt) in ours:
            ends = one.finished_ms is not None or one.state == Phase.STOPPING
            if (job, attempt) not in here and not ends:
                self._loop.check()
                known = one_line(one.id, 64)
                log.warning("%s at %s is not known here; it is cancelled", known, self.name)
                await self.wire.ask(Anything, JobCalls.cancel, one.id)


async def offers_of(wire: Wire, shapes: list[JobSpec]) -> OffersView:
    """What it says of itself is shown to people."""
    found = await wire.ask(OffersView, ClusterCalls.offers, shapes)
    labels = list(found.labels.items())[:LABELS_MAX]
    return msgspec.structs.replace(
        found,
        version=one_line(found.version, 20),
        cluster=one_line(found.cluster, 16),
        tenant=one_line(found.tenant, 63),
        currency=one_line(found.currency, 10),
        labels={one_line(key, 64): one_line(value, 64) for key, value in labels},
        now_ms=amount(found.now_ms),
        gpus=amount(found.gpus),
        gpus_free=amount(found.gpus_free),
        waiting=amount(found.waiting),
    )


def amount(number: float) -> int:
    return int(max(0, min(AMOUNT_MAX, number)))


def price_of(price: float | None) -> int | None:
    return None if price is None else min(PRICE_MAX, amount(price * PRICE_UNIT))
