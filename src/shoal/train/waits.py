"""Tells waiting for peers from computing, without touching the training script.

Three places are watched. `Work.wait` is where Python waits for a collective: FSDP2 and whatever a
script calls itself. DDP averages gradients from C++: a communication hook notes when the last
bucket was ready here, and when the last one came back. On GPUs nothing waits in Python, so events
on the stream take the times, and are read when they have passed.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

from shoal.train.step_times import Meter, clock_ns

EVENTS_MAX = 4096  # pairs not read yet; beyond that the oldest are forgotten


def watch(meter: Meter) -> None:
    """For the rest of the process."""
    import torch
    import torch.distributed as dist

    gpu = GpuWaits(meter) if torch.cuda.is_available() else None
    _watch_waits(dist.Work, meter, gpu)
    _watch_ddp(torch.nn.parallel.DistributedDataParallel, meter, gpu)
    if gpu is not None:
        _watch_fsdp(gpu)


class GpuWaits:
    """Pairs of events around what a stream waits for."""

    def __init__(self, meter: Meter) -> None:
        import torch

        self._event = functools.partial(torch.cuda.Event, enable_timing=True)
        self._pairs: deque[tuple[Any, Any]] = deque(maxlen=EVENTS_MAX)
        meter.settle.append(self.settle)

    def mark(self) -> Any:
        event = self._event()
        event.record()
        return event

    def pair(self, first: Any, second: Any) -> None:
        self._pairs.append((first, second))

    def settle(self) -> int:
        total = 0
        while self._pairs and self._pairs[0][1].query():
            first, second = self._pairs.popleft()
            total += max(0, int(first.elapsed_time(second) * 1_000_000))
        return total


def _watch_waits(work: Any, meter: Meter, gpu: GpuWaits | None) -> None:
    original = work.wait

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A wait for NCCL only makes the stream wait, and costs nothing here.
        before = gpu.mark() if gpu is not None else None
        began = clock_ns()
        try:
            return original(self, *args, **kwargs)
        finally:
            meter.waited(clock_ns() - began)
            if gpu is not None:
                gpu.pair(before, gpu.mark())

    work.wait = wait


def _watch_fsdp(gpu: GpuWaits) -> None:
    """FSDP2 lets the computing stream wait for its gathering and reducing streams."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    except ImportError:
        return  # an older or newer torch: its waits count as computing, as the guide says
    for name in ("wait_for_unshard", "finalize_backward"):
        original = getattr(FSDPParamGroup, name, None)
        if original is not None:
            setattr(FSDPParamGroup, name, _between_marks(original, gpu))


def _between_marks(original: Any, gpu: GpuWaits) -> Any:
    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        before = gpu.mark()
        try:
            return original(*args, **kwargs)
        finally:
            gpu.pair(before, gpu.mark())

    return marked


# -- DDP -----------------------------------------------------------------------------------


def _watch_ddp(kind: Any, meter: Meter, gpu: GpuWaits | None) -> None:
    """A model gets its hook at its first forward, unless the script has given it one: that one
    is timed instead."""
    make, register = kind.__init__, kind.register_comm_hook

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)

        def first_forward(model: Any, _: Any) -> None:
            handle.remove()
            if not model._comm_hooks:
                register(model, model.process_group, _bare(Buckets(average, meter, gpu)))

        handle = self.register_forward_pre_hook(first_forward)

    @functools.wraps(register)
    def register_comm_hook(self: Any, state: object, hook: Any) -> None:
        register(self, state, functools.wraps(hook)(_bare(Buckets(hook, meter, gpu))))

    kind.__init__, kind.register_comm_hook = init, register_comm_hook


def _bare(buckets: Buckets) -> Any:
    """DDP refuses a hook whose arguments are annotated with other types than its own."""
    return lambda state, bucket: buckets.hook(state, bucket)


def average(group: Any, bucket: Any) -> Any:
    """What DDP does by itself."""
    import torch.distributed as dist

    buffer = bucket.buffer().div_(group.size())
    future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


class Buckets:
    """Times one model's buckets: between the last that is ready and the last that is back, the
    backward pass has nothing to do but wait."""

    def __init__(self, inner: Any, meter: Meter, gpu: GpuWaits | None) -> None:
        self._inner = inner
        self._gpu = gpu
        self._ready_ns = 0
        self._done_ns = 0
        self._marks: tuple[Any, Any] | None = None
        meter.settle.append(self.settle)
        self._settled_ns = 0

    def hook(self, state: object, bucket: Any) -> Any:
        last, on_gpu = bucket.is_last(), self._gpu is not None and bucket.buffer().is_cuda
        if last:
            self._fold()
            self._ready_ns = clock_ns()
        mark = self._gpu.mark() if last and on_gpu and self._gpu is not None else None
        future = self._inner(state, bucket)

        def done(finished: Any) -> Any:
            value = finished.value()
            if mark is not None and self._gpu is not None:
                self._gpu.pair(mark, self._gpu.mark())
            elif not on_gpu:
                self._done_ns = clock_ns()
            return value

        return future.then(done)

    def _fold(self) -> None:
        if self._ready_ns:
            self._settled_ns += max(0, self._done_ns - self._ready_ns)
            self._ready_ns = 0

    def settle(self) -> int:
        self._fold()
        settled, self._settled_ns = self._settled_ns, 0
        return settled
