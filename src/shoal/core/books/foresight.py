"""Shoal's own placement score: how much a placement takes from the tasks that come later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from shoal.core.books.filling import CPU_STEP_MIN, CPU_STEPS, Filling
from shoal.core.books.vacancy import WHOLE, Footprint, Vacancy, accepts, choices, take

MIX_TASKS_MAX = 1 << 14  # at this many tasks the counts are halved, so old tasks fade
MIX_KINDS_MAX = 512
REFRESH_EVERY_MIN = 20
CACHE_MAX = 100_000

# The supply of places is counted again when the free GPUs have changed by this part of all GPUs.
LOOK_AGAIN_SHARE = 20

# The weight of scarcity beside filling. At 0 the scarce tasks find their places taken; at 0.2,
# vacancies that would fill well are passed over.
SCARCITY_WEIGHT = 0.07


class Mix:
    """The GPU tasks that arrived, placed or not, by kind; bounded and slowly forgetting."""

    def __init__(self, counts: dict[Footprint, int] | None = None) -> None:
        self.counts: dict[Footprint, int] = counts or {}
        self.total = sum(self.counts.values())

    def add(self, task: Footprint) -> None:
        kind = task._replace(memory_mb=0)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.total += 1
        if self.total >= MIX_TASKS_MAX or len(self.counts) > MIX_KINDS_MAX:
            self.counts = {kind: count // 2 for kind, count in self.counts.items() if count > 1}
            self.total = sum(self.counts.values())


class Foresight:
    """Places a task where it costs later tasks the least.

    A vacancy is worth the GPU-milli that tasks like those seen are expected to fill in it
    (`Filling`), and a little more if it has places for tasks that run short of them (`Scarcity`).
    The loss of a placement is the worth before less the worth after. It is about the task's own
    milli if nothing is wasted. It is more if GPUs are left without CPUs, if the rest fits no common
    task, or if a task that runs short loses a place.
    """

    def __init__(self, largest_cpu_milli: int, mix: Mix | None = None) -> None:
        self.largest_cpu_milli = largest_cpu_milli
        self._cpu_step = max(CPU_STEP_MIN, -(-largest_cpu_milli // CPU_STEPS))
        self.mix = mix or Mix()
        self._until_refresh = 1
        self._looked_milli: int | None = None  # GPUs free when the supply was last counted
        self._scarcity = Scarcity({}, [], 0)
        self._refresh()

    def saw(self, task: Footprint) -> None:
        """A task arrived. The tables follow when the mix has grown by half."""
        if not task.gpus:
            return  # tasks without GPUs fill none, but `loss` keeps them from stranding any
        self.mix.add(task)
        self._until_refresh -= 1
        if not self._until_refresh:
            self._until_refresh = max(REFRESH_EVERY_MIN, self.mix.total // 2)
            self._refresh()

    def outdated(self, free_milli: int, all_milli: int) -> bool:
        """Should `look` count the supply again?"""
        then = self._looked_milli
        return then is None or abs(free_milli - then) * LOOK_AGAIN_SHARE > all_milli

    def look(self, vacancies: Iterable[tuple[Vacancy, int]], free_milli: int) -> None:
        """Count which tasks run short. `vacancies` are those of the cluster, each with the number
        of nodes that have it."""
        self._scarcity = Scarcity(self.mix.counts, vacancies, free_milli)
        self._looked_milli = free_milli
        self._forget()

    def loss(self, vacancy: Vacancy, task: Footprint) -> tuple[int, int]:
        """What placing the task costs in millionths of a GPU, and the best place in
        `vacancy.gpus`."""
        losses = self._losses.get(task)
        if losses is None:
            losses = self._losses[task] = {}
        known = losses.get(vacancy)
        if known is None:
            value = self.value(vacancy)
            known = losses[vacancy] = min(
                (value - self.value(take(vacancy, task, place)), place)
                for place in choices(vacancy, task)
            )
        return known

    def value(self, vacancy: Vacancy) -> int:
        """What the vacancy is worth to tasks like those seen, in millionths of a GPU."""
        if not vacancy.gpus or not vacancy.gpus[0]:
            return 0
        key = (vacancy.cpu_milli, vacancy.gpus, vacancy.model)
        value = self._values.get(key)
        if value is None:
            if len(self._values) >= CACHE_MAX:
                self._forget()
            filled = self._filling(vacancy.model).value(vacancy)
            value = int(WHOLE * (filled + SCARCITY_WEIGHT * self._scarcity.value(vacancy)))
            self._values[key] = value
        return value

    def _filling(self, model: str) -> Filling:
        if model not in self._fillings:
            kinds = self._counts
            here = tuple(kind for kind in kinds if accepts(kind, model))
            if here not in self._by_kinds:  # most models are open to the same tasks
                self._by_kinds[here] = Filling(kinds, here, self._cpu_step)
            self._fillings[model] = self._by_kinds[here]
        return self._fillings[model]

    def _refresh(self) -> None:
        self._counts = dict(self.mix.counts)
        self._looked_milli = None
        self.drop_cache()

    def drop_cache(self) -> None:
        self._fillings: dict[str, Filling] = {}
        self._by_kinds: dict[tuple[Footprint, ...], Filling] = {}
        self._forget()

    def _forget(self) -> None:
        self._values: dict[tuple[int, tuple[int, ...], str], int] = {}
        self._losses: dict[Footprint, dict[Vacancy, tuple[int, int]]] = {}


class Scarcity:
    """How much of a vacancy is needed by tasks that run short of places.

    A place for a task is where the free GPUs hold one more like it. The mix says how many such
    tasks are expected before the cluster is full. That number divided by the places they have left
    is the chance that a place is needed: tasks that take any GPU have many places; tasks bound to a
    GPU model or to a whole node have few. A vacancy counts the milli of every task that it has a
    place for, times that chance. CPUs are left to `Filling`.
    """

    def __init__(
        self,
        counts: Mapping[Footprint, int],
        vacancies: Iterable[tuple[Vacancy, int]],
        free_milli: int,
    ) -> None:
        parts: dict[str, Counter[int]] = {}  # by model: GPUs by what is left of them
        wholes: dict[str, Counter[int]] = {}  # by model: nodes by how many whole GPUs are free
        for vacancy, nodes in vacancies:
            by_left = parts.setdefault(vacancy.model, Counter())
            for left in vacancy.gpus:
                by_left[left] += nodes
            wholes.setdefault(vacancy.model, Counter())[vacancy.gpus.count(WHOLE)] += nodes
        shapes: Counter[tuple[int, int, tuple[str, ...]]] = Counter()
        asked = 0
        for task, count in counts.items():
            shapes[task.gpus, task.gpu_milli, task.models] += count
            asked += count * task.milli
        self._weights: list[tuple[Footprint, float]] = []  # the milli that one place counts
        for (gpus, gpu_milli, models), count in shapes.items():
            shape = Footprint(0, 0, gpus, gpu_milli, models)
            supply, each = (parts, gpu_milli) if shape.shared else (wholes, gpus)
            places = sum(
                number * (size // each)
                for model, by_size in supply.items()
                if accepts(shape, model)
                for size, number in by_size.items()
            )
            if places:
                chance = min(1.0, count * free_milli / (asked * places))
                self._weights.append((shape, chance * shape.milli))
        self._parts: dict[tuple[str, int], float] = {}
        self._wholes: dict[tuple[str, int], float] = {}

    def value(self, vacancy: Vacancy) -> float:
        model, total = vacancy.model, 0.0
        for left in vacancy.gpus:
            worth = self._parts.get((model, left))
            if worth is None:
                shared = self._for(model, shared=True)
                worth = sum(weight * (left // shape.gpu_milli) for shape, weight in shared)
                self._parts[model, left] = worth
            total += worth
        free = vacancy.gpus.count(WHOLE)
        worth = self._wholes.get((model, free))
        if worth is None:
            whole = self._for(model, shared=False)
            worth = sum(weight * (free // shape.gpus) for shape, weight in whole)
            self._wholes[model, free] = worth
        return total + worth

    def _for(self, model: str, *, shared: bool) -> list[tuple[Footprint, float]]:
        return [
            (shape, weight)
            for shape, weight in self._weights
            if shape.shared == shared and accepts(shape, model)
        ]
