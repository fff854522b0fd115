"""Why a program failed, read from what it and its launcher printed.

The outputs are of real runs of scripts in which rank 1 (of accelerate: the only one) fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.core.answers.explain import last_lines
from shoal.model.last_error import last_error

OUTPUTS = Path(__file__).parent / "outputs_of_launchers"
NAN = "ValueError: the learning rate became nan at step 17"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("torchrun", f"{NAN} (rank 1)"),
        ("torchrun-plain", NAN),
        ("torchrun-record", f"{NAN} (rank 1)"),
        ("torchrun-killed", "Signal 9 (SIGKILL) received by PID 21973 (rank 1)"),
        ("accelerate", NAN),
        ("deepspeed", NAN),
        ("mpirun", NAN),
        ("lightning", f"{NAN} (rank 1)"),
    ],
)
def test_the_reason_is_the_failing_ranks_and_not_its_launchers(name: str, reason: str) -> None:
    text = (OUTPUTS / f"{name}.txt").read_text()
    assert last_error(text) == reason
    shown = "\n".join(last_lines(text))
    assert "ChildFailedError" not in shown and "https://pytorch.org" not in shown


def test_each_output_is_read_here() -> None:
    assert len(list(OUTPUTS.iterdir())) == 8


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ""),
        ("one\ntwo\n\n------\n", "two"),
        ("Traceback (most recent call last):\n  File x\nKeyError: 'a'\n", "KeyError: 'a'"),
        ("10%\r20%\rno such file\n", "no such file"),
        (
            "Traceback (most recent call last):\n  File x\nKeyError: 'a'\nit goes on\nno data",
            "no data",
        ),
        ("RuntimeError: Connection reset by peer", "RuntimeError: Connection reset by peer"),
        (
            "srun: error: n1: task 1: Exited with exit code 1",
            "srun: error: n1: task 1: Exited with exit code 1",
        ),
        ("cannot open x\nsrun: error: n1: task 1: Exited with exit code 1", "cannot open x"),
        ("Traceback (most recent call last):\n", "Traceback (most recent call last):"),
        ("-" * 30, ""),
    ],
)
def test_a_program_without_a_launcher_ends_with_its_reason(text: str, reason: str) -> None:
    assert last_error(text) == reason
