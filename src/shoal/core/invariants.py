"""The invariants, in code that shares nothing with the code it verifies: it reads fields only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shoal.core.features.access import access_violation
from shoal.core.features.array import arrays_violation
from shoal.core.features.ends import ends_violation
from shoal.core.features.halving import halving_violation
from shoal.core.features.identity import identity_violation
from shoal.core.features.labels import labels_violation, placement_violation
from shoal.core.features.lease import lease_violation
from shoal.core.features.neighbors import neighbors_violation
from shoal.core.features.schedules import schedules_violation
from shoal.core.features.service.sites import sites_violation
from shoal.core.features.sleep import (
    doze_violation,
    sleep_violation,
    sleeper_violation,
    sleeping_member_violation,
)
from shoal.core.features.supply.orders import ordered_violation, orders_violation
from shoal.core.features.workflow import workflow_violation
from shoal.core.state.events.base import NodeEvent
from shoal.core.state.events.cluster import PolicyChanged
from shoal.core.state.events.log import Event
from shoal.core.state.events.runs import JobAdopted, JobPlaced
from shoal.core.state.events.sleep import JobWaking
from shoal.core.state.room import Domain
from shoal.core.state.state import Node, State
from shoal.model.budget import BudgetLevel
from shoal.model.health import Standing
from shoal.model.job import Job, Member, MemberStatus, Phase, Restart
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.resources import Slice

# What each feature promises of the whole state: what is wrong; empty if nothing is.
OF_FEATURES = (
    labels_violation,
    arrays_violation,
    halving_violation,
    identity_violation,
    access_violation,
    workflow_violation,
    schedules_violation,
    sleep_violation,
    ends_violation,
    neighbors_violation,
    sites_violation,
    orders_violation,
    lease_violation,
)


class Violation(AssertionError):
    """The state breaks a promise of the design. Nothing may be sent or stored after this."""


def verify(state: State) -> None:
    """Every invariant over the whole state. `answers.why.verify_reasons` adds one more."""
    for job in state.jobs.values():
        _verify_job(job)
        _verify_drained(state, job)
    _verify_nodes(state, state.nodes)
    _verify_counts(state)
    for violation in OF_FEATURES:
        if problem := violation(state):
            raise Violation(problem)
    _verify_indexes(state)


def verify_touched(state: State, events: Iterable[Event]) -> None:
    """The same for only what one step touched: cheap enough to run live after every step."""
    jobs: dict[str, None] = {}
    nodes: dict[str, None] = {}
    gained: dict[str, None] = {}
    for event in events:
        if isinstance(event, NodeEvent):
            nodes[event.node] = None
        elif (job_id := getattr(event, "job", None)) is not None:
            jobs[job_id] = None
            if isinstance(event, JobPlaced) and job_id in state.jobs:
                _verify_placed(state, event)
            if isinstance(event, JobPlaced | JobWaking | JobAdopted):
                gained[job_id] = None
        elif isinstance(event, PolicyChanged):
            gained = {}  # that was by the caps before
    for job_id in jobs:
        job = state.jobs.get(job_id)
        if job is not None:
            _verify_job(job)
            nodes.update(dict.fromkeys(member.slice.node for member in job.members))
    for job_id in gained if state.accounts.caps else ():
        if job_id in state.jobs:
            _verify_cap(state, state.jobs[job_id])
    _verify_nodes(state, nodes)
    _verify_counts(state)
    if problem := ordered_violation(state, events) or doze_violation(state, events):
        raise Violation(problem)


def _verify_placed(state: State, event: JobPlaced) -> None:
    spec, nodes = state.jobs[event.job].spec, (slice_.node for slice_ in event.slices)
    if problem := placement_violation(state, spec, nodes):
        raise Violation(f"{event.job} was placed against its wishes: {problem}")


def _verify_cap(state: State, job: Job) -> None:
    """Whoever gets GPUs in a step stays within every cap above it. A cap that was lowered stops
    nobody, so more may be held after other steps."""
    for tenant in state.policy.tenants if job.spec.gpus else ():
        if tenant.gpus_max and tenant.name in _lineage(state, job.spec.tenant):
            account = state.accounts.sums.get(tenant.name)
            if account is not None and account.gpu_milli > 1000 * tenant.gpus_max:
                raise Violation(f"{job.id} has GPUs beyond the cap of {tenant.name}")


def _verify_job(job: Job) -> None:
    over = (MemberStatus.EXITED, MemberStatus.LOST)
    holding = [member for member in job.members if member.status not in over]
    if job.phase is Phase.FINISHED:
        raise Violation(f"{job.id} is finished but still in the state")
    if job.phase is Phase.WAITING and holding:
        raise Violation(f"{job.id} waits but holds {len(holding)} slices")
    if job.phase in (Phase.STARTING, Phase.RUNNING):
        most = max(job.spec.members, job.spec.members_max)
        if not job.spec.members <= len(job.members) <= most:
            raise Violation(f"{job.id} runs with {len(job.members)} of {job.spec.members} members")
        if any(member.status is MemberStatus.LOST or member.code for member in job.members):
            raise Violation(f"{job.id} goes on as a partial gang")
    if job.phase is Phase.RUNNING and any(m.status is MemberStatus.PENDING for m in job.members):
        raise Violation(f"{job.id} is running, but not all of its gang was seen alive")
    if job.phase is Phase.STOPPING and (job.stop_cause is None or not holding):
        raise Violation(f"{job.id} is stopping without a cause or with nothing left to stop")
    if problem := sleeper_violation(job):
        raise Violation(f"{job.id} {problem}")
    if job.phase is not Phase.WAITING and job.attempt < 1:
        raise Violation(f"{job.id} is {job.phase.value} but was never placed")
    for member in holding:
        _verify_slice(job, member)


def _verify_drained(state: State, job: Job) -> None:
    service = state.services.get(job.spec.service)
    if service is not None and job.id in service.ready:
        return  # it serves until another replica does
    goes_on = (Phase.STARTING, Phase.RUNNING, Phase.DOZING, Phase.ASLEEP)
    if job.phase in goes_on and job.spec.restart is not Restart.NEVER:
        for member in job.members:
            node = state.nodes[member.slice.node]
            if member.code is None and node.intent is NodeIntent.DRAINING:
                raise Violation(f"{job.id} goes on where it should move away from: {node.spec.id}")


def _verify_slice(job: Job, member: Member) -> None:
    asked, given = job.spec, member.slice
    got = (len(set(given.gpus)), given.cpu_milli, given.memory_mb)
    share = asked.gpu_milli or given.gpu_milli  # a share by memory depends on the node
    if (*got, given.gpu_milli) != (asked.gpus, asked.cpu_milli, asked.memory_mb, share):
        raise Violation(f"{job.id} was given {given} and not what it asked for")


def _verify_nodes(state: State, node_ids: Iterable[str]) -> None:
    """No GPU is held twice, no node gives more CPU or memory than it has, a lost node holds
    nothing, and free means neither held nor claimed."""
    for node_id in node_ids:
        node, room = state.nodes[node_id], state.rooms[state.nodes[node_id].index]
        held = _Sum(node.spec.gpus)
        for ref, job in state.placed[node_id].items():
            member = job.members[ref.member]
            slice_, memory_mb = member.slice, member.slice.memory_mb + member.host_mb
            if (job.attempt, job.id, slice_.node) != (ref.attempt, ref.job, node_id):
                raise Violation(f"{node_id} holds {ref}, which its job does not know")
            if problem := sleeping_member_violation(job, member):
                raise Violation(f"{ref} {problem}")
            if member.lent:
                held.asleep_mb += memory_mb
                held.memory_mb += memory_mb
                continue
            held.add(slice_, memory_mb, job)
        if held.gpus and (max(held.gpus) > 1000 or len(held.gpus) != node.spec.gpus):
            raise Violation(f"a GPU of {node_id} is held twice or does not exist: {held.gpus}")
        if held.cpu_milli > node.spec.cpu_milli or held.memory_mb > node.spec.memory_mb:
            raise Violation(f"{node_id} has given away more than it has")
        if (node.health is NodeHealth.LOST) != (node.index in state.lost):
            raise Violation(f"{node_id} is {node.health.value}, but not in the books")
        if node.health is NodeHealth.LOST and state.placed[node_id]:
            raise Violation(f"{node_id} is lost, but {list(state.placed[node_id])} hold slices")
        if held.exclusive and len(held.users) > 1:
            raise Violation(f"{node_id} is shared by a job that wants it for itself")
        for claimer, given in state.claims.items():
            for slice_ in given:
                if slice_.node == node_id:
                    held.add(slice_, slice_.memory_mb, state.jobs[claimer])
        free = (
            [1000 - milli for milli in held.gpus],
            node.spec.cpu_milli - held.cpu_milli,
            node.spec.memory_mb - held.memory_mb,
            held.exclusive,
            held.asleep_mb,
        )
        known = (room.gpu_milli, room.cpu_milli, room.memory_mb, room.exclusive, room.asleep_mb)
        if known != free:
            raise Violation(f"{node_id}: what is free does not match what is held and claimed")


class _Sum:
    def __init__(self, gpus: int) -> None:
        self.gpus = [0] * gpus
        self.cpu_milli = self.memory_mb = self.exclusive = self.asleep_mb = 0
        self.users: set[str] = set()

    def add(self, slice_: Slice, memory_mb: int, job: Job) -> None:
        for gpu in slice_.gpus:
            self.gpus += [0] * (gpu + 1 - len(self.gpus))  # a GPU that does not exist shows up here
            self.gpus[gpu] += slice_.gpu_milli
        self.cpu_milli += slice_.cpu_milli
        self.memory_mb += memory_mb
        self.exclusive += job.spec.whole_nodes
        if job.spec.whole_nodes or slice_.gpus or slice_.cpu_milli or memory_mb:
            self.users.add(job.id)  # a member that takes nothing does not count


def _verify_counts(state: State) -> None:
    if state.submitted != state.finished + len(state.jobs):
        raise Violation(
            f"{state.submitted} jobs submitted, {state.finished} ended, {len(state.jobs)} left"
        )


def _place(state: State, node: Node) -> str:
    found = state.fabric.places if state.policy.place == "measured" else {}
    return found.get(node.spec.id) or node.spec.place


def _verify_indexes(state: State) -> None:
    offered = [
        node
        for node in state.order
        if node.health is NodeHealth.READY
        and node.intent is NodeIntent.OPEN
        and node.record.standing is not Standing.QUARANTINED
    ]
    _verify_domain("the cluster", state, state.cluster, offered)
    for division in state.divisions:
        for place, domain in division.domains.items():
            inside = [node for node in offered if f"{_place(state, node)}/".startswith(f"{place}/")]
            _verify_domain(place, state, domain, inside)
        free = sorted((domain.gpus, place) for place, domain in division.domains.items())
        if free != division.tightest:
            raise Violation("racks or blocks are not in the order of their free GPUs")
    known = Counter(
        state.rooms[node.index].kind
        for node in state.order
        if node.intent is not NodeIntent.REMOVED
    )
    if known != Counter({kind: n for kind, n in state.capacity.items() if n}):
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
    waiting = sorted(
        job.number
        for job in state.jobs.values()
        if job.phase is Phase.WAITING and job.id not in state.claims
    )
    queued = [number for line in state.queue.lanes.values() for _, number in line]
    queued += [number for _, number in state.queue.delayed]
    queued += state.queue.held
    queued += state.queue.parked
    queued += state.queue.outbound
    for number in state.queue.lane:
        if _held(state, state.jobs[state.numbers[number]]):
            raise Violation(f"{state.numbers[number]} may start, but the budget is used up")
    for number in state.queue.held:
        if not _held(state, state.jobs[state.numbers[number]]):
            raise Violation(f"{state.numbers[number]} is held, but there is some budget left")
    queued += [number for line in state.queue.capped.values() for _, number in line]
    _verify_gpu_caps(state)
    if sorted(queued) != waiting:
        raise Violation("the queue does not match the waiting jobs")
    _verify_tally(state)


def _verify_gpu_caps(state: State) -> None:
    """What a cap leaves decides which lanes are held back."""
    if not any(tenant.gpus_max for tenant in state.policy.tenants):
        if state.queue.capped:
            raise Violation("jobs are held back for a cap on GPUs, and there is none")
        return
    held: Counter[str] = Counter()
    for job in state.jobs.values():
        own = sum(
            len(member.slice.gpus) * member.slice.gpu_milli
            for member in job.members
            if member.status in (MemberStatus.PENDING, MemberStatus.ALIVE) and not member.lent
        )
        claims = state.claims.get(job.id, ())
        own = max(own, sum(len(slice_.gpus) * slice_.gpu_milli for slice_ in claims))
        held.update(dict.fromkeys(_lineage(state, job.spec.tenant), own))
    caps = {tenant.name: 1000 * tenant.gpus_max for tenant in state.policy.tenants}
    for lanes, held_back in ((state.queue.lanes, False), (state.queue.capped, True)):
        for tenant, _, gang, *_ in lanes:
            need = gang.members * gang.demand.gpus * (gang.demand.gpu_milli or 1000)
            names = [name for name in _lineage(state, tenant) if caps.get(name)]
            over = need > 0 and any(held[name] + need > caps[name] for name in names)
            if over != held_back:
                raise Violation(f"{tenant}: what is held back does not match its cap on GPUs")


def _verify_tally(state: State) -> None:
    live: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    first = {job.spec.array: job.id for job in state.jobs.values() if job.spec.array}
    for array in state.arrays.values():
        live.update(["", *_lineage(state, array.spec.tenant)])
    for job in state.jobs.values():
        if not job.spec.service:
            names = ["", *_lineage(state, job.spec.tenant)]
            live.update(names if first.get(job.spec.array) != job.id else ())
            waiting.update(names if job.phase is Phase.WAITING else ())
    for service in state.services.values():
        for name in ["", *_lineage(state, service.spec.replica.tenant)]:
            live[name] += service.spec.scale.most
    if (live, waiting) != (state.tally.live, state.tally.waiting):
        raise Violation("the number of jobs by tenant does not match the jobs")
    of = state.sizes.of
    tenants = {
        job.id: job.spec.tenant
        for job in (*state.jobs.values(), *state.arrays.values())
        if not job.spec.service
    }
    for name, service in state.services.items():
        tenants[f"service {name}"] = service.spec.replica.tenant
    for key, schedule in state.schedules.items():
        tenants[f"schedule {key}"] = schedule.spec.tenant
    held: Counter[str] = Counter()
    for name, tenant in tenants.items():
        held.update({holder: of.get(name, 0) for holder in ("", tenant)})
    if set(of) != set(tenants) or held != state.sizes.held:
        raise Violation("the bytes of specs by tenant do not match what is live")


def _held(state: State, job: Job) -> bool:
    names = _lineage(state, job.spec.tenant)
    return any(state.accounts.budgets.get(name) is BudgetLevel.HELD for name in names)


def _lineage(state: State, name: str) -> list[str]:
    parents = {tenant.name: tenant.parent for tenant in state.policy.tenants}
    names: list[str] = []
    while name and name not in names:
        names.append(name)
        name = parents.get(name, "")
    return names


def _verify_domain(name: str, state: State, domain: Domain, nodes: list[Node]) -> None:
    indexed = {
        node: (kind, level)
        for kind, index in domain.free.items()
        for level, members in index.nodes.items()
        for node in members
    }
    true = {}
    for node in nodes:
        room = state.rooms[node.index]
        milli = sorted(room.gpu_milli)
        level = (
            milli.count(1000),
            room.cpu_milli,
            room.memory_mb,
            tuple(left for left in milli if 0 < left < 1000),
            room.asleep_mb,
        )
        closed = room.exclusive or room.cpu_milli < 0 or room.memory_mb < 0
        true[node.index] = (room.kind, (0, 0, 0, (), 0) if closed else level)
    ordered = all(
        members == sorted(set(members)) and members
        for index in domain.free.values()
        for members in index.nodes.values()
    ) and all(index.levels == sorted(index.nodes) for index in domain.free.values())
    whole = sum(level[0] for _, level in true.values())
    if indexed != true or not ordered or (domain.gpus, domain.nodes) != (whole, len(nodes)):
        raise Violation(f"the free index of {name} does not match the nodes")
