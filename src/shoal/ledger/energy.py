"""Whose the measured energy of GPUs is: of those that held them while it was drawn.

A node reads its GPUs' energy counters every few seconds, and when one of its members starts or
ends. What a GPU drew between two readings goes to its holders by their parts of it, and to nobody
for the time in which it had none. Where a driver has no counter, its power stands for the time
since the last sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.ledger.accounts import HOUR_MS
from shoal.ledger.book_state import Member, Node
from shoal.ledger.postings import Postings, settle_node
from shoal.model.resources import WHOLE_GPU_MILLI
from shoal.model.series import NodeSample

# Power says nothing about the time between two samples that are further apart.
APART_MS_MAX = 15_000
# A counter does, but not for the jobs that came and went while no controller ran.
COUNTED_MS_MAX = 600_000

WATTS_MAX = 10_000  # of a GPU; more is a mistake of its driver
LEFT_MAX = (
    1_000  # members that ended since the last reading; more: the driver has stopped reporting
)

Span = tuple[str, int, int, int]  # a job, thousandths of the GPU, from and until when, in ms


def hear_energy(postings: Postings, node_id: str, sample: NodeSample, now_ms: int) -> None:
    """Counts only if every GPU of the node reports: a part says nothing about the whole."""
    node = postings.cluster.nodes.get(node_id)
    if node is None or not node.gpus:
        return
    for reading in sample.energy:
        at_ms = now_ms - reading.age_ms
        if len(reading.mj) == node.gpus and at_ms > node.power_ms:
            if len(node.counters) == node.gpus and at_ms - node.power_ms <= COUNTED_MS_MAX:
                drawn = [new - old for new, old in zip(reading.mj, node.counters, strict=True)]
                most = WATTS_MAX * (at_ms - node.power_ms)
                if min(drawn) >= 0 and max(drawn) <= most:  # not if the driver was loaded anew
                    _divide(postings, node_id, node, at_ms, drawn)
            _begin(node, at_ms, list(reading.mj))
    watts = [gpu.power_w for gpu in sample.gpus if gpu.power_w is not None]
    if not sample.energy and len(watts) == node.gpus:
        passed_ms = now_ms - node.power_ms
        if node.power_ms >= 0 and 0 < passed_ms <= APART_MS_MAX:
            _divide(postings, node_id, node, now_ms, [one * passed_ms for one in watts])
        _begin(node, now_ms, [])


def hold(postings: Postings, job_id: str, member: Member, sign: int) -> None:
    """The member gets its GPUs, or gives them back: who had them is remembered up to the next
    reading, if there are any."""
    node, now_ms = postings.cluster.nodes[member.node], postings.cluster.now_ms
    settle_node(postings, member.node, node)
    for gpu in member.gpus:
        node.held[gpu] += sign * member.share
    if sign > 0:
        member.held_ms = now_ms
    elif len(node.left) >= LEFT_MAX:
        node.power_ms, node.left = -1, []
    elif node.power_ms >= 0:
        node.left.append((job_id, member.share, member.held_ms, now_ms, member.gpus))


def _begin(node: Node, at_ms: int, counters: list[int]) -> None:
    node.power_ms, node.counters = at_ms, counters
    node.left = [span for span in node.left if span[3] > at_ms]


def _divide(
    postings: Postings, node_id: str, node: Node, until_ms: int, drawn: Sequence[int]
) -> None:
    energy, since_ms = postings.adds.energy, node.power_ms
    for hour, from_ms, to_ms in _hours(since_ms, until_ms):
        for spans, whole_mj in zip(_spans(postings, node, from_ms, to_ms), drawn, strict=True):
            mj = whole_mj * (to_ms - since_ms) // (until_ms - since_ms)
            mj -= whole_mj * (from_ms - since_ms) // (until_ms - since_ms)
            for job_id, part_mj, gpu_us in _parts(spans, mj, to_ms - from_ms):
                key = (hour, node_id, job_id)
                before_mj, before_us = energy.get(key, (0, 0))
                energy[key] = (before_mj + part_mj, before_us + gpu_us)


def _hours(from_ms: int, to_ms: int) -> Iterator[tuple[int, int, int]]:
    while from_ms < to_ms:
        hour = from_ms // HOUR_MS
        until_ms = min(to_ms, (hour + 1) * HOUR_MS)
        yield hour, from_ms, until_ms
        from_ms = until_ms


def _spans(postings: Postings, node: Node, from_ms: int, to_ms: int) -> list[list[Span]]:
    """Who held each GPU of the node within this time, which part of it, and when."""
    spans: list[list[Span]] = [[] for _ in range(node.gpus)]
    held = list(node.left)
    for job_id, numbers in node.members.items():
        for member in map(postings.cluster.jobs[job_id].members.__getitem__, numbers):
            if not member.lent:
                held.append((job_id, member.share, member.held_ms, to_ms, member.gpus))
    for job_id, share, since_ms, until_ms, gpus in held:
        since_ms, until_ms = max(since_ms, from_ms), min(until_ms, to_ms)
        if since_ms < until_ms:
            for gpu in gpus:
                spans[gpu].append((job_id, share, since_ms, until_ms))
    return spans


def _parts(spans: list[Span], mj: int, whole_ms: int) -> Iterator[tuple[str, int, int]]:
    """(job, its energy, its GPU time); the last, of nobody, takes what is left over."""
    held_us = sum(share * (to_ms - from_ms) for _, share, from_ms, to_ms in spans)
    held_mj = mj * _covered_ms(spans) // whole_ms
    left_mj = mj
    for job_id, share, from_ms, to_ms in spans:
        gpu_us = share * (to_ms - from_ms)
        part_mj = held_mj * gpu_us // held_us
        left_mj -= part_mj
        yield job_id, part_mj, gpu_us
    yield "", left_mj, WHOLE_GPU_MILLI * whole_ms - held_us


def _covered_ms(spans: list[Span]) -> int:
    """How long anybody held it."""
    covered_ms = end_ms = 0
    for _, _, from_ms, to_ms in sorted(spans, key=lambda span: span[2]):
        covered_ms += max(0, to_ms - max(from_ms, end_ms))
        end_ms = max(end_ms, to_ms)
    return covered_ms
