"""Scores that say on which node a task leaves the GPUs of the cluster most useful.

First the classic scores, to be compared with, the higher the better; then `Foresight`, Shoal's own
and its default. All are pure: a room and a task in, a number out. GPUs are counted in thousandths
(`WHOLE` = one GPU), so that tasks may share one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shoal.model.resources import is_called

WHOLE = 1000

# The published scores are scaled by the largest node of that cluster.
CPU_SCALE = 128_000
GPU_SCALE = 8 * WHOLE


class Task(NamedTuple):
    """What a task asks for. `models` are the GPU models that it accepts; none named: any."""

    cpu_milli: int
    memory_mb: int
    gpus: int
    gpu_milli: int  # of each GPU; below WHOLE only for a task with one GPU
    models: tuple[str, ...] = ()

    @property
    def milli(self) -> int:
        return self.gpus * self.gpu_milli

    @property
    def shared(self) -> bool:
        return 0 < self.gpu_milli < WHOLE


class Room(NamedTuple):
    """What is free on a node, and nothing that tells two nodes with the same room apart."""

    cpu_milli: int
    memory_mb: int
    gpus: tuple[int, ...]  # milli left on each of its GPUs, the freest first
    model: str
    held: tuple[int, ...] = ()  # classes of the GPU tasks here; kept for `clustering` only


def fits(room: Room, task: Task) -> bool:
    if room.cpu_milli < task.cpu_milli or room.memory_mb < task.memory_mb:
        return False
    wanted = task.gpus
    if not wanted:
        return True
    enough = wanted <= len(room.gpus) and room.gpus[wanted - 1] >= task.gpu_milli
    return enough and (not task.models or accepts(task, room.model))


def accepts(task: Task, model: str) -> bool:
    return model in task.models or any(is_called(model, name) for name in task.models)


def choices(room: Room, task: Task) -> list[int]:
    """Places in `room.gpus` that differ for a task that fits, the tightest last; for whole GPUs
    there is one."""
    if not task.shared:
        return [0]
    gpus, needed = room.gpus, task.gpu_milli
    return [
        place
        for place, left in enumerate(gpus)
        if left >= needed and (not place or left != gpus[place - 1])
    ]


def take(room: Room, task: Task, place: int = 0) -> Room:
    """The room that is left once the task is on the GPU at `place`, or on whole free GPUs."""
    gpus = list(room.gpus)
    for index in range(place, place + task.gpus):
        gpus[index] -= task.gpu_milli
    gpus.sort(reverse=True)
    cpu_milli, memory_mb = room.cpu_milli - task.cpu_milli, room.memory_mb - task.memory_mb
    return Room(cpu_milli, memory_mb, tuple(gpus), room.model, room.held)


def dot_product(room: Room, task: Task) -> int:
    """Prefers small nodes for large tasks: least aligned room and request."""
    cpu = room.cpu_milli * task.cpu_milli * GPU_SCALE**2
    gpu = sum(room.gpus) * task.milli * CPU_SCALE**2
    scale = (CPU_SCALE * GPU_SCALE) ** 2
    return (100 * scale - 50 * (cpu + gpu)) // scale


def best_fit(room: Room, task: Task) -> int:
    """Least CPU and GPU left after placement; see `rescaled`."""
    cpu = (room.cpu_milli - task.cpu_milli) * GPU_SCALE
    gpu = (sum(room.gpus) - task.milli) * CPU_SCALE
    scale = CPU_SCALE * GPU_SCALE
    return (100 * scale - 50 * (cpu + gpu)) // scale


def rescaled(score: int, lowest: int, highest: int) -> int:
    """The score between 0 and 100 among those of all nodes that fit."""
    return 100 * (score - lowest) // (highest - lowest) if highest > lowest else 0


def packing(room: Room, task: Task) -> int:
    """Shared GPUs that are in use first, then free GPUs of nodes in use, then idle nodes."""
    if not task.gpus:
        return 0
    idle = len(room.gpus)
    if room.gpus[-1] == WHOLE:
        return max(33 - idle, idle)
    used = [left for left in reversed(room.gpus) if left >= task.gpu_milli][: task.gpus]
    free = used.count(WHOLE)
    return max(50 - free, 33) if free else max(100 - sum(used) // 100, 50)


def clustering(room: Room, task: Task) -> int:
    """Tasks of one class together. Needs `room.held`."""
    if not task.gpus:
        return 0
    base = 25 * (GPU_SCALE - sum(room.gpus)) // GPU_SCALE
    if task_class(task) in room.held:
        return base + (75 if len(room.held) == 1 else 50)
    return base if room.held else base + 25


def task_class(task: Task) -> int:
    """0 for shared GPUs, else the number of whole GPUs."""
    return 0 if task.shared else task.gpus


def typical(tasks: Iterable[Task], percent: int = 95) -> dict[Task, int]:
    """The most frequent tasks, memory aside, until so many percent of all tasks are covered."""
    counts = Counter(task._replace(memory_mb=0) for task in tasks)
    wanted = percent * counts.total()
    result: dict[Task, int] = {}
    covered = 0
    for task, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if 100 * covered >= wanted:
            break
        result[task] = count
        covered += count
    return result


def unusable(room: Room, mix: Mapping[Task, int]) -> int:
    """GPU-milli that a task of the mix cannot use here, summed over the mix by its weights."""
    everything = sum(room.gpus)
    result = 0
    for task, weight in mix.items():
        if task.gpus and fits(room, task):
            result += weight * sum(left for left in room.gpus if left < task.gpu_milli)
        else:
            result += weight * everything
    return result


def fgd(before: int, after: int, weight: int) -> int:
    """Fragmentation gradient descent (Weng et al., USENIX ATC'23): the published score of a change
    in `unusable` under a mix of that total weight."""
    return int(100 / (1 + math.exp((after - before) / weight / WHOLE)))


MIX_TASKS_MAX = 1 << 14  # when so many were seen the counts are halved: old tasks fade
MIX_KINDS_MAX = 512
REFRESH_EVERY_MIN = 20
CACHE_MAX = 100_000

CPU_STEPS = 64  # of the largest node's CPUs; finer steps placed no better
CPU_STEP_MIN = 250
GPU_STEP = 10

# A rest counts on tasks that come within about so many. With fewer it is given up too early,
# with more it waits for tasks that never come.
HORIZON_LOG2 = 5

# A GPU in use is not filled by chance alone: the scheduler sends it the best of a few tasks.
BEST_OF_LOG2 = 3

# What only whole GPUs and idle nodes can give is worth a little more than the mix alone says,
# in milli per GPU: without it shared tasks are spread over free GPUs, and large tasks starve.
FREE_GPU_BONUS = 25
IDLE_NODE_BONUS = 15

# Among rooms that fill alike, the one that the fewest tasks may use (GPU models) goes first.
MODEL_WEIGHT = 1.0


class Mix:
    """The GPU tasks that arrived, placed or not, by kind; bounded and slowly forgetting."""

    def __init__(self, counts: dict[Task, int] | None = None) -> None:
        self.counts: dict[Task, int] = counts or {}
        self.total = sum(self.counts.values())

    def add(self, task: Task) -> None:
        kind = task._replace(memory_mb=0)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.total += 1
        if self.total >= MIX_TASKS_MAX or len(self.counts) > MIX_KINDS_MAX:
            self.counts = {kind: count // 2 for kind, count in self.counts.items() if count > 1}
            self.total = sum(self.counts.values())


class Foresight:
    """Places a task where it costs the cluster the least of what later tasks would fill.

    The value of a room is the GPU-milli that a random sequence of tasks of the mix is expected to
    fill in it (`Outlook`). The loss of a placement is the value before less the value after: it is
    the task's own milli where nothing is wasted, more where it strands GPUs without CPUs or leaves
    a rest that no task wants, less where it takes what hardly anything else can use.
    """

    def __init__(self, largest_cpu_milli: int, mix: Mix | None = None) -> None:
        self.largest_cpu_milli = largest_cpu_milli
        self._cpu_step = max(CPU_STEP_MIN, -(-largest_cpu_milli // CPU_STEPS))
        self.mix = mix or Mix()
        self._until_refresh = 1
        self._refresh()

    def saw(self, task: Task) -> None:
        """A task arrived. The outlook follows when the mix has grown by half."""
        if not task.gpus:
            return  # tasks without GPUs fill none; where they go, `loss` says
        self.mix.add(task)
        self._until_refresh -= 1
        if not self._until_refresh:
            self._until_refresh = max(REFRESH_EVERY_MIN, self.mix.total // 2)
            self._refresh()

    def loss(self, room: Room, task: Task) -> tuple[int, int]:
        """What placing the task costs in millionths of a GPU, and the best place in `room.gpus`."""
        losses = self._losses.get(task)
        if losses is None:
            losses = self._losses[task] = {}
        known = losses.get(room)
        if known is None:
            value = self.value(room)
            known = losses[room] = min(
                (value - self.value(take(room, task, place)), place)
                for place in choices(room, task)
            )
        return known

    def value(self, room: Room) -> int:
        """What tasks like those seen are expected to fill of it, in millionths of a GPU."""
        if not room.gpus or not room.gpus[0]:
            return 0
        key = (room.cpu_milli, room.gpus, room.model)
        value = self._values.get(key)
        if value is None:
            if len(self._values) >= CACHE_MAX:
                self._values.clear()
                self._losses.clear()
            value = self._values[key] = int(WHOLE * self._outlook(room.model).value(room))
        return value

    def _outlook(self, model: str) -> Outlook:
        if model not in self._outlooks:
            kinds = self._counts
            here = tuple(kind for kind in kinds if not kind.models or accepts(kind, model))
            if here not in self._by_kinds:  # most models are open to the same tasks
                self._by_kinds[here] = Outlook(kinds, here, self._cpu_step)
            self._outlooks[model] = self._by_kinds[here]
        return self._outlooks[model]

    def _refresh(self) -> None:
        self._counts = dict(self.mix.counts)
        self.drop_cache()

    def drop_cache(self) -> None:
        self._outlooks: dict[str, Outlook] = {}
        self._by_kinds: dict[tuple[Task, ...], Outlook] = {}
        self._values: dict[tuple[int, tuple[int, ...], str], int] = {}
        self._losses: dict[Task, dict[Room, tuple[int, int]]] = {}


class Outlook:
    """How many GPU-milli of a room the tasks of a mix are expected to fill.

    Ideally: fill the room with random sequences of tasks, each on the fullest GPU that holds it,
    and take the mean. Done exactly this needs the whole room as the state; instead one table holds
    a single GPU that is partly used, another the free GPUs of a node, both over the CPUs left, and
    a room is read as its used GPUs one after another, the fullest first, then its free ones.
    """

    def __init__(self, counts: Mapping[Task, int], here: Iterable[Task], cpu_step: int) -> None:
        total = max(1, sum(counts.values()))
        shared: Counter[tuple[int, int]] = Counter()
        whole: Counter[tuple[int, int]] = Counter()
        milli = 0
        for task in here:
            cpu = (task.cpu_milli + cpu_step // 2) // cpu_step
            if task.shared:
                shared[cpu, -(-task.gpu_milli // GPU_STEP)] += counts[task]
            else:
                whole[cpu, task.gpus] += counts[task]
            milli += counts[task] * task.milli
        self._cpu_step = cpu_step
        self._shared = [(*kind, count / total) for kind, count in sorted(shared.items())]
        self._whole = [(*kind, count / total) for kind, count in sorted(whole.items())]
        asked = max(1, sum(count * task.milli for task, count in counts.items()))
        self._scale = 1 + MODEL_WEIGHT * milli / asked
        self._used: dict[int, tuple[list[float], list[float]]] = {0: (NOTHING, NOTHING)}
        self._free: list[list[float]] = [NOTHING]

    def value(self, room: Room) -> float:
        cpu = min(CPU_STEPS, room.cpu_milli / self._cpu_step)
        value, free = 0.0, 0
        for left in reversed(room.gpus):
            if left == WHOLE:
                free += 1
            elif left >= GPU_STEP:
                fill, spend = self._used_gpu(left // GPU_STEP)
                steps = int(cpu)
                value += fill[steps]
                cpu = max(0.0, cpu - spend[steps])
        if free:
            bonus = FREE_GPU_BONUS + (IDLE_NODE_BONUS if free == len(room.gpus) else 0)
            value += _between(self._free_gpus(free), cpu) + free * bonus
        return value * self._scale

    def _used_gpu(self, left: int) -> tuple[list[float], list[float]]:
        """By CPU steps: the milli filled on a GPU with so many GPU steps left, the CPU spent."""
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
        """By CPU steps left: the milli filled on so many free GPUs."""
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
    """What the best of a few tasks fills, and what a task spends, with so many CPU steps left."""
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
    """That a task of this share of the mix comes within the horizon."""
    return 1 - _power(max(0.0, 1 - weight), HORIZON_LOG2)


def _power(base: float, log2: int) -> float:
    """By squaring: the same on every machine."""
    for _ in range(log2):
        base *= base
    return base


def _between(row: list[float], steps: float) -> float:
    low = int(steps)
    part = steps - low
    return row[low] + part * (row[low + 1] - row[low]) if part > 0 else row[low]
