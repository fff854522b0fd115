"""The invariants, in code that shares nothing with the code it checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shoal.core.explain import waiting_reason
from shoal.core.state import State
from shoal.model.events import Event, NodeEvent
from shoal.model.job import Job, Member, MemberStatus, Phase, Restart
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.policy import Policy


class Violation(AssertionError):
    """The state is not what the design promises. Nothing may be sent or stored after this."""


def check(state: State, policy: Policy, now_ms: int, *, settled: bool = True) -> None:
    """Every invariant over the whole state. `settled`: the step had no work left over."""
    for job in state.jobs.values():
        _check_job(job)
        _check_drained(state, job)
    _check_nodes(state, [node.id for node in state.order])
    _check_counts(state)
    _check_indexes(state)
    if settled:
        for job in state.jobs.values():
            if job.phase is Phase.WAITING and not waiting_reason(state, job, policy, now_ms):
                raise Violation(f"{job.id} waits without a reason")


def check_touched(state: State, events: Iterable[Event]) -> None:
    """The same for what one step touched alone: cheap enough to run live after every step."""
    jobs: dict[str, None] = {}
    nodes: dict[str, None] = {}
    for event in events:
        if isinstance(event, NodeEvent):
            nodes[event.node] = None
        elif (job_id := getattr(event, "job", None)) is not None:
            jobs[job_id] = None
    for job_id in jobs:
        job = state.jobs.get(job_id)
        if job is not None:
            _check_job(job)
            nodes.update(dict.fromkeys(member.slice.node for member in job.members))
    _check_nodes(state, nodes)
    _check_counts(state)


def _check_job(job: Job) -> None:
    over = (MemberStatus.EXITED, MemberStatus.LOST)
    holding = [member for member in job.members if member.status not in over]
    if job.phase is Phase.FINISHED:
        raise Violation(f"{job.id} is finished but still in the state")
    if job.phase is Phase.WAITING and holding:
        raise Violation(f"{job.id} waits but holds {len(holding)} slices")
    if job.phase in (Phase.STARTING, Phase.RUNNING):
        if len(job.members) != job.spec.members:
            raise Violation(f"{job.id} runs with {len(job.members)} of {job.spec.members} members")
        if any(member.status is MemberStatus.LOST or member.code for member in job.members):
            raise Violation(f"{job.id} goes on as a partial gang")
    if job.phase is Phase.RUNNING and any(m.status is MemberStatus.PENDING for m in job.members):
        raise Violation(f"{job.id} is running, but not all of its gang was seen alive")
    if job.phase is Phase.STOPPING and (job.stop_cause is None or not holding):
        raise Violation(f"{job.id} is stopping without a cause or with nothing left to stop")
    if job.phase is not Phase.WAITING and job.attempt < 1:
        raise Violation(f"{job.id} is {job.phase.value} but was never placed")
    for member in holding:
        _check_slice(job, member)


def _check_drained(state: State, job: Job) -> None:
    if job.phase in (Phase.STARTING, Phase.RUNNING) and job.spec.restart is not Restart.NEVER:
        for member in job.members:
            node = state.nodes[member.slice.node]
            if member.code is None and node.intent is NodeIntent.DRAINING:
                raise Violation(f"{job.id} goes on where it should move away from: {node.id}")


def _check_slice(job: Job, member: Member) -> None:
    asked, given = job.spec, member.slice
    got = (len(set(given.gpus)), given.cpu_milli, given.memory_mb)
    if got != (asked.gpus, asked.cpu_milli, asked.memory_mb):
        raise Violation(f"{job.id} was given {given} and not what it asked for")


def _check_nodes(state: State, node_ids: Iterable[str]) -> None:
    """No GPU twice, no CPU or megabyte more than there is, nothing held on a lost node."""
    for node_id in node_ids:
        node = state.nodes[node_id]
        gpus: Counter[int] = Counter()
        cpu_milli = memory_mb = 0
        for ref, job in state.placed[node_id].items():
            member = job.members[ref.member]
            if (job.attempt, job.id, member.slice.node) != (ref.attempt, ref.job, node_id):
                raise Violation(f"{node_id} holds {ref}, which the job knows nothing of")
            gpus.update(member.slice.gpus)
            cpu_milli += member.slice.cpu_milli
            memory_mb += member.slice.memory_mb
        if gpus and (max(gpus.values()) > 1 or not set(gpus) <= set(range(node.spec.gpus))):
            raise Violation(f"a GPU of {node_id} is held twice or does not exist: {dict(gpus)}")
        if cpu_milli > node.spec.cpu_milli or memory_mb > node.spec.memory_mb:
            raise Violation(f"{node_id} is given away more than it has")
        if node.health is NodeHealth.LOST and state.placed[node_id]:
            raise Violation(f"{node_id} is lost, but {list(state.placed[node_id])} hold slices")
        room = state.rooms[node.index]
        free = {gpu for gpu in range(node.spec.gpus) if room.gpu_bits >> gpu & 1}
        if free != set(range(node.spec.gpus)) - set(gpus) or room.gpus != len(free):
            raise Violation(f"{node_id}: the free GPUs {free} do not match what is held")
        if (room.cpu_milli, room.memory_mb) != (
            node.spec.cpu_milli - cpu_milli,
            node.spec.memory_mb - memory_mb,
        ):
            raise Violation(f"{node_id}: the free CPUs or memory do not match what is held")


def _check_counts(state: State) -> None:
    if state.submitted != state.finished + len(state.jobs):
        raise Violation(
            f"{state.submitted} jobs came, {state.finished} ended, {len(state.jobs)} are left"
        )


def _check_indexes(state: State) -> None:
    open_ = {
        node.index: (state.rooms[node.index].gpus, state.rooms[node.index].cpu_milli)
        for node in state.order
        if node.health is NodeHealth.READY and node.intent is NodeIntent.OPEN
    }
    levels = state.free.nodes
    indexed = {index: tuple(level) for level, nodes in levels.items() for index in nodes}
    ordered = all(nodes and nodes == sorted(set(nodes)) for nodes in levels.values())
    if indexed != open_ or not ordered or state.free.levels != sorted(levels):
        raise Violation("the free index does not match the nodes")
    known = Counter(
        (node.spec.gpus, node.spec.cpu_milli, node.spec.memory_mb)
        for node in state.order
        if node.intent is not NodeIntent.REMOVED
    )
    if known != Counter({tuple(kind): n for kind, n in state.capacity.items() if n}):
        raise Violation("the capacity does not match the nodes")
    held = {
        (job.id, job.attempt, number): member.slice.node
        for job in state.jobs.values()
        for number, member in enumerate(job.members)
        if member.status in (MemberStatus.PENDING, MemberStatus.ALIVE)
    }
    placed = {tuple(ref): node for node, refs in state.placed.items() for ref in refs}
    if held != placed:
        raise Violation("what the nodes hold does not match what the jobs hold")
    waiting = sorted(job.number for job in state.jobs.values() if job.phase is Phase.WAITING)
    queued = [number for numbers in state.queue.shapes.values() for number in numbers]
    queued += [number for _, number in state.queue.delayed]
    if sorted(queued) != waiting or state.queue.size != len(waiting):
        raise Violation("the queue does not match the waiting jobs")
