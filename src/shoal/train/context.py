"""The context of a run: its steps, its saves, and what it tells of itself."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from shoal.train import interval, loading
from shoal.train import shuffle as order
from shoal.train.beats import Beats
from shoal.train.checkpoints import Manifest, Vault
from shoal.train.errors import TrainError, end_in_one_line, say
from shoal.train.group import Group
from shoal.train.saver import END_AFTER_ERROR_S, END_WAIT_S, Saver
from shoal.train.shuffle import Stretch
from shoal.train.state import State, check
from shoal.train.step_times import Meter, clock_ns
from shoal.train.stop import STOPPED_CODE, Stop

CHECKPOINTS_ENV = "SHOAL_CHECKPOINT_DIR"
MTBF_ENV = "SHOAL_MTBF_S"
KEEP = 3

Every = int | Literal["auto"] | None


def init(*, checkpoint: str | None = None, keep: int = KEEP, seed: int = 0) -> Context:
    """Joins the group that `shoal run` or `torchrun` started, or works alone.

    `checkpoint`: where saves go, a directory or s3://bucket/path; SHOAL_CHECKPOINT_DIR if not
    given. `keep`: how many are kept. `seed`: of the order of the samples.
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
    """Made by `init`. `step` and `position` say where the run is."""

    def __init__(self, checkpoint: str, keep: int, seed: int) -> None:
        from shoal.train import waits

        self._meter = Meter()
        self._group = Group()
        waits.watch(self._meter)
        self._beats = Beats()
        self._stop = Stop(self._group)
        self._saver: Saver | None = None
        if checkpoint:
            self._saver = Saver(Vault(checkpoint), self._group, keep, self._meter)
        self.rank, self.world = self._group.rank, self._group.world
        self.local_rank, self.device = self._group.local_rank, self._group.device
        self.step = 0  # so many are done, over all attempts
        self.position = 0  # so many samples are used, over all attempts and members
        self.weight = 1.0  # of this member's part of the batch: see `order.weight`
        self._seed = seed
        self._claimed = 0  # what calls of `steps` cover, in samples and in epochs
        self._claimed_epochs = 0
        self._stretch: Stretch | None = None
        self._after: tuple[int, int] | None = None  # step and position once this step is done
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
        """The batches of the next `epochs` passes over the loader (1 if nothing is said), or until
        the run has done `steps` steps; on from where a restored run was."""
        feed = self._feed(loader, epochs, steps)
        meter, beats, stop = self._meter, self._beats, self._stop
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
                meter.step(ready - began, ended - ready, samples)
                if ended >= beats.due_ns:
                    self._beat()
            self._stop_if_due()
        finally:
            self._after = None
            self._beat(busy=True)

    def log(self, **metrics: Any) -> None:
        """The loss and any other number of this step. Nothing is waited for."""
        self._beats.log(metrics)

    def _feed(
        self, loader: Iterable[Any], epochs: int | None, steps: int | None
    ) -> Iterator[tuple[Any, int, int]]:
        """Batches, the position after each, and the samples of this member in it."""
        for name, value in (("epochs", epochs), ("steps", steps)):
            if value is not None and value < 0:
                raise TrainError(f"{name}={value} of ctx.steps is negative")
        if not loading.is_ordered(loader):
            self._steps_total = steps or 0
            return self._as_it_comes(loader, 1 if epochs is None and steps is None else epochs)
        if epochs is None:
            # Until so many steps are done; a run has fewer epochs than samples to draw.
            epochs = 1 if steps is None else 1 << 31
        stretch = loading.stretch_of(loader, self._claimed, self._claimed_epochs, epochs)
        loading.check_parts(stretch, self.world)
        self._check_same_data(stretch)
        self._claimed, self._claimed_epochs = stretch.end, self._claimed_epochs + epochs
        self.position = max(self.position, stretch.start)
        total = self.step + stretch.batches_from(self.position)
        self._steps_total = total if steps is None else min(total, steps)
        if self.position >= stretch.end:
            return iter(())  # an earlier attempt has done all of it
        self._stretch = stretch
        return self._ordered(loader, stretch)

    def _ordered(self, loader: Any, stretch: Stretch) -> Iterator[tuple[Any, int, int]]:
        position = self.position
        batches = loading.in_order(loader, stretch, position, self.world, self.rank, self._seed)
        for batch in batches:
            samples = min(stretch.batch, stretch.end - position)
            position += samples
            self.weight = order.weight(samples, self.world, self.rank)
            yield batch, position, order.part(samples, self.world, self.rank)[1]

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
        """`busy`: no step is to be expected for a while, and that is well."""
        self._beats.send(
            busy=busy,
            step=self.step,
            steps_total=self._steps_total,
            saved_step=self._saved_step,
            saves=self._saves,
            **self._meter.numbers(),
        )

    def _stop_if_due(self) -> None:
        if not self._stop.due(self.step, self._meter.fastest_ns / 1e9):
            return
        if self._saver is None or self._state is None:
            self._tell(f"stopped by SIGTERM before step {self.step}; ctx.save was never called")
        else:
            self.save(self._state)
            with self._saving():
                self._saver.finish()
            self._tell(f"stopped by SIGTERM before step {self.step}, which is saved")
        self._beat()
        raise SystemExit(STOPPED_CODE)

    # -- checkpoints -----------------------------------------------------------------------

    @property
    def can_save(self) -> bool:
        """Whether there is a directory to save to."""
        return self._saver is not None

    def save(self, state: State, every: Every = None) -> bool:
        """Begins a checkpoint of `state`, after this step's work; every member calls it alike.

        `every`: only in every so many steps, or "auto": as often as failures and the cost of a
        save make it worth while. The last step is always saved. Returns whether a save began.
        """
        self._state = check(state)
        if self._saver is None:
            raise TrainError(
                f"there is nowhere to save to: set {CHECKPOINTS_ENV}, or init(checkpoint=...)"
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
        """Puts the newest whole checkpoint into `state`, and the run where it was. Returns whether
        there was one. Every member calls it, before the first step."""
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
        self._beat(busy=True)  # until the first step: who restored has more to set up
        return True

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """The loop is blocked: that is booked, and no reason to think that it hangs."""
        self._beat(busy=True)
        with self._meter.saving(in_body=self._after is not None):
            yield
        self._beat()

    def _is_due(self, step: int, every: int | Literal["auto"]) -> bool:
        if isinstance(every, int) and every < 1:
            raise TrainError(f"every={every} of ctx.save: a number of steps from 1 on, or 'auto'")
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
        """From the saver's thread."""
        self._saved_step, self._saves = manifest.step, self._saves + 1
        self._beats.hurry()

    def _plan(self, blocked_s: float, now: Manifest) -> None:
        """When to save next. Rank 0 decides: its clock is not the others'."""
        assert self._saver is not None
        told = _seconds(os.environ.get(MTBF_ENV))
        between = interval.mtbf_s(self._group.nodes, now.trained_s, now.restarts, told)
        seconds = interval.interval_s(blocked_s, self._saver.written_s, between)
        gap = interval.interval_steps(seconds, self._step_s(), self._save_gap)
        self._save_gap = self._group.agree(gap)
        self._next_save = now.step + self._save_gap

    def _step_s(self) -> float:
        """The mean time of a step of this process."""
        meter = self._meter
        return (meter.body_ns + meter.data_ns) / 1e9 / max(1, meter.steps)

    def _tell(self, text: str) -> None:
        if self.rank == 0:
            say(text)

    # -- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for the last save and leaves the group. Called by itself when the script ends."""
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
        """An error here would be told, but the exit code would still be 0."""
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
