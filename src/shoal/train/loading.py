"""Makes the user's loader follow the run's order of samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shoal.train import shuffle as order
from shoal.train.errors import TrainError
from shoal.train.shuffle import Stretch


def is_ordered(loader: object) -> bool:
    """Whether it is a DataLoader over numbered samples; any other loader keeps its own order."""
    from torch.utils.data import DataLoader, IterableDataset

    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def stretch_of(loader: Any, start: int, epoch: int, epochs: int) -> Stretch:
    """The part of the run that a loader covers. Its batch size is for all members together."""
    if loader.batch_size is None:
        raise TrainError(
            "the loader has no batch_size: make it with DataLoader(dataset, batch_size=B), B being "
            "the samples of a step over all members"
        )
    size = len(loader.dataset)
    if size == 0:
        raise TrainError("the loader's data set has no samples")
    return Stretch(start, epoch, epochs, size, loader.batch_size, loader.drop_last)


def check_parts(stretch: Stretch, world: int) -> None:
    """With fewer samples than members, some would have no work in any step."""
    if stretch.batch < world:
        raise TrainError(
            f"a batch of {stretch.batch} samples cannot be divided among {world} members: use a "
            f"batch_size of at least {world}, or at most {stretch.batch} members"
        )


def in_order(
    loader: Any, stretch: Stretch, position: int, world: int, rank: int, seed: int
) -> Iterator[Any]:
    """The same loader, with our choice of samples for this member."""
    from torch.utils.data import DataLoader

    chosen = order.batches(stretch, position, world, rank, seed if _shuffles(loader) else None)
    again = DataLoader(
        loader.dataset,
        batch_sampler=Batches(chosen),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=False,  # one pass covers the whole run
    )
    return iter(again)


class Batches:
    """A batch sampler for DataLoader: iterable once."""

    def __init__(self, chosen: Iterable[list[int]]) -> None:
        self._chosen = chosen

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._chosen)


def _shuffles(loader: Any) -> bool:
    from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

    sampler = loader.sampler
    if isinstance(sampler, SequentialSampler):
        return False
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    if isinstance(sampler, RandomSampler) and not sampler.replacement:
        return True
    raise TrainError(
        f"the loader's sampler is a {type(sampler).__name__}: ctx.steps chooses the samples "
        "itself, so use DataLoader(dataset, batch_size=B, shuffle=True or False)"
    )
