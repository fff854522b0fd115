"""`shoal.Client` in a Python program, on a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

import shoal
from tests.live.cluster import Live


def test_a_program_submits_a_job_with_the_fields_of_a_job_file(live: Live, tmp_path: Path) -> None:
    with shoal.Client(home=live.home.path) as client:
        job = client.run(
            ["sh", "-c", "echo $SEED; pwd"],
            name="from-python",
            memory="16 MB",
            env={"SEED": 7},
            workdir=tmp_path,
            time_limit="10m",
            gpus=None,
        )
    assert (job.spec.memory_mb, job.spec.time_limit_ms, job.spec.gpus) == (16, 600_000, 0)
    assert live.wait(job.id) == "succeeded"
    assert live.output(job.id) == f"7\n{tmp_path}\n"


def test_what_the_controller_refuses_is_the_same_error(live: Live) -> None:
    with (
        shoal.Client(home=live.home.path) as client,
        pytest.raises(shoal.ShoalError, match="CUDA_VISIBLE_DEVICES is set by Shoal") as caught,
    ):
        client.run("true", env={"CUDA_VISIBLE_DEVICES": "0"})
    assert caught.value.field == "env"
