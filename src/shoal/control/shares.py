"""Who gives when a store is full: whoever has most, down to what the next one has."""

from __future__ import annotations

from collections.abc import Mapping

# Where nothing can be taken back, nobody may have more than so many times what nobody has.
SHARE = 4


def kept_shares(held: Mapping[str, int], excess: int) -> dict[str, int]:
    """How much each of those who have to give may keep, so that `excess` is gone."""
    aims: dict[str, int] = {}
    kept = dict(held)
    ranked = sorted(kept, key=lambda name: (-kept[name], name))
    for count, name in enumerate(ranked, 1):
        if excess <= 0:
            break
        following = kept[ranked[count]] if count < len(ranked) else 0
        cut = min(excess, count * (kept[name] - following))
        for place, richer in enumerate(ranked[:count]):
            kept[richer] -= cut // count + (place < cut % count)
            aims[richer] = kept[richer]
        excess -= cut
    return aims
