"""The order in which a run uses its samples: fixed by the seed alone, whatever happens to the run.

The stream of a run is the concatenation of the shuffled epochs. A position in it is counted in
samples, so it means the same for every world size: a run that goes on at its position uses every
sample of every epoch exactly once.

An epoch's shuffle is computed, not stored: a Feistel network over the next power of four, walked
until it falls inside. So a run goes on anywhere at once, and a billion samples need no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

ROUNDS = 4
BLOCK_SAMPLES = 8192  # computed at once: the cost per sample is that of the tensor's arithmetic
# Odd constants with well spread bits; any would do, but they may never change.
KEY_STEP = 0x9E3779B97F4A7C15
MIX = 0x2545F4914F6CDD1D
WORD = (1 << 64) - 1


class Stretch(msgspec.Struct, frozen=True):
    """What one call of `steps` covers: `epochs` passes over `size` samples, from `start` on."""

    start: int  # where it begins in the stream of the run
    epoch: int  # the number of its first epoch in the run
    epochs: int
    size: int
    batch: int  # of all members together
    drop_last: bool = False  # leave out what does not fill a batch at the very end

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
    """The samples of one member, batch by batch; no seed: in the order of the data set.

    A member whose part is empty (only in a last, short batch) is given the batch's first sample,
    that its collectives have something to work on: see `weight`.
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
    """What to multiply a member's mean loss with, so that the mean of the members' gradients is
    the gradient of the batch's mean. 1 where the parts are even, 0 where a part is empty."""
    return part(samples, world, rank)[1] * world / samples


def _shuffled(places: Any, stretch: Stretch, seed: int | None) -> Any:
    """Places in the stretch become samples of the data set, epoch by epoch."""
    epochs, within = places // stretch.size, places % stretch.size
    if seed is None:
        return within
    for epoch in epochs.unique().tolist():
        chosen = epochs == epoch
        within[chosen] = permute(within[chosen], stretch.size, seed, stretch.epoch + epoch)
    return within


def permute(places: Any, size: int, seed: int, epoch: int) -> Any:
    """Where each place of an epoch's order points: a bijection of range(size), in a tensor."""
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
        mixed = ((right ^ key) + (key >> 7)) * MIX  # wraps around, as 64 bits do everywhere
        mixed = (mixed ^ (mixed >> 29)) * MIX
        left, right = right, left ^ ((mixed >> 33) & mask)
    return (left << half) | right


def _keys(seed: int, epoch: int) -> list[int]:
    """Numbers of 63 bits, one for each round."""
    keys = []
    state = (seed * MIX + epoch * KEY_STEP + 1) & WORD
    for _ in range(ROUNDS):
        state = (state + KEY_STEP) & WORD
        word = state
        word = ((word ^ (word >> 30)) * MIX) & WORD
        word = ((word ^ (word >> 27)) * KEY_STEP) & WORD
        keys.append((word ^ (word >> 31)) >> 1)
    return keys
