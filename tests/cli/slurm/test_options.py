"""What a Slurm script asks for becomes the fields of a job."""

from __future__ import annotations

import pytest

from shoal.cli.slurm.options import (
    directives,
    fields,
    hostnames,
    job_id,
    notes,
    parse,
    seconds_of,
    shape,
    slurm_id,
)
from shoal.forms.failure import Failure

SCRIPT = """#!/bin/bash
# A comment, and then what it needs.
#SBATCH --job-name=train   # a name
#SBATCH -N 2
#SBATCH --ntasks-per-node=4 --cpus-per-task 8
#SBATCH --gres=gpu:a100:4
#SBATCH --mem=64G -t 1-12:30
#SBATCH --mail-type=END

srun python train.py
#SBATCH --nodes=64
"""


def test_the_lines_before_the_first_command_count() -> None:
    found = directives(SCRIPT)
    assert found["nodes"] == "2"
    assert fields(found) == {
        "name": "train",
        "members": 2,
        "per_node": 1,
        "launcher": True,
        "cpus": 32,
        "gpus": 4,
        "gpu_model": ["a100"],
        "memory": "65536M",
        "time_limit": "131400s",
    }
    assert notes(found) == ["--mail-type has no effect: use shoal notify"]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("-n 3 -c2", {"cpus": 6}),
        ("--ntasks=4 --gpus-per-task=1", {"cpus": 4, "gpus": 4}),
        ("-N2 -G 8", {"cpus": 1, "gpus": 4, "members": 2, "per_node": 1, "launcher": True}),
        ("--gres=gpu", {"cpus": 1, "gpus": 1}),
        ("--gres=gpu:h100", {"cpus": 1, "gpus": 1, "gpu_model": ["h100"]}),
        ("-c 4 --mem-per-cpu=500", {"cpus": 4, "memory": "2000M"}),
        ("--mem=0", {"cpus": 1}),
        ("-d afterok:3:4,afterany:5_2", {"cpus": 1, "after": ["j3", "j4", "j5.2:any"]}),
        ("--exclusive --no-requeue", {"cpus": 1, "whole_nodes": True, "restart": "never"}),
        ("-a 0-9%2 -A lab", {"cpus": 1, "array": "0-9%2", "label": {"account": "lab"}}),
        ("-Wl -t 0", {"cpus": 1}),
    ],
)
def test_options_become_fields(line: str, wanted: dict[str, object]) -> None:
    assert fields(parse(line.split(), "sbatch").options) == wanted


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--nonsense", "--nonsense"),
        ("-t 1x", "--time"),
        ("--mem=lots", "--mem"),
        ("-N 3 -G 4", "--gpus-per-node"),
        ("-d singleton", "afterok"),
        ("-n 0", "--ntasks"),
        ("--job-name", "needs a value"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(line: str, text: str) -> None:
    with pytest.raises(Failure) as refused:
        fields(parse(line.split(), "sbatch").options)
    assert text in refused.value.message


def test_options_end_where_the_command_begins() -> None:
    wishes = parse(["-n", "2", "python", "-c", "print(1)"], "srun")
    assert wishes.rest == ["python", "-c", "print(1)"]
    assert shape(wishes.options).tasks == 2


def test_times_names_and_ids_are_read_as_slurm_writes_them() -> None:
    assert [seconds_of(text) for text in ("30", "5:30", "1:00:00", "2-12", "UNLIMITED")] == [
        1800,
        330,
        3600,
        216_000,
        0,
    ]
    assert hostnames("a,n[1-3,07],b2") == ["a", "n1", "n2", "n3", "n07", "b2"]
    assert [job_id(text) for text in ("7", "7_3", "j7.3")] == ["j7", "j7.3", "j7.3"]
    assert slurm_id("j7.3") == "7_3"
