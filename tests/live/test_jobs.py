"""What a user is promised about jobs, on a real cluster."""

from __future__ import annotations

import os
import signal

import pytest
from harness.waiting import until

from shoal.client import ShoalError
from tests.live.cluster import Live


def test_a_job_runs_and_its_output_is_kept(live: Live) -> None:
    job = live.run("echo hello; echo world >&2")
    assert live.wait(job) == "succeeded"
    assert live.output(job) == "hello\nworld\n"


def test_a_gang_gets_the_torchrun_environment(live: Live) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES SHOAL_JOB_ID"
    job = live.run(f"for n in {names}; do printenv $n; done", members=2, gpus=8)
    assert live.wait(job) == "succeeded"
    view = live.client.job(job)
    for rank in (0, 1):
        lines = live.output(job, member=rank).split()
        port = view.master.rpartition(":")[2]
        gpus = "0,1,2,3,4,5,6,7"
        assert lines == [str(rank), "2", "0", "127.0.0.1", port, gpus, job]
    assert len({member.node for member in view.gang}) == 2


@pytest.mark.parametrize(
    ("script", "code", "state"), [("exit 0", 0, "succeeded"), ("exit 7", 7, "failed")]
)
def test_the_exit_code_is_the_jobs_code(live: Live, script: str, code: int, state: str) -> None:
    job = live.run(script)
    assert live.wait(job) == state
    assert live.client.job(job).code == code


def test_a_job_ended_by_a_signal_says_so(live: Live) -> None:
    job = live.run("kill -9 $$")
    assert live.wait(job) == "failed"
    assert live.client.job(job).code == 128 + signal.SIGKILL
    assert "signal 9" in live.client.why(job).why


def test_a_failing_job_is_retried_until_it_succeeds(live: Live) -> None:
    script = 'test "$SHOAL_ATTEMPT" = 3 || exit 5'
    job = live.run(script, restart="on-failure", retries=5, backoff_ms=10)
    assert live.wait(job) == "succeeded"
    assert live.client.job(job).attempt == 3


def test_a_retry_budget_ends(live: Live) -> None:
    job = live.run("exit 5", restart="on-failure", retries=2, backoff_ms=10)
    assert live.wait(job) == "failed"
    view = live.client.job(job)
    assert (view.attempt, view.code) == (3, 5)
    assert "retries (2) are used up" in view.why


def test_one_failing_member_ends_the_gang(live: Live) -> None:
    job = live.run('test "$RANK" != 1 || exit 9; sleep 600', members=3, stop_grace_ms=1000)
    assert live.wait(job) == "failed"
    assert live.client.job(job).code == 9
    assert "member 1" in live.client.why(job).why


def test_a_time_limit_ends_a_job(live: Live) -> None:
    job = live.run("sleep 600", time_limit_ms=300)
    assert live.wait(job) == "timed-out"
    assert live.client.job(job).code == 124


def test_cancelling_a_running_job_ends_even_one_that_ignores_sigterm(live: Live) -> None:
    job = live.run("trap '' TERM; echo up; while :; do sleep 0.1; done", stop_grace_ms=300)
    assert live.wait(job, "running") == "running"
    until(lambda: live.output(job) == "up\n")
    live.client.cancel(job)
    assert live.wait(job) == "cancelled"


def test_cancelling_a_waiting_job_ends_it_at_once(live: Live) -> None:
    blocker = live.run("sleep 600", members=4, gpus=8)
    waiting = live.run("true", gpus=1)
    why = live.client.why(waiting).why
    assert "no node has " in why and "GPUs are held by j" in why
    live.client.cancel(waiting)
    assert live.wait(waiting) == "cancelled"
    live.client.cancel(blocker)
    assert live.wait(blocker) == "cancelled"


def test_a_program_that_is_not_there_fails_with_a_reason(live: Live) -> None:
    job = live.client.submit(live.spec("no-such-program")).id
    assert live.wait(job) == "failed"
    assert "no program 'no-such-program' in PATH" in live.client.why(job).why
    job = live.client.submit(live.spec("true", workdir="/no/such/place")).id
    assert live.wait(job) == "failed"
    assert "workdir /no/such/place is not a directory" in live.client.why(job).why


def test_a_key_makes_one_job_however_often_it_is_sent(live: Live) -> None:
    spec = live.spec("true")
    first = live.client.submit(spec, key="once").id
    assert live.wait(first) == "succeeded"
    assert live.client.submit(spec, key="once").id == first


def test_what_a_job_leaves_in_the_background_ends_with_it(live: Live) -> None:
    script = "setsid sh -c 'sleep 600 & sleep 600' & sleep 600 & sleep 0.2; echo done"
    job = live.run(script, env={"LEFT": "behind-by-this-job"})
    assert live.wait(job) == "succeeded"

    def left() -> list[int]:
        found = []
        for pid in live.member_processes():
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if b"LEFT=behind-by-this-job" in file.read():
                        found.append(pid)
            except OSError:
                continue
        return found

    until(lambda: not left())


def test_a_large_output_arrives_whole(live: Live) -> None:
    job = live.run("seq 1 300000")
    assert live.wait(job) == "succeeded"
    data, offset = b"", 0
    while True:
        view = live.client.logs(job, offset=offset)
        data += view.data
        offset = view.next_offset
        if view.ended:
            break
    assert data == b"".join(b"%d\n" % n for n in range(1, 300001))


def test_impossible_requests_name_the_field_and_what_would_work(live: Live) -> None:
    with pytest.raises(ShoalError, match=r"gpus: .*no node has more than 8; ask for at most 8"):
        live.client.submit(live.spec("true", gpus=9))
    with pytest.raises(ShoalError, match=r"members: .*ask for at most 4"):
        live.client.submit(live.spec("true", gpus=8, members=5))


def test_files_of_the_cluster_are_private(live: Live) -> None:
    assert os.stat(live.home.token).st_mode & 0o777 == 0o600
    assert os.stat(live.home.path).st_mode & 0o777 == 0o700


def test_a_finished_job_is_submitted_again_once_however_often_that_is_asked(live: Live) -> None:
    job = live.run("true")
    live.wait(job)
    again = [live.client.requeue(job, key="only-once").id for _ in range(3)]
    assert len(set(again)) == 1
    assert again[0] != job
    assert live.client.requeue(job).id not in again
