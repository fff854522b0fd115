"""Proves how much of the GPUs any placement could allocate, even one that knew all arrivals.

A linear program over kinds of tasks and kinds of nodes, by column generation on the ways to share
one GPU. Relaxed, so that the optimum can only be higher than the truth: tasks and patterns may be
split; the CPUs and GPUs of like nodes are pooled (no node boundaries, but a task must fit an empty
node of the kind); memory is ignored; the order of arrival is ignored and tasks may be refused.
Not refused are those that would have found room whatever was placed before them (`forced`).
The bound is the optimum plus what missing patterns could still gain at its prices: it holds even
where the search for patterns ends early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from operator import mul
from typing import Any, NamedTuple

from shoal.core.books.vacancy import WHOLE, Footprint, Vacancy, fits

ROUNDS_MAX = 60
GAP = 1e-4  # of one GPU per GPU: where no pattern gains more, the optimum is close enough


class Kind(NamedTuple):
    """What the linear program knows about a task; memory is ignored."""

    cpu_milli: int
    gpus: int
    gpu_milli: int
    models: tuple[str, ...]


def upper_bound(nodes: Sequence[Vacancy], arrivals: Sequence[Footprint]) -> float | None:
    """The share of all GPU-milli that could be allocated at most; None without scipy."""
    if find_spec("scipy") is None:
        return None
    linprog = import_module("scipy.optimize").linprog
    program = _Program(nodes, arrivals)
    if not program.columns:
        return 0.0
    bound = float(capacity := WHOLE * sum(program.gpus))
    for _ in range(ROUNDS_MAX):
        optimum, gains = program.solve(linprog)
        missing = sum(
            max(0.0, gain) * gpus for (gain, _), gpus in zip(gains, program.gpus, strict=True)
        )
        bound = min(bound, optimum + missing)
        known = len(program.columns)
        for _, patterns in gains:
            program.add_patterns(patterns)
        if len(program.columns) == known:
            break
    return bound / capacity


def forced(nodes: Sequence[Vacancy], arrivals: Sequence[Footprint]) -> list[bool]:
    """Whether each task would have found room however its predecessors were placed.

    To keep a task off a node, its predecessors must leave too little CPU or memory there, or
    put something on too many of its GPUs. Price what they ask for by the cluster's totals: while
    all of it is cheaper than the cheapest way to close every node, some node is still open. Any
    prices prove it, so several are tried.
    """
    kinds = Counter(nodes)
    totals = (
        max(1, sum(room.cpu_milli for room in nodes)),
        max(1, sum(room.memory_mb for room in nodes)),
        WHOLE * sum(len(room.gpus) for room in nodes),
        sum(len(room.gpus) for room in nodes),
    )
    used = [0, 0, 0, 0]
    closing: dict[Footprint, list[float]] = {}
    result = []
    for task in arrivals:
        if task not in closing:
            closing[task] = [_closing(kinds, task, totals, prices) for prices in PRICES]
        spent = [amount / total for amount, total in zip(used, totals, strict=True)]
        bills = (sum(map(mul, prices, spent)) for prices in PRICES)
        result.append(any(bill < cost for bill, cost in zip(bills, closing[task], strict=True)))
        for index, amount in enumerate((task.cpu_milli, task.memory_mb, task.milli, task.gpus)):
            used[index] += amount
    return result


# For CPU, memory, GPU-milli and GPUs touched, each per share of the cluster's total.
PRICES = [
    (cpu, memory, milli, touched)
    for cpu in (0.2, 0.5, 1.0)
    for memory in (0.5, 1.0, 2.0)
    for milli, touched in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0))
]


def _closing(
    kinds: Counter[Vacancy],
    task: Footprint,
    totals: tuple[int, int, int, int],
    prices: tuple[float, float, float, float],
) -> float:
    """The cheapest way to close every node to the task."""
    cost = 0.0
    for room, count in kinds.items():
        if not fits(room, task):
            continue
        ways = [
            prices[0] * (room.cpu_milli - task.cpu_milli) / totals[0],
            prices[1] * (room.memory_mb - task.memory_mb) / totals[1],
        ]
        if task.gpus:
            closed = len(room.gpus) - task.gpus + 1
            milli = closed * (WHOLE - task.gpu_milli)
            ways.append(prices[2] * milli / totals[2] + prices[3] * closed / totals[3])
        cost += count * min(ways)
    return cost


class _Program:
    """The restricted master program; its columns are tasks on node kinds and shared GPUs."""

    def __init__(self, nodes: Sequence[Vacancy], arrivals: Sequence[Footprint]) -> None:
        rooms = Counter(room._replace(memory_mb=0) for room in nodes)
        self.rooms = list(rooms)
        self.gpus = [rooms[room] * len(room.gpus) for room in self.rooms]
        self.cpus = [rooms[room] * room.cpu_milli for room in self.rooms]
        supply: Counter[Kind] = Counter()
        must: Counter[Kind] = Counter()
        for task, sure in zip(arrivals, forced(nodes, arrivals), strict=True):
            supply[_kind(task)] += 1
            must[_kind(task)] += sure
        self.kinds = [kind for kind in supply if kind.gpus or must[kind]]
        self.supply = [supply[kind] for kind in self.kinds]
        self.must = [must[kind] for kind in self.kinds]
        self.columns: list[tuple[int, dict[int, int]]] = []  # (room, {kind: tasks})
        self._known: set[tuple[int, tuple[tuple[int, int], ...]]] = set()
        self.add(
            (index, {number: 1})
            for index, room in enumerate(self.rooms)
            for number in range(len(self.kinds))
            if fits(room, self._task(number))
        )

    def add(self, columns: Any) -> None:
        for room, tasks in columns:
            key = (room, tuple(sorted(tasks.items())))
            if key not in self._known:
                self._known.add(key)
                self.columns.append((room, tasks))

    def add_patterns(self, patterns: list[dict[int, int]]) -> None:
        """A pattern that shares a GPU well on one kind of node is tried on the others."""
        for tasks in patterns:
            kinds = [self._task(number) for number in tasks]
            for index, room in enumerate(self.rooms):
                if all(fits(room, task) for task in kinds):
                    self.add([(index, tasks)])

    def solve(self, linprog: Any) -> tuple[float, list[tuple[float, list[dict[int, int]]]]]:
        """The optimum over the columns so far and, per node kind, what new ones gain."""
        csr_matrix = import_module("scipy.sparse").csr_matrix
        count, rooms = len(self.kinds), len(self.rooms)
        entries: list[tuple[int, int, float]] = []
        gains = []
        for column, (room, tasks) in enumerate(self.columns):
            milli = sum(n * self.kinds[k].gpus * self.kinds[k].gpu_milli for k, n in tasks.items())
            gains.append(-milli)
            for kind, number in tasks.items():
                entries += [(kind, column, number), (count + kind, column, -number)]
            cpu = sum(n * self.kinds[k].cpu_milli for k, n in tasks.items())
            entries.append((2 * count + room, column, cpu / 1000))
            entries.append((2 * count + rooms + room, column, self._gpus_of(tasks)))
        limits: list[float] = [*self.supply, *(-must for must in self.must)]
        limits += [cpu / 1000 for cpu in self.cpus]
        limits += self.gpus
        row, col, value = zip(*entries, strict=True)
        matrix = csr_matrix((value, (row, col)), shape=(len(limits), len(gains)))
        answer = linprog(gains, A_ub=matrix, b_ub=limits, method="highs")
        if answer.status != 0:
            raise RuntimeError(f"the bound's linear program was not solved: {answer.message}")
        duals = [-float(dual) for dual in answer.ineqlin.marginals]
        worth = [duals[k] - duals[count + k] for k in range(count)]
        prices = [
            self._price(room, worth, duals[2 * count + room], duals[2 * count + rooms + room])
            for room in range(rooms)
        ]
        return -float(answer.fun), prices

    def _task(self, number: int) -> Footprint:
        kind = self.kinds[number]
        return Footprint(kind.cpu_milli, 0, kind.gpus, kind.gpu_milli, kind.models)

    def _gpus_of(self, tasks: dict[int, int]) -> int:
        shared = any(0 < self.kinds[kind].gpu_milli < WHOLE for kind in tasks)
        return 1 if shared else sum(n * self.kinds[kind].gpus for kind, n in tasks.items())

    def _price(
        self, room: int, worth: list[float], cpu_price: float, gpu_price: float
    ) -> tuple[float, list[dict[int, int]]]:
        """The gain of the best way to share one GPU of this kind, by dynamic programming over its
        milli, and the best ways that contain each kind of task."""
        where = self.rooms[room]
        gain = []
        for number, kind in enumerate(self.kinds):
            if 0 < kind.gpu_milli < WHOLE and fits(where, self._task(number)):
                value = kind.gpu_milli - worth[number] - cpu_price * kind.cpu_milli / 1000
                if value > 0:
                    gain.append((kind.gpu_milli, value, number))
        best = [0.0] * (WHOLE + 1)
        chosen = [-1] * (WHOLE + 1)
        for milli in range(1, WHOLE + 1):
            best[milli] = best[milli - 1]
            for size, value, number in gain:
                if size <= milli and best[milli - size] + value > best[milli] + 1e-12:
                    best[milli], chosen[milli] = best[milli - size] + value, number
        patterns = [
            self._trace(chosen, number)
            for size, value, number in gain
            if value + best[WHOLE - size] - gpu_price > GAP * WHOLE
        ]
        return best[WHOLE] - gpu_price, patterns

    def _trace(self, chosen: list[int], first: int) -> dict[int, int]:
        """The best pattern that contains this kind; adding many at once saves rounds."""
        tasks = Counter([first])
        milli = WHOLE - self.kinds[first].gpu_milli
        while milli > 0:
            number = chosen[milli]
            if number < 0:
                milli -= 1
            else:
                tasks[number] += 1
                milli -= self.kinds[number].gpu_milli
        return dict(tasks)


def _kind(task: Footprint) -> Kind:
    return Kind(task.cpu_milli, task.gpus, task.gpu_milli, task.models)
