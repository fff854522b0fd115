"""The examples, as gangs of their own. (All of them under `shoal run`: live/test_launchers.py.)"""

from __future__ import annotations

import re
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


def test_the_transformer_learns_saves_and_goes_on(tmp_path: Path) -> None:
    with start("chars.py", "--steps", 12, "--batch", 8, directory=tmp_path) as gang:
        first = gang.succeed()
    saved = [one.step for one in CheckpointStore(str(tmp_path)).find() if one.whole]
    assert saved[0] == 12, "the last step is always saved"
    assert "loss" in first[0].out
    with start("chars.py", "--steps", 16, "--batch", 8, directory=tmp_path, world=1) as gang:
        assert "continues with step 12" in gang.succeed()[0].err


@pytest.mark.parametrize(
    ("script", "said"), [("images.py", "of new images right"), ("fsdp2.py", "epoch 0 done")]
)
def test_an_example_runs_to_its_end(script: str, said: str, tmp_path: Path) -> None:
    with start(script, "--epochs", 1, "--samples", 64, directory=tmp_path) as gang:
        assert said in gang.succeed()[0].out


@pytest.mark.soak
@pytest.mark.parametrize("script", ["chars.py", "images.py"])
def test_an_example_reaches_the_loss_it_states(script: str, tmp_path: Path) -> None:
    with start(script, directory=tmp_path) as gang:
        out = gang.succeed()[0].out
    assert re.search(r"^loss .*: reached the goal", out, re.MULTILINE), out
