"""Scores that say on which node a task leaves the GPUs of the cluster most useful.

The classic scores are here to be compared with; `Foresight` is Shoal's own and its default.
All are pure: a room and a task in, a number out. GPUs are counted in thousandths (`WHOLE` = one
GPU), so that tasks may share one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

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
    if wanted > len(room.gpus) or room.gpus[wanted - 1] < task.gpu_milli:
        return False
    return not task.models or room.model in task.models


def tightest(room: Room, task: Task) -> int:
    """The place in `room.gpus` of the fullest GPU that still holds a shared task."""
    return max(place for place, left in enumerate(room.gpus) if left >= task.gpu_milli)


def choices(room: Room, task: Task) -> list[int]:
    """Places in `room.gpus` that differ for a task that fits; for whole GPUs there is one."""
    if not task.shared:
        return [0]
    places = []
    before = -1
    for place, left in enumerate(room.gpus):
        if left < task.gpu_milli:
            break
        if left != before:
            places.append(place)
        before = left
    return places


def take(room: Room, task: Task, place: int = 0) -> Room:
    """The room that is left once the task is on the GPU at `place`, or on whole free GPUs."""
    gpus = room.gpus
    if task.gpus:
        shared = task.shared
        start, count = (place, 1) if shared else (0, task.gpus)
        rest = [*gpus[:start], *gpus[start + count :]]
        rest += [gpus[place] - task.gpu_milli] if shared else [0] * count
        rest.sort(reverse=True)
        gpus = tuple(rest)
    return room._replace(
        cpu_milli=room.cpu_milli - task.cpu_milli,
        memory_mb=room.memory_mb - task.memory_mb,
        gpus=gpus,
    )


# --- Classic scores: integers, the higher the better ---


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
    if not room.held:
        return base + 25
    if task_class(task) not in room.held:
        return base
    return base + (75 if len(room.held) == 1 else 50)


def task_class(task: Task) -> int:
    """0 for shared GPUs, else the number of whole GPUs."""
    return 0 if task.shared else task.gpus


# --- Fragmentation gradient descent (Weng et al., USENIX ATC'23) ---


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
    left = sum(room.gpus)
    return sum(
        weight * (left if not _could_run(room, task) else _too_small(room, task))
        for task, weight in mix.items()
    )


def fgd(before: int, after: int, weight: int) -> int:
    """The published score of a change in `unusable` under a mix of that total weight."""
    return int(100 / (1 + math.exp((after - before) / weight / WHOLE)))


def _could_run(room: Room, task: Task) -> bool:
    return (
        0 < task.gpus <= len(room.gpus)
        and room.cpu_milli >= task.cpu_milli
        and room.gpus[task.gpus - 1] >= task.gpu_milli
        and (not task.models or room.model in task.models)
    )


def _too_small(room: Room, task: Task) -> int:
    return sum(left for left in room.gpus if left < task.gpu_milli)


# --- Shoal's own: how much of a room will tasks like those seen lately fill? ---

MIX_TASKS_MAX = 1 << 14  # when so many were seen the counts are halved: old tasks fade
MIX_KINDS_MAX = 512
REFRESH_FIRST = 20
CACHE_MAX = 200_000

CPU_STEPS = 64  # of the largest node's CPUs; finer steps placed no better
CPU_STEP_MIN = 250
GPU_STEP = 10

# A room counts on the tasks that are likely to come within about so many. Fewer: it hoards
# nothing for rare tasks; more: it waits for tasks that never come. 40 to 100 are alike.
HORIZON_LOG2 = 6

# A room is not filled by chance alone: the scheduler sends each task where it suits best. So the
# best next task counts this much, the average one the rest; tasks below COMMON never as the best.
OPTIMISM = 0.7
COMMON = 0.01

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
        self._refresh_at = 1
        self._forget()

    def saw(self, task: Task) -> None:
        """A task arrived. The outlook follows when the mix has grown by half."""
        if not task.gpus:
            return  # tasks without GPUs fill none; where they go, `loss` says
        self.mix.add(task)
        if self.mix.total >= self._refresh_at or self.mix.total * 4 < self._refresh_at:
            self._refresh_at = max(REFRESH_FIRST, self.mix.total * 3 // 2)
            self._forget()

    def loss(self, room: Room, task: Task) -> tuple[int, int]:
        """What placing the task costs in millionths of a GPU, and the best place in `room.gpus`."""
        losses = self._losses.get(task)
        if losses is None:
            losses = self._losses[task] = {}
        known = losses.get(room)
        if known is None:
            known = losses[room] = self._loss(room, task)
            self._cached += 1
            if self._cached >= CACHE_MAX:
                self._forget()
        return known

    def _loss(self, room: Room, task: Task) -> tuple[int, int]:
        value = self.value(room)
        return min(
            (value - self.value(take(room, task, place)), place) for place in choices(room, task)
        )

    def value(self, room: Room) -> int:
        """What tasks like those seen are expected to fill of it, in millionths of a GPU."""
        if not room.gpus or not room.gpus[0]:
            return 0
        key = (room.cpu_milli, room.gpus, room.model)
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = int(WHOLE * self._outlook(room.model).value(room))
        return value

    def _outlook(self, model: str) -> Outlook:
        outlook = self._outlooks.get(model)
        if outlook is None:
            counts = self.mix.counts
            here = tuple(kind for kind in counts if not kind.models or model in kind.models)
            outlook = self._by_kinds.get(here)  # most models are open to the same tasks
            if outlook is None:
                outlook = self._by_kinds[here] = Outlook(counts, here, self._cpu_step)
            self._outlooks[model] = outlook
        return outlook

    def _forget(self) -> None:
        self._outlooks: dict[str, Outlook] = {}
        self._by_kinds: dict[tuple[Task, ...], Outlook] = {}
        self._values: dict[tuple[int, tuple[int, ...], str], int] = {}
        self._losses: dict[Task, dict[Room, tuple[int, int]]] = {}
        self._cached = 0


class Outlook:
    """How many GPU-milli of a room the tasks of a mix are expected to fill.

    Ideally: fill the room with a random sequence of tasks, each on the fullest GPU that holds it,
    and take the mean. Done exactly this needs the whole room as the state; instead one table holds
    a single GPU that is partly used, another the free GPUs of a node, both over the CPUs left, and
    a room is read as its used GPUs one after another, the fullest first, then its free ones.
    A room that only rare tasks fit counts only as far as such a task is likely to come in time.
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
        nothing = [0.0] * (CPU_STEPS + 1)
        self._used: dict[int, tuple[list[float], list[float]]] = {0: (nothing, nothing)}
        self._free: list[list[float]] = [nothing]

    def value(self, room: Room) -> float:
        cpu = min(CPU_STEPS, room.cpu_milli / self._cpu_step)
        value = 0.0
        free = 0
        for left in reversed(room.gpus):
            if left == WHOLE:
                free += 1
            elif left >= GPU_STEP:
                fill, spend = self._used_gpu(left // GPU_STEP)
                steps = int(cpu)
                value += fill[steps]
                cpu = max(0.0, cpu - spend[steps])
        if free:
            value += _between(self._free_gpus(free), cpu)
        return value * self._scale

    def _used_gpu(self, left: int) -> tuple[list[float], list[float]]:
        """By CPU steps: the milli filled on a GPU with so many GPU steps left, the CPU spent."""
        known = self._used.get(left)
        if known is not None:
            return known
        row = _Row()
        spends = [0.0] * (CPU_STEPS + 1)
        for cpu, size, weight in self._shared:
            if size <= left:
                fill, spend = self._used_gpu(left - size)
                row.add(cpu, weight, [size * GPU_STEP + later for later in fill])
                for steps in range(cpu, CPU_STEPS + 1):
                    spends[steps] += weight * (cpu + spend[steps - cpu])
        spend = [
            _chance(weight) * spend / weight if weight else 0.0
            for weight, spend in zip(row.weights, spends, strict=True)
        ]
        self._used[left] = (row.values(), spend)
        return self._used[left]

    def _free_gpus(self, free: int) -> list[float]:
        """By CPU steps left: the milli filled on so many free GPUs."""
        while len(self._free) <= free:
            self._free.append(self._next_free(len(self._free)))
        return self._free[free]

    def _next_free(self, free: int) -> list[float]:
        row = _Row()
        for cpu, size, weight in self._shared:
            fill, spend = self._used_gpu(WHOLE // GPU_STEP - size)
            others = self._free[free - 1]
            row.add(
                cpu,
                weight,
                [
                    size * GPU_STEP + fill[rest] + _between(others, rest - spend[rest])
                    for rest in range(CPU_STEPS + 1 - cpu)
                ],
            )
        for cpu, gpus, weight in self._whole:
            if gpus <= free:
                row.add(cpu, weight, [gpus * WHOLE + later for later in self._free[free - gpus]])
        return row.values()


class _Row:
    """The milli filled, by CPU steps left, while one kind of task after the other is considered."""

    def __init__(self) -> None:
        self.weights = [0.0] * (CPU_STEPS + 1)
        self._sums = [0.0] * (CPU_STEPS + 1)
        self._best = [0.0] * (CPU_STEPS + 1)

    def add(self, cpu: int, weight: float, outcomes: list[float]) -> None:
        """The outcomes, by CPU steps left after it, if such a task comes next."""
        weights, sums, best = self.weights, self._sums, self._best
        common = weight >= COMMON
        for steps, outcome in zip(range(cpu, CPU_STEPS + 1), outcomes, strict=False):
            weights[steps] += weight
            sums[steps] += weight * outcome
            if common and outcome > best[steps]:
                best[steps] = outcome

    def values(self) -> list[float]:
        return [
            _chance(weight) * ((1 - OPTIMISM) * total / weight + OPTIMISM * best) if weight else 0.0
            for weight, total, best in zip(self.weights, self._sums, self._best, strict=True)
        ]


def _chance(weight: float) -> float:
    """That a task of this share of the mix comes within the horizon."""
    missed = max(0.0, 1 - weight)
    for _ in range(HORIZON_LOG2):
        missed *= missed
    return 1 - missed


def _between(row: list[float], steps: float) -> float:
    low = int(steps)
    part = steps - low
    return row[low] + part * (row[low + 1] - row[low]) if part > 0 else row[low]
