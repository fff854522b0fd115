"""How many nodes a goal needs: replays of one trace on more or fewer nodes, by bisection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from shoal.model.durations import duration_text
from shoal.model.node import NodeSpec
from shoal.sim.replay.metrics import Outcome, quantile
from shoal.sim.replay.traces import Arrival, TraceError

GROWTH_MAX = 16  # times as many nodes: a goal that needs more is not a question of nodes
NODES_MAX = 20_000
ADDED = "added"  # the names of nodes that do not exist begin with it

Figure = Literal["wait", "jct"]


class Goal(msgspec.Struct, frozen=True):
    """`p90 wait < 1h`: of all jobs, the time until they start or until they are done."""

    share: float | None  # None: the mean
    figure: Figure
    below_ms: int

    @property
    def name(self) -> str:
        return f"{'mean' if self.share is None else f'p{100 * self.share:g}'} {self.figure}"

    def of(self, times_ms: Sequence[int]) -> float:
        if self.share is None:
            return sum(times_ms) / max(len(times_ms), 1)
        return quantile(sorted(times_ms), self.share)


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """One replay: on how many nodes, what the goal's figure was, and whether the goal was met."""

    nodes: int
    gpus: int
    value_ms: float | None  # None: some jobs do not fit
    met: bool
    utilization: float


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`best` is the smallest size that meets the goal; None if none does. `tried` is in order of
    size. `kind` is the node that was added or left out."""

    now: Size
    best: Size | None
    tried: list[Size]
    kind: NodeSpec


Play = Callable[[list[NodeSpec]], Outcome | None]  # None: some jobs do not fit on these nodes


def search(nodes: Sequence[NodeSpec], goal: Goal, play: Play) -> Answer:
    """As many nodes as there are; if they are too few, twice as many and so on; then between."""
    if not nodes:
        raise TraceError("the cluster has no nodes to begin with")
    kind = usual(nodes)
    sizes: dict[int, Size] = {}

    def met(count: int) -> bool:
        if count not in sizes:
            cluster = resized(nodes, kind, count)
            sizes[count] = measure(cluster, goal, play(cluster))
        return sizes[count].met

    here, least = len(nodes), max(1, sum(node.kind != kind.kind for node in nodes))
    most = min(NODES_MAX, GROWTH_MAX * here)
    if met(here):
        low, high = least - 1, here
    else:
        low, high = here, min(most, 2 * here)
        while not met(high) and high < most:
            low, high = high, min(most, 2 * high)
    best = None
    if sizes[high].met:
        while high - low > 1 and high - low > here // 200:  # half a percent is exact enough
            middle = (low + high) // 2
            low, high = (low, middle) if met(middle) else (middle, high)
        best = sizes[high]
    return Answer(
        now=sizes[here], best=best, tried=[sizes[count] for count in sorted(sizes)], kind=kind
    )


def measure(cluster: Sequence[NodeSpec], goal: Goal, outcome: Outcome | None) -> Size:
    gpus = sum(node.gpus for node in cluster)
    if outcome is None:
        return Size(nodes=len(cluster), gpus=gpus, value_ms=None, met=False, utilization=0.0)
    records, sums = outcome.records, outcome.levels.sums
    if goal.figure == "wait":
        ends, begins = records.placed_ms, records.submit_ms
    else:
        ends, begins = records.finished_ms, records.submit_ms
    times = [end - begin for end, begin in zip(ends, begins, strict=True) if end >= 0]
    value = goal.of(times)
    up = sums["held"] + sums["wanted"] + sums["idle"]
    return Size(
        nodes=len(cluster),
        gpus=gpus,
        value_ms=value,
        met=value < goal.below_ms,
        utilization=sums["held"] / up if up else 0.0,
    )


def unreachable(goal: Goal, arrivals: Sequence[Arrival]) -> str:
    """Why no number of nodes can meet the goal, if that is known without a replay."""
    if goal.figure == "jct":
        works = goal.of([arrival.work_ms for arrival in arrivals])
        if works >= goal.below_ms:
            return f"the {goal.name} of the work alone is {duration_text(int(works))}"
    return ""


def usual(nodes: Sequence[NodeSpec]) -> NodeSpec:
    """A node of the kind that most of them are; among equals, of the one with more GPUs."""
    kinds = Counter(node.kind for node in nodes)
    return max(nodes, key=lambda node: (kinds[node.kind], node.gpus, node.cpu_milli))


def resized(nodes: Sequence[NodeSpec], kind: NodeSpec, count: int) -> list[NodeSpec]:
    """These nodes, with others like `kind` added, or the last ones like it left out."""
    if count >= len(nodes):
        prefix = ADDED
        while any(node.id.startswith(prefix) for node in nodes):
            prefix += "-x"
        more = range(1, count - len(nodes) + 1)
        return [*nodes, *[msgspec.structs.replace(kind, id=f"{prefix}-{n}") for n in more]]
    same = [node.id for node in nodes if node.kind == kind.kind]
    out = set(same[count - len(nodes) :])
    return [node for node in nodes if node.id not in out]
