"""`shoal explain` of real jobs, from a real log of events and real output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.waiting import until

from shoal.agent.members import MemoryWatch
from shoal.client import ShoalError
from tests.observe.conftest import Observed


def shoal(observed: Observed, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal.main", args[0], "--home", str(observed.home.path)]
    return subprocess.run(
        [*command, *args[1:]], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_rank_that_failed_first_is_found_and_quoted(observed: Observed) -> None:
    job = observed.run(
        'if [ "$RANK" = 1 ]; then echo "hello from the one that fails"; exit 9; fi; sleep 600',
        members=3,
        gpus=1,
    )
    assert observed.wait(job) == "failed"
    said = shoal(observed, "explain", job)
    assert said.returncode == 0, said.stderr
    assert f"{job} has failed" in said.stdout
    assert "member 1 on" in said.stdout and "exit code 9" in said.stdout
    assert "| hello from the one that fails" in said.stdout
    assert "GPU-seconds in total" in said.stdout
    assert ") lost to failures" in said.stdout
    told = json.loads(shoal(observed, "explain", job, "--json").stdout)
    assert told["attempts"][0]["cause"] == "exited with an error"
    assert told["attempts"][0]["first"]["member"] == 1
    assert told["cost"]["gpu_us"] > 0


def test_a_member_out_of_memory_is_told_as_such(observed: Observed) -> None:
    job = observed.train(3, FAIL="MemoryError")
    assert observed.wait(job) == "failed"
    (one,) = observed.client.explanation(job).attempts
    assert (one.cause.value, one.sure) == ("out of memory", False)
    assert one.to_step == 3


@pytest.fixture
def tight() -> Iterator[Path]:
    """A cgroup with little memory, that a job may put itself into."""
    group = Path(f"/sys/fs/cgroup/memory/shoal-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("60M")
    except OSError as error:
        pytest.skip(f"no cgroup of one's own can be made here ({error.strerror})")
    yield group
    until(lambda: not (group / "tasks").read_text().strip())
    group.rmdir()


def test_what_the_kernel_killed_for_want_of_memory_is_told_as_such(
    observed: Observed, tight: Path
) -> None:
    eat = f"{sys.executable} -c \"x = b'x' * 500_000_000\""
    job = observed.run(f"echo $$ > {tight}/tasks && exec {eat}", gpus=1)
    assert observed.wait(job) == "failed"
    (one,) = observed.client.explanation(job).attempts
    assert (one.cause.value, one.sure) == ("out of memory", False)
    assert "the kernel killed processes there" in one.evidence
    assert one.first is not None and one.first.code == 137
    other = observed.run("kill -9 $$", gpus=1)  # the kernel's kill was a moment ago, perhaps
    observed.wait(other)
    assert observed.client.explanation(other).attempts[0].sure is False


def test_a_job_that_is_not_there_is_one_line(observed: Observed) -> None:
    said = shoal(observed, "explain", "j424242")
    assert said.returncode == 1
    assert said.stderr.count("\n") == 1 and "j424242" in said.stderr
    with pytest.raises(ShoalError, match="no job 'x y'"):
        observed.client.explanation("x y")


def test_a_kill_of_the_kernel_is_seen_only_at_its_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("shoal.agent.members.time.monotonic", lambda: now[0])
    file = tmp_path / "vmstat"
    file.write_text("nr_free_pages 5\noom_kill 3\n")
    watch = MemoryWatch(file)
    assert not watch.killed()
    file.write_text("nr_free_pages 5\noom_kill 4\n")
    assert watch.killed()
    now[0] += 60
    assert not watch.killed(), "an old kill explains no new death"
    file.write_text("garbage")
    assert not watch.killed()
    assert not MemoryWatch(tmp_path / "missing").killed()
