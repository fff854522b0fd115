"""What is free on nodes, and the index that finds it without looking at every node."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from shoal.core.books.grouping import groups_of, split
from shoal.model.node import NodeSpec
from shoal.model.resources import WHOLE_GPU_MILLI, Demand, Kind, Slice

UNLIMITED = 1 << 30  # a demand of nothing fits any number of times


class Level(NamedTuple):
    """Everything that is free on a node. The scheduler treats nodes of one kind and level alike."""

    gpus: int  # wholly free
    cpu_milli: int
    memory_mb: int
    shares: tuple[int, ...] = ()  # what is left of partly held GPUs, the least first
    asleep_mb: int = 0  # memory that sleepers hold; they use nothing else

    @property
    def gpu_milli(self) -> int:
        whole = self.gpus * WHOLE_GPU_MILLI
        return whole + sum(self.shares) if self.shares else whole

    def unused(self, kind: Kind) -> bool:
        """Does nobody who is awake hold anything of such a node?"""
        free = (self.gpus, self.cpu_milli, self.memory_mb + self.asleep_mb)
        return free == (kind.gpus, kind.cpu_milli, kind.memory_mb)

    def holds(self, demand: Demand, share_milli: int) -> int:
        """How many members with this demand fit, if each takes this share of its GPUs."""
        count = UNLIMITED
        if demand.gpus:
            if share_milli == WHOLE_GPU_MILLI:
                count = self.gpus // demand.gpus
            else:
                count = self.gpus * (WHOLE_GPU_MILLI // share_milli)
                for left in self.shares:
                    count += left // share_milli
        if demand.cpu_milli:
            count = min(count, self.cpu_milli // demand.cpu_milli)
        if demand.memory_mb:
            count = min(count, self.memory_mb // demand.memory_mb)
        return count

    def minus(self, demand: Demand, share_milli: int, members: int) -> Level:
        """What is left after this many members have taken their part, as `Room.pick` would."""
        gpus, shares = self.gpus, self.shares
        if demand.gpus and share_milli == WHOLE_GPU_MILLI:
            gpus -= demand.gpus * members
        elif demand.gpus:
            left = list(shares)
            for _ in range(members):
                position = bisect_left(left, share_milli)
                if position < len(left):
                    rest = left.pop(position) - share_milli
                else:
                    gpus, rest = gpus - 1, WHOLE_GPU_MILLI - share_milli
                if rest:
                    insort(left, rest)
            shares = tuple(left)
        return Level(
            gpus,
            self.cpu_milli - demand.cpu_milli * members,
            self.memory_mb - demand.memory_mb * members,
            shares,
            self.asleep_mb,
        )


NOTHING = Level(0, 0, 0)


class Room:
    """One node's free resources. `gpu_milli[i]` is what is left of GPU i. A claim may take more
    than is free: a negative amount is still held by jobs that are being stopped for it."""

    __slots__ = (
        "asleep_mb",
        "cpu_milli",
        "domains",
        "exclusive",
        "gpu_milli",
        "groups",
        "kind",
        "level",
        "memory_mb",
    )

    def __init__(self, spec: NodeSpec, kind: Kind, domains: tuple[str, ...] | None = None) -> None:
        self.kind = kind
        self.domains = spec.domains if domains is None else domains
        self.gpu_milli = [WHOLE_GPU_MILLI] * spec.gpus
        self.groups = groups_of(spec)  # how its GPUs are joined, if that makes a difference
        self.cpu_milli = spec.cpu_milli
        self.memory_mb = spec.memory_mb
        self.asleep_mb = 0  # held by sleepers
        self.exclusive = 0  # slices of jobs that use whole nodes
        self.level = NOTHING
        self.settle()

    def change(
        self, slice_: Slice, sign: int, *, exclusive: bool = False, asleep: bool = False
    ) -> None:
        """Take the slice (-1) or give it back (+1). `asleep`: for a sleeper."""
        for gpu in slice_.gpus:
            self.gpu_milli[gpu] += sign * slice_.gpu_milli
        self.cpu_milli += sign * slice_.cpu_milli
        self.memory_mb += sign * slice_.memory_mb
        if exclusive:
            self.exclusive -= sign
        if asleep:
            self.asleep_mb -= sign * slice_.memory_mb
        self.settle()

    def copy(self) -> Room:
        copy = object.__new__(Room)
        copy.kind, copy.domains, copy.level = self.kind, self.domains, self.level
        copy.gpu_milli, copy.groups = list(self.gpu_milli), self.groups
        copy.cpu_milli, copy.memory_mb = self.cpu_milli, self.memory_mb
        copy.exclusive, copy.asleep_mb = self.exclusive, self.asleep_mb
        return copy

    def settle(self) -> None:
        if self.exclusive or self.cpu_milli < 0 or self.memory_mb < 0:
            self.level = NOTHING
            return
        shares: tuple[int, ...] = ()
        if not self.gpu_milli:
            self.level = Level(0, self.cpu_milli, self.memory_mb, shares, self.asleep_mb)
            return
        whole = self.gpu_milli.count(WHOLE_GPU_MILLI)
        if whole + self.gpu_milli.count(0) != len(self.gpu_milli):
            shares = tuple(sorted(left for left in self.gpu_milli if 0 < left < WHOLE_GPU_MILLI))
        self.level = Level(whole, self.cpu_milli, self.memory_mb, shares, self.asleep_mb)

    @property
    def awaited(self) -> bool:
        """Has a claim taken what another job still holds?"""
        return self.cpu_milli < 0 or self.memory_mb < 0 or any(left < 0 for left in self.gpu_milli)

    @property
    def empty(self) -> bool:
        """But for sleepers."""
        return self.level.unused(self.kind)

    @property
    def gpus(self) -> int:
        return self.gpu_milli.count(WHOLE_GPU_MILLI)

    @property
    def free(self) -> tuple[int, ...]:
        """The GPUs that are wholly free."""
        whole = WHOLE_GPU_MILLI
        return tuple([gpu for gpu, milli in enumerate(self.gpu_milli) if milli == whole])

    def holds(self, demand: Demand) -> int:
        """How many members with this demand fit here now."""
        if not demand.suits(self.kind):
            return 0
        return self.level.holds(demand, demand.share_milli(self.kind))

    def pick(self, demand: Demand, members: int) -> list[tuple[tuple[int, ...], int]]:
        """The GPUs of each member and the share it takes: whole GPUs that are joined best, or from
        the lowest index; a share from the fullest GPU that has it."""
        share = demand.share_milli(self.kind)
        if not demand.gpus:
            return [((), share)] * members
        if share == WHOLE_GPU_MILLI:
            free, each = self.free, demand.gpus
            if self.groups is not None:
                return [(gpus, share) for gpus in split(self.groups, free, each, members)]
            return [(free[each * n : each * (n + 1)], share) for n in range(members)]
        left = list(self.gpu_milli)
        picked: list[tuple[tuple[int, ...], int]] = []
        for _ in range(members):
            fitting = [(milli, gpu) for gpu, milli in enumerate(left) if milli >= share]
            gpu = min(fitting)[1]
            left[gpu] -= share
            picked.append(((gpu,), share))
        return picked


class FreeIndex:
    """Schedulable nodes of one kind by level. Many nodes share few levels, especially in a full
    cluster, so walking the levels is shorter than walking the nodes."""

    __slots__ = ("levels", "nodes")

    def __init__(self) -> None:
        self.levels: list[Level] = []  # those in use, the emptiest nodes last
        self.nodes: dict[Level, list[int]] = {}  # node indexes, in join order

    def add(self, index: int, level: Level) -> None:
        nodes = self.nodes.get(level)
        if nodes is None:
            insort(self.levels, level)
            self.nodes[level] = [index]
        else:
            insort(nodes, index)

    def remove(self, index: int, level: Level) -> None:
        nodes = self.nodes[level]
        position = bisect_left(nodes, index)
        assert nodes[position] == index, "a schedulable node is always on its level"
        del nodes[position]
        if not nodes:
            del self.nodes[level]
            del self.levels[bisect_left(self.levels, level)]

    def fitting(self, demand: Demand, share_milli: int, members: int = 1) -> list[Level]:
        """The levels with room for this many members, the fullest nodes first."""
        gpus = demand.gpus * members if share_milli == WHOLE_GPU_MILLI else 0
        cpu_milli, memory_mb = demand.cpu_milli * members, demand.memory_mb * members
        start = bisect_left(self.levels, (gpus, cpu_milli if gpus else 0))
        found = [
            level
            for level in self.levels[start:]
            if level.cpu_milli >= cpu_milli and level.memory_mb >= memory_mb
        ]
        if demand.gpus and not gpus:
            found = [level for level in found if level.holds(demand, share_milli) >= members]
        return found


class Domain:
    """A rack, a block or the cluster: its schedulable nodes, and what is free of their GPUs."""

    __slots__ = ("free", "gpu_milli", "gpus", "nodes")

    def __init__(self) -> None:
        self.free: dict[Kind, FreeIndex] = {}
        self.gpus = 0  # wholly free
        self.gpu_milli = 0  # free, parts of GPUs included
        self.nodes = 0

    def add(self, index: int, room: Room) -> None:
        if room.kind not in self.free:
            self.free[room.kind] = FreeIndex()
        self.free[room.kind].add(index, room.level)
        self.gpus += room.level.gpus
        self.gpu_milli += room.level.gpu_milli
        self.nodes += 1

    def remove(self, index: int, room: Room) -> None:
        self._leave(index, room.level, room.kind)
        self.gpus -= room.level.gpus
        self.gpu_milli -= room.level.gpu_milli
        self.nodes -= 1

    def change_kind(self, index: int, level: Level, before: Kind, after: Kind) -> None:
        self._leave(index, level, before)
        self.free.setdefault(after, FreeIndex()).add(index, level)

    def _leave(self, index: int, level: Level, kind: Kind) -> None:
        free = self.free[kind]
        free.remove(index, level)
        if not free.levels and (kind.labels or kind.taints):
            del self.free[kind]  # such kinds come and go with what jobs ask about

    def move(self, index: int, kind: Kind, before: Level, after: Level) -> None:
        """The node's level has changed."""
        free = self.free[kind]
        free.remove(index, before)
        free.add(index, after)
        if after.gpus != before.gpus or after.shares != before.shares:
            self.gpus += after.gpus - before.gpus
            self.gpu_milli += after.gpu_milli - before.gpu_milli


