"""The examples, as gangs of their own. (All of them under `shoal run`: live/test_launchers.py.)"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from shoal.train.checkpoints import CheckpointStore
from tests.needs import need
from tests.train.gangs import ROOT, Gang, zygote

need("torch")

EXAMPLES = ROOT / "examples" / "train"


def start(script: str, *arguments: object, directory: Path, world: int = 2) -> Gang:
    env = {"SHOAL_CHECKPOINT_DIR": str(directory)}
    return Gang(str(EXAMPLES / script), *arguments, world=world, env=env)


def test_the_transformer_learns_saves_and_goes_on(tmp_path: Path) -> None:
    with start("chars.py", "--steps", 12, "--batch", 8, directory=tmp_path) as gang:
        first = gang.succeed()
    saved = [one.step for one in CheckpointStore(str(tmp_path)).find() if one.whole]
    assert saved[0] == 12, "the last step is always saved"
    assert "loss" in first[0].out
    with start("chars.py", "--steps", 16, "--batch", 8, directory=tmp_path, world=1) as gang:
        assert "continues with step 12" in gang.succeed()[0].err


def test_the_classifier_runs_to_its_end(tmp_path: Path) -> None:
    with start("images.py", "--epochs", 1, "--samples", 64, directory=tmp_path) as gang:
        assert "of new images right" in gang.succeed()[0].out


@pytest.mark.soak
def test_a_run_over_shards_that_is_killed_ends_with_the_loss_of_one_that_is_not(
    tmp_path: Path,
) -> None:
    with start("shards.py", "--write", tmp_path / "digits", directory=tmp_path, world=0) as gang:
        gang.succeed()
    ends = []
    for name, kills in (("calm", ()), ("disturbed", (100, 250, 350))):
        # Always one member, so that the last loss can be compared to its last digit.
        arguments = "shards.py", "--volume", tmp_path / "digits"
        for step in kills:
            with start(*arguments, directory=tmp_path / name, world=1) as gang:
                gang.read_until(f"step {step}")
                gang.signal(signal.SIGKILL)
        with start(*arguments, directory=tmp_path / name, world=1) as gang:
            ends.append(gang.succeed()[0].out.strip().splitlines()[-1].partition(",")[0])
    assert "after step 500" in ends[0]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("script", "package", "imports"),
    [
        ("fsdp2.py", "torch", ()),
        ("accelerated.py", "accelerate", ("accelerate",)),
        ("deepspeeded.py", "deepspeed", ("deepspeed", "torch._inductor.compile_fx")),
        ("megatron_gpt.py", "megatron", ("megatron.core.models.gpt.gpt_model",)),
    ],
)
def test_a_run_that_was_killed_continues_with_the_losses_of_one_that_was_not(
    script: str, package: str, imports: tuple[str, ...], tmp_path: Path
) -> None:
    """A plain script of another project, as users have it; under Shoal: live/test_launchers.py."""
    need(package)
    zygote().preload(*imports)
    counted = "steps" if "--steps" in (EXAMPLES / script).read_text() else "epochs"
    small = () if counted == "steps" else ("--samples", 64)

    def train(until: int, directory: Path) -> Gang:
        return start(script, f"--{counted}", until, *small, directory=directory)

    with train(100_000, tmp_path / "killed") as gang:
        gang.read_until(f"{counted[:-1]} 6 done")
        gang.members[1].signal(signal.SIGKILL)
        gang.signal(signal.SIGKILL)  # Shoal ends the others
        before = losses("\n" + gang.end()[0].out)
    until = max(before, default=6) + 4
    with train(until, tmp_path / "killed") as gang:
        ended = gang.succeed()
    first = {int(n) for one in ended for n in re.findall(r"goes on with \w+ (\d+)", one.out)}
    after = losses(ended[0].out)
    with train(until, tmp_path / "calm") as gang:
        calm = losses(gang.succeed()[0].out)
    assert first == {min(after)} and 5 <= min(after) <= until - 2, "it went on at a saved step"
    assert sorted(after) == list(range(min(after), until))
    assert calm | after | before == pytest.approx(calm, rel=1e-4)
    assert min(calm.values()) < calm[0], "it learns"


def losses(out: str) -> dict[int, float]:
    lines = re.findall(r"^(?:step|epoch) (\d+) done: loss ([\d.]+)$", out, re.MULTILINE)
    return {int(number): float(loss) for number, loss in lines}


@pytest.mark.soak
@pytest.mark.parametrize("script", ["chars.py", "images.py"])
def test_an_example_reaches_the_loss_it_states(script: str, tmp_path: Path) -> None:
    with start(script, directory=tmp_path) as gang:
        out = gang.succeed()[0].out
    assert re.search(r"^loss .*: reached the goal", out, re.MULTILINE), out
