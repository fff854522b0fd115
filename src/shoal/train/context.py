"""The context of a run: its steps, its saves and its reports."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from shoal.train import interval, loading, shuffle
from shoal.train.beats import Beats
from shoal.train.checkpoints import CheckpointStore, Manifest
from shoal.train.errors import TrainError, end_in_one_line, say
from shoal.train.group import Group
from shoal.train.saver import END_AFTER_ERROR_S, END_WAIT_S, Saver
from shoal.train.shuffle import Stretch
from shoal.train.stalls import Stalls
from shoal.train.state import State, check
from shoal.train.step_times import StepTimes, clock_ns
from shoal.train.stop import STOPPED_CODE, Stop

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
        self._after: tuple[int, int] | None = None  # step and position after this step
        self._steps_total = 0
        self._state: State | None = None
        self._restored: Manifest | None = None
        self._saved_step = self._saves = 0
        self._next_save = self._save_gap = interval.FIRST_SAVE_STEPS
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
        if not loading.is_ordered(loader):
            self._steps_total = steps or 0
            return self._as_it_comes(loader, 1 if epochs is None and steps is None else epochs)
        if epochs is None:
            # With `steps`, the number of epochs is in effect unbounded.
            epochs = 1 if steps is None else 1 << 31
        stretch = loading.stretch_of(loader, self._claimed, self._claimed_epochs, epochs)
        loading.check_parts(stretch, self.world)
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
        batches = loading.in_order(loader, stretch, position, self.world, self.rank, self._seed)
        for batch in batches:
            samples = min(stretch.batch, stretch.end - position)
            position += samples
            self.weight = shuffle.weight(samples, self.world, self.rank)
            yield batch, position, shuffle.part(samples, self.world, self.rank)[1]

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
            with self._saving():
                self._saver.finish()
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
            self._saver.write(copy, manifest, self._whole)
        return True

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
        self._next_save = self.step + interval.FIRST_SAVE_STEPS
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
        between = interval.mtbf_s(self._group.nodes, now.trained_s, now.restarts, given)
        seconds = interval.interval_s(blocked_s, self._saver.written_s, between)
        gap = interval.interval_steps(seconds, self._step_s(), self._save_gap)
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
            self._saver.finish(END_AFTER_ERROR_S if failed else END_WAIT_S)
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
