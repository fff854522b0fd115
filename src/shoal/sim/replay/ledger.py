"""The ledger of a replay: the live ledger's book and store, in memory, on virtual time."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

from shoal.core.state.events.log import Event
from shoal.ledger.accounts import DAY_MS, HOUR_MS
from shoal.ledger.book import Book
from shoal.ledger.report import (
    Spent,
    Tariff,
    open_sums,
    since_hour,
    spendings,
    view,
    wants_spendings,
)
from shoal.ledger.store import LedgerStore
from shoal.model.budget import Spending
from shoal.model.ledger import By, LedgerView, PriceList
from shoal.model.policy import Policy
from shoal.model.report import Report
from shoal.sim.replay.clusters import NEVER_MS

IN_MEMORY = Path(":memory:")
WRITE_STEPS = 2048  # between two writes of the book to the store
LONG_HOUR_MS = 28 * DAY_MS
SPENT_MS = 300_000  # between two looks at what tenants have spent


class ReplayLedger:
    """`began_ms` is the real time at which the replay's clock shows 0: months begin by it."""

    def __init__(self, prices: PriceList, began_ms: int, policy: Policy) -> None:
        self._prices = prices
        self._policy = policy
        self._offset_ms = began_ms // HOUR_MS * HOUR_MS
        # Nobody asks a replay about an hour, unless a tenant may spend so much in a month. Closing
        # every hour of years on every node would take longer than the jobs do.
        self._book = Book(hour_ms=HOUR_MS if wants_spendings(policy) else LONG_HOUR_MS)
        self._store = LedgerStore(IN_MEMORY)
        weakref.finalize(self, self._store.close)  # a replay may end anywhere
        self._spent = Spent()
        self._steps = 0
        self.next_ms = 0 if wants_spendings(policy) else NEVER_MS  # when spendings are due

    def stepped(self, report: Report, events: Sequence[Event], now_ms: int) -> None:
        self._advance(now_ms)
        self._book.stepped(report, events, now_ms)
        self._steps += 1
        if self._steps % WRITE_STEPS == 0:
            self._write()

    def _advance(self, now_ms: int) -> None:
        """In strides, because the book does not count a week in which no controller ran."""
        book = self._book
        while now_ms - book.cluster.now_ms > DAY_MS:
            book.advance(book.cluster.now_ms + DAY_MS)
        book.advance(now_ms)

    def _write(self) -> None:
        self._book.settle()
        self._store.put(self._book.drain(), b"", 0)

    def spendings(self, now_ms: int) -> tuple[Spending, ...]:
        """What each tenant has spent, if the policy sets budgets and it is time to look."""
        if now_ms < self.next_ms:
            return ()
        self.next_ms = now_ms + SPENT_MS
        self._advance(now_ms)
        self._write()
        tariff = Tariff(self._prices, self._store.machines())
        amounts = self._book.open()
        found = {}
        for period in {one.budget_period: None for one in self._policy.tenants if one.has_budget}:
            since = since_hour(period, self._offset_ms + now_ms) - self._offset_ms // HOUR_MS
            until = now_ms // HOUR_MS + 1
            sums = self._spent.sums(self._store, tariff.of_machine, period, since, until)
            more = open_sums(self._store, tariff, self._book, amounts, By.TENANT, since, until)
            found[period] = [*sums, *more]
        return spendings(self._policy, tariff, found)

    def view(self, now_ms: int) -> LedgerView:
        """Where all GPU time up to now went, and what it cost."""
        self._advance(now_ms)
        self._write()
        until = now_ms // HOUR_MS + 1
        tariff = Tariff(self._prices, self._store.machines())
        sums = self._store.sums(By.ACCOUNT, 0, until, tariff.of_machine)
        sums += open_sums(self._store, tariff, self._book, self._book.open(), By.ACCOUNT, 0, until)
        return view(
            tariff,
            sums,
            by=By.ACCOUNT,
            from_ms=0,
            to_ms=now_ms,
            began_ms=0,
            capacity=self._store.capacity(0, until),
            gpus=sum(node.gpus for node in self._book.cluster.nodes.values()),
            keys_max=1,
            notes=[],
            nap=self._store.naps(0, until),
        )
