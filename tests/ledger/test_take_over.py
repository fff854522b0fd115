"""The ledger of several heads is exact: whoever is stopped, deposed or cut off, and whenever."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from harness.postgres import Postgres

from shoal.control.store.events import EventStore
from shoal.core.state.events.log import Event
from shoal.database.base import Deposed, StoreAway
from shoal.database.postgres import PostgresCursor, PostgresDatabase
from shoal.database.settings import TableSettings
from shoal.ledger.live import LiveLedger
from shoal.model.ledger import By, LedgerView
from shoal.model.report import Report
from tests.database.two_heads import Cluster
from tests.ledger.worlds import Books, capacity, kept


class Torn(PostgresDatabase):
    """The link to the server breaks at the next commit: before it is stored, or after."""

    torn = ""

    @contextmanager
    def transaction(self) -> Iterator[PostgresCursor]:
        torn, self.torn = self.torn, ""
        with super().transaction() as cursor:
            yield cursor
            if torn == "before":
                raise StoreAway("the server is gone")
        if torn == "after":
            raise StoreAway("the server is gone")


class Clock:
    ms = 0

    def now_ms(self) -> int:
        return self.ms


class Head:
    """It leads from now on."""

    def __init__(self, cluster: Cluster, name: str, clock: Clock) -> None:
        database, lease = cluster.head(name)
        self.log = EventStore(database)
        self.books = Torn(cluster.url, lease)
        cluster.opened.append(self.books)
        TableSettings.prepare(self.books)
        self.ledger = LiveLedger(self.books, TableSettings(self.books), self.log, clock)

    def happens(self, event: Event) -> None:
        self.ledger.stepped(Report(), [event], self.log.commit([event], []))


@pytest.fixture
def cluster(postgres_server: Postgres) -> Iterator[Cluster]:
    made = Cluster(postgres_server)
    yield made
    made.close()


async def story(cluster: Cluster, events: Sequence[Event], end_ms: int, rng: random.Random) -> None:
    clock, seen = Clock(), Counter[str]()
    heads = [Head(cluster, "h0", clock)]
    for event in events:
        clock.ms = event.at_ms
        heads[-1].happens(event)
        chance = rng.random()
        if chance < 0.1:
            await heads[-1].ledger.write()
        elif chance < 0.15:
            heads[-1].books.torn = rng.choice(("before", "after"))
            with pytest.raises(StoreAway):
                await heads[-1].ledger.write()
            seen["torn"] += 1
        elif chance < 0.2:  # the old one was stopped, and continues when another leads
            heads.append(Head(cluster, f"h{len(heads)}", clock))
            old = rng.choice(heads[:-1]).ledger
            with pytest.raises(Deposed):
                await old.write()
            with pytest.raises(Deposed):
                await old.view(By.NODE, 0, 0)
            seen["taken over"] += 1
    assert min(seen.values()) > 2, seen
    clock.ms = end_ms
    check(await heads[-1].ledger.view(By.NODE, 0, 0), events, end_ms)
    for head in heads:
        head.ledger.close()


def check(view: LedgerView, events: Sequence[Event], end_ms: int) -> None:
    expected = capacity(events, end_ms)
    assert view.capacity_gpu_us == sum(expected.values()) > 0
    assert sum(row.gpu_us for row in view.rows) == view.capacity_gpu_us
    whole = Books()  # of one head that nothing ever happened to
    for event in events:
        whole.stepped([event])
    by_account: Counter[str] = Counter()
    for place, amount in whole.close(end_ms).items():
        by_account[place.account.value] += amount
    found: Counter[str] = Counter()
    for row in view.rows:
        found[row.account] += row.gpu_us
    assert found == by_account


def test_the_sums_are_the_capacity_over_take_overs_and_commits_of_unknown_fate(
    cluster: Cluster,
) -> None:
    with kept(11) as (run, books):
        run.finish()
    asyncio.run(story(cluster, books.events, run.world.timeline.now_ms, random.Random(11)))
