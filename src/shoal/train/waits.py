"""Separates waiting for peers from computing, without changing the training script.

It watches three places. `Work.wait` is where Python waits for a collective, in FSDP2 or in the
script itself. DDP averages gradients in C++, so a communication hook records when the last bucket
was ready and when the last one came back. On GPUs Python does not wait, so events on the stream
take the times and are read after they have passed.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

from shoal.train.step_times import StepTimes, clock_ns

EVENTS_MAX = 4096  # pairs not read yet; the oldest are dropped beyond this


def watch(times: StepTimes) -> None:
    """Lasts for the rest of the process."""
    import torch
    import torch.distributed as dist

    gpu = GpuWaits(times) if torch.cuda.is_available() else None
    _watch_waits(dist.Work, times, gpu)
    _watch_ddp(torch.nn.parallel.DistributedDataParallel, times, gpu)
    if gpu is not None:
        _watch_fsdp(gpu)


class GpuWaits:
    """Pairs of events around the waits of a stream."""

    def __init__(self, times: StepTimes) -> None:
        import torch

        self._event = functools.partial(torch.cuda.Event, enable_timing=True)
        self._pairs: deque[tuple[Any, Any, int]] = deque(maxlen=EVENTS_MAX)
        self._times = times
        self._step = self._step_ns = 0  # the step whose waits are being read, and their sum
        times.settle_late.append(self.settle)

    def mark(self) -> Any:
        event = self._event()
        event.record()
        return event

    def pair(self, first: Any, second: Any) -> None:
        self._pairs.append((first, second, self._times.steps))

    def settle(self) -> int:
        total = 0
        while self._pairs and self._pairs[0][1].query():
            first, second, step = self._pairs.popleft()
            took = max(0, int(first.elapsed_time(second) * 1_000_000))
            if step != self._step:  # all waits of the step before are known
                self._times.quickest_on_gpu.add(self._step_ns)
                self._step, self._step_ns = step, 0
            self._step_ns += took
            total += took
        return total


def _watch_waits(work: Any, times: StepTimes, gpu: GpuWaits | None) -> None:
    original = work.wait

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A wait for NCCL only blocks the stream, and costs no time here.
        before = gpu.mark() if gpu is not None else None
        began = clock_ns()
        try:
            return original(self, *args, **kwargs)
        finally:
            times.waited(clock_ns() - began)
            if gpu is not None:
                gpu.pair(before, gpu.mark())

    work.wait = wait


def _watch_fsdp(gpu: GpuWaits) -> None:
    """In FSDP2 the compute stream waits for the gather and reduce streams."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    except ImportError:
        return  # another version of torch: its waits count as computing
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


def _watch_ddp(kind: Any, times: StepTimes, gpu: GpuWaits | None) -> None:
    """A model gets its hook at its first forward pass. If the script has set one, that one is timed
    instead."""
    make, register = kind.__init__, kind.register_comm_hook

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)

        def first_forward(model: Any, _: Any) -> None:
            handle.remove()
            if not model._comm_hooks:
                register(model, model.process_group, _bare(Buckets(average, times, gpu)))

        handle = self.register_forward_pre_hook(first_forward)

    @functools.wraps(register)
    def register_comm_hook(self: Any, state: object, hook: Any) -> None:
        register(self, state, functools.wraps(hook)(_bare(Buckets(hook, times, gpu))))

    kind.__init__, kind.register_comm_hook = init, register_comm_hook


def _bare(buckets: Buckets) -> Any:
    """DDP refuses a hook whose annotations are not its own types, so this one has none."""
    return lambda state, bucket: buckets.hook(state, bucket)


def average(group: Any, bucket: Any) -> Any:
    """What DDP does without a hook."""
    import torch.distributed as dist

    buffer = bucket.buffer().div_(group.size())
    future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


class Buckets:
    """Times one model's buckets: the backward pass waits from when the last bucket is ready until
    the last one is back."""

    def __init__(self, inner: Any, times: StepTimes, gpu: GpuWaits | None) -> None:
        self._inner = inner
        self._gpu = gpu
        self._ready_ns = 0
        self._done_ns = 0

        times.settle.append(self.settle)
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
