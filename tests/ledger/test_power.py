"""Energy is what was measured where GPUs tell their power, and a stated model where they do not."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import msgspec
import pytest

from shoal.core.state.events.nodes import NodeJoined, NodeReady
from shoal.ledger.accounts import Account
from shoal.ledger.book import Book
from shoal.ledger.prices import Drawn, Rate, fitted, hear_power
from shoal.ledger.report import Tariff, account_sums
from shoal.ledger.store import LedgerStore
from shoal.model.ledger import By, Price, PriceList
from shoal.model.node import NodeSpec
from shoal.model.series import GpuSample, NodeSample

MODEL = Rate(None, (Fraction(100), Fraction(700)))


@pytest.mark.parametrize(
    ("covered", "watts"), [(1000, 400), (500, Fraction(400 + 250, 2)), (0, 250)]
)
def test_the_model_is_scaled_to_what_was_measured(covered: int, watts: Fraction) -> None:
    """By the model 250 W on average: three parts free, one part useful. Measured: 400 W."""
    accounts = {Account.FREE: 750, Account.USEFUL: 250}
    rate = fitted(MODEL, Drawn(400 * covered // 1000, covered, accounts))
    assert rate.watts is not None
    idle, busy = rate.watts
    assert (750 * idle + 250 * busy) / 1000 == watts


def test_without_a_model_only_what_was_measured_nearly_whole_is_told() -> None:
    unknown = Rate(None, None)
    assert fitted(unknown, Drawn(300, 1000, {Account.FREE: 1000})).watts == (Fraction(300),) * 2
    assert fitted(unknown, Drawn(150, 500, {Account.FREE: 1000})).watts is None


def test_samples_of_all_gpus_become_energy_in_the_report(tmp_path: Path) -> None:
    book = Book()
    spec = NodeSpec(id="n1", gpus=2, cpu_milli=1000, memory_mb=1000, gpu_model="X")
    book.take(NodeJoined(at_ms=0, node="n1", spec=spec, incarnation=1))
    book.take(NodeReady(at_ms=0, node="n1"))
    for at_ms in range(0, 3_600_000, 2_000):
        book.advance(at_ms)
        gpus = (GpuSample(power_w=100), GpuSample(power_w=300))
        hear_power(book.postings, "n1", NodeSample(at_ms=at_ms, gpus=gpus))
        hear_power(book.postings, "n1", NodeSample(at_ms=at_ms, gpus=gpus[:1]))  # a half
    book.advance(3_600_000 - 2_000)
    book.settle()
    store = LedgerStore(tmp_path / "ledger.db")
    store.put(book.drain(), msgspec.msgpack.encode(book.cluster), 2)
    prices = PriceList(gpus={"X": Price(idle_watts=10, busy_watts=20)}, pue=2)
    tariff = Tariff(prices, store.machines(), store.drawn(0, 10))
    sums = store.sums(By.ACCOUNT, 0, 10, tariff.of_machine)
    (free,) = account_sums(tariff, sums, store.capacity(0, 10))
    assert free.account == "free"
    assert free.energy_wh == pytest.approx(400 * 2 * (3598 / 3600))
    assert any("is measured" in note for note in tariff.notes())
    store.close()
