"""How much of a node's free GPUs the tasks of a mix are expected to fill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from shoal.core.books.vacancy import WHOLE, Footprint, Vacancy

CPU_STEPS = 64  # of the largest node's CPUs; finer steps placed no better
CPU_STEP_MIN = 250
GPU_STEP = 10

# Free room counts on tasks that come within about 2^5 arrivals. With a smaller horizon it is given
# up too early; with a larger one it waits for tasks that never come.
HORIZON_LOG2 = 5

# A GPU in use is not filled at random: the scheduler picks the best of about 2^3 tasks for it.
BEST_OF_LOG2 = 3


class Filling:
    """The GPU-milli of a vacancy that the tasks of a mix are expected to fill.

    Ideally: fill the vacancy with random sequences of tasks, each on the fullest GPU that holds it,
    and take the mean. An exact answer needs a table over whole vacancies. Instead, one table holds
    a single GPU that is partly used, another the free GPUs of a node, both by the CPUs left. A
    vacancy is read as its used GPUs one after another, the fullest first, then its free ones.
    """

    def __init__(
        self, counts: Mapping[Footprint, int], here: Iterable[Footprint], cpu_step: int
    ) -> None:
        total = max(1, sum(counts.values()))
        shared: Counter[tuple[int, int]] = Counter()
        whole: Counter[tuple[int, int]] = Counter()
        for task in here:
            cpu = (task.cpu_milli + cpu_step // 2) // cpu_step
            if task.shared:
                shared[cpu, -(-task.gpu_milli // GPU_STEP)] += counts[task]
            else:
                whole[cpu, task.gpus] += counts[task]
        self._cpu_step = cpu_step
        self._shared = [(*kind, count / total) for kind, count in sorted(shared.items())]
        self._whole = [(*kind, count / total) for kind, count in sorted(whole.items())]
        self._used: dict[int, tuple[list[float], list[float]]] = {0: (NOTHING, NOTHING)}
        self._free: list[list[float]] = [NOTHING]

    def value(self, vacancy: Vacancy) -> float:
        cpu = min(CPU_STEPS, vacancy.cpu_milli / self._cpu_step)
        value, free = 0.0, 0
        for left in reversed(vacancy.gpus):
            if left == WHOLE:
                free += 1
            elif left >= GPU_STEP:
                fill, spend = self._used_gpu(left // GPU_STEP)
                steps = int(cpu)
                value += fill[steps]
                cpu = max(0.0, cpu - spend[steps])
        if free:
            value += _between(self._free_gpus(free), cpu)
        return value

    def _used_gpu(self, left: int) -> tuple[list[float], list[float]]:
        """By CPU steps left: the milli filled and CPU steps spent on a GPU with `left` steps."""
        known = self._used.get(left)
        if known is None:
            rows = [
                (cpu, size * GPU_STEP, weight, *self._used_gpu(left - size))
                for cpu, size, weight in self._shared
                if size <= left
            ]
            pairs = [_used_at(steps, rows) for steps in range(CPU_STEPS + 1)] if rows else []
            fills, spends = [fill for fill, _ in pairs], [spend for _, spend in pairs]
            known = self._used[left] = (fills or NOTHING, spends or NOTHING)
        return known

    def _free_gpus(self, free: int) -> list[float]:
        """By CPU steps left: the milli filled on `free` whole GPUs."""
        while len(self._free) <= free:
            self._free.append(self._next_free(len(self._free)))
        return self._free[free]

    def _next_free(self, free: int) -> list[float]:
        weights, sums = ([0.0] * (CPU_STEPS + 1) for _ in range(2))
        others = self._free[free - 1]
        for cpu, size, weight in self._shared:
            fill, spend = self._used_gpu(WHOLE // GPU_STEP - size)
            for steps in range(cpu, CPU_STEPS + 1):
                rest = steps - cpu
                later = fill[rest] + _between(others, rest - spend[rest])
                weights[steps] += weight
                sums[steps] += weight * (size * GPU_STEP + later)
        for cpu, gpus, weight in self._whole:
            after = self._free[free - gpus] if gpus <= free else []
            for steps in range(cpu, CPU_STEPS + 1 if after else cpu):
                weights[steps] += weight
                sums[steps] += weight * (gpus * WHOLE + after[steps - cpu])
        return [
            _chance(weight) * total / weight if weight else 0.0
            for weight, total in zip(weights, sums, strict=True)
        ]


NOTHING = [0.0] * (CPU_STEPS + 1)


def _used_at(
    steps: int, rows: list[tuple[int, int, float, list[float], list[float]]]
) -> tuple[float, float]:
    """What the best of a few tasks fills, and what a task spends, with this many CPU steps."""
    outcomes = []
    weights = spends = 0.0
    for cpu, milli, weight, fill, spend in rows:
        if cpu <= steps:
            outcomes.append((milli + fill[steps - cpu], weight))
            weights += weight
            spends += weight * (cpu + spend[steps - cpu])
    if not outcomes:
        return 0.0, 0.0
    outcomes.sort(reverse=True)
    fills, worse, none_better = 0.0, weights, 1.0
    for outcome, weight in outcomes:
        worse = max(0.0, worse - weight)
        before, none_better = none_better, _power(worse / weights, BEST_OF_LOG2)
        fills += outcome * (before - none_better)
    chance = _chance(weights)
    return chance * fills, chance * spends / weights


def _chance(weight: float) -> float:
    """The chance that a task with this share of the mix comes within the horizon."""
    return 1 - _power(max(0.0, 1 - weight), HORIZON_LOG2)


def _power(base: float, log2: int) -> float:
    """By repeated squaring: gives the same result on every machine."""
    for _ in range(log2):
        base *= base
    return base


def _between(row: list[float], steps: float) -> float:
    low = int(steps)
    part = steps - low
    return row[low] + part * (row[low + 1] - row[low]) if part > 0 else row[low]
