"""How far a job is and what limits it, as its members report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shoal.control.loop import ControlLoop
from shoal.core.answers.bound import busiest, judge
from shoal.core.books.spending import window
from shoal.model.bound import Bound
from shoal.model.job import Job, Phase
from shoal.model.samples import NodeSample
from shoal.model.views import ProgressView

Samples = Mapping[str, NodeSample]  # the newest of each node


def progress_view(
    loop: ControlLoop, job: Job, samples: Samples | None = None
) -> ProgressView | None:
    """The furthest member's progress, if the job's members report steps."""
    watch = loop.state.heard.watches.get(job.id)
    if watch is None or not watch.beats:
        return None
    beat = max(watch.beats.values(), key=lambda beat: beat.step)
    paces = sorted(watch.pace.paces_us)
    step_us = paces[len(paces) // 2] if paces else 0
    left = beat.steps_total - beat.step if beat.steps_total else 0
    return ProgressView(
        step=beat.step,
        steps_total=beat.steps_total,
        step_us=step_us,
        left_ms=max(0, left) * step_us // 1000 if step_us and beat.steps_total else None,
        saved_step=job.saved_step,
        loss=next((b.loss for _, b in sorted(watch.beats.items()) if b.loss is not None), None),
        metrics=dict(beat.metrics),
        slow=sorted(watch.slow),
        bound=bound_of(loop, job, samples or {}),
    )


def bound_of(loop: ControlLoop, job: Job, samples: Samples) -> Bound | None:
    """What limits the steps of a job that runs now. None: it does not report enough of them."""
    watch = loop.state.heard.watches.get(job.id)
    if watch is None or watch.attempt != job.attempt or job.phase is not Phase.RUNNING:
        return None
    nodes = [member.slice.node for member in job.members]
    busy_milli, fabric = busiest(_busy(job, samples)), loop.state.fabric
    return judge(window(watch.recent), nodes, busy_milli=busy_milli, fabric=fabric)


def _busy(job: Job, samples: Samples) -> Iterator[int | None]:
    for member in job.members:
        sample = samples.get(member.slice.node)
        for gpu in member.slice.gpus if sample is not None else ():
            if sample is not None and gpu < len(sample.gpus):
                yield sample.gpus[gpu].busy_milli
