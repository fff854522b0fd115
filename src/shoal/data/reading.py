"""A volume's samples, read ahead by as much as the reader was found to need."""

from __future__ import annotations

import hashlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from shoal.data.arrival import Source, find
from shoal.data.order import Mark, Order
from shoal.data.shards import DataError, Files, Place

BUFFER = 10_000
MEMORY = 256 << 20
PART = 16  # samples that a thread reads at a time, if nobody has made batches
DEPTH_MIN = 2
DEPTH_MAX = 64
READERS_MAX = 16
READY_BEFORE_LESS = 32  # parts in a row that nobody waited for

Decode = Callable[[dict[str, Any]], Any]


def open(  # noqa: A001
    place: str,
    *,
    match: str = "",
    shuffle: bool = True,
    buffer: int = BUFFER,
    seed: int = 0,
    decode: Decode | None = None,
    memory: int = MEMORY,
    rank: int | None = None,
    world: int | None = None,
) -> Data:
    """The samples of a volume, by its name, or of a folder or URL.

    `match`: shards whose path in the volume is like this, such as "train/*". `buffer`: samples
    that are shuffled together, after the order of the shards. `decode`: makes a sample out of its
    fields. `memory`: bytes that are read ahead at most. `rank` and `world`: of a loop without
    `shoal.train`; default: those in the environment.
    """
    if buffer < 1 or memory < 1:
        raise DataError(f"buffer={buffer}, memory={memory}: both must be at least 1")
    rank = int(os.environ.get("RANK") or 0) if rank is None else rank
    world = int(os.environ.get("WORLD_SIZE") or 1) if world is None else world
    if not 0 <= rank < world:
        raise DataError(f"rank={rank} is not one of {world} members")
    torch = sys.modules.get("torch")
    if torch is not None:  # a DataLoader takes it for what it is, without torch being imported
        torch.utils.data.IterableDataset.register(Data)
    return Data(find(place, match), shuffle, buffer, seed, Reader(decode, memory), rank, world)


class Data:
    """Made by `open`. Iterating over it is an epoch: this member's part of the samples."""

    def __init__(
        self,
        source: Source,
        shuffle: bool,
        buffer: int,
        seed: int,
        reader: Reader,
        rank: int,
        world: int,
    ) -> None:
        self._source, self._reader = source, reader
        self._shuffle, self._buffer, self._seed = shuffle, buffer, seed
        self._rank, self._world = rank, world
        self.epoch = 0  # the next one, or the current one
        self.position = 0  # samples of it that were used, over all members
        self._mark = Mark(0, 0, 0, 0)

    def __iter__(self) -> Iterator[Any]:
        rank, world = self._rank, self._world
        torch = sys.modules.get("torch")
        worker = torch.utils.data.get_worker_info() if torch is not None else None
        if worker is not None:
            rank, world = rank * worker.num_workers + worker.id, world * worker.num_workers
        mark = self._mark if self._mark.epoch == self.epoch else Mark(self.epoch, 0, 0, 0)
        order = Order(self._source, self._seed_of(self._seed), self._buffer, mark, self.epoch + 1)
        try:
            for part in self._reader.ahead(_strides(order, self.position, rank, world)):
                for sample in part:
                    self.position += world
                    yield sample
                    self._mark = order.mark(self.position)
        finally:
            order.close()
        self.epoch, self.position = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Before each epoch of a loader with workers: they advance copies of this only."""
        self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """The same on every member, if all have used as many samples. It can be continued with
        another number of members."""
        return {"position": self.position, "epoch": self.epoch, **self._saved(self._mark)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mark = self._loaded(state)
        self.position, self.epoch = state["position"], state["epoch"]

    # -- for `shoal.train` -----------------------------------------------------------------

    def follow(
        self, seed: int, mark: dict[str, Any] | None, position: int, epoch: int, end: int | None
    ) -> Followed:
        """The run's order from a position on, until the epoch `end`."""
        start = self._loaded(mark) if mark else Mark(epoch, 0, 0, position)
        if start.epoch < epoch:
            start = Mark(epoch, 0, 0, position)
        order = Order(self._source, self._seed_of(seed), self._buffer, start, end)
        return Followed(order, self._reader, self._saved)

    def _seed_of(self, seed: int) -> int | None:
        return seed if self._shuffle else None

    def _saved(self, mark: Mark) -> dict[str, Any]:
        return {"mark": list(mark), "shards": self._identity()}

    def _loaded(self, state: dict[str, Any]) -> Mark:
        if state["shards"] != self._identity():
            raise DataError(
                f"{self._source.label} has other shards, or another buffer, shuffle or seed, than "
                "when the checkpoint was made: the order of the samples would change"
            )
        return Mark(*state["mark"])

    def _identity(self) -> str:
        text = f"{self._source.identity} {self._buffer} {self._shuffle} {self._seed}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class Followed:
    """What `shoal.train` needs of a stream of samples."""

    def __init__(
        self, order: Order, reader: Reader, saved: Callable[[Mark], dict[str, Any]]
    ) -> None:
        self.reader = reader
        self.available, self.places = order.available, order.places
        self.leave, self.close = order.leave, order.close
        self._order, self._saved = order, saved

    def mark(self, position: int) -> dict[str, Any]:
        return self._saved(self._order.mark(position))

    @property
    def identity(self) -> str:
        return str(self.mark(0)["shards"])


class Reader:
    """Reads places: one by one in the workers of a DataLoader, or ahead, in threads."""

    def __init__(self, decode: Decode | None, memory: int) -> None:
        self._decode, self._memory = decode, memory
        self._files, self._pid = Files(), os.getpid()
        self.depth = DEPTH_MIN  # parts that are read ahead
        self.waits = 0  # how often a part was not there in time

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None, "_pid": 0}

    def __getitem__(self, place: Place) -> Any:
        if self._pid != os.getpid():  # a fork: a thread of its parent may have held a lock
            self._files, self._pid = Files(), os.getpid()
        sample = self._files.read(place)
        return sample if self._decode is None else self._decode(sample)

    def ahead(self, parts: Iterable[list[Place]]) -> Iterator[list[Any]]:
        """Each part's samples, in order. More parts are read at the same time when the consumer
        had to wait, and fewer when it did not for a while."""
        coming: deque[tuple[Future[list[Any]], int]] = deque()
        held, ready, source = 0, 0, iter(parts)
        pool = ThreadPoolExecutor(READERS_MAX, "shoal-read")
        try:
            while True:
                while len(coming) < self.depth and (held < self._memory or not coming):
                    part = next(source, None)
                    if part is None:
                        break
                    size = sum(place.size for place in part)
                    held += size
                    coming.append((pool.submit(self._read, part), size))
                if not coming:
                    return
                future, size = coming.popleft()
                ready = ready + 1 if future.done() else 0
                if not ready:
                    self.waits += 1
                    self.depth = min(DEPTH_MAX, self.depth * 2)
                elif ready % READY_BEFORE_LESS == 0:
                    self.depth = max(DEPTH_MIN, self.depth - 1)
                samples = future.result()
                held -= size
                yield samples
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, part: list[Place]) -> list[Any]:
        return [self[place] for place in part]


def _strides(order: Order, position: int, rank: int, world: int) -> Iterator[list[Place]]:
    """This member's samples: every one of `world`, from the position on."""
    while count := order.available(position, PART * world):
        part = order.places(position, count)[rank::world]
        if part:
            yield part
        position += count
        order.leave(position)
