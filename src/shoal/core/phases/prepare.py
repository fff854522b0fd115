"""Which nodes should be warm for a gang before they are needed, so that a spare starts quickly."""

from __future__ import annotations

import heapq

from shoal.core.nodebook import PREPARED_MAX
from shoal.core.phases.reconcile import uid_of
from shoal.core.scheduling.ends import too_short
from shoal.core.scheduling.fit import members_here
from shoal.core.state.queue import Gang, gang_of
from shoal.core.state.room import Level
from shoal.core.state.state import Node, State
from shoal.model.commands import Command, Prepare
from shoal.model.job import Job, Phase, Restart, for_members
from shoal.model.report import NodeReport
from shoal.model.resources import Kind

# For each gang that reports its steps: more than one node is seldom lost at once, and a warm
# interpreter takes memory.
WARM_NODES = 2
# A node that has not named the job for this long does not count.
HEARD_MS = 10_000


def prepares_wanted(state: State, inventories: list[NodeReport], now_ms: int) -> list[Command]:
    """For nodes that reported and could take a member's place. Sent again until the report names
    the job; not logged, like the beats that it depends on."""
    if not state.heard.watches:
        return []
    wanted: list[Command] = []
    lacking: dict[Gang, list[tuple[int, Job]]] | None = None
    fits: dict[tuple[Gang, Kind, Level], bool] = {}
    for inventory in inventories:
        node = state.nodes[inventory.spec.id]
        named = [job_id for job_id in inventory.prepared if job_id in state.heard.watches]
        for job_id in named:
            if _may_take(state, node, state.jobs[job_id], now_ms):
                state.heard.warm.setdefault(job_id, {})[node.id] = now_ms
            else:
                state.heard.warm.get(job_id, {}).pop(node.id, None)
        if not node.schedulable or len(named) >= PREPARED_MAX:
            continue
        if lacking is None:
            lacking = _lacking(state, now_ms)
        # Most nodes of a full cluster have no room: a look at each shape of gang shows that, and
        # not every gang has to be looked at.
        some = [jobs for gang, jobs in lacking.items() if _room_for(state, node, gang, fits)]
        for _, job in heapq.merge(*some, key=_place):
            if len(named) >= PREPARED_MAX:
                break
            if (
                job.id not in named
                and _lacks(state, job, now_ms)
                and _may_take(state, node, job, now_ms)
            ):
                named.append(job.id)
                state.heard.warm.setdefault(job.id, {})[node.id] = now_ms
                wanted.append(_prepare(state, node, inventory.incarnation, job))
    return wanted


def _lacking(state: State, now_ms: int) -> dict[Gang, list[tuple[int, Job]]]:
    """Gangs that want warm nodes, those of one shape together, each with its place in line."""
    found: dict[Gang, list[tuple[int, Job]]] = {}
    for place, job_id in enumerate(state.heard.watches):
        job = state.jobs[job_id]
        if _lacks(state, job, now_ms):
            found.setdefault(gang_of(job), []).append((place, job))
    return found


def _place(entry: tuple[int, Job]) -> int:
    return entry[0]


def _room_for(
    state: State, node: Node, gang: Gang, fits: dict[tuple[Gang, Kind, Level], bool]
) -> bool:
    room = state.rooms[node.index]
    key = (gang, room.kind, room.level)
    known = fits.get(key)
    if known is None:
        suits = gang.demand.suits(room.kind)
        known = fits[key] = suits and members_here(gang, room.kind, room.level) > 0
    return known


def _lacks(state: State, job: Job, now_ms: int) -> bool:
    warm = state.heard.warm.get(job.id, {})
    limit = max(WARM_NODES, min(state.policy.spares, 2 * WARM_NODES))
    if len(warm) >= limit:
        for node_id in [node for node, at_ms in warm.items() if now_ms - at_ms > HEARD_MS]:
            del warm[node_id]
    running = job.phase is Phase.RUNNING and job.spec.restart is not Restart.NEVER
    return running and len(warm) < limit


def _may_take(state: State, node: Node, job: Job, now_ms: int) -> bool:
    """Room for a member, on a node that has none of this job: those are warm by themselves."""
    gang = gang_of(job)
    room = state.rooms[node.index]
    return (
        node.schedulable
        and gang.demand.suits(room.kind)
        and members_here(gang, room.kind, room.level) > 0
        and all(member.slice.node != node.id for member in job.members)
        and node.index not in too_short(state, job, now_ms)
    )


def _prepare(state: State, node: Node, incarnation: int, job: Job) -> Prepare:
    return Prepare(
        **for_members(job.spec),
        node=node.id,
        incarnation=incarnation,
        job=job.id,
        argv=job.spec.command,
        env=dict(job.spec.env),
        uid=uid_of(state, job.spec.tenant),
    )
