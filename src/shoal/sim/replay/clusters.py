"""The cluster of a replay: its nodes and the conditions they run under."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal.model.node import GPUS_PER_NODE_MAX, NodeSpec
from shoal.model.supply import Supply
from shoal.sim.replay.readers.rows import Row, Rows
from shoal.sim.replay.traces import Gangs, TraceError

NEVER_MS = 1 << 60  # a checkpoint that is never taken; a time that never comes
DAY_MS = 86_400_000
NODES_MAX = 200_000

# The table of causes counts what happened to 2,048 nodes in 54 days.
CAUSES_NODE_DAYS = 2_048 * 54
# These end the jobs on the node but do not break it; all others do.
SOFTWARE_CATEGORIES = ("Dependency", "Unknown")

# Columns of a nodes CSV, by the names that public lists use for them.
NODE_NAME = ("node", "id", "name", "sn")
NODE_GPUS = ("gpus", "gpu", "num_gpu")
NODE_CPU_MILLI = ("cpu_milli",)
NODE_MEMORY_MB = ("memory_mb", "memory_mib")
NODE_MODEL = ("gpu_model", "model")
NODE_COUNT = "count"


class Cause(msgspec.Struct, frozen=True):
    """A cause of failure, its count in the table, and whether the node must be repaired."""

    name: str
    weight: int
    breaks_node: bool = True


class Failures(msgspec.Struct, frozen=True):
    """Each node fails at random, this often in a thousand days, and is then out for the repair."""

    per_1000_node_days: float = 0.0
    repair_ms: int = 4 * 3_600_000
    causes: tuple[Cause, ...] = (Cause("node failure", 1),)


class Slowness(msgspec.Struct, frozen=True):
    """This share of nodes or attempts runs at this speed; 1 is full speed."""

    share: float = 0.0
    speed: float = 1.0


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions that the trace does not contain."""

    start_up_ms: int = 10_000  # from the launch command until all members work
    stop_ms: int = 1_000  # from the stop command until the members have ended
    checkpoint_ms: int = 600_000  # 0: nothing is ever lost
    restart_cost_ms: int = 30_000  # to load the checkpoint in every attempt but the first
    failures: Failures = Failures()
    slow_nodes: Slowness = Slowness()  # permanently
    stragglers: Slowness = Slowness()  # one attempt of a job, whatever the reason


def alike(count: int, *, gpus: int, cpu_milli: int = 0, memory_mb: int = 0) -> list[NodeSpec]:
    """n1..nN with the same resources."""
    return [
        NodeSpec(id=f"n{number}", gpus=gpus, cpu_milli=cpu_milli, memory_mb=memory_mb)
        for number in range(1, count + 1)
    ]


def read_nodes(path: Path) -> list[NodeSpec]:
    """Nodes from a CSV with a row for each, or for each kind with a `count`."""
    rows = Rows(path)
    gpus = next((name for name in NODE_GPUS if name in rows.index), "")
    if not gpus:
        rows.need("gpus", why="a list of nodes")
    nodes: dict[str, NodeSpec] = {}
    for row in rows:
        for spec in _nodes_of(row, rows, gpus, len(nodes)):
            if spec.id in nodes:
                raise row.problem(f"two nodes are named {spec.id}")
            nodes[spec.id] = spec
    if not nodes:
        raise TraceError(f"{path}: has no nodes, only a header")
    return list(nodes.values())


def _nodes_of(row: Row, rows: Rows, gpus: str, known: int) -> list[NodeSpec]:
    def column(names: tuple[str, ...]) -> str:
        return next((name for name in names if name in rows.index), "")

    name = row.text(column(NODE_NAME))
    count = row.whole(NODE_COUNT, 1, most=NODES_MAX)
    cpu_milli = row.whole(column(NODE_CPU_MILLI), 0)
    if "cpus" in rows.index:
        cpu_milli = round(row.number_in("cpus") * 1000)
    memory_mb = row.whole(column(NODE_MEMORY_MB), 0)
    if "memory_gb" in rows.index:
        memory_mb = round(row.number_in("memory_gb") * 1024)
    specs = []
    for number in range(count):
        plain = f"{name}-{number + 1}" if name and count > 1 else name or f"n{known + number + 1}"
        fields = {
            "id": plain.lower(),
            "gpus": row.whole(gpus, most=GPUS_PER_NODE_MAX),
            "cpu_milli": cpu_milli,
            "memory_mb": memory_mb,
            "gpu_model": row.text(column(NODE_MODEL)),
            "place": row.text("place"),
            "containers": "podman",  # a table of nodes does not say what it can run
        }
        try:
            specs.append(msgspec.convert(fields, NodeSpec))
        except msgspec.ValidationError as error:
            raise row.problem(f"{error}") from error
    return specs


def read_causes(path: Path, repair_ms: int) -> Failures:
    """Causes and their counts: columns `component`, `category`, `interruptions`."""
    rows = Rows(path)
    rows.need("component", "category", "interruptions", why="a table of failures")
    causes = tuple(
        Cause(
            row.text("component", "unknown"),
            row.whole("interruptions"),
            row.text("category") not in SOFTWARE_CATEGORIES,
        )
        for row in rows
    )
    total = sum(cause.weight for cause in causes)
    if not total:
        raise TraceError(f"{path}: interruptions: no cause has any")
    return Failures(1000 * total / CAUSES_NODE_DAYS, repair_ms, causes)


def speeds(count: int, slow: Slowness, rng: random.Random) -> list[float]:
    """How fast each node is: the share of slow nodes is exact, the choice is random."""
    chosen = set(rng.sample(range(count), round(count * slow.share)))
    return [slow.speed if index in chosen else 1.0 for index in range(count)]


def gangs_for(nodes: Sequence[NodeSpec | Supply]) -> Gangs:
    """Jobs as these nodes can take them: a resource that no node lists does not count. Nodes that
    can be brought count as well."""
    return Gangs(
        max(node.gpus for node in nodes),
        cpus_count=any(node.cpu_milli for node in nodes),
        memory_counts=any(node.memory_mb for node in nodes),
    )
