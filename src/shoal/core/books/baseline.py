"""What nodes of a kind usually measure, and how a node's figures compare.

Busy nodes are compared with busy ones and idle with idle ones: a probe beside a running job
measures less, and that is not a fault. A GPU is compared with its siblings, too. With fewer than
three others known, a node is compared with its own history. Counters of errors only grow, so what
counts is by how much since the node's last check, whether that passed or not.
"""

from __future__ import annotations

import enum
from typing import TypeVar

import msgspec

from shoal.core.books.numbers import keep, lower_median, upper_median
from shoal.model.health import CheckResult, Stand, Verdict
from shoal.model.resources import Kind

NODES_PER_KIND_MAX = 256  # the node that was checked longest ago makes room
KINDS_MAX = 64
FIGURES_PER_NODE_MAX = 256
OWN_KEPT = 8
OTHERS_NEEDED = 3
OWN_NEEDED = 3
MAD_FACTOR = 6  # about four standard deviations


class Sense(enum.StrEnum):
    RATE = "rate"  # more is better
    LOAD = "load"  # less is better
    GROWTH = "growth"  # a counter: less growth since the last check is better
    TOLD = "told"  # shown, not judged


class Measure(msgspec.Struct, frozen=True):
    """`tolerance_milli`: how far from the median a node may always be. `floor`: a load below it is
    never too high, and a counter may always grow by so much."""

    sense: Sense
    tolerance_milli: int = 0
    floor: int = 0


# By the ending of a figure's name; the first match counts. The tolerances are wider than the
# scatter of healthy machines of one kind: a busy sibling thread alone halves a core's figure, and
# disks are shared. A node worth a quarantine is further off.
MEASURES: tuple[tuple[str, Measure], ...] = (
    ("matmul_gflops", Measure(Sense.RATE, 100)),
    ("copy_up_mbs", Measure(Sense.RATE, 250)),
    ("copy_down_mbs", Measure(Sense.RATE, 250)),
    ("cpu_one_mbs", Measure(Sense.RATE, 500)),
    ("cpu_all_mbs", Measure(Sense.RATE, 500)),
    ("cpu_share_milli", Measure(Sense.RATE, 600)),
    ("memory_mbs", Measure(Sense.RATE, 300)),
    ("disk_write_mbs", Measure(Sense.RATE, 600)),
    ("disk_read_mbs", Measure(Sense.RATE, 600)),
    ("steal_milli", Measure(Sense.LOAD, 500, 50)),
    ("memory_pressure_milli", Measure(Sense.LOAD, 500, 100)),
    ("clock_offset_us", Measure(Sense.LOAD, 500, 100_000)),
    # Links. Weeks may lie between two checks, in which a switch restarts and single bits flip.
    ("_rate_mbits", Measure(Sense.RATE, 50)),
    ("_up", Measure(Sense.RATE)),
    ("_link_downs", Measure(Sense.GROWTH, floor=4)),
    ("_recoveries", Measure(Sense.GROWTH, floor=20)),
    ("_crc_errors", Measure(Sense.GROWTH, floor=1_000)),
    ("_replays", Measure(Sense.GROWTH, floor=1_000)),
    ("_errors", Measure(Sense.GROWTH, floor=1_000)),
)
TOLD = Measure(Sense.TOLD)

Value = TypeVar("Value")


class Fleet(msgspec.Struct):
    """By kind and load: each node's last figures. By node: its own recent ones. Bounded."""

    kinds: dict[str, dict[str, dict[str, int]]] = {}
    own: dict[str, dict[str, list[int]]] = {}


def key_of(kind: Kind, busy: bool) -> str:
    gpu = f"{kind.gpus}x{kind.gpu_model}:{kind.gpu_memory_mb}"
    return f"{gpu}/{kind.cpu_milli}/{kind.memory_mb}/{'busy' if busy else 'idle'}"


def learn(fleet: Fleet, node: str, kind: Kind, result: CheckResult) -> None:
    """Learn only from checks that passed; otherwise a slow fleet would become the norm."""
    key = key_of(kind, result.busy)
    values = [(name, value) for name, value in result.figures.items() if not _counts(name)]
    figures = dict(values[:FIGURES_PER_NODE_MAX])
    nodes = fleet.kinds.pop(key, {})
    fleet.kinds[key] = nodes  # the latest to learn stands last
    nodes.pop(node, None)
    nodes[node] = figures
    _trim(nodes, NODES_PER_KIND_MAX)
    _trim(fleet.kinds, KINDS_MAX)
    own_key = f"{node}/{'busy' if result.busy else 'idle'}"
    own = fleet.own.pop(own_key, {})
    fleet.own[own_key] = {name: own.get(name, []) for name in figures}
    for name, value in figures.items():
        keep(fleet.own[own_key][name], value, OWN_KEPT)
    _trim(fleet.own, KINDS_MAX * NODES_PER_KIND_MAX)


