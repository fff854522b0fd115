"""Where a job that ran before starts again: on its old nodes, replacing only those that are gone.

The options, cheapest first. If all its nodes are there, it restarts in place, where interpreters
are warm and files are cached. If some are gone, other nodes replace them and the rest stays.
Otherwise it is placed like any other job, an elastic one as large as possible, or waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from shoal.core.scheduling.capacity import held_when_empty
from shoal.core.scheduling.ends import too_short
from shoal.core.scheduling.fit import GangFit, fit, members_here, slices
from shoal.core.scheduling.hangs import hung_for
from shoal.core.scheduling.keep import keeper_of
from shoal.core.scheduling.weak_links import off_weak
from shoal.core.state.apply_room import Overlay
from shoal.core.state.queue import Gang, gang_of
from shoal.core.state.room import Room
from shoal.core.state.state import State
from shoal.model.job import Job
from shoal.model.resources import Slice, plural


def again(
    state: State, job: Job, gang: Gang, avoid: Collection[int]
) -> tuple[tuple[Slice, ...], str] | None:
    """Slices for the whole gang, by member, and the reason for them; None if neither works."""
    if not job.attempt or not job.members:
        return None
    if gang.bound:
        return None
    kept = {number: job.members[number].slice for number in _kept(state, job, gang, avoid)}
    total = max(len(job.members), gang.members)
    missing = [number for number in range(total) if number not in kept]
    if not kept:
        return None
    if not missing:
        return tuple(kept[number] for number in range(total)), "same nodes as before"
    with taken(state, job, tuple(kept.values())):
        rest = gang._replace(members=len(missing))
        avoid = beside(state, gang, kept.values(), avoid)
        plan = _on_warm_nodes(state, job, rest, avoid) or fit(state, rest, avoid, kept.values())
        if plan is not None:
            _, plan = off_weak(state, rest, avoid, plan, kept.values())
        found = slices(state, plan, gang.demand) if plan is not None else ()
    if plan is None or len(found) < len(missing):
        return None
    kept.update(zip(missing, found, strict=True))
    names = ", ".join(dict.fromkeys(slice_.node for slice_ in found))
    why = f"{plural(total - len(missing), 'member')} in place, {len(missing)} on {names}{plan.off}"
    return tuple(kept[number] for number in range(total)), why


def _on_warm_nodes(state: State, job: Job, gang: Gang, avoid: Collection[int]) -> GangFit | None:
    """Nodes that prepared for the job have already loaded what its members need to start."""
    given: list[tuple[int, int]] = []
    missing = gang.members
    for node_id in state.heard.warm.get(job.id, ()):
        node = state.nodes[node_id]
        if missing and node.schedulable and node.index not in avoid:
            room = state.rooms[node.index]
            here = members_here(gang, room.kind, room.level) if gang.demand.suits(room.kind) else 0
            if here:
                given.append((node.index, min(here, missing)))
                missing -= given[-1][1]
    return GangFit(given, "nodes prepared for it") if not missing else None


def _kept(state: State, job: Job, gang: Gang, avoid: Collection[int]) -> list[int]:
    """Members whose old slices are free now."""
    rooms = {}
    found = []
    for number, member in enumerate(job.members):
        node = state.nodes[member.slice.node]
        if not node.schedulable or node.index in avoid:
            continue
        if node.index not in rooms:
            room = state.rooms[node.index].copy()
            if room.awaited or room.exclusive or (gang.whole_nodes and not room.empty):
                continue
            rooms[node.index] = room
        room = rooms[node.index]
        if not _still_suits(room, member.slice, gang):
            continue
        room.change(member.slice, -1)
        if room.awaited:
            room.change(member.slice, +1)
        else:
            found.append(number)
    return _whole_groups(job, gang, found) if gang.per_node else found


def _whole_groups(job: Job, gang: Gang, kept: list[int]) -> list[int]:
    """If the job fixes the number of members per node, those of one node stay or move together."""
    sizes = Counter(job.members[number].slice.node for number in kept)
    return [n for n in kept if sizes[job.members[n].slice.node] == gang.per_node]


def beside(
    state: State, gang: Gang, kept: Iterable[Slice], avoid: Collection[int]
) -> Collection[int]:
    """Nodes closed to the rest of the gang: a node with its fixed number of members is full."""
    if not gang.per_node:
        return avoid
    return {*avoid, *(state.nodes[slice_.node].index for slice_ in kept)}


def _still_suits(room: Room, slice_: Slice, gang: Gang) -> bool:
    """The node may have come back with other GPUs than it had."""
    return (
        gang.demand.suits(room.kind)
        and slice_.gpu_milli == gang.demand.share_milli(room.kind)
        and all(gpu < len(room.gpu_milli) for gpu in slice_.gpus)
    )


def kept_from(state: State, job: Job, now_ms: int) -> set[int]:
    """Open nodes that the job may not start on."""
    return spares_kept_from(state, job, now_ms) | too_short(state, job, now_ms)


def spares_kept_from(state: State, job: Job, now_ms: int) -> set[int]:
    """Nodes that a policy keeps for gangs that lose a node: the last ones in join order that are
    free or hold only preemptible jobs. Restarted and preemptible jobs may use them. Nodes that lack
    what the job needs are kept from it, too, and nodes where a job that is ahead of it sleeps and
    has waited to wake for too long."""
    spares = set() if job.attempt else spares_beside(state, job, now_ms)
    return shunned(state, job) | spares | keeper_of(state, job, now_ms).keys()


def shunned(state: State, job: Job) -> set[int]:
    """Open nodes that lack what it needs, as long as others could take it. Once those have been
    removed, it is tried where it was before, because nothing else is left. Where something that it
    needs does not answer, it is not tried."""
    hung = set(hung_for(state, job)) if state.heard.hangs else set()
    if not job.missing_on:
        return hung
    gang, bad = gang_of(job), lacking(state, job)
    elsewhere = held_when_empty(state, gang, open_only=False, avoid=bad)
    return bad | hung if elsewhere >= gang.members else hung


def lacking(state: State, job: Job) -> set[int]:
    """Open nodes where its program or folder was found to be missing."""
    return {state.nodes[node].index for node in job.missing_on if state.nodes[node].schedulable}


def spares_beside(state: State, job: Job, now_ms: int) -> set[int]:
    """Nodes that it may not grow into either, whether it ran before or not. A node that ends soon
    is not a spare."""
    wanted = state.policy.spares
    if not wanted or job.spec.yields:
        return set()
    found: set[int] = set()
    short = too_short(state, job, now_ms)
    for node in reversed(state.order):
        if len(found) == wanted:
            break
        if node.index in short or not node.schedulable:
            continue
        if all(other.spec.yields for other in state.placed[node.id].values()):
            found.add(node.index)
    return found


def kept_when_empty(state: State, job: Job, now_ms: int) -> set[int]:
    """Nodes that would be kept from it if no job ran."""
    wanted, short = state.policy.spares, too_short(state, job, now_ms)
    if not wanted or job.attempt or job.spec.yields:
        return shunned(state, job) | short
    long = [node for node in state.order if node.schedulable and node.index not in short]
    return {*short, *(node.index for node in long[-wanted:])}


class taken(Overlay):  # noqa: N801
    """Treat these slices as held while a plan is made."""

    def __init__(self, state: State, job: Job, given: tuple[Slice, ...]) -> None:
        super().__init__(state)
        for slice_ in given:
            self.change(slice_, -1, exclusive=job.spec.whole_nodes)
