"""`shoal.Client` in a Python program, on a real cluster."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import shoal
from shoal.client.connections import Interrupt, Interrupted
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


def test_threads_share_a_client_and_each_gets_its_own_answers(live: Live) -> None:
    ids = [live.run("true", name=f"of-{number}") for number in range(4)]
    with shoal.Client(home=live.home.path) as client:

        def look(number: int) -> set[str]:
            return {client.job(ids[number % 4]).name for _ in range(25)}

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(look, range(8))) == [{f"of-{n % 4}"} for n in range(8)]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_and_its_parent_use_one_client(live: Live) -> None:
    """On one connection they would read each other's answers."""
    job = live.run("true", name="of-the-parent")
    with shoal.Client(home=live.home.path) as client:
        client.status()
        child = os.fork()
        if not child:
            os._exit(0 if all(client.status().version for _ in range(50)) else 1)
        names = {client.job(job).name for _ in range(50)}
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert names == {"of-the-parent"}


def test_a_call_that_waits_can_be_interrupted_from_another_thread(live: Live) -> None:
    job, interrupt = live.run("sleep 60"), Interrupt()
    with shoal.Client(home=live.home.path) as client, ThreadPoolExecutor(1) as threads:
        lent = client.lent(interrupt=interrupt)
        waiting = threads.submit(lambda: lent.job(job, wait_for="finished", wait_s=30))
        assert not waiting.done()
        interrupt.ask()
        with pytest.raises(Interrupted):
            waiting.result(120)
        assert client.cancel(job).id == job  # the client itself goes on


def test_lines_come_as_they_are_written_over_attempts_and_a_killed_controller(
    live: Live, tmp_path: Path
) -> None:
    """The script ends its first attempt when we have seen its line, so we see it while it runs."""
    script = "echo attempt $SHOAL_ATTEMPT; until test -e go; do sleep 0.05; done; printf last"
    with shoal.Client(home=live.home.path) as client:
        job = client.run(["sh", "-c", f"{script}; test -e end"], workdir=tmp_path, retries=1)
        lines = client.follow(job.id)
        assert next(lines) == "attempt 1"
        live.kill_controller()
        (tmp_path / "go").touch()
        assert next(lines) == "last"
        assert next(lines) == "attempt 2"
        (tmp_path / "end").touch()  # too late for this attempt or not: both end the job
        assert list(lines) == ["last"]
        assert client.wait(job.id).state in ("succeeded", "failed")


def test_waiting_outlives_a_controller_and_ends_in_time(live: Live, tmp_path: Path) -> None:
    with shoal.Client(home=live.home.path) as client, ThreadPoolExecutor(1) as threads:
        job = client.run("sh -c 'until test -e go; do sleep 0.05; done'", workdir=tmp_path)
        with pytest.raises(TimeoutError, match=f"{job.id} is "):
            client.wait(job.id, timeout_s=0.2)
        waiting = threads.submit(client.wait, job.id)
        live.kill_controller()
        client.lent(patience_s=60).status()  # the next one answers
        (tmp_path / "go").touch()
        assert waiting.result(120).state == "succeeded"


def test_job_files_are_read_by_the_code_of_shoal_run(live: Live, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "train.yaml"
    path.write_text(
        "command: [sh, -c, 'echo $LR; pwd']\nenv: {LR: 1}\nworkdir: data\nmemory: 64M\n"
    )
    with shoal.Client(home=live.home.path) as client:
        job = client.run_file(path, env={"LR": 2}, name="from-file")
        assert client.wait(job.id).name == "from-file"
        assert list(client.follow(job.id)) == ["2", str(tmp_path / "data")]
        with pytest.raises(shoal.ShoalError, match=r"there is no such file"):
            client.run_file(tmp_path / "other.yaml")
    assert shoal.read_job(path).memory_mb == 64
    path.write_text("command: date\ngpus: many\n")
    with pytest.raises(shoal.ShoalError, match=r"train\.yaml: ") as caught:
        shoal.read_job(path)
    assert caught.value.field == "gpus"
    with pytest.raises(shoal.ShoalError) as caught:
        shoal.read_job(path, gpus=1, memory="lots")
    assert caught.value.field == "memory" and "train.yaml" not in str(caught.value)


def test_a_client_maps_over_its_own_cluster(live: Live) -> None:
    with shoal.Client(home=live.home.path) as client:
        assert list(client.map(lambda n: n * n, range(50), workers=2)) == [n * n for n in range(50)]
    assert "map" in {row.name for row in live.client.jobs(finished=True)}
