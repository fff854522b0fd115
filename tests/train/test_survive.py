"""Runs that are killed, resized and told to stop, with real processes."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path

import pytest

from tests.needs import need
from tests.train.gangs import Gang, last_line

need("torch")

SAMPLES, BATCH, EPOCHS = 41, 6, 4
STEPS = -(-SAMPLES * EPOCHS // BATCH)


@pytest.mark.outside("members meet over gloo on a port that was free a moment before")
def test_killed_and_resized_at_random_a_run_uses_every_sample_of_every_epoch_once(
    tmp_path: Path,
) -> None:
    """The state itself counts how often each sample was used, and is rolled back with the rest."""
    seed = int(os.environ.get("SHOAL_SEED", random.randrange(1 << 30)))
    print(f"SHOAL_SEED={seed}")
    dice = random.Random(seed)
    env = {"SHOAL_CHECKPOINT_DIR": str(tmp_path), "EVERY": "2"}
    done = 0
    for kind in ("ddp", "fsdp", "ddp"):
        with Gang(
            "tiny.py",
            SAMPLES,
            BATCH,
            EPOCHS,
            world=dice.choice((1, 2, 3)),
            env=env | {"KIND": kind},
        ) as gang:
            done = min(STEPS - 2, done + dice.randint(2, 8))
            gang.read_until(f"step {done}")
            dice.choice(gang.members).signal(signal.SIGKILL)
            gang.signal(signal.SIGKILL)
    with Gang("tiny.py", SAMPLES, BATCH, EPOCHS, world=dice.choice((2, 3)), env=env) as gang:
        ended = gang.succeed()
    for member in ended:
        assert "restored" in member.out
        assert f"used {[EPOCHS] * SAMPLES}" in member.out


@pytest.mark.outside("members meet over gloo on a port that was free a moment before")
def test_a_run_over_shards_goes_on_with_the_samples_that_were_left(tmp_path: Path) -> None:
    """Killed in one epoch and in the next, with other numbers of members and of workers."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for first in range(0, SAMPLES, 5):
        numbers = range(first, min(first + 5, SAMPLES))
        lines = (f'{{"number": {number}}}\n' for number in numbers)
        (shards / f"{first:02}.jsonl").write_text("".join(lines))
    env = {
        "SHOAL_CHECKPOINT_DIR": str(tmp_path / "saved"),
        "SHOAL_VOLUME_TINY": str(shards),
        "LOOPS": "2",
    }
    arguments = "tiny.py", SAMPLES, BATCH, 2
    for world, workers, step in ((1, "2", 5), (3, "0", 19)):
        dying = env | {"DIE_AT": str(step), "WORKERS": workers}
        with Gang(*arguments, world=world, env=dying) as gang:
            assert {member.code for member in gang.end()} == {9}
    with Gang(*arguments, world=2, env=env) as gang:
        ended = gang.succeed()
    assert int(ended[0].out.split()[1]) > 28 // 2  # in the second call of `steps`
    assert f"used {[4] * SAMPLES}" in ended[0].out


@pytest.mark.outside("members meet over gloo on a port that was free a moment before")
def test_the_curve_of_a_disturbed_run_is_that_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Not only the samples: the optimizer, too, goes on where it was, with other members."""
    losses = []
    for name, dying in (("calm", ()), ("disturbed", (2, 1))):
        env = {"SHOAL_CHECKPOINT_DIR": str(tmp_path / name), "EVERY": "3"}
        for world in dying:
            with Gang("tiny.py", 40, 4, 4, world=world, env=env | {"DIE_AT": "13"}) as gang:
                assert {member.code for member in gang.end()} == {9}
        with Gang("tiny.py", 40, 4, 4, world=1, env=env) as gang:
            losses.append(float(last_line(gang.succeed()[0].out).split()[1]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    "told", [pytest.param([0, 1], marks=pytest.mark.soak), [1]], ids=["all", "one"]
)
def test_sigterm_saves_the_step_that_all_members_have_done_and_ends(
    told: list[int], tmp_path: Path
) -> None:
    env = {"SHOAL_CHECKPOINT_DIR": str(tmp_path), "EVERY": "1000"}
    with Gang("tiny.py", 40, 4, 1000, env=env | {"SLEEP": "0.01"}) as gang:
        gang.read_until("step 5")
        for rank in told:
            gang.members[rank].signal(signal.SIGTERM)
        ended = gang.end()
    assert [member.code for member in ended] == [143, 143], ended[0].err
    stopped = re.search(r"stopped by SIGTERM before step (\d+), which is saved", ended[0].err)
    assert stopped, ended[0].err
    step = int(stopped[1])
    assert all(last_line(member.out) == f"step {step - 1}" for member in ended), "nothing is lost"
    with Gang("tiny.py", 40, 4, 1000, world=1, env=env | {"DIE_AT": str(step)}) as gang:
        assert f"restored {step} after {step - 1}" in gang.end()[0].out


def test_sigterm_without_anything_to_save_ends_too() -> None:
    with Gang("plain.py", world=0) as gang:
        gang.read_until("step 3")
        gang.signal(signal.SIGTERM)
        ended = gang.end()[0]
    assert ended.code == 143
    assert "ctx.save was never called" in last_line(ended.err)


def test_a_script_with_an_epoch_loop_of_its_own_goes_on_in_the_right_epoch(tmp_path: Path) -> None:
    env = {"SHOAL_CHECKPOINT_DIR": str(tmp_path), "EVERY": "1", "LOOPS": "3"}
    with Gang("tiny.py", 10, 4, 1, world=1, env=env | {"DIE_AT": "4"}) as gang:
        assert gang.end()[0].code == 9
    with Gang("tiny.py", 10, 4, 1, world=2, env=env) as gang:
        ended = gang.succeed()
    assert f"used {[3] * 10}" in ended[0].out
    assert "step 8\n" in ended[0].out and "step 9\n" not in ended[0].out
