"""Keeps the ledger of a live cluster: it follows the log and is written every few seconds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec import structs

from shoal.core.state.events.budgets import BudgetHeld
from shoal.core.state.events.cluster import PolicyChanged
from shoal.core.state.events.log import Event
from shoal.core.state.events.neighbors import JobHanded
from shoal.core.state.events.nodes import (
    NodeIntended,
    NodeJoined,
    NodeJudged,
    NodeLost,
    NodeReady,
    NodeSilent,
)
from shoal.core.state.events.queue import JobClaimed, JobReserved, JobSubmitted
from shoal.core.state.events.runs import JobPlaced, JobRunning, JobStopping, MemberExited
from shoal.core.state.events.services import ReplicaReady
from shoal.core.state.events.sleep import JobAsleep, JobDozing
from shoal.core.state.state import State
from shoal.database import sqlite
from shoal.database.base import StoreAway
from shoal.database.settings import Settings
from shoal.ledger.accounts import EVERYBODY, HOUR_MS, Only, Place, Sum
from shoal.ledger.book import Book
from shoal.ledger.book_state import BookState
from shoal.ledger.energy import hear_energy
from shoal.ledger.prices import PRICES, read_prices
from shoal.ledger.report import (
    Spent,
    Tariff,
    cost_view,
    costs_by_key,
    gap_notes,
    moment,
    open_sums,
    since_hour,
    spendings,
    view,
    wants_spendings,
)
from shoal.ledger.store import HOURS_PER_DAY, LedgerStore
from shoal.ledger.tokens import (
    NO_TOKENS,
    Parties,
    Quota,
    SpentTokens,
    TokenReport,
    Who,
    by_tenant,
    hear_tokens,
    nobody,
    of_keys,
    token_report,
)
from shoal.model.budget import BudgetLevel, BudgetPeriod, Spending
from shoal.model.job import Job, Phase, SleepCause, StopCause
from shoal.model.ledger import By, CostView, LedgerView, OwedRow, PriceList
from shoal.model.neighbor import PRICE_UNIT
from shoal.model.node import NodeHealth
from shoal.model.policy import Policy
from shoal.model.report import Report
from shoal.model.series import NodeSample
from shoal.ports import Clock, Store, StoreDamaged, StoreError

log = logging.getLogger("shoal.ledger")

WRITE_S = 15.0
FIRST_WRITE_S = 1.0  # what a controller has booked again is written, if it lives only for seconds
SPENT_S = 5.0  # the same, if the policy sets budgets
EVENTS_AT_ONCE = 5_000
EVENTS_REBOOKED_MAX = 100_000  # a few seconds
KEYS_MAX = 1_000
TIMES_MAX = 2_400  # rows of days or hours: 100 days of hours


Spend = Callable[[tuple[Spending, ...]], None]


class LiveLedger:
    """Called by the loop after every step. Trouble with its file never stops a cluster: the events
    are in the log, and are booked when the file works again. In a database it continues where the
    head that led before has written it, and books the rest from the log."""

    def __init__(
        self,
        place: sqlite.Place,
        settings: Settings,
        events: Store,
        clock: Clock,
        alarm: Callable[[str], None] = log.error,
    ) -> None:
        self._log = events
        self._alarm = alarm
        self._clock = clock
        self._settings = settings
        self._place = place
        self._store: LedgerStore | None = None
        self._lock = asyncio.Lock()
        self._rolled = 0
        self._rebook = False
        self._unsure = False  # nobody knows whether the last write was stored
        self._newest = 0  # the last event that was heard of
        self._spent = Spent()
        self.book = Book()
        self.seq = 0
        self.who: Who = nobody
        self.quotas: Callable[[], tuple[Quota, ...]] = tuple
        self._spent_tokens = SpentTokens()
        self.trouble = ""
        self.prices = read_prices(settings)
        try:
            try:
                self._open()
            except StoreDamaged as error:
                self._set_aside(error)
                self._open()
        except (StoreError, OSError) as error:
            self._give_up(error)

    def _set_aside(self, error: StoreDamaged) -> None:
        """What is still in the log is booked again; older sums are in the damaged file."""
        if not isinstance(self._place, Path):
            raise error
        if self._store is not None:
            self._store.close()
            self._store = None
        number, name = 1, self._place.name
        while (aside := self._place.with_name(f"{name}.damaged-{number}")).exists():
            number += 1
        sqlite.set_aside(self._place, aside.name)
        self._rebook = self._whole_log()
        again = "is booked again from the log" if self._rebook else "starts again from now"
        self._alarm(f"{error}: it is kept as {aside.name}, and the ledger {again}")

    def _open(self) -> None:
        self._store = LedgerStore(self._place)
        self._begin(self._store)

    def _begin(self, store: LedgerStore) -> None:
        found = store.load()
        state, last = self._log.load() if found is None else (None, 0)
        if found is not None and self._follows(found[1], store.mark(found[1])):
            self.book, self.seq = Book(found[0]), found[1]
            return
        if state is None:
            state, last = self._log.load()
        if self._rebook:
            return  # the first step books from the first event on
        # A ledger that is new, or does not match this log, begins with the present state.
        began = BookState()
        if found is not None:  # routers count on, whatever became of the log
            began = BookState(gaps=found[0].gaps, tokens=found[0].tokens)
        self.book, self.seq = Book(began), last
        for event in events_of(state, self._clock.now_ms()):
            self.book.take(event)
        # Whoever continues after a crash continues from here, not from the time of the crash.
        mark = self._log.mark(self.seq)
        store.put(self.book.drain(), msgspec.msgpack.encode(self.book.cluster), self.seq, mark)

    def _whole_log(self) -> bool:
        """Whether the log is complete and short enough to book all of it at once."""
        first, newest = self._log.events(0, 1), self._log.events(-1, 1)
        whole = bool(first) and first[0].seq == 1 and not self._log.unbroken_from
        return whole and newest[0].seq <= EVENTS_REBOOKED_MAX

    def _follows(self, seq: int, mark: int) -> bool:
        """Whether the log still has the events after this one, and this one itself: not another of
        its number, because it has lost events."""
        there = self._log.mark(seq) if mark else None
        if seq < self._log.unbroken_from or (there and there != mark):
            return False
        newest = self._log.events(-1, 1)
        if not newest or newest[0].seq < seq:
            return False
        following = self._log.events(seq, 1)
        return newest[0].seq == seq or (bool(following) and following[0].seq == seq + 1)

    # -- booking ---------------------------------------------------------------------------

    def stepped(self, report: Report, events: Sequence[Event], seq: int) -> None:
        """A step is stored: these are its events; the last is number `seq` of the log."""
        self._newest = seq
        if self._store is None or self._unsure:
            return
        try:
            self._catch_up(seq - len(events))
            now_ms = events[0].at_ms if events else self._clock.now_ms()
            # A look before the first step may have read them from the log already.
            self.book.stepped(report, events[len(events) - (seq - self.seq) :], now_ms)
            for load in report.services:
                hear_tokens(self.book.postings, load, self.who)
            self.seq = seq
        except StoreAway:  # only when it caught up: it begins again where it was written last
            self._unsure = True
        except Exception as error:
            log.exception("the ledger cannot book an event and stops")
            self._give_up(error)

    def sampled(self, node: str, sample: NodeSample) -> None:
        """At once, not with the next step: several may come before it."""
        if self._store is not None and not self._unsure and sample.gpus:
            hear_energy(self.book.postings, node, sample, self._clock.now_ms())

    def _catch_up(self, until: int) -> None:
        while self.seq < until:
            found = self._log.events(self.seq, min(EVENTS_AT_ONCE, until - self.seq))
            for recorded in found:
                self.book.take(recorded.event)
                self.seq = recorded.seq
            if not found:  # the rest of them cannot be read
                self.seq = until

    def _give_up(self, error: Exception) -> None:
        self._store = None
        self.trouble = f"the ledger cannot be kept: {error}"
        self._alarm(self.trouble)

    # -- writing ---------------------------------------------------------------------------

    async def run(self, policy: Callable[[], Policy], spent: Spend) -> None:
        """Write at intervals; if the policy sets budgets, pass `spent` what tenants have spent."""
        pause_s = FIRST_WRITE_S
        while True:
            await asyncio.sleep(pause_s)
            budgets = wants_spendings(policy()) or bool(self.quotas())
            pause_s = SPENT_S if budgets else WRITE_S
            if self._store is None:
                continue
            try:
                if budgets:
                    spent(await self.spendings(policy()))
                else:
                    await self.write()
            except StoreDamaged as error:
                self._give_up(StoreError(f"{error}; the next controller starts it again"))
            except StoreError as error:
                log.error("the ledger could not be written; it will be tried again: %s", error)

    async def write(self) -> dict[Place, int]:
        """Write everything that is certain to the file; returns what is still open."""
        async with self._lock:
            await self._ready()
            return await self._write()

    async def _ready(self) -> LedgerStore:
        """After a server was lost in the middle of a write, only the server knows what is stored:
        the book begins again there, as that of a head that takes over."""
        store = self._well()
        if not self._newest:  # before its first step: what is in the log was before now
            newest = self._log.events(-1, 1)
            if newest:
                self._newest = newest[0].seq
                self._catch_up(self._newest)
        if self._unsure:
            await asyncio.to_thread(self._begin, store)
            await asyncio.to_thread(self._catch_up, self._newest)
            self._catch_up(self._newest)  # what came meanwhile
            self._unsure = False
        return store

    async def _write(self) -> dict[Place, int]:
        store = self._well()
        book = self.book
        book.settle()
        entries, open_ = book.drain(), book.open()
        state, seq = msgspec.msgpack.encode(book.cluster), self.seq
        day = book.cluster.now_ms // HOUR_MS // HOURS_PER_DAY
        live = [job_id for job_id, job in book.cluster.jobs.items() if job.gpus]
        try:
            await asyncio.to_thread(lambda: store.put(entries, state, seq, self._log.mark(seq)))
        except StoreAway:
            self._unsure = True
            raise
        except BaseException:
            book.postings.give_back(entries)
            raise
        if day != self._rolled:
            # The entries are stored: an error in making days of hours must not book them again.
            try:
                await asyncio.to_thread(store.roll, day * HOURS_PER_DAY, live)
                self._rolled = day
            except StoreError as error:
                log.error("old hours could not be rolled up into days: %s", error)
        return open_

    def close(self) -> None:
        """What is not written now is booked again from the log."""
        store, self._store = self._store, None
        if store is not None:
            try:
                if self._unsure:
                    raise StoreError("what the ledger could not write is booked again from the log")
                self.book.settle()
                state = msgspec.msgpack.encode(self.book.cluster)
                store.put(self.book.drain(), state, self.seq, self._log.mark(self.seq))
            except StoreError as error:
                log.error("%s", error)
            store.close()

    # -- reading ---------------------------------------------------------------------------

    async def view(self, by: By, from_ms: int, to_ms: int, only: Only = EVERYBODY) -> LedgerView:
        """Whole hours; `to_ms` 0 is now. `only`: what these jobs used, which is then all of the
        capacity."""
        async with self._lock:
            store = await self._ready()
            now_ms = self._clock.now_ms()
            self.book.advance(now_ms)
            cluster = self.book.cluster
            to_ms = min(to_ms or now_ms, now_ms)
            since, until = max(0, from_ms) // HOUR_MS, -(-to_ms // HOUR_MS)
            gaps, began_ms = list(cluster.gaps), cluster.began_ms
            gpus = sum(node.gpus for node in cluster.nodes.values() if node.known)
            open_ = await self._write()
            tariff = await asyncio.to_thread(self._tariff, store, since, until)
            sums = await asyncio.to_thread(tariff.sums, store, by, since, until, only)
            capacity = await asyncio.to_thread(store.capacity, since, until)
            nap = await asyncio.to_thread(store.naps, since, until, only)
            draws = await asyncio.to_thread(store.draws, open_ if tariff.measured else ())
            sums += open_sums(store, tariff, self.book, open_, by, since, until, only, draws)
            keys_max = TIMES_MAX if by in (By.DAY, By.HOUR) else KEYS_MAX
            tokens = await self._tokens(store, tariff, open_, by, since, until, only, keys_max)
            owed = await self._owed(store, since, until, only)
        if only.given:
            capacity = sum(one.gpu_us for one in sums)
        notes = gap_notes(gaps, since * HOUR_MS, until * HOUR_MS)
        if not capacity:
            known = f"the ledger begins {moment(began_ms)}" if began_ms >= 0 else "it is empty"
            notes.append(
                f"nothing is booked in this range; {known}"
                if gpus
                else "no node has GPUs, so there is no GPU time to book"
            )
        found = view(
            tariff,
            sums,
            by=by,
            from_ms=since * HOUR_MS,
            to_ms=max(min(until * HOUR_MS, now_ms), since * HOUR_MS),
            began_ms=began_ms,
            capacity=capacity,
            gpus=gpus,
            keys_max=keys_max,
            notes=notes,
            nap=nap,
        )
        return structs.replace(found, tokens=tokens.rows, token_costs=tokens.services, owed=owed)

    async def _tokens(
        self,
        store: LedgerStore,
        tariff: Tariff,
        open_: dict[Place, int],
        by: By,
        since: int,
        until: int,
        only: Only,
        keys_max: int,
    ) -> TokenReport:
        if only.user is not None or only.job is not None:  # a key is not a user's or a job's
            return NO_TOKENS
        found = await asyncio.to_thread(store.tokens, by, since, until, only.tenant)
        if not found:
            return NO_TOKENS
        service = By.SERVICE
        sums = await asyncio.to_thread(tariff.sums, store, service, since, until, only)
        sums += open_sums(store, tariff, self.book, open_, service, since, until, only)
        return token_report(tariff, found, sums, by, keys_max, only.tenant)

    async def _owed(self, store: LedgerStore, since: int, until: int, only: Only) -> list[OwedRow]:
        """It is kept by tenant, not by user or job."""
        if not self.book.cluster.owes or only not in (EVERYBODY, Only(tenant=only.tenant)):
            return []
        found = await asyncio.to_thread(store.owed, since, until, only.tenant)
        return [
            OwedRow(**debt._asdict(), jobs=one.jobs, gpu_ms=one.gpu_ms, cost=one.money / PRICE_UNIT)
            for debt, one in found[:KEYS_MAX]
        ]

    async def cost(self, job_id: str) -> CostView:
        async with self._lock:
            store = await self._ready()
            self.book.advance(self._clock.now_ms())
            open_ = await self._write()
            forever, only = 1 << 40, Only(job=job_id)
            tariff = await asyncio.to_thread(self._tariff, store, 0, forever)
            sums = await asyncio.to_thread(tariff.sums, store, By.ACCOUNT, 0, forever, only)
            nap = await asyncio.to_thread(store.naps, 0, forever, only)
            mine = {place: amount for place, amount in open_.items() if place.job == job_id}
            draws = await asyncio.to_thread(store.draws, mine if tariff.measured else ())
            sums += open_sums(store, tariff, self.book, mine, By.ACCOUNT, 0, forever, draws=draws)
        return cost_view(tariff, job_id, sums, nap)

    async def costs(self, array: str) -> dict[str, tuple[float, float | None]]:
        """The GPU time in ms and the money of each element that has used any."""
        async with self._lock:
            store = await self._ready()
            self.book.advance(self._clock.now_ms())
            open_ = await self._write()
            forever, only = 1 << 40, Only(array=array)
            tariff = await asyncio.to_thread(self._tariff, store, 0, forever)
            sums = await asyncio.to_thread(tariff.sums, store, By.JOB, 0, forever, only)
            mine = {place: us for place, us in open_.items() if only.fits("", "", place.job)}
            sums += open_sums(store, tariff, self.book, mine, By.JOB, 0, forever)
        return costs_by_key(tariff, sums)

    def _tariff(self, store: LedgerStore, since: int, until: int) -> Tariff:
        return Tariff(self.prices, store.machines(), measured=store.measured(since, until))

    def _well(self) -> LedgerStore:
        if self._store is None:
            raise StoreError(self.trouble or "the ledger is closed")
        return self._store

    async def spendings(self, policy: Policy) -> tuple[Spending, ...]:
        async with self._lock:
            store = await self._ready()
            now_ms = self._clock.now_ms()
            self.book.advance(now_ms)
            open_ = await self._write()
            tariff = Tariff(self.prices, await asyncio.to_thread(store.machines))
            found: dict[BudgetPeriod, Iterable[Sum]] = {}
            for period in {one.budget_period: None for one in policy.tenants if one.has_budget}:
                rates = tariff.of_machine
                since, until = since_hour(period, now_ms), now_ms // HOUR_MS + 1
                sums = await asyncio.to_thread(self._spent.sums, store, rates, period, since, until)
                more = open_sums(store, tariff, self.book, open_, By.TENANT, since, until)
                found[period] = [*sums, *more]
            tokens: dict[BudgetPeriod, dict[tuple[str, str], int]] = {}
            quotas = self.quotas()
            for period in dict.fromkeys([*_token_periods(policy), *(one.period for one in quotas)]):
                read = partial(self._spent_tokens.sums, store, period, now_ms)
                tokens[period] = await asyncio.to_thread(read)
        per_tenant = {period: by_tenant(sums) for period, sums in tokens.items()}
        own = spendings(policy, tariff, found, per_tenant)
        return own + of_keys(quotas, tokens, now_ms)

    # -- prices ----------------------------------------------------------------------------

    def set_prices(self, prices: PriceList) -> None:
        self._settings.set(PRICES, msgspec.json.format(msgspec.json.encode(prices)) + b"\n")
        self.prices = prices


def _token_periods(policy: Policy) -> dict[BudgetPeriod, None]:
    return {one.budget_period: None for one in policy.tenants if one.budget_tokens}


def quotas_of(state: State) -> tuple[Quota, ...]:
    """Keys with so many tokens."""
    return tuple(
        Quota(key.id, key.tenant, key.tokens, BudgetPeriod(key.per.value))
        for key in state.identity.api_keys.values()
        if key.tokens
    )


def parties(state: State, service: str, caller: str) -> Parties:
    """Who pays for the tokens of a caller, and to whom."""
    known, identity = state.services.get(service), state.identity
    shown = identity.api_keys.get(caller) or identity.tokens.get(caller)
    owner = known.spec.replica.tenant if known is not None else ""
    return Parties(owner, shown.tenant if shown is not None else "")


# A running cluster's state as events, for a ledger that begins with it.


def events_of(state: State, now_ms: int) -> Iterator[Event]:
    """The present state, as if all of it happened now."""
    yield PolicyChanged(at_ms=now_ms, policy=state.policy)
    for tenant, level in state.accounts.budgets.items():
        if level is BudgetLevel.HELD:
            yield BudgetHeld(at_ms=now_ms, tenant=tenant)
    for node in state.order:
        yield NodeJoined(at_ms=now_ms, node=node.id, spec=node.spec, incarnation=node.incarnation)
        if node.health is not NodeHealth.JOINING:
            yield NodeReady(at_ms=now_ms, node=node.id)
        yield NodeIntended(at_ms=now_ms, node=node.id, intent=node.intent)
        yield NodeJudged(at_ms=now_ms, node=node.id, record=node.record)
    for job in state.jobs.values():
        yield JobSubmitted(at_ms=now_ms, job=job.id, spec=job.spec, key=job.key, awaits=job.awaits)
        yield from _attempt(job, now_ms)
        if job.id in state.reservations:
            nodes = tuple(state.order[index].id for index in state.reservations[job.id].nodes)
            yield JobReserved(at_ms=now_ms, job=job.id, start_ms=None, nodes=nodes, why="")
    for job_id, slices in state.claims.items():
        yield JobClaimed(at_ms=now_ms, job=job_id, slices=slices, why="")
    for service in state.services.values():
        for job_id in service.ready:
            name = service.spec.name
            yield ReplicaReady(at_ms=now_ms, service=name, job=job_id)
    for node in state.order:  # last, because no job is placed on a lost node
        if node.health is NodeHealth.SILENT:
            yield NodeSilent(at_ms=now_ms, node=node.id)
        elif node.health is NodeHealth.LOST:
            dead, life = node.dead, node.incarnation
            yield NodeLost(at_ms=now_ms, node=node.id, incarnation=life, dead=dead)


def _attempt(job: Job, now_ms: int) -> Iterator[Event]:
    if job.away is not None:
        name = job.away.neighbor
        yield JobHanded(at_ms=now_ms, job=job.id, attempt=job.attempt, neighbor=name, why="")
    if not job.members or not job.active:
        return
    slices = tuple(
        msgspec.structs.replace(member.slice, gpus=()) if member.over else member.slice
        for member in job.members
    )
    yield JobPlaced(at_ms=now_ms, job=job.id, attempt=job.attempt, slices=slices, master="", why="")
    for number, member in enumerate(job.members):
        if member.over:
            yield MemberExited(
                at_ms=now_ms,
                job=job.id,
                attempt=job.attempt,
                member=number,
                node=member.slice.node,
                code=member.code or 0,
            )
    if job.phase is not Phase.STARTING:
        yield JobRunning(at_ms=now_ms, job=job.id, attempt=job.attempt)
    yield from _nap(job, now_ms)
    if job.phase is Phase.STOPPING:
        cause = job.stop_cause or StopCause.CANCEL
        yield JobStopping(at_ms=now_ms, job=job.id, attempt=job.attempt, cause=cause, why="")


def _nap(job: Job, now_ms: int) -> Iterator[Event]:
    """One that sleeps has lent its GPUs, perhaps to others that come before it here."""
    lent = any(member.lent and not member.over for member in job.members)
    if not lent and not job.napping:
        return
    cause = job.sleep_cause or SleepCause.USER
    charges = tuple(member.host_mb for member in job.members)
    yield JobDozing(
        at_ms=now_ms, job=job.id, attempt=job.attempt, cause=cause, host_mb=charges, why=""
    )
    if lent:
        yield JobAsleep(
            at_ms=now_ms, job=job.id, attempt=job.attempt, took_ms=0, memory_mb=0, why=""
        )
