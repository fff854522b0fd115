"""The state of the cluster and the indexes that keep a step cheap."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from shoal.model.job import Job, MemberRef, Phase
from shoal.model.node import NodeHealth, NodeIntent, NodeSpec
from shoal.model.resources import Demand, Slice


class Node(msgspec.Struct, kw_only=True):
    """A node as the controller sees it. `index` is its place in join order and never changes."""

    spec: NodeSpec
    index: int
    incarnation: int
    health: NodeHealth = NodeHealth.JOINING
    intent: NodeIntent = NodeIntent.OPEN
    dead: bool = False  # lost for certain: this incarnation can never speak again
    since_ms: int = 0
    why: str = ""

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def schedulable(self) -> bool:
        return self.health is NodeHealth.READY and self.intent is NodeIntent.OPEN


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state without its indexes: what is stored, and what two equal states agree on."""

    epoch: int
    next_job: int
    next_port: int
    submitted: int
    finished: int
    jobs: list[Job]
    nodes: list[Node]


class Room:
    """What is free on one node. GPUs are bits of an integer: bit i is set when GPU i is free."""

    __slots__ = ("cpu_milli", "gpu_bits", "gpus", "memory_mb")

    def __init__(self, spec: NodeSpec) -> None:
        self.gpu_bits = (1 << spec.gpus) - 1
        self.gpus = spec.gpus
        self.cpu_milli = spec.cpu_milli
        self.memory_mb = spec.memory_mb

    def holds(self, demand: Demand) -> int:
        """How many members with this demand fit here now."""
        gpus, cpu_milli, memory_mb = demand
        count = self.gpus // gpus if gpus else UNLIMITED
        if cpu_milli:
            count = min(count, self.cpu_milli // cpu_milli)
        if memory_mb:
            count = min(count, self.memory_mb // memory_mb)
        return count


UNLIMITED = 1 << 30  # a demand of nothing fits any number of times


class Level(NamedTuple):
    """What is free on a node, but for memory."""

    gpus: int
    cpu_milli: int


class FreeIndex:
    """Schedulable nodes by level. Many nodes share few levels, most of all when the cluster is
    full, so whoever walks the levels need not look at every node to find that nothing fits."""

    def __init__(self) -> None:
        self.levels: list[Level] = []  # those in use, the emptiest nodes last
        self.nodes: dict[Level, list[int]] = {}  # node indexes, in join order

    def add(self, index: int, room: Room) -> None:
        level = Level(room.gpus, room.cpu_milli)
        if level not in self.nodes:
            insort(self.levels, level)
            self.nodes[level] = []
        insort(self.nodes[level], index)

    def remove(self, index: int, room: Room) -> None:
        level = Level(room.gpus, room.cpu_milli)
        nodes = self.nodes[level]
        position = bisect_left(nodes, index)
        assert nodes[position] == index, "a schedulable node is always on its level"
        del nodes[position]
        if not nodes:
            del self.nodes[level]
            del self.levels[bisect_left(self.levels, level)]

    def at_least(self, gpus: int, cpu_milli: int) -> list[Level]:
        """The levels with that much free, the tightest first."""
        start = bisect_left(self.levels, (gpus, cpu_milli))
        return [level for level in self.levels[start:] if level.cpu_milli >= cpu_milli]


class Shape(NamedTuple):
    """Waiting jobs of one shape are alike to the scheduler: if one does not fit, none does."""

    priority: int
    members: int
    demand: Demand


def shape_of(job: Job) -> Shape:
    spec = job.spec
    return Shape(spec.priority, spec.members, spec.demand)


class Queue:
    """Waiting jobs: those that may start now, by shape in order of submission, and the delayed."""

    def __init__(self) -> None:
        self.shapes: dict[Shape, list[int]] = {}
        self.delayed: list[tuple[int, int]] = []  # heap of (not_before_ms, job number)
        self.size = 0

    def add(self, job: Job) -> None:
        self.size += 1
        if job.not_before_ms:
            heapq.heappush(self.delayed, (job.not_before_ms, job.number))
        else:
            insort(self.shapes.setdefault(shape_of(job), []), job.number)

    def remove(self, job: Job) -> None:
        self.size -= 1
        shape = shape_of(job)
        numbers = self.shapes.get(shape, [])
        position = bisect_left(numbers, job.number)
        if position < len(numbers) and numbers[position] == job.number:
            del numbers[position]
            if not numbers:
                del self.shapes[shape]
        else:
            self.delayed.remove((job.not_before_ms, job.number))
            heapq.heapify(self.delayed)

    def wake(self, now_ms: int, jobs: Callable[[int], Job]) -> None:
        """Move the delayed jobs whose time has come among those that may start."""
        while self.delayed and self.delayed[0][0] <= now_ms:
            _, number = heapq.heappop(self.delayed)
            insort(self.shapes.setdefault(shape_of(jobs(number)), []), number)


class State:
    """Owned by one loop. Only `apply` changes it, but for `contacts` and `said`,
    what the controller has heard since it started: not logged, and built anew by hearing."""

    def __init__(self) -> None:
        self.epoch = 0
        self.next_job = 1
        self.next_port = 0
        self.submitted = 0
        self.finished = 0
        self.jobs: dict[str, Job] = {}  # live ones only: finished jobs live in the store
        self.nodes: dict[str, Node] = {}

        # Indexes: all derived from the above.
        self.order: list[Node] = []  # nodes by index
        self.rooms: list[Room] = []  # by node index
        self.free = FreeIndex()
        self.placed: dict[str, dict[MemberRef, Job]] = {}  # node -> members that hold slices
        self.capacity: dict[Demand, int] = {}  # kind of node -> how many are known
        self.open_capacity: dict[Demand, int] = {}  # ... how many are schedulable
        self.queue = Queue()
        self.numbers: dict[int, str] = {}  # job number -> id
        self.keys: dict[str, str] = {}  # submission key -> job id
        self.masters: set[str] = set()  # rendezvous points in use, "address:port"
        self.limits: list[tuple[int, str, int]] = []  # heap of (deadline_ms, job, attempt)
        self.attention: dict[str, None] = {}  # jobs that `heal` must look at
        # Known not to fit until a node gains room; a cache, so losing it costs only time.
        self.hopeless: set[tuple[int, Demand]] = set()

        self.contacts: dict[str, int] = {}  # when nodes not lost were heard, longest unheard first
        # The newest (incarnation, sequence) of each node, lost or not: what is older is refused.
        self.said: dict[str, tuple[int, int]] = {}

    def snapshot(self) -> Snapshot:
        return Snapshot(
            epoch=self.epoch,
            next_job=self.next_job,
            next_port=self.next_port,
            submitted=self.submitted,
            finished=self.finished,
            jobs=list(self.jobs.values()),
            nodes=self.order,
        )

    @classmethod
    def restore(cls, snapshot: Snapshot) -> State:
        state = cls()
        state.epoch = snapshot.epoch
        state.next_job = snapshot.next_job
        state.next_port = snapshot.next_port
        state.submitted = snapshot.submitted
        state.finished = snapshot.finished
        for node in snapshot.nodes:
            state.add_node(node)
        for job in snapshot.jobs:
            state.add_job(job)
        return state

    # -- index keeping, for apply and restore only ---------------------------------------

    def add_node(self, node: Node) -> None:
        assert node.index == len(self.order), "nodes are indexed in join order"
        self.nodes[node.id] = node
        self.order.append(node)
        self.rooms.append(Room(node.spec))
        self.placed[node.id] = {}
        self._count_known(node, 1)
        self.open_up(node)

    def replace_node(self, node: Node, spec: NodeSpec, incarnation: int) -> None:
        """The node starts a new life, perhaps with other resources; it must be closed and empty."""
        assert not self.placed[node.id], "a node that rejoins holds nothing"
        self._count_known(node, -1)
        node.spec = spec
        node.incarnation = incarnation
        self._count_known(node, 1)
        self.rooms[node.index] = Room(spec)

    def set_intent(self, node: Node, intent: NodeIntent) -> None:
        self._count_known(node, -1)
        node.intent = intent
        self._count_known(node, 1)

    def _count_known(self, node: Node, change: int) -> None:
        if node.intent is not NodeIntent.REMOVED:
            kind = kind_of(node)
            self.capacity[kind] = self.capacity.get(kind, 0) + change

    def open_up(self, node: Node) -> None:
        """Offer the node to the scheduler if it may be offered."""
        if node.schedulable:
            room = self.rooms[node.index]
            self.free.add(node.index, room)
            kind = kind_of(node)
            self.open_capacity[kind] = self.open_capacity.get(kind, 0) + 1
            self.gained(room)

    def close(self, node: Node) -> None:
        """Take the node away from the scheduler, before its health or intent changes."""
        if node.schedulable:
            self.free.remove(node.index, self.rooms[node.index])
            self.open_capacity[kind_of(node)] -= 1

    def gained(self, room: Room) -> None:
        """A node has more room than before: shapes whose members fit on it are worth a try."""
        if self.hopeless:
            self.hopeless = {key for key in self.hopeless if not room.holds(key[1])}

    def add_job(self, job: Job) -> None:
        self.jobs[job.id] = job
        self.numbers[job.number] = job.id
        if job.key:
            self.keys[job.key] = job.id
        if job.phase is Phase.WAITING:
            self.queue.add(job)
        else:
            self.hold(job)
            self.watch_limit(job)
            self.attention[job.id] = None

    def job_numbered(self, number: int) -> Job:
        return self.jobs[self.numbers[number]]

    def drop_job(self, job: Job) -> None:
        del self.jobs[job.id]
        del self.numbers[job.number]
        self.attention.pop(job.id, None)
        if job.key:
            del self.keys[job.key]

    def hold(self, job: Job) -> None:
        """The members of a placed job take their slices."""
        for number, member in enumerate(job.members):
            if not member.over:
                self.placed[member.slice.node][MemberRef(job.id, job.attempt, number)] = job
                self.take(member.slice)
        self.masters.add(job.master)

    def release(self, job: Job, number: int) -> None:
        """A member is over; its slice is free again."""
        slice_ = job.members[number].slice
        del self.placed[slice_.node][MemberRef(job.id, job.attempt, number)]
        self.give(slice_)

    def watch_limit(self, job: Job) -> None:
        if job.spec.time_limit_ms and job.running_ms is not None:
            deadline_ms = job.running_ms + job.spec.time_limit_ms
            heapq.heappush(self.limits, (deadline_ms, job.id, job.attempt))
            if len(self.limits) > 2 * len(self.jobs) + 64:  # most belong to jobs long finished
                self.limits = [entry for entry in self.limits if entry[1] in self.jobs]
                heapq.heapify(self.limits)

    def take(self, slice_: Slice) -> None:
        node = self.nodes[slice_.node]
        room = self.rooms[node.index]
        bits = gpu_bits(slice_.gpus)
        assert room.gpu_bits & bits == bits, f"a GPU of {slice_} is already held"
        if node.schedulable:
            self.free.remove(node.index, room)
        room.gpu_bits &= ~bits
        room.gpus -= len(slice_.gpus)
        room.cpu_milli -= slice_.cpu_milli
        room.memory_mb -= slice_.memory_mb
        if node.schedulable:
            self.free.add(node.index, room)

    def give(self, slice_: Slice) -> None:
        node = self.nodes[slice_.node]
        room = self.rooms[node.index]
        if node.schedulable:
            self.free.remove(node.index, room)
        room.gpu_bits |= gpu_bits(slice_.gpus)
        room.gpus += len(slice_.gpus)
        room.cpu_milli += slice_.cpu_milli
        room.memory_mb += slice_.memory_mb
        if node.schedulable:
            self.free.add(node.index, room)
            self.gained(room)


def kind_of(node: Node) -> Demand:
    """Nodes with equal resources are of one kind."""
    spec = node.spec
    return Demand(spec.gpus, spec.cpu_milli, spec.memory_mb)


def gpu_bits(gpus: Iterable[int]) -> int:
    bits = 0
    for gpu in gpus:
        bits |= 1 << gpu
    return bits
