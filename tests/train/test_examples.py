"""The examples go on after a kill. (Under `shoal run`: tests/live/test_launchers.py.)"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from shoal.train.checkpoints import CheckpointStore
from tests.needs import need
from tests.train.gangs import ROOT, Gang

need("torch")

EXAMPLES = ROOT / "examples" / "train"


def start(script: str, *arguments: object, directory: Path, world: int = 2) -> Gang:
    env = {"SHOAL_CHECKPOINT_DIR": str(directory)}
    return Gang(str(EXAMPLES / script), *arguments, world=world, env=env)


@pytest.mark.outside("torch and the launchers of others meet on a port by clocks of their own")
@pytest.mark.parametrize(
    ("script", "package"),
    [
        ("ddp.py", "torch"),
        ("fsdp2.py", "torch"),
        ("accelerated.py", "accelerate"),
        ("deepspeeded.py", "deepspeed"),
    ],
)
def test_a_script_that_knows_nothing_of_shoal_goes_on_from_its_checkpoint(
    script: str, package: str, tmp_path: Path
) -> None:
    need(package)
    # One that is killed within an epoch, and one that does the rest.
    with start(script, "--epochs", 1000, "--samples", 256, directory=tmp_path) as gang:
        gang.read_until("epoch 1 done")
        gang.signal(signal.SIGKILL)
    with start(script, "--epochs", 5, "--samples", 256, directory=tmp_path) as gang:
        ended = gang.succeed()
    went_on = [re.search(r"goes on with epoch (\d+)", member.out) for member in ended]
    epochs = {int(found[1]) for found in went_on if found}
    assert len(epochs) == 1 and epochs.pop() >= 1
    assert "import shoal" not in (EXAMPLES / script).read_text()


def test_the_transformer_learns_saves_and_goes_on(tmp_path: Path) -> None:
    with start("chars.py", "--steps", 12, "--batch", 8, directory=tmp_path) as gang:
        first = gang.succeed()
    saved = [one.step for one in CheckpointStore(str(tmp_path)).find() if one.whole]
    assert saved[0] == 12, "the last step is always saved"
    assert "loss" in first[0].out
    with start("chars.py", "--steps", 16, "--batch", 8, directory=tmp_path, world=1) as gang:
        assert "continues with step 12" in gang.succeed()[0].err


@pytest.mark.soak
@pytest.mark.parametrize("script", ["chars.py", "images.py"])
def test_an_example_reaches_the_loss_it_states(script: str, tmp_path: Path) -> None:
    with start(script, directory=tmp_path) as gang:
        out = gang.succeed()[0].out
    assert re.search(r"^loss .*: reached the goal", out, re.MULTILINE), out