def count(fleet: Fleet, node: str, result: CheckResult) -> None:
    """After every check: otherwise a counter that grew once would fail all checks to come."""
    counters = [(name, [value]) for name, value in result.figures.items() if _counts(name)]
    if counters:
        fleet.own.pop(_counters(node), None)
        fleet.own[_counters(node)] = dict(counters[:FIGURES_PER_NODE_MAX])
        _trim(fleet.own, KINDS_MAX * NODES_PER_KIND_MAX)


def judge(fleet: Fleet, node: str, kind: Kind, result: CheckResult) -> Verdict:
    """A fault or a figure out of range fails the check. A probe that failed says nothing about the
    node, so it does not fail the check."""
    if result.error:
        return Verdict(passed=True, why=f"nothing measured: {result.error}")
    others = fleet.kinds.get(key_of(kind, result.busy), {})
    own = fleet.own.get(f"{node}/{'busy' if result.busy else 'idle'}", {})
    own = {**own, **fleet.own.get(_counters(node), {})}
    stands = tuple(
        _stand(
            name,
            value,
            [theirs[name] for other, theirs in others.items() if other != node and name in theirs]
            + _siblings(name, result.figures),
            own.get(name, []),
        )
        for name, value in result.figures.items()
    )
    low = [stand for stand in stands if stand.low]
    if result.faults:
        more = f" and {len(result.faults) - 1} more" if len(result.faults) > 1 else ""
        return Verdict(passed=False, why=result.faults[0] + more, stands=stands)
    if low:
        return Verdict(passed=False, why="; ".join(map(_tell, low[:3])), stands=stands)
    compared = sum(stand.usual is not None for stand in stands)
    if not compared:
        return Verdict(passed=True, why="no fault found; nothing to compare with", stands=stands)
    return Verdict(passed=True, why=f"{compared} figures as expected", stands=stands)


def forget(fleet: Fleet, node: str) -> None:
    """It left the cluster."""
    for nodes in fleet.kinds.values():
        nodes.pop(node, None)
    for load in ("busy", "idle"):
        fleet.own.pop(f"{node}/{load}", None)
    fleet.own.pop(_counters(node), None)


def measure_of(figure: str) -> Measure:
    return next((measure for ending, measure in MEASURES if figure.endswith(ending)), TOLD)


def _counts(figure: str) -> bool:
    return measure_of(figure).sense is Sense.GROWTH


def _counters(node: str) -> str:
    return f"{node}/counters"


def _siblings(figure: str, figures: dict[str, int]) -> list[int]:
    """The same figure of the node's other GPUs, which are of one model."""
    gpu, _, ending = figure.partition("_")
    if not gpu.removeprefix("gpu").isdecimal():
        return []
    return [
        value
        for name, value in figures.items()
        if name != figure and name.startswith("gpu") and name.partition("_")[2] == ending
    ]


def _stand(figure: str, value: int, others: list[int], own: list[int]) -> Stand:
    measure = measure_of(figure)
    if measure.sense is Sense.GROWTH:
        return _growth(figure, value, own, measure.floor)
    by_own = len(others) < OTHERS_NEEDED
    known = own if by_own else others
    if len(known) < (OWN_NEEDED if by_own else OTHERS_NEEDED):
        return Stand(figure=figure, value=value)
    usual = upper_median(known)
    if measure.sense is Sense.TOLD:
        return Stand(figure=figure, value=value, usual=usual, of=len(known), own=by_own)
    scatter = lower_median(abs(one - usual) for one in known)
    far = max(usual * measure.tolerance_milli // 1000, MAD_FACTOR * scatter)
    if measure.sense is Sense.RATE:
        limit = max(usual - far, 0)
        low = value < limit
    else:
        limit = max(usual + far, measure.floor)
        low = value > limit
    return Stand(
        figure=figure, value=value, usual=usual, limit=limit, of=len(known), own=by_own, low=low
    )


def _growth(figure: str, value: int, own: list[int], floor: int) -> Stand:
    """A counter that is lower than before began again at 0."""
    if not own:
        return Stand(figure=figure, value=value)
    limit = own[-1] + floor
    return Stand(
        figure=figure, value=value, usual=own[-1], limit=limit, of=1, own=True, low=value > limit
    )


def _tell(stand: Stand) -> str:
    if _counts(stand.figure):
        return f"{stand.figure} grew from {stand.usual} to {stand.value} since its last check"
    of = "its own earlier checks" if stand.own else f"{stand.of} others of its kind"
    return f"{stand.figure} is {stand.value}; {of} measured {stand.usual}"


def _trim(table: dict[str, Value], most: int) -> None:
    while len(table) > most:
        del table[next(iter(table))]
