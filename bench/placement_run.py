"""Places arrivals on a simulated cluster by one policy and records how much is allocated."""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Callable, Sequence
from typing import NamedTuple

from harness.published import clustering, fgd, rescaled, task_class, typical

from bench.openb import Node
from shoal.core.books.foresight import Foresight
from shoal.core.books.vacancy import Footprint, Vacancy, choices, fits, take
from shoal.core.scheduling.classic import best_fit, dot_product, packing, unusable


class Spot(NamedTuple):
    """A room that fits, how good it is and which of its GPUs to take."""

    score: int
    room: Vacancy
    place: int


class Cluster:
    """Nodes grouped by their room: nodes with the same room get the same score."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.groups: dict[Vacancy, list[int]] = {}
        self._open: dict[Vacancy, None] = {}  # rooms with some GPU left, in order of appearance
        self._hopeless: set[Footprint] = set()  # nothing departs, so what fits nowhere never will
        for index, node in enumerate(nodes):
            self._enter(index, node.room)

    def fitting(self, task: Footprint) -> list[Vacancy]:
        if task in self._hopeless:
            return []
        cpu_milli, memory_mb = task.cpu_milli, task.memory_mb
        rooms = [
            room
            for room in (self._open if task.gpus else self.groups)
            if room[0] >= cpu_milli and room[1] >= memory_mb and fits(room, task)
        ]
        if not rooms:
            self._hopeless.add(task)
        return rooms

    def move(self, index: int, before: Vacancy, after: Vacancy) -> None:
        nodes = self.groups[before]
        nodes.remove(index)
        if not nodes:
            del self.groups[before]
            self._open.pop(before, None)
        self._enter(index, after)

    def _enter(self, index: int, room: Vacancy) -> None:
        insort(self.groups.setdefault(room, []), index)
        if room.gpus and room.gpus[0]:
            self._open[room] = None


class Policy:
    """Scores the rooms that fit; the best score wins. Each policy defines the score."""

    keeps_classes = False

    def __init__(self, nodes: Sequence[Node], tasks: Sequence[Footprint]) -> None:
        """`tasks` is the whole list in advance: only FGD may look at it."""

    def saw(self, task: Footprint) -> None:
        """The task arrived; called before it is placed."""

    def look(self, cluster: Cluster, free_milli: int, all_milli: int) -> None:
        """See what is free; called before a task is placed."""

    def spots(self, rooms: list[Vacancy], task: Footprint) -> list[Spot]:
        return [Spot(self.score(room, task), room, self.place(room, task)) for room in rooms]

    def score(self, room: Vacancy, task: Footprint) -> int:  # noqa: ARG002
        return 0

    def place(self, room: Vacancy, task: Footprint) -> int:
        return choices(room, task)[-1]


class FirstFit(Policy):
    """Every room that fits is as good as any other: the tie rule decides."""


class Random(Policy):
    """Chooses rooms and GPUs at random, under any tie rule."""


class DotProduct(Policy):
    def score(self, room: Vacancy, task: Footprint) -> int:
        return dot_product(room, task)


class BestFit(Policy):
    def spots(self, rooms: list[Vacancy], task: Footprint) -> list[Spot]:
        spots = super().spots(rooms, task)
        lowest, highest = min(spots).score, max(spots).score
        return [spot._replace(score=rescaled(spot.score, lowest, highest)) for spot in spots]

    def score(self, room: Vacancy, task: Footprint) -> int:
        return best_fit(room, task)


class Packing(Policy):
    def score(self, room: Vacancy, task: Footprint) -> int:
        return packing(room, task)


class Clustering(Policy):
    keeps_classes = True

    def score(self, room: Vacancy, task: Footprint) -> int:
        return clustering(room, task)


class Fgd(Policy):
    """Published FGD: it knows the mix of the whole list in advance."""

    def __init__(self, nodes: Sequence[Node], tasks: Sequence[Footprint]) -> None:  # noqa: ARG002
        self._mix = typical(tasks)
        self._weight = sum(self._mix.values())
        self._unusable: dict[Vacancy, int] = {}
        self._best: dict[tuple[Vacancy, Footprint], tuple[int, int]] = {}

    def spots(self, rooms: list[Vacancy], task: Footprint) -> list[Spot]:
        task = task._replace(memory_mb=0)
        result = []
        for room in rooms:
            key = (room._replace(memory_mb=0), task)
            if key not in self._best:
                self._best[key] = self._score(*key)
            score, place = self._best[key]
            result.append(Spot(score, room, -place))
        return result

    def _score(self, room: Vacancy, task: Footprint) -> tuple[int, int]:
        before = self._fragments(room)
        return max(
            (fgd(before, self._fragments(take(room, task, place)), self._weight), -place)
            for place in choices(room, task)
        )

    def _fragments(self, room: Vacancy) -> int:
        known = self._unusable.get(room)
        if known is None:
            known = self._unusable[room] = unusable(room, self._mix)
        return known


class ShoalDefault(Policy):
    """Shoal's own policy: it knows only the tasks that have arrived."""

    def __init__(self, nodes: Sequence[Node], tasks: Sequence[Footprint]) -> None:  # noqa: ARG002
        self._foresight = Foresight(max(node.room.cpu_milli for node in nodes if node.room.gpus))

    def saw(self, task: Footprint) -> None:
        self._foresight.saw(task)

    def look(self, cluster: Cluster, free_milli: int, all_milli: int) -> None:
        if self._foresight.outdated(free_milli, all_milli):
            vacancies = ((room, len(nodes)) for room, nodes in cluster.groups.items())
            self._foresight.look(vacancies, free_milli)

    def spots(self, rooms: list[Vacancy], task: Footprint) -> list[Spot]:
        result = []
        for room in rooms:
            loss, place = self._foresight.loss(room, task)
            result.append(Spot(-loss, room, place))
        return result


