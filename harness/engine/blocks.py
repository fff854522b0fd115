"""The blocks of an engine's memory: which prefixes it holds, and which it forgets first."""

from __future__ import annotations

from collections.abc import Sequence


class Blocks:
    """As vLLM keeps them: a block that is full has a hash and stays after its sequence, until its
    room is needed; of those that nobody uses, the least recently used goes first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.plain = 0  # in use and not to be found: not full yet, or twice there
        self._used: dict[int, int] = {}  # hash -> sequences that use it
        self._idle: dict[int, None] = {}  # the least recently used first

    @property
    def in_use(self) -> int:
        return self.plain + len(self._used)

    @property
    def held(self) -> int:
        """Blocks that a later prompt could find."""
        return len(self._used) + len(self._idle)

    def found(self, hashes: Sequence[int]) -> int:
        """How many of the first blocks are here."""
        count = 0
        for each in hashes:
            if each not in self._used and each not in self._idle:
                break
            count += 1
        return count

    def take(self, hashes: Sequence[int], plain: int) -> bool:
        """For a sequence that found `hashes` and needs `plain` more. False: there is no room."""
        idle = sum(each in self._idle for each in hashes)
        if self.in_use + idle + plain > self.count:
            return False
        for each in hashes:
            self._idle.pop(each, None)
            self._used[each] = self._used.get(each, 0) + 1
        self.plain += plain
        while self.in_use + len(self._idle) > self.count:
            del self._idle[next(iter(self._idle))]
        return True

    def fill(self, block: int) -> bool:
        """One plain block is full now. False: an equal one is here already."""
        if block in self._used or block in self._idle:
            return False
        self.plain -= 1
        self._used[block] = 1
        return True

    def release(self, hashes: Sequence[int], plain: int) -> None:
        """The end of a prefix is forgotten before its beginning."""
        self.plain -= plain
        for each in reversed(hashes):
            left = self._used[each] - 1
            if left:
                self._used[each] = left
            else:
                del self._used[each]
                self._idle[each] = None

    def forget(self) -> None:
        self._idle.clear()
