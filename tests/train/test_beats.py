"""What a run tells of itself, and that a slow member can be told from those that wait for it."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.needs import need
from tests.train.gangs import Gang, Listener

need("torch")


def listened(listener: Listener, world: int) -> list[dict[str, str]]:
    return [listener.env(f"j1.1.{rank}") for rank in range(world)]


def test_beats_count_up_and_tell_steps_samples_losses_and_saves(
    listener: Listener, tmp_path: Path
) -> None:
    listener.listen()
    env = {"SHOAL_CHECKPOINT_DIR": str(tmp_path), "EVERY": "4"}
    with Gang("tiny.py", 20, 4, 4, env=env, each=listened(listener, 2)) as gang:
        gang.succeed()
    members = listener.heard()
    assert sorted(members) == ["j1.1.0", "j1.1.1"]
    for beats in members.values():
        for before, after in itertools.pairwise(beats):
            for name in ("step", "steps", "compute_us", "wait_us", "data_us", "save_us", "samples"):
                assert getattr(before, name) <= getattr(after, name)
        last = beats[-1]
        assert (last.step, last.steps, last.steps_total) == (20, 20, 20)
        assert (last.samples, last.saved_step, last.saves) == (40, 20, 5)
        assert last.compute_us > 0 and last.wait_us > 0 and last.data_us > 0 and last.save_us > 0
        assert last.loss is not None and last.metrics == {"step_number": 19.0}
        assert last.busy, "it winds up"
        assert any(not beat.busy for beat in beats)


def test_without_an_agent_or_with_a_dead_one_a_run_goes_on(tmp_path: Path) -> None:
    env = {"SHOAL_BEATS": "nobody-listens-here", "SHOAL_REF": "j1.1.0"}
    with Gang("tiny.py", 8, 4, 1, world=0, env=env | {"SHOAL_CHECKPOINT_DIR": str(tmp_path)}) as g:
        g.succeed()


def test_an_agent_that_does_not_read_holds_nobody_up(listener: Listener, tmp_path: Path) -> None:
    """Its queue is full after some beats (net.unix.max_dgram_qlen); nothing here reads it."""
    env = {"SHOAL_CHECKPOINT_DIR": str(tmp_path), "EVERY": "1"}
    with Gang("tiny.py", 200, 4, 1, world=0, env=env | listener.env("j1.1.0")) as gang:
        gang.succeed()
    listener.listen()
    assert 0 < len(listener.heard()["j1.1.0"]) < 100


@pytest.mark.outside("it compares times that real processes need")
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.soak)])
def test_a_slowed_member_shows_in_its_compute_time_and_in_its_peers_waits(
    kind: str, listener: Listener
) -> None:
    listener.listen()
    with Gang("busy.py", kind, each=listened(listener, 2)) as gang:
        gang.read_until("ready", rank=1)
        with duty_cycled(gang.members[1].signal):
            gang.succeed()
    members = listener.heard()
    healthy, slow = members["j1.1.0"][-1], members["j1.1.1"][-1]
    assert healthy.steps == slow.steps
    assert slow.compute_us > 1.25 * healthy.compute_us, (slow, healthy)
    assert healthy.wait_us > slow.wait_us, (slow, healthy)


class duty_cycled:  # noqa: N801  (reads as a statement)
    """Stops a process for three quarters of the time, as a hog beside it would."""

    def __init__(self, send: Callable[[int], None]) -> None:
        self._send, self._over = send, threading.Event()
        self._thread = threading.Thread(target=self._cycle)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _cycle(self) -> None:
        while not self._over.is_set():
            self._send(signal.SIGSTOP)
            self._over.wait(0.03)
            self._send(signal.SIGCONT)
            self._over.wait(0.01)