POLICIES: dict[str, Callable[[Sequence[Node], Sequence[Footprint]], Policy]] = {
    "random": Random,
    "first-fit": FirstFit,
    "dot-product": DotProduct,
    "clustering": Clustering,
    "packing": Packing,
    "best-fit": BestFit,
    "fgd": Fgd,
    "shoal-default": ShoalDefault,
}


def replay(
    policy: str,
    nodes: Sequence[Node],
    tasks: Sequence[Footprint],
    arrivals: Sequence[Footprint],
    ties: str,
    seed: int,
) -> dict[int, float]:
    """The allocated share of the capacity by the arrived share, both in percent.

    Nothing departs; a task that does not fit is dropped. The figure at k percent is the mean over
    the arrivals after which the arrived share rounds to k, as published.
    """
    cluster = Cluster(nodes)
    chooser = POLICIES[policy](nodes, tasks)
    generator = random.Random(f"{seed} {policy}")
    capacity = sum(sum(node.room.gpus) for node in nodes)
    sums: dict[int, list[int]] = {}
    arrived = allocated = 0
    for task in arrivals:
        arrived += task.milli
        chooser.saw(task)
        rooms = cluster.fitting(task)
        if rooms:
            chooser.look(cluster, capacity - allocated, capacity)
            put(cluster, chooser, rooms, task, generator, by_name=ties == "name")
            allocated += task.milli
        total = sums.setdefault(round(100 * arrived / capacity), [0, 0])
        total[0] += allocated
        total[1] += 1
    return {k: 100 * total / count / capacity for k, (total, count) in sums.items()}


def put(
    cluster: Cluster,
    chooser: Policy,
    rooms: list[Vacancy],
    task: Footprint,
    generator: random.Random,
    *,
    by_name: bool,
) -> int:
    """Places the task and returns the node's index."""
    spots = chooser.spots(rooms, task)
    highest = max(spot.score for spot in spots)
    best = [spot for spot in spots if spot.score == highest]
    groups = cluster.groups
    if by_name and not isinstance(chooser, Random):
        spot = min(best, key=lambda spot: groups[spot.room][0])
        index = groups[spot.room][0]
    else:
        spot = generator.choices(best, [len(groups[spot.room]) for spot in best])[0]
        index = generator.choice(groups[spot.room])
    place = spot.place
    if isinstance(chooser, Random) and task.shared:
        fitting = sum(left >= task.gpu_milli for left in spot.room.gpus)
        place = generator.randrange(fitting)
    after = take(spot.room, task, place)
    if chooser.keeps_classes and task.gpus:
        after = after._replace(held=tuple(sorted({*after.held, task_class(task)})))
    cluster.move(index, spot.room, after)
    return index