class Division:
    """All racks, or all blocks: by name, and by how many GPUs are wholly free in them."""

    __slots__ = ("domains", "tightest")

    def __init__(self) -> None:
        self.domains: dict[str, Domain] = {}
        self.tightest: list[tuple[int, str]] = []  # (free GPUs, name), the fewest first

    def add(self, name: str, index: int, room: Room) -> None:
        domain = self.domains.get(name)
        if domain is None:
            domain = self.domains[name] = Domain()
            insort(self.tightest, (0, name))
        before = domain.gpus
        domain.add(index, room)
        self._settle(name, before, domain.gpus)

    def remove(self, name: str, index: int, room: Room) -> None:
        domain = self.domains[name]
        before = domain.gpus
        domain.remove(index, room)
        self._settle(name, before, domain.gpus)

    def forget(self, name: str) -> None:
        """A domain that has no node any more."""
        del self.tightest[bisect_left(self.tightest, (self.domains.pop(name).gpus, name))]

    def move(self, name: str, index: int, kind: Kind, before: Level, after: Level) -> None:
        domain = self.domains[name]
        gpus = domain.gpus
        domain.move(index, kind, before, after)
        if gpus != domain.gpus:
            self._settle(name, gpus, domain.gpus)

    def with_gpus(self, least: int) -> list[str]:
        """The names of domains with at least this many free GPUs, the tightest first."""
        return [name for _, name in self.tightest[bisect_left(self.tightest, (least, "")) :]]

    def _settle(self, name: str, before: int, after: int) -> None:
        if before != after:
            del self.tightest[bisect_left(self.tightest, (before, name))]
            insort(self.tightest, (after, name))
