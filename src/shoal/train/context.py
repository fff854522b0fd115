"""The context of a run: its steps, its saves and its reports."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, Literal

from shoal.train import shuffle
from shoal.train import shuffle as order
from shoal.train.beats import Beats
from shoal.train.checkpoints import CheckpointStore, Manifest, State, check
from shoal.train.errors import TrainError, Unsaved, end_in_one_line, say
from shoal.train.group import Group
from shoal.train.saver import END_AFTER_ERROR_S, END_WAIT_S, Saver
from shoal.train.shuffle import Stretch
from shoal.train.waits import Stalls, StepTimes, clock_ns

CHECKPOINTS_ENV = "SHOAL_CHECKPOINT_DIR"
MTBF_ENV = "SHOAL_MTBF_S"
KEEP = 3

Every = int | Literal["auto"] | None


def init(*, checkpoint: str | None = None, keep: int = KEEP, seed: int = 0) -> Context:
    """Joins the group that `shoal run` or `torchrun` started, or runs alone.

    `checkpoint`: where to save, a directory or s3://bucket/path; default: $SHOAL_CHECKPOINT_DIR.
    `keep`: the number of checkpoints to keep. `seed`: for the order of the samples.
    """
    end_in_one_line()
    try:
        import torch  # noqa: F401
    except ImportError:
        raise TrainError("shoal.train needs torch: pip install 'shoal[train]'") from None
    if keep < 1:
        raise TrainError(f"keep={keep}: at least one checkpoint must be kept")
    return Context(checkpoint or os.environ.get(CHECKPOINTS_ENV, ""), keep, seed)


class Context:
    """Made by `init`. `step` and `position` are the run's progress."""

    def __init__(self, checkpoint: str, keep: int, seed: int) -> None:
        from shoal.train import waits

        self._times = StepTimes()
        self._group = Group()
        waits.watch(self._times)
        self._beats = Beats()
        self._stalls = Stalls()
        self._stop = Stop(self._group)
        self._saver: Saver | None = None
        if checkpoint:
            self._saver = Saver(CheckpointStore(checkpoint), self._group, keep, self._times)
        self.rank, self.world = self._group.rank, self._group.world
        self.local_rank, self.device = self._group.local_rank, self._group.device
        self.step = 0  # steps done, over all attempts
        self.position = 0  # samples used, over all attempts and members
        self.weight = 1.0  # of this member's part of the batch: see `shuffle.weight`
        self._seed = seed
        self._claimed = 0  # samples and epochs covered by calls of `steps`
        self._claimed_epochs = 0
        self._stretch: Stretch | None = None
        self._stream: Any = None  # of the current call of `steps`, if its loader has one
        self._after: tuple[int, int] | None = None  # step and position after this step
        self._steps_total = 0
        self._state: State | None = None
        self._restored: Manifest | None = None
        self._saved_step = self._saves = 0
        self._next_save = self._save_gap = FIRST_SAVE_STEPS
        self._began_ns = clock_ns()
        self._closed = False
        atexit.register(self._at_exit)

    # -- the loop --------------------------------------------------------------------------

    def steps(
        self, loader: Iterable[Any], *, epochs: int | None = None, steps: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        """The batches of the next `epochs` passes over the loader (default 1), or until the run has
        done `steps` steps. A restored run continues where it was."""
        feed = self._feed(loader, epochs, steps)
        times, beats, stop = self._times, self._beats, self._stop
        self._beat()
        try:
            while not self._steps_total or self.step < self._steps_total:
                if stop.before_step <= self.step or stop.asked:
                    self._stop_if_due()
                began = clock_ns()
                try:
                    batch, position, samples = next(feed)
                except StopIteration:
                    break
                ready = clock_ns()
                self._after = (self.step + 1, position)
                yield self.step, batch
                ended = clock_ns()
                self.step, self.position = self._after
                self._after = None
                times.step(ready - began, ended - ready, samples)
                if ended >= beats.due_ns:
                    self._beat()
            self._stop_if_due()
        finally:
            self._after = None
            self._beat(busy=True)

    def log(self, **metrics: Any) -> None:
        """Report the loss and other numbers of this step, without waiting."""
        self._beats.log(metrics)

    def _feed(
        self, loader: Iterable[Any], epochs: int | None, steps: int | None
    ) -> Iterator[tuple[Any, int, int]]:
        """Batches, the position after each, and the number of this member's samples in it."""
        for name, value in (("epochs", epochs), ("steps", steps)):
            if value is not None and value < 0:
                raise TrainError(f"{name}={value} of ctx.steps is negative")
        if hasattr(getattr(loader, "dataset", None), "follow"):
            self._steps_total = steps or 0
            return self._streamed(loader, 1 if epochs is None and steps is None else epochs)
        if not is_ordered(loader):
            self._steps_total = steps or 0
            return self._as_it_comes(loader, 1 if epochs is None and steps is None else epochs)
        if self._stream is not None or (self._restored and self._restored.mark):
            raise TrainError("a run that reads a stream cannot go on with numbered samples")
        if epochs is None:
            # With `steps`, the number of epochs is in effect unbounded.
            epochs = 1 if steps is None else 1 << 31
        stretch = stretch_of(loader, self._claimed, self._claimed_epochs, epochs)
        check_parts(stretch.batch, self.world)
        self._check_same_data(stretch)
        self._claimed, self._claimed_epochs = stretch.end, self._claimed_epochs + epochs
        self.position = max(self.position, stretch.start)
        total = self.step + stretch.batches_from(self.position)
        self._steps_total = total if steps is None else min(total, steps)
        if self.position >= stretch.end:
            return iter(())  # an earlier attempt did all of it
        self._stretch = stretch
        return self._ordered(loader, stretch)

    def _ordered(self, loader: Any, stretch: Stretch) -> Iterator[tuple[Any, int, int]]:
        position = self.position
        batches = in_order(loader, stretch, position, self.world, self.rank, self._seed)
        for batch in batches:
            samples = min(stretch.batch, stretch.end - position)
            position += samples
            self.weight = shuffle.weight(samples, self.world, self.rank)
            yield batch, position, shuffle.part(samples, self.world, self.rank)[1]

    def _streamed(self, loader: Any, epochs: int | None) -> Iterator[tuple[Any, int, int]]:
        """Of a data set that has an order of its own, over all members, but no known size. Its
        mark says where in it a position is."""
        if self._stretch is not None or self._claimed:
            raise TrainError("a run that uses numbered samples cannot go on with a stream")
        size = batch_size(loader)
        check_parts(size, self.world)
        mark = self._mark_at(self.position)
        first = self._claimed_epochs
        end = None if epochs is None else first + epochs
        self._claimed_epochs = first + (1 << 31 if epochs is None else epochs)
        stream = loader.dataset.follow(self._seed, mark, self.position, first, end)
        if self._stream is None:
            if self._saver is not None:
                self._saver.finish()  # its thread uses the same group
            if self._group.agree(stream.identity) != stream.identity:
                raise TrainError(f"member {self.rank} reads other shards than member 0")
        self._stream = stream
        coming: deque[tuple[int, int]] = deque()  # position after a batch, its samples
        chosen = parts_of(stream, coming, self.position, size, loader, self.world, self.rank)
        try:
            for batch in in_chunks(loader, stream, chosen):
                position, samples = coming.popleft()
                if stream.available(position, size) < (size if loader.drop_last else 1):
                    self._steps_total = self.step + 1  # only now it is known to be the last one
                self.weight = shuffle.weight(samples, self.world, self.rank)
                yield batch, position, shuffle.part(samples, self.world, self.rank)[1]
        finally:
            stream.close()

    def _mark_at(self, position: int) -> dict[str, Any] | None:
        if self._stream is not None:
            mark: dict[str, Any] = self._stream.mark(position)
            return mark
        return self._restored.mark if self._restored else None

    def _as_it_comes(
        self, loader: Iterable[Any], epochs: int | None
    ) -> Iterator[tuple[Any, int, int]]:
        done = 0
        while epochs is None or done < epochs:
            for batch in loader:
                yield batch, self.position, 0
            done += 1

    def _check_same_data(self, stretch: Stretch) -> None:
        before = self._restored.stretch if self._restored else None
        begun = before is not None and before.start == stretch.start < self.position
        if begun and before is not None and before.size != stretch.size:
            raise TrainError(
                f"the data set has {stretch.size} samples, the checkpoint was made with "
                f"{before.size}: the order of the samples would change"
            )

    def _beat(self, *, busy: bool = False) -> None:
        """`busy`: the next step may take a while, and that is not a hang."""
        self._beats.send(
            busy=busy,
            step=self.step,
            steps_total=self._steps_total,
            saved_step=self._saved_step,
            saves=self._saves,
            unsaved=self._saver.failed if self._saver is not None else 0,
            stall_us=self._stalls.us,
            **self._times.numbers(),
        )

    def _stop_if_due(self) -> None:
        if not self._stop.due(self.step, self._times.fastest_ns / 1e9):
            return
        if self._saver is None or self._state is None:
            self._say(f"stopped by SIGTERM before step {self.step}; ctx.save was never called")
        else:
            self.save(self._state)
            try:
                with self._saving():
                    self._saver.finish(last=True)
            except Unsaved as error:
                self._say(
                    f"stopped by SIGTERM before step {self.step}, which is not saved: {error}"
                )
            else:
                self._say(f"stopped by SIGTERM before step {self.step}, which is saved")
        self._beat()
        raise SystemExit(STOPPED_CODE)

    # -- checkpoints -----------------------------------------------------------------------

    @property
    def can_save(self) -> bool:
        """Whether a checkpoint directory is set."""
        return self._saver is not None

    def save(self, state: State, every: Every = None) -> bool:
        """Starts a checkpoint of `state` after this step's work. Every member must call it.

        `every`: the number of steps between saves, or "auto": as often as failures and the cost of
        a save make worthwhile. The last step is always saved. Returns whether a save started.
        """
        self._state = check(state)
        if self._saver is None:
            raise TrainError(
                f"no checkpoint directory: set {CHECKPOINTS_ENV}, or init(checkpoint=...)"
            )
        step, position = self._after or (self.step, self.position)
        if every is not None and not self._is_due(step, every):
            return False
        manifest = self._manifest(step, position)
        with self._saving():
            began = clock_ns()
            copy = self._saver.copy(state, step)
            if every == "auto":
                self._plan((clock_ns() - began) / 1e9, manifest)
            if copy is not None:
                self._saver.write(copy, manifest, self._whole)
        return copy is not None

    def restore(self, state: State) -> bool:
        """Loads the newest whole checkpoint into `state` and continues from its step. Returns
        whether there was one. Every member must call it, before the first step."""
        self._state = check(state)
        if self._saver is None:
            return False
        with self._saving():
            manifest = self._saver.restore(state, self._seed)
        if manifest is None:
            return False
        self._restored = manifest
        self.step, self.position = manifest.step, manifest.position
        self._saved_step = manifest.step
        self._next_save = self.step + FIRST_SAVE_STEPS
        self._beat(busy=True)  # until the first step: a restored run has more to set up
        return True

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Counts the time that the loop is blocked, and reports that it does not hang."""
        self._beat(busy=True)
        with self._times.saving(in_body=self._after is not None):
            yield
        self._beat()

    def _is_due(self, step: int, every: int | Literal["auto"]) -> bool:
        if isinstance(every, int) and every < 1:
            raise TrainError(f"every={every} of ctx.save: must be at least 1, or 'auto'")
        last = step == self._steps_total
        return last or (step >= self._next_save if every == "auto" else step % every == 0)

    def _manifest(self, step: int, position: int) -> Manifest:
        before = self._restored
        return Manifest(
            step=step,
            position=position,
            seed=self._seed,
            stretch=self._stretch,
            mark=self._mark_at(position),
            world=self.world,
            trained_s=(before.trained_s if before else 0.0) + (clock_ns() - self._began_ns) / 1e9,
            restarts=before.restarts if before else 0,
            files={},
        )

    def _whole(self, manifest: Manifest) -> None:
        """Called in the saver's thread."""
        self._saved_step, self._saves = manifest.step, self._saves + 1
        self._beats.hurry()

    def _plan(self, blocked_s: float, now: Manifest) -> None:
        """Decides when to save next. Rank 0 decides, because clocks differ."""
        assert self._saver is not None
        given = _seconds(os.environ.get(MTBF_ENV))
        between = mtbf_s(self._group.nodes, now.trained_s, now.restarts, given)
        seconds = interval_s(blocked_s, self._saver.written_s, between)
        gap = interval_steps(seconds, self._step_s(), self._save_gap)
        self._save_gap = self._group.agree(gap)
        self._next_save = now.step + self._save_gap

    def _step_s(self) -> float:
        """The mean duration of a step in this process."""
        times = self._times
        return (times.body_ns + times.data_ns) / 1e9 / max(1, times.steps)

    def _say(self, text: str) -> None:
        if self.rank == 0:
            say(text)

    # -- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for the last save and leaves the group. Called automatically at exit."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        failed = sys.exc_info()[0] is not None or hasattr(sys, "last_type")
        self._beat(busy=True)
        self._stop.close()
        if self._saver is not None:
            self._saver.finish(END_AFTER_ERROR_S if failed else END_WAIT_S, last=not failed)
        self._beat(busy=True)
        self._group.leave()

    def _at_exit(self) -> None:
        """Without `os._exit`, an error here would be printed but the exit code would still be 0."""
        try:
            self.close()
        except TrainError as error:
            say(str(error))
            sys.stdout.flush()
            os._exit(1)


def _seconds(text: str | None) -> float | None:
    with contextlib.suppress(TypeError, ValueError):
        value = float(text or "")
        return value if value > 0 else None
    return None


# Computes how often to save, so that failures and saves together cost the least time.


# The assumption before any failure is seen: one failure a month on each node.
NODE_MTBF_S = 30 * 24 * 3600.0
FIRST_SAVE_STEPS = 5  # the first save comes early, because its cost is not known yet
GROWTH_MAX = 10  # so that one odd measurement does not delay the next save for long


def mtbf_s(nodes: int, trained_s: float, restarts: int, told_s: float | None) -> float:
    """The mean time between failures: from Shoal, else the assumption corrected by this run."""
    if told_s is not None:
        return told_s
    return (NODE_MTBF_S / max(1, nodes) + trained_s) / (1 + restarts)


def interval_s(blocked_s: float, written_s: float, between_failures_s: float) -> float:
    """Young's interval, sqrt(2 x cost x time between failures), with Daly's correction.

    The cost is the time that the loop is blocked. Writing goes on beside the training, but a save
    must be done before the next one starts.
    """
    cost = max(blocked_s, 1e-6)
    if cost >= 2 * between_failures_s:
        return max(between_failures_s, written_s)
    ratio = cost / (2 * between_failures_s)
    daly = math.sqrt(2 * cost * between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
    return max(daly, written_s, cost)


def interval_steps(seconds: float, step_s: float, before: int) -> int:
    """The interval in steps, which all members can agree on; at most ten times the previous."""
    return max(1, min(round(seconds / max(step_s, 1e-6)), before * GROWTH_MAX))


# SIGTERM: all members finish the same step, save, and exit.
#
# Members get the signal at slightly different moments. The first one proposes a step that is far
# enough ahead for all members to learn of it in time. The others poll for a proposal in a thread,
# so that the loop itself only compares two numbers.


STOPPED_CODE = 128 + signal.SIGTERM
NEVER = 1 << 62
POLL_S = 0.1
POLLS_PER_S_MAX = 1000  # over all members, because the store is one process
# Uses the fastest step so far, not the mean: the first steps are slow, and a member that learns of
# the stop too late would continue without the others.
AHEAD_POLLS = 10
AHEAD_STEPS_MAX = 100_000


class Stop:
    def __init__(self, group: Group) -> None:
        self._group = group
        self.asked = False
        self._proposed = False
        self.before_step = NEVER  # all members stop before this step
        self._over = threading.Event()
        self._poll_s = max(POLL_S, group.world / POLLS_PER_S_MAX)
        self._thread: threading.Thread | None = None
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread gets signals, so only it can stop
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._signaled)
        if group.world > 1:
            self._thread = threading.Thread(target=self._listen, name="shoal-stop", daemon=True)
            self._thread.start()

    def due(self, step: int, fastest_s: float) -> bool:
        """Called before each step."""
        if self.asked and not self._proposed:
            self._proposed = True
            ahead = 0
            if self._group.world > 1:
                ahead = 1 + min(
                    AHEAD_STEPS_MAX, int(AHEAD_POLLS * self._poll_s / max(fastest_s, 1e-6))
                )
            self.before_step = min(self.before_step, self._group.propose_stop(step + ahead))
        return step >= self.before_step

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _signaled(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True

    def _listen(self) -> None:
        while not self._over.wait(self._poll_s):
            step = self._group.proposed_stop()
            if step is not None:
                self.before_step = step
                return


# Makes the user's loader follow the run's order of samples.


def is_ordered(loader: object) -> bool:
    """Whether it is a DataLoader over numbered samples; any other loader keeps its own order."""
    from torch.utils.data import DataLoader, IterableDataset

    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def stretch_of(loader: Any, start: int, epoch: int, epochs: int) -> Stretch:
    """The part of the run that a loader covers."""
    batch, size = batch_size(loader), len(loader.dataset)
    if size == 0:
        raise TrainError("the loader's data set has no samples")
    return Stretch(start, epoch, epochs, size, batch, loader.drop_last)


def batch_size(loader: Any) -> int:
    """For all members together."""
    if loader.batch_size is None:
        raise TrainError(
            "the loader has no batch_size: make it with DataLoader(dataset, batch_size=B), B being "
            "the samples of a step over all members"
        )
    return int(loader.batch_size)


def check_parts(batch: int, world: int) -> None:
    """With fewer samples than members, some would have no work in any step."""
    if batch < world:
        raise TrainError(
            f"a batch of {batch} samples cannot be divided among {world} members: use a "
            f"batch_size of at least {world}, or at most {batch} members"
        )


def in_order(
    loader: Any, stretch: Stretch, position: int, world: int, rank: int, seed: int
) -> Iterator[Any]:
    """The same loader, with our choice of samples for this member."""
    chosen = order.batches(stretch, position, world, rank, seed if _shuffles(loader) else None)
    return iter(remade(loader, loader.dataset, chosen))


def remade(loader: Any, dataset: Any, chosen: Iterable[list[Any]]) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(
        dataset,
        batch_sampler=Batches(chosen),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=False,  # one pass covers the whole run
    )


def parts_of(
    stream: Any, coming: deque[tuple[int, int]], at: int, size: int, loader: Any,
    world: int, rank: int,
) -> Iterator[list[Any]]:  # fmt: skip
    """This member's part of each batch of a stream; see `shuffle.batches`."""
    while samples := stream.available(at, size):
        if samples < size and loader.drop_last:
            return
        offset, own = order.part(samples, world, rank)
        part = stream.places(at + offset, own) if own else stream.places(at, 1)
        at += samples
        stream.leave(at)
        coming.append((at, samples))
        yield part


def in_chunks(loader: Any, stream: Any, chosen: Iterable[list[Any]]) -> Iterator[Any]:
    """Read by the loader's workers, or without any, by the stream itself: as far ahead as is
    needed."""
    if loader.num_workers:
        return iter(remade(loader, stream.reader, chosen))
    return map(loader.collate_fn, stream.reader.ahead(chosen))


class Batches:
    """A batch sampler for DataLoader: iterable once."""

    def __init__(self, chosen: Iterable[list[int]]) -> None:
        self._chosen = chosen

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._chosen)


def _shuffles(loader: Any) -> bool:
    from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

    sampler = loader.sampler
    if isinstance(sampler, SequentialSampler):
        return False
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    if isinstance(sampler, RandomSampler) and not sampler.replacement:
        return True
    raise TrainError(
        f"the loader's sampler is a {type(sampler).__name__}: ctx.steps chooses the samples "
        "itself, so use DataLoader(dataset, batch_size=B, shuffle=True or False)"
    )
