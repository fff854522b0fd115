"""Sleepers whose memory a waiting job would need."""

from __future__ import annotations

from shoal.core.scheduling.fit import members_here
from shoal.core.state.queue import Gang
from shoal.core.state.state import State

NODES_LOOKED = 256
NAMED_MAX = 3


def sleepers_note(state: State, gang: Gang) -> str:
    """For instance "500 MB of memory on a are held by j3, which sleeps there": of the first node
    where the gang would have room if nobody slept there. Empty if there is none."""
    if not state.napping or not gang.demand.memory_mb:
        return ""
    nodes = dict.fromkeys(
        member.slice.node
        for job_id in list(state.napping)[:NODES_LOOKED]
        for member in state.jobs[job_id].members
        if member.lent and not member.over
    )
    for name in nodes:
        node = state.nodes[name]
        room = state.rooms[node.index]
        level = room.level._replace(memory_mb=room.memory_mb + room.asleep_mb, asleep_mb=0)
        fits = gang.demand.suits(room.kind) and members_here(gang, room.kind, level)
        if node.schedulable and fits and not members_here(gang, room.kind, room.level):
            owners = dict.fromkeys(
                job.label for ref, job in state.placed[name].items() if job.members[ref.member].lent
            )
            names = ", ".join(list(owners)[:NAMED_MAX])
            verb = "which sleeps there" if len(owners) == 1 else "which sleep there"
            return f"{room.asleep_mb} MB of memory on {name} are held by {names}, {verb}"
    return ""
