"""Every sample of every epoch is used exactly once, whoever dies and however many go on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal.data
from shoal.train import context
from shoal.train.shuffle import Stretch, batches, part, permute, weight
from tests.needs import need
from tests.reading.shards import write_volume

need("torch")


def count(size: int) -> Any:
    import torch

    return torch.arange(size)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 50))
def test_a_shuffled_epoch_has_every_sample_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(permute(count(size), size, seed, epoch).tolist()) == list(range(size))


def test_epochs_and_seeds_are_shuffled_differently_and_the_order_never_changes() -> None:
    orders = {
        tuple(permute(count(50), 50, seed, epoch).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25
    # Checkpoints of earlier versions rely on it.
    assert permute(count(10), 10, 0, 0).tolist() == [0, 5, 6, 7, 4, 1, 3, 8, 9, 2]


def test_neighbors_in_the_data_are_not_neighbors_in_the_order() -> None:
    import torch

    order = permute(count(100_000), 100_000, 1, 0).double()
    assert abs(torch.corrcoef(torch.stack([order[1:], order[:-1]]))[0, 1].item()) < 0.02
    place = torch.arange(100_000).double()
    assert abs(torch.corrcoef(torch.stack([order, place]))[0, 1].item()) < 0.02


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(1, 40))
def test_the_parts_of_a_batch_make_the_batch(samples: int, world: int) -> None:
    parts = [part(samples, world, rank) for rank in range(world)]
    covered = [place for offset, size in parts for place in range(offset, offset + size)]
    assert covered == list(range(samples))
    assert max(size for _, size in parts) - min(size for _, size in parts) <= 1
    assert sum(weight(samples, world, rank) for rank in range(world)) == pytest.approx(world)


@st.composite
def disturbed_runs(draw: st.DrawFn) -> tuple[Stretch, list[tuple[int, int, int]]]:
    """A stretch, and attempts: members, steps done, and how many of the last were not saved."""
    stretch = Stretch(
        start=0,
        epoch=draw(st.integers(0, 3)),
        epochs=draw(st.integers(1, 4)),
        size=draw(st.integers(1, 60)),
        batch=draw(st.integers(8, 20)),
    )
    attempt = st.tuples(st.integers(1, 8), st.integers(0, 6), st.integers(0, 6))
    return stretch, draw(st.lists(attempt, max_size=8))


@settings(max_examples=40, deadline=None)
@given(disturbed_runs(), st.one_of(st.none(), st.integers(0, 9)))
def test_killed_and_resized_at_random_a_run_uses_each_sample_once_per_epoch(
    run: tuple[Stretch, list[tuple[int, int, int]]], seed: int | None
) -> None:
    stretch, attempts = run
    used: list[int] = []  # by the state that survives: what was not saved is forgotten
    position = 0
    for world, steps, lost in [*attempts, (3, 10_000, 0)]:
        members = [batches(stretch, position, world, rank, seed) for rank in range(world)]
        saved = used, position
        for number in range(steps):
            samples = min(stretch.batch, stretch.end - position)
            if samples <= 0:
                break
            for rank, member in enumerate(members):
                batch = next(member)
                used = used + batch if part(samples, world, rank)[1] else used
            position += samples
            if number < steps - lost:
                saved = used, position
        used, position = saved
    for epoch in range(stretch.epochs):
        once = used[epoch * stretch.size : (epoch + 1) * stretch.size]
        assert Counter(once) == Counter(range(stretch.size))
    assert len(used) == stretch.epochs * stretch.size


def test_a_run_can_go_on_in_the_middle_of_a_very_large_data_set() -> None:
    stretch = Stretch(0, 0, 3, 10**12, 64)
    middle = batches(stretch, 2 * 10**12 + 320, 4, 1, 7)
    assert all(0 <= sample < 10**12 for sample in next(middle))


# -- how often to save ---------------------------------------------------------------------


def test_the_interval_is_youngs_where_saves_are_cheap() -> None:
    assert context.interval_s(1.0, 2.0, 20_000.0) == pytest.approx(200.0, rel=0.01)


@settings(deadline=None)
@given(st.floats(1e-4, 600), st.floats(0, 600), st.floats(60, 1e7))
def test_the_interval_loses_no_more_time_than_its_neighbors(
    blocked: float, written: float, between: float
) -> None:
    chosen = context.interval_s(blocked, 0.0, between)

    def lost(seconds: float) -> float:
        return blocked / seconds + (seconds + blocked) / (2 * between)

    if blocked < between / 10:  # else nothing helps, and the formula is only a bound
        assert lost(chosen) <= min(lost(chosen * 1.3), lost(chosen / 1.3)) * 1.01
    assert context.interval_s(blocked, written, between) >= written


def test_failures_that_were_seen_make_saves_more_frequent() -> None:
    calm = context.mtbf_s(4, 3600.0, 0, None)
    assert context.mtbf_s(4, 3600.0, 9, None) < calm / 5
    assert context.mtbf_s(400, 3600.0, 0, None) < calm / 50
    assert context.mtbf_s(4, 3600.0, 9, 120.0) == 120.0


def test_one_odd_measurement_does_not_put_off_the_next_save_for_long() -> None:
    assert context.interval_steps(1e9, 0.001, before=5) == 50
    assert context.interval_steps(0.0, 1.0, before=5) == 1


def test_workers_of_a_loader_share_the_samples_of_a_volume(tmp_path: Path) -> None:
    from torch.utils.data import DataLoader, IterableDataset

    data = shoal.data.open(
        str(write_volume(tmp_path, 4, 9, 1, 0, 23)), buffer=5, decode=lambda one: one["number"]
    )
    assert isinstance(data, IterableDataset)
    loader = DataLoader(data, batch_size=4, num_workers=2)
    epochs = []
    for epoch in range(2):
        data.set_epoch(epoch)
        epochs.append([int(one) for batch in loader for one in batch])
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(37))
    assert epochs[0] != epochs[1]
