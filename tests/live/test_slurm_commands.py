"""Scripts and habits of Slurm on a real cluster: what `shoal slurm-commands` writes is called as
people and tools call Slurm's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.waiting import until

from tests.live.cluster import Live

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def at(live: Live, tmp_path: Path) -> Run:
    """Runs a command line in an empty folder, with Slurm's commands in the PATH."""
    environment = {
        **os.environ,
        "SHOAL_HOME": str(live.home.path),
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def run(line: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == code, (line, done.returncode, done.stdout, done.stderr)
        return done

    run("shoal slurm-commands bin")
    return run


def test_a_script_runs_as_its_lines_say_and_writes_its_file(at: Run, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\n"
        "#SBATCH --job-name=hello --ntasks=2 --gres=gpu:2\n"
        "#SBATCH --output=%x-%j.txt\n"
        'echo "$1 $SLURM_JOB_NAME on $SLURM_JOB_NODELIST with $CUDA_VISIBLE_DEVICES"\n'
        "unset SLURM_NNODES SLURM_JOB_NODELIST SLURM_CPUS_PER_TASK  # as Snakemake does\n"
        "srun -l bash -c 'echo task $SLURM_PROCID of $SLURM_NTASKS'\n"
    )
    number = at("sbatch --wait --parsable job.sh 'a b'").stdout.strip()
    first, *tasks = (tmp_path / f"hello-{number}.txt").read_text().splitlines()
    assert first.startswith("a b hello on n")
    assert len(first.split(" with ")[1].split(",")) == 2
    assert sorted(tasks) == ["0: task 0 of 2", "1: task 1 of 2"]
    listed = at(f"sacct -X -P -n -o JobIDRaw,JobName,State,ExitCode -j {number}").stdout
    assert listed == f"{number}|hello|COMPLETED|0:0\n"


def test_srun_starts_the_tasks_of_a_script_on_all_of_its_nodes(at: Run, tmp_path: Path) -> None:
    wrapped = "srun bash -c 'echo $SLURM_PROCID/$SLURM_NTASKS on $SLURMD_NODENAME $SHOAL_NODE'"
    number = at(
        f'sbatch -W --parsable -N 2 --ntasks-per-node=2 --wrap "{wrapped}; exit 3"'.replace(
            "$", "\\$"
        ),
        code=3,
    ).stdout.strip()
    lines = sorted((tmp_path / f"slurm-{number}.out").read_text().split("\n")[:-1])
    assert [line.split(" on ")[0] for line in lines] == ["0/4", "1/4", "2/4", "3/4"]
    homes = [line.split()[-1] for line in lines]
    assert homes[0] == homes[1] != homes[2] == homes[3]


def test_arrays_dependencies_and_cancelling(at: Run, tmp_path: Path) -> None:
    wrapped = r"echo {index} \$SLURM_ARRAY_TASK_ID; exit \$((SLURM_ARRAY_TASK_ID == 2))"
    number = at(f'sbatch --parsable -a 0-2 --wrap "{wrapped}"').stdout.strip()
    at(f"sbatch -W -d afterany:{number} --wrap true")
    assert (tmp_path / f"slurm-{number}_1.out").read_text() == "{index} 1\n"
    listed = at(f"sacct -P -n -o JobID,State -j {number}").stdout.split()
    assert listed == [f"{number}_0|COMPLETED", f"{number}_1|COMPLETED", f"{number}_2|FAILED"]
    long = at("sbatch --parsable --wrap 'sleep 600'").stdout.strip()
    until(lambda: at(f"squeue -h -j {long} -o '%i %t'").stdout == f"{long} R\n")
    script = at(
        "cat /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -a /slurm_script"
    ).stdout.split()
    at(f"scancel {long}")
    until(lambda: at(f"sacct -n -P -o State -j {long}").stdout == "CANCELLED\n")
    until(lambda: not any(map(os.path.exists, script)), "the script is left behind")


def test_srun_alone_shows_the_output_and_ends_with_the_commands_code(at: Run) -> None:
    assert at("srun -n 2 -l echo hallo").stdout == "0: hallo\n1: hallo\n"
    assert "failed" in at("srun sh -c 'exit 5'", code=5).stderr


def test_bad_input_gets_one_line(at: Run, tmp_path: Path) -> None:
    for line, text in (
        ("sbatch nothing.sh", "nothing.sh"),
        ("sbatch --nonsense --wrap true", "--nonsense"),
        ("echo true >plain; sbatch plain", "#!/bin/bash"),
        ("squeue --nonsense", "--nonsense"),
        ("scancel", "name a job"),
        ("scancel 999999", "999999"),
        ("scontrol update", "show hostnames"),
    ):
        done = subprocess_fails(at, line)
        assert text in done.stderr
        assert done.stderr.count("\n") == 1
    (tmp_path / "real").mkdir()
    (tmp_path / "real/sbatch").write_text("#!/bin/sh\n")
    assert "another program" in subprocess_fails(at, "shoal slurm-commands real").stderr


def subprocess_fails(at: Run, line: str) -> subprocess.CompletedProcess[str]:
    return at(f"{line} && exit 77; exit 76", code=76)
