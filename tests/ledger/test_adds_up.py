"""Every GPU-millisecond is in exactly one account: over histories full of faults, restarts too."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from shoal.cli.screen.explanation import _cost, _gpu_time
from shoal.core.state.events.nodes import NodeJoined
from shoal.ledger.accounts import Account, Only
from shoal.ledger.book_state import Hardware, Owner
from shoal.ledger.postings import Addition, Nap
from shoal.ledger.report import Tariff, cost_view, rows
from shoal.ledger.store import LedgerStore
from shoal.model.ledger import By, PriceList
from tests.ledger.worlds import Books, by_node, capacity, kept

SEEDS = range(40)


@pytest.mark.parametrize("seed", SEEDS)
def test_accounts_add_up_to_the_capacity_of_every_node_and_hour(seed: int) -> None:
    with kept(seed) as (run, books):
        run.finish()
        end_ms = run.world.timeline.now_ms
    amounts = books.close(end_ms)
    expected = capacity(books.events, end_ms)
    assert by_node(amounts) == expected
    assert books.totals.capacity == expected
    assert all(amount > 0 for amount in amounts.values())
    jobs_accounts = {Account.USEFUL, Account.STARTUP, Account.RECOMPUTE, Account.PREEMPTED}
    assert all(bool(place.job) for place in amounts if place.account in jobs_accounts)


def test_the_histories_are_hard_enough_to_use_every_account() -> None:
    missing = set(Account) - {Account.CHECKPOINT}
    for seed in range(40, 120):
        if not missing:
            break
        with kept(seed) as (run, books):
            run.finish()
        missing -= {place.account for place in books.close(run.world.timeline.now_ms)}
    assert not missing


@pytest.mark.parametrize("seed", range(20))
def test_a_jobs_page_says_what_the_report_says(seed: int, tmp_path: Path) -> None:
    """`shoal explain` and `shoal report --by job`: the same accounts, to the GPU-microsecond."""
    with kept(seed) as (run, books):
        run.finish()
    amounts = books.close(run.world.timeline.now_ms)
    store = LedgerStore(tmp_path / "ledger.db")
    nodes = {e.node: Hardware("", 1) for e in books.events if isinstance(e, NodeJoined)}
    owners = {place.job: Owner("t", "u", "") for place in amounts if place.job}
    store.put([Addition(amounts=amounts, machines=nodes, owners=owners)], b"", 1)
    tariff = Tariff(PriceList(), store.machines())
    by_job = rows(tariff, store.sums(By.JOB, 0, 1 << 40, tariff.of_machine), By.JOB, 1 << 20)
    for job in owners:
        sums = store.sums(By.ACCOUNT, 0, 1 << 40, tariff.of_machine, Only(job=job))
        cost = cost_view(tariff, job, sums, Nap())
        reported = {row.account: row.gpu_us for row in by_job if row.key == job}
        assert {one.account: one.gpu_us for one in cost.accounts} == reported
        assert cost.gpu_us == sum(reported.values())
        shown = _cost(cost)
        assert shown[0].strip() == f"{_gpu_time(cost.gpu_us)} in total"
        titles = {one.title.lower() for one in cost.accounts}
        assert len(shown) == 1 or {line.partition(") ")[2] for line in shown[1:]} == titles


@pytest.mark.parametrize("seed", range(200, 215))
def test_a_ledger_killed_at_any_time_goes_on_as_if_nothing_had_happened(
    seed: int, tmp_path: Path
) -> None:
    """What is in memory is lost; the log and the file together give it back, and no more."""
    with kept(seed) as (run, books):
        run.finish()
    end_ms = run.world.timeline.now_ms
    whole, killed = Books(), Books()
    store = LedgerStore(tmp_path / "ledger.db")
    stored_seq, rng = 0, random.Random(seed)
    for seq, event in enumerate(books.events, 1):
        whole.stepped([event])
        killed.stepped([event])
        if rng.random() < 0.1:  # written, with the place in the log
            killed.book.settle()
            state = msgspec.msgpack.encode(killed.book.cluster)
            store.put(killed.book.drain(), state, seq)
            stored_seq = seq
        if rng.random() < 0.05 and stored_seq:  # killed
            store.close()
            store = LedgerStore(tmp_path / "ledger.db")
            found = store.load()
            assert found is not None
            assert found[1] == stored_seq
            killed = Books()
            killed.book.postings.cluster = found[0]
            for missed in books.events[stored_seq:seq]:
                killed.stepped([missed])
    killed.book.advance(end_ms)
    killed.book.settle()
    store.put(killed.book.drain(), msgspec.msgpack.encode(killed.book.cluster), len(books.events))
    amounts = whole.close(end_ms)
    rates = Tariff(PriceList(), store.machines()).of_machine
    for by, of_place in ((By.NODE, "node"), (By.JOB, "job")):
        told: Counter[tuple[str, Account]] = Counter()
        for one in store.sums(by, 0, 1 << 40, rates):
            told[str(one.key), one.account] += one.gpu_us
        for place, amount in killed.book.open().items():
            told[getattr(place, of_place), place.account] += amount
        expected: Counter[tuple[str, Account]] = Counter()
        for place, amount in amounts.items():
            expected[getattr(place, of_place), place.account] += amount
        assert told == expected
    assert store.capacity(0, 1 << 40) == sum(capacity(books.events, end_ms).values())
    store.close()
