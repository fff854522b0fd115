"""What members have on GPUs: as much memory of the node is set aside before one is put to sleep."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from shoal.model.job import MemberRef
from shoal.model.naps import Uses

WHOLE_MB = 1_000


def uses(
    usage: Mapping[int, Mapping[int, int]],
    owner: Callable[[int], MemberRef | None],
    alive: Collection[MemberRef],
) -> tuple[Uses, ...]:
    """`usage`: MB by GPU and process, as the driver reports them."""
    found: dict[MemberRef, int] = {}
    for processes in usage.values():
        for pid, memory_mb in processes.items():
            ref = owner(pid)
            if ref is not None and ref in alive:
                found[ref] = found.get(ref, 0) + memory_mb
    return tuple(Uses(ref, -(-mb // WHOLE_MB) * WHOLE_MB) for ref, mb in sorted(found.items()))
