"""The order in which a run uses its samples: it depends only on the seed.

A run's stream is the concatenation of its shuffled epochs. A position in it is counted in samples,
so it means the same for every world size: a run that continues at its position uses every sample of
every epoch exactly once.

An epoch's shuffle is computed, not stored: a Feistel network over the next power of four, repeated
until the result is in range. So a run can continue anywhere at once, and a billion samples need no
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

ROUNDS = 4
BLOCK_SAMPLES = 8192  # samples computed at a time, so that tensor arithmetic dominates the cost
# Odd constants with well-spread bits. Any would do, but they must never change.
KEY_STEP = 0x9E3779B97F4A7C15
MIX = 0x2545F4914F6CDD1D
WORD = (1 << 64) - 1


class Stretch(msgspec.Struct, frozen=True):
    """What one call of `steps` covers: `epochs` passes over `size` samples, from `start` on."""

    start: int  # where it begins in the stream of the run
    epoch: int  # the number of its first epoch in the run
    epochs: int
    size: int
    batch: int  # samples per step, over all members
    drop_last: bool = False  # leave out a last batch that is not full

    @property
    def end(self) -> int:
        samples = self.epochs * self.size
        return self.start + (samples - samples % self.batch if self.drop_last else samples)

    def batches_from(self, position: int) -> int:
        return -(-max(0, self.end - position) // self.batch)


def part(samples: int, world: int, rank: int) -> tuple[int, int]:
    """The offset and size of a member's part of a batch. Parts differ by at most one sample."""
    each, more = divmod(samples, world)
    return rank * each + min(rank, more), each + (rank < more)


def batches(
    stretch: Stretch, position: int, world: int, rank: int, seed: int | None
) -> Iterator[list[int]]:
    """The samples of one member, batch by batch; without a seed, in the order of the data set.

    A member whose part is empty, which happens only in a short last batch, gets the batch's first
    sample, so that its collectives have something to work on: see `weight`.
    """
    import torch

    at = max(position, stretch.start)
    per_block = max(1, BLOCK_SAMPLES * world // stretch.batch)
    while at < stretch.end:
        spans = []
        for _ in range(per_block):
            samples = min(stretch.batch, stretch.end - at)
            if samples <= 0:
                break
            offset, size = part(samples, world, rank)
            spans.append((at + offset, size) if size else (at, 1))
            at += samples
        places = torch.cat([torch.arange(first, first + size) for first, size in spans])
        samples_of = _shuffled(places - stretch.start, stretch, seed).tolist()
        taken = 0
        for _, size in spans:
            yield samples_of[taken : taken + size]
            taken += size


def weight(samples: int, world: int, rank: int) -> float:
    """The factor for a member's mean loss that makes the mean of the members' gradients the
    gradient of the batch's mean: 1 if the parts are equal, 0 if a part is empty."""
    return part(samples, world, rank)[1] * world / samples


def _shuffled(places: Any, stretch: Stretch, seed: int | None) -> Any:
    """Maps positions in the stretch to samples of the data set, epoch by epoch."""
    epochs, within = places // stretch.size, places % stretch.size
    if seed is None:
        return within
    for epoch in epochs.unique().tolist():
        chosen = epochs == epoch
        within[chosen] = permute(within[chosen], stretch.size, seed, stretch.epoch + epoch)
    return within


def permute(places: Any, size: int, seed: int, epoch: int) -> Any:
    """The sample at each position of an epoch's order: a bijection of range(size), as a tensor."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    result = _rounds(places, half, keys)
    outside = result >= size
    while outside.any():
        result[outside] = _rounds(result[outside], half, keys)
        outside = result >= size
    return result


def _rounds(places: Any, half: int, keys: list[int]) -> Any:
    mask = (1 << half) - 1
    left, right = places >> half, places & mask
    for key in keys:
        mixed = ((right ^ key) + (key >> 7)) * MIX  # 64-bit overflow wraps around
        mixed = (mixed ^ (mixed >> 29)) * MIX
        left, right = right, left ^ ((mixed >> 33) & mask)
    return (left << half) | right


def _keys(seed: int, epoch: int) -> list[int]:
    """63-bit numbers, one for each round."""
    keys = []
    state = (seed * MIX + epoch * KEY_STEP + 1) & WORD
    for _ in range(ROUNDS):
        state = (state + KEY_STEP) & WORD
        word = state
        word = ((word ^ (word >> 30)) * MIX) & WORD
        word = ((word ^ (word >> 27)) * KEY_STEP) & WORD
        keys.append((word ^ (word >> 31)) >> 1)
    return keys
