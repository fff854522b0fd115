"""Which GPUs of a node a member gets: joined as closely as possible, and whole groups left free.

Ideally every choice of free GPUs would be compared by `_worth`. GPUs that are joined alike are
interchangeable, so only how many come from each such cell is tried. A node with very many ways to
choose (16 GPUs, each at a switch of its own) tries those that stand together in the tree instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod

from shoal.model.node import NodeSpec
from shoal.model.tree import Tree

# By GPU: its NVLink group, its socket's memory, its outer and its inner switch. GPUs with the same
# number at a place are joined there.
Groups = tuple[tuple[int, ...], ...]
WAYS_MAX = 2_000


def groups_of(spec: NodeSpec) -> Groups | None:
    """None if the node tells nothing that would make a difference, or is wrong about itself."""
    tree = spec.tree
    if not isinstance(tree, Tree) or len(tree.gpus) != spec.gpus or spec.gpus < 3:
        return None
    rows = []
    for index, gpu in enumerate(tree.gpus):
        own = -2 - index  # joined to nobody
        switches = gpu.switches or (own,)
        rows.append((_or(gpu.nvlink, own), _or(gpu.numa, own), switches[0], switches[-1]))
    plain = all(len(set(column)) in (1, len(rows)) for column in zip(*rows, strict=True))
    return None if plain else tuple(rows)


def _or(number: int, own: int) -> int:
    return number if number >= 0 else own


@lru_cache(maxsize=8192)
def split(
    groups: Groups, free: tuple[int, ...], each: int, members: int
) -> tuple[tuple[int, ...], ...]:
    """GPUs for members of one job, of `free` in order: all of them together first, then each."""
    left = closest(groups, free, each * members)
    found = []
    for _ in range(members - 1):
        found.append(closest(groups, left, each))
        left = tuple(gpu for gpu in left if gpu not in found[-1])
    return (*found, left)


@lru_cache(maxsize=8192)
def closest(groups: Groups, free: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The best `count` of the free GPUs, in order."""
    if count >= len(free):
        return free[:count]
    return min(_ways(groups, free, count), key=lambda some: _worth(groups, free, some))


@lru_cache(maxsize=8192)
def cost(groups: Groups, free: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Of nodes with equal room, a job takes the one where this is the least: how its GPUs would be
    joined, and then how much it would leave of the groups that it opens."""
    return _spread(groups, free, closest(groups, free, count))


def _ways(groups: Groups, free: Sequence[int], count: int) -> Iterator[tuple[int, ...]]:
    cells: dict[tuple[int, ...], list[int]] = {}
    for gpu in free:
        cells.setdefault(groups[gpu], []).append(gpu)
    if prod(len(cell) + 1 for cell in cells.values()) > WAYS_MAX:
        line = sorted(free, key=lambda gpu: (groups[gpu], gpu))
        for start in range(len(line) - count + 1):
            yield tuple(sorted(line[start : start + count]))
        return
    for counts in product(*(range(len(cell) + 1) for cell in cells.values())):
        if sum(counts) == count:
            taken = zip(cells.values(), counts, strict=True)
            yield tuple(sorted(gpu for cell, number in taken for gpu in cell[:number]))


def _worth(
    groups: Groups, free: Sequence[int], some: tuple[int, ...]
) -> tuple[int | tuple[int, ...], ...]:
    return (*_spread(groups, free, some), some)


def _spread(groups: Groups, free: Sequence[int], some: tuple[int, ...]) -> tuple[int, ...]:
    """The least is the best: over few NVLink groups, few sockets and few switches; then, of those
    that it opens, as few GPUs as possible stay behind, so that whole groups stay free."""
    spans, rest = [], []
    for level in range(len(groups[0])):
        taken = {groups[gpu][level] for gpu in some}
        spans.append(len(taken))
        rest.append(sum(groups[gpu][level] in taken for gpu in free) - len(some))
    return (*spans, *rest)
