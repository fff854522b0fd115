"""Energy is what was measured, of whoever held the GPU then; a stated model where it was not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.state.events.nodes import NodeJoined, NodeReady
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobFinished, JobPlaced, JobRunning, MemberExited
from shoal.ledger.accounts import HOUR_MS
from shoal.ledger.book import Book
from shoal.ledger.energy import APART_MS_MAX, LEFT_MAX, hear_energy
from shoal.ledger.report import Tariff, account_sums, rows
from shoal.ledger.store import LedgerStore
from shoal.model.job import JobSpec, Outcome
from shoal.model.ledger import By, Price, PriceList
from shoal.model.node import NodeSpec
from shoal.model.resources import Slice
from shoal.model.series import EnergyReading, GpuSample, NodeSample


def opened(gpus: int = 1) -> Book:
    book = Book()
    spec = NodeSpec(id="n1", gpus=gpus, cpu_milli=1000, memory_mb=1000, gpu_model="X")
    book.take(NodeJoined(at_ms=0, node="n1", spec=spec, incarnation=1))
    book.take(NodeReady(at_ms=0, node="n1"))
    return book


def starts(book: Book, job: str, at_ms: int, gpus: Iterable[int] = (0,), milli: int = 1000) -> None:
    held = tuple(gpus)
    spec = JobSpec(command=("x",), gpus=len(held), tenant="red", user=job)
    slice_ = Slice(node="n1", cpu_milli=1, memory_mb=1, gpus=held, gpu_milli=milli)
    book.take(JobSubmitted(at_ms=at_ms, job=job, spec=spec))
    book.take(JobPlaced(at_ms=at_ms, job=job, attempt=1, slices=(slice_,), master="", why=""))
    book.take(JobRunning(at_ms=at_ms, job=job, attempt=1))


def ends(book: Book, job: str, at_ms: int) -> None:
    book.take(MemberExited(at_ms=at_ms, job=job, attempt=1, member=0, node="n1", code=0))
    book.take(
        JobFinished(at_ms=at_ms, job=job, attempt=1, outcome=Outcome.SUCCEEDED, why="", code=0)
    )


def reads(book: Book, at_ms: int, *joules: float, age_ms: int = 0) -> None:
    book.advance(at_ms)
    mj = tuple(round(1000 * one) for one in joules)
    sample = NodeSample(at_ms=at_ms, energy=(EnergyReading(age_ms, mj),))
    hear_energy(book.postings, "n1", sample, at_ms)


def joules(book: Book) -> dict[str, float]:
    found: dict[str, float] = {}
    for (_, _, job), (mj, _) in book.postings.adds.energy.items():
        found[job] = found.get(job, 0) + mj / 1000
    return found


def energies(book: Book, path: Path, by: By) -> dict[str, float | None]:
    """In joules, as the report tells them."""
    book.settle()
    store = LedgerStore(path / "ledger.db")
    store.put(book.drain(), msgspec.msgpack.encode(book.cluster), 2)
    prices = PriceList(gpus={"X": Price(idle_watts=100, busy_watts=700)})
    tariff = Tariff(prices, store.machines(), measured=store.measured(0, 1 << 40))
    found: dict[str, float | None] = {}
    for row in rows(tariff, tariff.sums(store, by, 0, 1 << 40), by, 100):
        more = row.energy_wh
        found[row.key] = None if more is None else (found.get(row.key) or 0) + more * 3600
    store.close()
    return found


def test_a_hungry_job_and_a_modest_one_pay_what_each_of_them_drew(tmp_path: Path) -> None:
    """618 W and 120 W, one after the other, with a reading where the one gives way to the other."""
    book = opened()
    reads(book, 0, 0)
    starts(book, "j1", 0)
    reads(book, 10_000, 6180)
    ends(book, "j1", 10_000)
    starts(book, "j2", 10_000)
    reads(book, 40_000, 6180 + 3600)
    ends(book, "j2", 40_000)
    reads(book, 50_000, 6180 + 3600 + 750)
    told = energies(book, tmp_path, By.JOB)
    assert told == {"j1": pytest.approx(6180), "j2": pytest.approx(3600), "": pytest.approx(750)}


def test_a_reading_that_arrives_late_counts_for_the_time_at_which_it_was_made() -> None:
    book = opened()
    reads(book, 0, 0)
    starts(book, "j1", 0)
    ends(book, "j1", 10_000)
    starts(book, "j2", 10_000)
    reads(book, 11_000, 7000, age_ms=1_000)  # at the moment when j1 ended
    reads(book, 20_000, 8000)
    assert joules(book) == {"j1": 7000, "j2": 1000, "": 0}


def test_holders_divide_a_gpu_by_their_parts_and_free_gpus_draw_for_nobody() -> None:
    book = opened(gpus=2)
    reads(book, 0, 0, 0)
    starts(book, "j1", 0, milli=250)
    starts(book, "j2", 0, milli=500)
    reads(book, 10_000, 3000, 700)
    assert joules(book) == {"j1": 1000, "j2": 2000, "": 700}


def test_without_counters_the_power_stands_for_the_time_since_the_last_sample() -> None:
    book = opened(gpus=2)
    starts(book, "j1", 0, gpus=(0, 1))
    for at_ms in (0, 2_000, 4_000, 4_000 + APART_MS_MAX + 1):  # the last is too far away
        book.advance(at_ms)
        gpus = (GpuSample(power_w=100), GpuSample(power_w=300))
        hear_energy(book.postings, "n1", NodeSample(at_ms=at_ms, gpus=gpus), at_ms)
        half = NodeSample(at_ms=at_ms, gpus=gpus[:1])
        hear_energy(book.postings, "n1", half, at_ms)
    assert joules(book) == {"j1": 1600, "": 0}


@pytest.mark.parametrize("second", [-1.0, 1e9])
def test_a_counter_that_begins_anew_or_is_impossible_is_not_believed(second: float) -> None:
    book = opened()
    reads(book, 0, 5000)
    reads(book, 2_000, 5000 + second)
    assert joules(book) == {}
    reads(book, 4_000, 5000 + second + 200)
    assert joules(book) == {"": 200}


def test_a_driver_that_stops_reporting_costs_bounded_memory() -> None:
    book = opened()
    reads(book, 0, 0)
    for number in range(1, LEFT_MAX + 10):
        starts(book, f"j{number}", number)
        ends(book, f"j{number}", number)
    assert len(book.cluster.nodes["n1"].left) <= LEFT_MAX


def test_time_that_no_reading_covers_is_told_by_the_model(tmp_path: Path) -> None:
    book = opened()
    starts(book, "j1", 0)
    ends(book, "j1", 36_000)
    assert energies(book, tmp_path, By.JOB) == {"j1": pytest.approx(36 * 700)}


def test_a_model_is_not_needed_where_all_is_measured(tmp_path: Path) -> None:
    book = opened()
    reads(book, 0, 0)
    reads(book, 10_000, 500)
    book.settle()
    store = LedgerStore(tmp_path / "ledger.db")
    store.put(book.drain(), msgspec.msgpack.encode(book.cluster), 2)
    tariff = Tariff(PriceList(pue=2), store.machines(), measured=True)
    (free,) = account_sums(tariff, tariff.sums(store, By.ACCOUNT, 0, 1), store.capacity(0, 1))
    assert free.energy_wh == pytest.approx(2 * 500 / 3600)
    assert not any("no power is known" in note for note in tariff.notes())
    store.close()


@given(st.lists(st.tuples(st.integers(1, 3 * HOUR_MS // 4), st.sampled_from("abr")), max_size=12))
def test_nothing_that_was_measured_is_lost_or_counted_twice(steps: list[tuple[int, str]]) -> None:
    """Jobs come and go at any time, over ends of hours; each reading is 1 J per second more."""
    book, now_ms, running = opened(), 0, dict.fromkeys("ab", 0)
    reads(book, 0, 0)
    read_ms = 0
    for number, (ms, what) in enumerate(steps):
        now_ms += ms
        book.advance(now_ms)
        if what == "r":
            if now_ms - read_ms <= 600_000:
                before = sum(joules(book).values())
                reads(book, now_ms, now_ms / 1000)
                assert sum(joules(book).values()) - before == pytest.approx(
                    (now_ms - read_ms) / 1000
                )
            else:
                reads(book, now_ms, now_ms / 1000)
            read_ms = now_ms
        elif running[what]:
            ends(book, f"{what}{running[what]}", now_ms)
            running[what] = 0
        else:
            running[what] = number + 1
            starts(book, f"{what}{number + 1}", now_ms, milli=500)
    covered: dict[int, int] = {}
    for (hour, _, _), (_, gpu_us) in book.postings.adds.energy.items():
        covered[hour] = covered.get(hour, 0) + gpu_us
    assert all(gpu_us <= HOUR_MS * 1000 for gpu_us in covered.values())
