"""Which beginnings of prompts each replica is believed to hold in its cache, within a bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

BLOCK_CHARS = 256  # about 64 tokens
BLOCKS_MAX = 1 << 19  # of all replicas of a service, at about BLOCK_BYTES each
REPLICA_BLOCKS_MAX = 1 << 16  # 16 MiB of text, about four million tokens
BLOCK_BYTES = 200  # a number, its stamp, and their places in an ordered dictionary
ROOM_MIN = 64
LEARNED = 0.25  # of the difference, each time


def chain(text: str, seed: str = "") -> tuple[int, ...]:
    """A number for each whole block: of the block and of all text before it. Python's own hash
    differs in each process, so nobody can write a prompt that has the numbers of another."""
    last, found = hash(seed), []
    for start in range(0, len(text) - BLOCK_CHARS + 1, BLOCK_CHARS):
        last = hash((last, text[start : start + BLOCK_CHARS]))
        found.append(last)
    return tuple(found)


class Sent:
    """A request as it was sent: what has to be known when the engine says what it had."""

    __slots__ = ("before", "blocks", "matched")

    def __init__(self, blocks: Sequence[int], before: list[int]) -> None:
        self.blocks = blocks
        self.matched = len(before)
        self.before = before  # when each block that matched had been used last


class Held:
    """Blocks of one replica, in the order in which an engine that needs room drops them."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, int] = OrderedDict()  # -> `clock` when it was last used
        self.clock = 0  # blocks that were added so far: an age in blocks, not in time
        self.room = float(REPLICA_BLOCKS_MAX)  # learned: what the engine's cache takes

    def match(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are held. What is dropped first is an end, never a middle, so
        the place can be bisected."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in self.blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def send(self, blocks: Sequence[int], most: int) -> Sent:
        """The replica will hold all of them when it has answered."""
        matched = self.match(blocks)
        sent = Sent(blocks, [self.blocks.get(one, 0) for one in blocks[:matched]])
        self.clock += max(1, len(blocks) - matched)
        for one in reversed(blocks):  # so that an end is older than its beginning
            self.blocks[one] = self.clock
            self.blocks.move_to_end(one)
        self.shrink(min(most, int(self.room)))
        return sent

    def correct(self, sent: Sent, had: int) -> None:
        """The engine had `had` leading blocks when the request came. If it had fewer than believed,
        it has dropped the first missing one, and with it all that was used no later."""
        if had + 1 < sent.matched:  # the last block may be cached in part
            stamp = sent.before[had]
            age = self.clock - stamp
            if age < self.room:
                self.room = max(ROOM_MIN, self.room + (age - self.room) * LEARNED)
            while self.blocks and next(iter(self.blocks.values())) <= stamp:
                self.blocks.popitem(last=False)
        elif had > sent.matched + 1:
            self.room = min(REPLICA_BLOCKS_MAX, self.room * (1 + LEARNED))

    def undo(self, sent: Sent) -> None:
        """It was not worked on there."""
        for one in sent.blocks[sent.matched :]:
            self.blocks.pop(one, None)

    def shrink(self, most: int) -> None:
        while len(self.blocks) > most:
            self.blocks.popitem(last=False)


class Index:
    def __init__(self, most: int = BLOCKS_MAX) -> None:
        self._most = most
        self.replicas: dict[str, Held] = {}

    def match(self, replica: str, blocks: Sequence[int]) -> int:
        held = self.replicas.get(replica)
        return held.match(blocks) if held is not None else 0

    def send(self, replica: str, blocks: Sequence[int]) -> Sent:
        held = self.replicas.get(replica)
        if held is None:
            held = self.replicas[replica] = Held()
            for other in self.replicas.values():
                other.shrink(self._share)
        return held.send(blocks, self._share)

    @property
    def _share(self) -> int:
        return min(REPLICA_BLOCKS_MAX, self._most // len(self.replicas))

    def size(self, replica: str) -> int:
        held = self.replicas.get(replica)
        return len(held.blocks) if held is not None else 0

    def forget(self, replica: str) -> None:
        """It has restarted."""
        self.replicas.pop(replica, None)

    def keep(self, replicas: Collection[str]) -> None:
        """There are no others any more."""
        for gone in self.replicas.keys() - replicas:
            del self.replicas[gone]
