"""The order in which a run reads the samples of its shards: it depends on the seed alone.

An epoch shuffles the shards, and cuts them into windows of at least `buffer` samples, which are
shuffled each. So a position, counted in samples over all members, means the same for every number
of them, and nothing has to be known of shards that come later: neither how many samples they hold
nor their content. A mark is where a window begins; it and a position are all that a run saves.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from shoal.data.arrival import Source
from shoal.data.shards import PARQUET_BYTES, DataError, Index, Place, index

INDEXED_AHEAD = 2  # shards whose samples are counted before their turn


class Mark(NamedTuple):
    """The window that begins with this group of this shard, in the epoch's order."""

    epoch: int
    shard: int
    group: int
    at: int  # samples of the run before it


class Window(NamedTuple):
    mark: Mark
    places: list[Place]

    @property
    def end(self) -> int:
        return self.mark.at + len(self.places)


class Order:
    """From a mark to the end of the last epoch. `seed` None: as the shards are."""

    def __init__(
        self, source: Source, seed: int | None, buffer: int, mark: Mark, end_epoch: int | None
    ) -> None:
        self._source = source
        self._seed, self._buffer, self._end_epoch = seed, buffer, end_epoch
        self._pool: ThreadPoolExecutor | None = None
        self._indexes: dict[str, Future[Index]] = {}
        self._made = self._make(mark)
        self._windows: deque[Window] = deque()
        self._end = mark.at  # of the windows so far
        self._marks: deque[Mark] = deque([mark])

    def available(self, position: int, count: int) -> int:
        """How many of the next `count` samples there are: fewer only at the end."""
        while self._end < position + count:
            window = next(self._made, None)
            if window is None:
                break
            self._windows.append(window)
            self._marks.append(window.mark)
            self._end = window.end
        return max(0, min(count, self._end - position))

    def places(self, first: int, count: int) -> list[Place]:
        """Of samples that are available."""
        found: list[Place] = []
        for window in self._windows:
            start = max(0, first - window.mark.at)
            found += window.places[start : max(0, first + count - window.mark.at)]
        return found

    def leave(self, position: int) -> None:
        """Nothing before it is asked for again."""
        while self._windows and self._windows[0].end <= position:
            self._windows.popleft()

    def mark(self, position: int) -> Mark:
        """Where to continue a run that has used the samples before this position."""
        while len(self._marks) > 1 and self._marks[1].at <= position:
            self._marks.popleft()
        return self._marks[0]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    # -- windows ---------------------------------------------------------------------------

    def _make(self, mark: Mark) -> Iterator[Window]:
        epoch, shard, group, at = mark
        while self._end_epoch is None or epoch < self._end_epoch:
            began = at
            for window in self._of_epoch(Mark(epoch, shard, group, at)):
                at = window.end
                yield window
            if at == began and not shard and not group:
                raise DataError(f"{self._source.label} has no samples in its shards")
            epoch, shard, group = epoch + 1, 0, 0

    def _of_epoch(self, mark: Mark) -> Iterator[Window]:
        names = self._shuffled(self._source.names, mark.epoch)
        chosen: list[tuple[Index, range]] = []
        heavy, group = 0, mark.group
        for number in range(mark.shard, len(names)):
            found = self._index(names, number)
            groups = self._shuffled(range(len(found.groups)), mark.epoch, names[number])
            for turn in range(group, len(groups)):
                chosen.append((found, found.groups[groups[turn]]))
                heavy += found.heavy[groups[turn]]
                if heavy >= PARQUET_BYTES or sum(len(of) for _, of in chosen) >= self._buffer:
                    window = self._window(mark, chosen)
                    yield window
                    mark = Mark(mark.epoch, number, turn + 1, window.end)
                    chosen, heavy = [], 0
            group = 0
        if chosen:
            yield self._window(mark, chosen)

    def _window(self, mark: Mark, chosen: list[tuple[Index, range]]) -> Window:
        places = [found.place(number) for found, numbers in chosen for number in numbers]
        return Window(mark, self._shuffled(places, mark.epoch, mark.shard, mark.group))

    def _shuffled(self, items: Any, *salt: object) -> list[Any]:
        """By keys from `random()`, which gives the same numbers in every version of Python."""
        if self._seed is None:
            return list(items)
        draw = random.Random(":".join(map(str, (self._seed, *salt)))).random
        keys = [draw() for _ in items]
        return [items[number] for number in sorted(range(len(keys)), key=keys.__getitem__)]

    def _index(self, names: list[str], number: int) -> Index:
        """Of the shard whose turn it is, while the next ones are made ready."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1 + INDEXED_AHEAD, "shoal-index")
        for name in names[number : number + 1 + INDEXED_AHEAD]:
            if name not in self._indexes:
                self._indexes[name] = self._pool.submit(self._look, name)
        found = self._indexes.pop(names[number])
        self._source.coming(names[number:], waited=not found.done())
        return found.result()

    def _look(self, name: str) -> Index:
        return index(self._source.path(name), name, self._buffer)
