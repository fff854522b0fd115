"""Where the time of steps goes: computing, waiting for peers or for storage, without changing the
script.

It watches three places. `Work.wait` is where Python waits for a collective, in FSDP2 or in the
script itself. DDP averages gradients in C++, so a communication hook records when the last bucket
was ready and when the last one came back. On GPUs Python does not wait, so events on the stream
take the times and are read after they have passed.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


# How long processes have waited for storage, as the kernel counts it (pressure stall information).
#
# The member's own cgroup counts only its own processes, with the workers of its loaders. Without
# one, the whole machine's figure is the next best. Where the kernel counts neither, it stays 0.


MACHINE = Path("/proc/pressure/io")
CGROUPS = Path("/sys/fs/cgroup")
BYTES_MAX = 512


class Stalls:
    """Since this process asked first. The file stays open: reading it costs microseconds."""

    def __init__(self, file: Path | None = None) -> None:
        self._file: int | None = None
        for path in (file,) if file else (_own(), MACHINE):
            try:
                self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path else None
            except OSError:
                continue
            if self._file is not None:
                break
        self._first_us = self._read()

    @property
    def us(self) -> int:
        return max(0, self._read() - self._first_us)

    def _read(self) -> int:
        """'some avg10=0.00 avg60=0.10 avg300=0.28 total=1327347264': the total."""
        if self._file is None:
            return 0
        try:
            words = os.pread(self._file, BYTES_MAX, 0).split(b"\n", 1)[0].split()
            return int(words[-1].removeprefix(b"total="))
        except (OSError, ValueError, IndexError):
            return 0


def _own() -> Path | None:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("0::/") and len(line) > len("0::/"):
            return CGROUPS / line.removeprefix("0::/") / "io.pressure"
    return None


# Measures where the time of the steps went, in numbers that only grow.


clock_ns = time.perf_counter_ns


BLOCK_STEPS = 8


class Quickest:
    """How long the waits of all steps would have been, had each been as short as the shortest of
    its block of steps. A peer is late in some steps; it is hardly late in eight in a row, unless it
    always is. Steps without a wait (gradients that are only added up) are left out."""

    def __init__(self) -> None:
        self._closed_ns = self._least_ns = self._steps = 0

    def add(self, wait_ns: int) -> None:
        if wait_ns <= 0:
            return
        self._least_ns = min(self._least_ns, wait_ns) if self._steps else wait_ns
        self._steps += 1
        if self._steps == BLOCK_STEPS:
            self._closed_ns, self._steps = self.ns, 0

    @property
    def ns(self) -> int:
        return self._closed_ns + self._steps * self._least_ns


class StepTimes:
    """`compute` is the time in the loop's body without waits and saves."""

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self.data_ns = 0
        self.body_ns = 0
        self.fastest_ns = 1 << 62
        self.wait_ns = 0
        self.save_ns = 0
        self._save_in_body_ns = 0
        self._compute_ns = 0
        self._wait_ns_before = 0  # at the end of the last step
        self.quickest = Quickest()
        self.quickest_on_gpu = Quickest()
        # Each returns waits that have ended since, in another thread or on a GPU. On a GPU they
        # may be of an earlier step.
        self.settle: list[Callable[[], int]] = []
        self.settle_late: list[Callable[[], int]] = []
        self._aside = threading.local()
        self._saving = False

    def waited(self, nanoseconds: int) -> None:
        """Counts a wait for peers, except during a save and in the saver's thread."""
        if not self._saving and not getattr(self._aside, "on", False):
            self.wait_ns += nanoseconds

    def step(self, data_ns: int, body_ns: int, samples: int) -> None:
        self.steps += 1
        self.samples += samples
        self.data_ns += data_ns
        self.body_ns += body_ns
        self.fastest_ns = min(self.fastest_ns, data_ns + body_ns)
        for settle in self.settle:
            self.wait_ns += settle()
        self.quickest.add(self.wait_ns - self._wait_ns_before)
        for settle in self.settle_late:
            self.wait_ns += settle()
        self._wait_ns_before = self.wait_ns

    @property
    def compute_ns(self) -> int:
        """Never decreases, although waits on a GPU become known late."""
        now = self.body_ns - self.wait_ns - self._save_in_body_ns
        self._compute_ns = max(self._compute_ns, now)
        return self._compute_ns

    @contextmanager
    def saving(self, *, in_body: bool) -> Iterator[None]:
        began = clock_ns()
        self._saving = True
        try:
            yield
        finally:
            self._saving = False
            took = clock_ns() - began
            self.save_ns += took
            if in_body:
                self._save_in_body_ns += took

    def leave_out_this_thread(self) -> None:
        self._aside.on = True

    def numbers(self) -> dict[str, int]:
        """The fields of a beat."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "compute_us": self.compute_ns // 1000,
            "wait_us": self.wait_ns // 1000,
            "transfer_us": (self.quickest.ns + self.quickest_on_gpu.ns) // 1000,
            "data_us": self.data_ns // 1000,
            "save_us": self.save_ns // 1000,
        }
