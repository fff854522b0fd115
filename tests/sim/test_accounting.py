"""`shoal import sacct`: where a Slurm site's time went, from what its accounting prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.sim.accounting import Accounts, account, gpus_of_nodes, idle_s
from shoal.sim.replay.readers import read_trace
from shoal.sim.replay.readers.rows import Rows
from shoal.sim.replay.traces import Gangs

# What Slurm prints: steps, an array, a job that was requeued, one that runs, one that was cancelled
# before it started, a typed GPU alone, a limit in words, a state that was cut.
SITE = Path(__file__).parent.parent / "golden" / "traces" / "sacct_site.txt"


@pytest.fixture
def printed() -> Path:
    return SITE


@pytest.fixture
def found(printed: Path) -> Accounts:
    return account(Rows(printed))


def test_every_gpu_second_is_in_one_outcome(found: Accounts) -> None:
    hours = {one.name: round(one.time_s / 3600, 3) for one in found.outcomes}
    assert hours == {
        "completed": 14.0,
        "still running": 2.0,
        "failed": 1.0,
        "node failures": 1.0,
        "cancelled": 0.167,
        "timed out": 0.0,
    }
    assert found.time_s == sum(one.time_s for one in found.outcomes)
    assert found.time_s == sum(one.time_s for one in found.accounts)
    assert found.time_s == sum(one.time_s for one in found.users)


def test_jobs_are_counted_once_though_steps_and_attempts_have_rows(found: Accounts) -> None:
    assert (found.jobs, found.never_ran, found.unit) == (8, 2, "GPU")
    users = {one.name: one for one in found.users}
    assert users["bob"].jobs == 3 and round(users["bob"].lost_s / 3600, 2) == 2.0


def test_waiting_counts_from_when_a_job_could_have_started(found: Accounts) -> None:
    users = {one.name: one for one in found.users}
    assert users["ann"].waits_s == [600.0]
    assert sorted(users["bob"].waits_s) == [0.0, 0.0, 60.0]
    assert users["bob"].wait_s(0.5) == 0.0 and users["bob"].wait_s(0.9) == 60.0


def test_what_is_not_used_is_idle(found: Accounts) -> None:
    assert found.span_s == 6180  # from 00:00 to 01:43
    assert idle_s(found, 16) == 16 * 6180 - found.time_s
    assert idle_s(found, 1) == 0.0


def test_a_site_without_gpus_is_counted_in_cpus(tmp_path: Path) -> None:
    path = tmp_path / "cpus.txt"
    path.write_text(
        "JobID|User|Submit|Start|ElapsedRaw|AllocTRES|State\n"
        "1|ann|2026-01-01T00:00:00|2026-01-01T00:00:00|3600|cpu=4,mem=1G|COMPLETED\n"
    )
    found = account(Rows(path))
    assert found.unit == "CPU" and found.time_s == 4 * 3600


def test_sinfo_says_how_many_gpus_there_are() -> None:
    text = "n1|gpu:h100:8(S:0-1)\nn2|gpu:h100:8(S:0-1)\nn2|gpu:h100:8(S:0-1)\nn3|gpu:4,shard:16\n"
    assert gpus_of_nodes(text + "n4|(null)\nn5|fpga:2\nn6|gpu:a100:2,gpu:t4:1\n") == 23
    assert gpus_of_nodes("") == 0


def call(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "shoal.main", "import", *words]
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)


def test_the_command_reads_a_file_or_its_input_and_writes_a_trace(
    printed: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.txt"
    done = call(
        "sacct", "-", "--json", "--gpus", "16", "--trace", str(trace), stdin=printed.read_text()
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["jobs"] == 8 and said["hours"] == 18.167 and said["idle_hours"] == 9.3
    arrivals = read_trace(trace, Gangs(8)).arrivals
    assert [arrival.work_ms for arrival in arrivals if arrival.spec.gpus == 6] == [3_600_000]
    assert len(arrivals) == 6  # each job that ran, once
    shown = call("sacct", str(printed), "--gpus", "16").stdout
    assert "18.2 GPU-hours, 8 jobs, 2 of them never ran" in shown and "idle, of 16 GPUs" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pbs",), "use shoal import sacct"),
        (("sacct", "/nowhere/x"), "/nowhere/x"),
        (("sacct", "--from", "soon"), "--from: 'soon' is not a time"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    done = call(*words)
    assert done.returncode in (1, 2) and said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    done = call("sacct", str(path))
    assert done.returncode == 1 and "has no column JobID or Submit" in done.stderr
    done = call("sacct", "-", stdin="a,b\n1,2\n")
    assert done.stderr.startswith("error: standard input: has no column JobID or Submit")
