"""The best layouts for a model on a cluster, ranked, and why the other families lose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from shoal.plan import layout as layouts
from shoal.plan.hardware import GIB, Cluster, Impossible, at_least, at_most
from shoal.plan.layout import Layout, Recompute, Stack, memory
from shoal.plan.model import Model
from shoal.plan.step import Estimate, Known, Parts, quick

BATCH_MAX = 100_000_000
BATCH_SLACK = 0.1  # a layout may round the batch by this share
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
INTERLEAVES = (1, 2, 3, 4, 5, 6, 8)
TENSOR_NODES = 1  # tensor groups stay within a node: beyond it they never win
CONTEXT_TOKENS = 8192  # a part of a sequence that is worth a GPU of its own
CONTEXT_MAX = 64
PIPELINE_MAX = 128
LEAST_GPUS_MAX = 1 << 20


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Layouts that use the same kinds of parallelism."""

    name: str
    best: Estimate | None  # None: none of them fits
    least_bytes: float  # on a GPU, of the layout that needs the least
    reason: str  # why it is not the best; empty for the family that is


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a search gives: the best layouts, best first, and the families."""

    ranked: tuple[Estimate, ...]
    families: tuple[Family, ...]
    tried: int

    @property
    def best(self) -> Estimate:
        return self.ranked[0]


def search(
    model: Model,
    cluster: Cluster,
    batch: int,
    stack: Stack | None = None,
    *,
    keep: int = 10,
    fixed: Mapping[str, int | str | bool] | None = None,
) -> Found:
    """The fastest layouts that fit. `batch` is in sequences; `fixed` holds fields of the layout."""
    model.check()
    cluster.check()
    at_least("batch", batch, 1)
    at_most("batch", batch, BATCH_MAX)
    chosen, wanted = stack or Stack(), dict(fixed or {})
    cluster.accelerator.peak(chosen.precision)
    best: dict[str, Estimate] = {}
    least: dict[str, float] = {}
    fast: list[Estimate] = []
    known: Known = {}
    tried = 0
    room = cluster.accelerator.memory_bytes
    for bare in candidates(model, cluster.gpus, cluster.node.gpus, batch, wanted):
        tried += 1
        name = family(bare)
        fitting, need = _first_fit(model, bare, chosen, room, wanted)
        least[name] = min(need, least.get(name, need))
        if fitting is None:
            continue
        found = quick(model, cluster, fitting, chosen, known)
        fast.append(found)
        if name not in best or found.tokens_s > best[name].tokens_s:
            best[name] = found
    if not tried:
        raise Impossible(_no_layout(model, cluster, batch, wanted))
    if not fast:
        raise Impossible(_too_large(model, cluster, batch, chosen, wanted, min(least.values())))
    fast.sort(key=lambda found: -found.tokens_s)
    return Found(
        ranked=tuple(fast[:keep]),
        families=_families(best, least, fast[0], room),
        tried=tried,
    )


def family(layout: Layout) -> str:
    """The kinds of parallelism that a layout uses."""
    kinds = ["DDP" if layout.zero == 0 else "FSDP" if layout.zero == 3 else f"ZeRO-{layout.zero}"]
    for kind in ("tensor", "pipeline", "context", "expert"):
        if getattr(layout, kind) > 1:
            kinds.append(kind)
    return " + ".join(kinds)


def candidates(
    model: Model, gpus: int, node: int, batch: int, fixed: Mapping[str, int | str | bool]
) -> Iterator[Layout]:
    """All layouts worth a look, without a choice of what is recomputed."""
    for tensor in _allowed("tensor", _powers(min(node * TENSOR_NODES, gpus)), fixed):
        for pipeline in _allowed("pipeline", _stages(model), fixed):
            for context in _allowed("context", _contexts(model), fixed):
                split = tensor * pipeline * context
                if gpus % split:
                    continue
                data = gpus // split
                for expert in _allowed("expert", _experts(model, data * context), fixed):
                    bare = Layout(
                        data=data, tensor=tensor, pipeline=pipeline, context=context, expert=expert
                    )
                    yield from _filled(model, bare, batch, fixed)


def _filled(
    model: Model, bare: Layout, batch: int, fixed: Mapping[str, int | str | bool]
) -> Iterator[Layout]:
    """With micro-batches, interleaving and ZeRO."""
    sizes = MICRO_BATCHES if bare.context == 1 else MICRO_BATCHES[:1]  # first split less, then this
    for micro_batch in _allowed("micro_batch", sizes, fixed):
        many = round(batch / (bare.data * micro_batch))
        if many < 1 or abs(bare.data * micro_batch * many / batch - 1) > BATCH_SLACK:
            continue
        for interleave in _allowed("interleave", INTERLEAVES, fixed):
            if interleave > 1 and bare.pipeline == 1:
                break
            for zero in _allowed("zero", (0, 1, 2, 3), fixed):
                if bare.pipeline > 1 and zero >= 2:
                    continue  # each micro-batch would reduce or gather again
                if bare.data * bare.context == 1 and zero:
                    continue
                one = msgspec.structs.replace(
                    bare,
                    micro_batch=micro_batch,
                    micro_batches=many,
                    interleave=interleave,
                    zero=zero,
                    sequence_parallel=bool(fixed.get("sequence_parallel", bare.tensor > 1)),
                )
                if not layouts.problem(model, one):
                    yield one


def _first_fit(
    model: Model,
    bare: Layout,
    stack: Stack,
    room: float,
    fixed: Mapping[str, int | str | bool],
) -> tuple[Layout | None, float]:
    """With the least recomputation that fits, and the least memory that it can do with."""
    ways: tuple[Recompute, ...] = ("none", "full") if stack.flash else ("none", "selective", "full")
    need = float("inf")
    for recompute in ways:
        if fixed.get("recompute", recompute) != recompute and not (
            recompute == "none" and fixed["recompute"] == "selective" and stack.flash
        ):
            continue
        one = msgspec.structs.replace(bare, recompute=recompute)
        need = min(need, memory(model, one, stack).total)
        if need <= room:
            return one, need
    return None, need


# -- what is tried


def _allowed(
    name: str, values: Iterable[int], fixed: Mapping[str, int | str | bool]
) -> Iterable[int]:
    return (int(fixed[name]),) if name in fixed else values


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _stages(model: Model) -> list[int]:
    """Numbers of stages that share out the layers well."""
    found = {1}
    for layers in (model.layers, model.layers + 2):
        found |= {
            stages for stages in range(2, min(layers, PIPELINE_MAX) + 1) if layers % stages == 0
        }
    found |= set(_powers(min(model.layers // 2, PIPELINE_MAX)))  # the last may have fewer layers
    return sorted(stages for stages in found if stages <= model.layers)


def _contexts(model: Model) -> list[int]:
    most = min(CONTEXT_MAX, 2 * model.sequence // CONTEXT_TOKENS)
    return _powers(max(1, most))


def _experts(model: Model, replicas: int) -> list[int]:
    if not model.experts:
        return [1]
    return [size for size in _powers(model.experts) if replicas % size == 0]


# -- sentences


def _families(
    best: Mapping[str, Estimate], least: Mapping[str, float], winner: Estimate, room: float
) -> tuple[Family, ...]:
    found = [
        Family(
            name=name,
            best=best.get(name),
            least_bytes=need,
            reason=_reason(best.get(name), winner, need, room),
        )
        for name, need in least.items()
    ]
    return tuple(sorted(found, key=lambda one: -(one.best.tokens_s if one.best else 0.0)))


_WORDS = {
    "matmul": "smaller matrix products",
    "attention": "attention",
    "moving": "kernels bound by memory bandwidth",
    "recompute": "recomputation",
    "tensor": "collectives of the tensor groups",
    "context": "collectives of the context groups",
    "expert": "tokens on their way to experts",
    "pipeline": "transfers between stages",
    "bubble": "the pipeline's bubble",
    "data": "gradients and weights between replicas",
    "optimizer": "the optimizer",
    "other": "gaps",
}


def _reason(one: Estimate | None, winner: Estimate, need: float, room: float) -> str:
    if one is None:
        return f"it does not fit: a GPU would need {need / GIB:.0f} GiB and has {room / GIB:.0f}"
    if one.layout == winner.layout:
        return ""
    slower = winner.tokens_s / one.tokens_s - 1
    if slower < 0.005:
        return "it is as fast as the best"

    def per_token(estimate: Estimate, part: str) -> float:
        seconds: float = getattr(estimate.parts, part)
        return seconds / estimate.layout.batch

    costs = {
        part: per_token(one, part) - per_token(winner, part) for part in Parts.__struct_fields__
    }
    worst = max(costs, key=lambda part: costs[part])
    share = getattr(one.parts, worst) / one.step_s
    return f"{slower:.0%} slower, because of {_WORDS[worst]}: {share:.0%} of its step"


def _no_layout(
    model: Model, cluster: Cluster, batch: int, fixed: Mapping[str, int | str | bool]
) -> str:
    given = ", ".join(f"{name} {value}" for name, value in fixed.items())
    if given:
        return (
            f"no layout of {model.name} on {cluster.gpus} GPUs has {given} and a batch of {batch} "
            "sequences: give fewer of them, or another number of nodes"
        )
    return (
        f"{cluster.gpus:,} GPUs cannot share a batch of {many(batch, 'sequence')} of {model.name}: "
        "give a larger batch, fewer nodes, or a number of nodes with small factors"
    )


def _too_large(
    model: Model,
    cluster: Cluster,
    batch: int,
    stack: Stack,
    fixed: Mapping[str, int | str | bool],
    need: float,
) -> str:
    room = cluster.accelerator.memory_bytes
    said = (
        f"{model.name} does not fit on {cluster.gpus} x {cluster.accelerator.name}: the best "
        f"layout needs {need / GIB:.0f} GiB on each GPU, which has {room / GIB:.0f}"
    )
    nodes = least_nodes(model, cluster, batch, stack, fixed)
    if nodes:
        gpus = nodes * cluster.node.gpus
        least = f"{said}; the least that fits is {many(nodes, 'node')} ({many(gpus, 'GPU')})"
        # on as many nodes as there are, only the batch can have been too small for a layout
        more = f" with a batch of {gpus:,} sequences ({count_text(gpus * model.sequence)} tokens)"
        return f"{least}{more}" if nodes <= cluster.nodes else least
    return f"{said}; no number of such nodes helps: use GPUs with more memory or a shorter sequence"


def least_nodes(
    model: Model,
    cluster: Cluster,
    batch: int,
    stack: Stack,
    fixed: Mapping[str, int | str | bool] | None = None,
) -> int:
    """The fewest nodes of this kind on which a layout fits; 0 if there are none."""
    room, node = cluster.accelerator.memory_bytes, cluster.node.gpus
    wanted = {"micro_batch": 1, **(fixed or {})}

    def fits(nodes: int) -> bool:
        some = max(batch, nodes * node)  # a batch can grow, so it never decides
        return any(
            _first_fit(model, bare, stack, room, wanted)[0] is not None
            for bare in candidates(model, nodes * node, node, some, wanted)
        )

    nodes = 1
    while not fits(nodes):
        nodes *= 2
        if nodes * node > LEAST_GPUS_MAX:
            return 0
    step = max(1, nodes // 8)
    return next((few for few in range(nodes // 2 + step, nodes, step) if fits(few)), nodes)


# Amounts in words, as a plan shows them.


def count_text(value: float) -> str:
    """Three figures: '70.6B', '2T', '1,024'."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}"


def many(count: int, noun: str) -> str:
    """'1 node', '1,024 nodes'."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
