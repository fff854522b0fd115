"""`shoal.run`: functions as jobs, whose results are kept with the job."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import shoal
from shoal.sdk import call as calling
from shoal.sdk.client import Client
from tests.live.cluster import Live


@pytest.fixture
def cluster(live: Live, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv("SHOAL_HOME", str(live.home.path))
    return shoal.Client()


def add(one: int, other: int = 0) -> int:
    print(f"adding {one} and {other}")
    return one + other


class Odd(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def test_a_function_runs_as_a_job_and_what_it_returns_comes_back(cluster: Client) -> None:
    call = shoal.run(add, 1, 2, gpus=1, cpus=1, name="sum")
    assert call.result() == 3
    assert list(call.follow()) == ["adding 1 and 2"]
    view = call.wait()
    assert (view.name, view.gpus, view.state) == ("sum", 1, "succeeded")
    assert call.done() and shoal.Call[int](cluster, call.id).result() == 3, "as often as one likes"
    names = {"a": 1}
    lazy = functools.partial(lambda key, *, more: names[key] + more, more=41)
    assert shoal.run(lazy, "a").result() == 42


def test_every_member_of_a_gang_calls_the_function(cluster: Client) -> None:
    def rank(base: int) -> int:
        return base + int(os.environ["RANK"])

    call = shoal.run(rank, 10, members=2)
    assert (call.result(), call.results()) == (10, [10, 11])


def test_a_function_is_an_array_and_comes_after_another_job(cluster: Client) -> None:
    def square() -> int:
        return int(os.environ["SHOAL_ARRAY_INDEX"]) ** 2

    first = cluster.run("true")
    call = shoal.run(square, array="2-6:2", after=first.id)
    assert call.results() == [4, 16, 36]
    assert cluster.result(f"{call.id}.6") == 36
    with pytest.raises(shoal.ShoalError, match=f"{call.id} is an array; results"):
        call.result()
    with pytest.raises(shoal.ShoalError, match=f"{call.id} is an array; name an element, e.g."):
        list(call.follow())


def test_what_a_function_raises_is_raised_here_with_its_traceback(cluster: Client) -> None:
    def bad(number: int) -> None:
        while os.environ["RANK"] == "0":
            time.sleep(0.05)  # until it is stopped
        raise Odd(number)

    call = shoal.run(bad, 7, members=2, stop_grace="1s")
    with pytest.raises(Odd) as caught:
        call.result()
    assert caught.value.number == 7
    assert "raise Odd(number)" in str(caught.value.__cause__)
    lines = list(call.follow(member=1))
    assert "Odd: 7" in lines[-1] and "member.py" not in "".join(lines), "only what is the user's"
    with pytest.raises(shoal.JobFailed, match=r"j\d+ has no result, because it failed: .*exited 9"):
        shoal.run(os._exit, 9).result()
    assert shoal.run(sys.exit, 0).result() is None
    endless = shoal.run(time.sleep, 600, name="endless")
    endless.cancel()
    with pytest.raises(shoal.JobFailed, match="because it was cancelled: ") as stopped:
        endless.result()
    assert (stopped.value.job, stopped.value.state) == (endless.id, "cancelled")
    with pytest.raises(TypeError, match="the result, a generator, cannot be sent"):
        shoal.run(lambda: (n for n in range(3))).result()


def test_what_cannot_be_a_call_is_refused_here(cluster: Client) -> None:
    with pytest.raises(TypeError, match="cannot be sent to a worker"):
        shoal.run(lambda: cluster._connections)  # it holds a lock
    with pytest.raises(TypeError, match="the arguments cannot be sent"):
        shoal.run(add, cluster)
    with pytest.raises(TypeError, match=r"'python train\.py' is not a function"):
        shoal.run("python train.py")  # type: ignore[arg-type]
    with pytest.raises(shoal.ShoalError, match=r"to run a command, use Client\.run"):
        shoal.run(add, command="true")
    with pytest.raises(shoal.ShoalError, match="there is no field 'gpu'; did you mean 'gpus'"):
        shoal.run(add, 1, gpu=1)
    job = cluster.run("true")
    with pytest.raises(shoal.ShoalError, match=f"{job.id} runs a command, which has no result"):
        cluster.result(job.id)


def test_from_another_machine_the_folder_and_the_function_travel(
    live: Live, tmp_path: Path
) -> None:
    """As from a laptop: nothing but the API's address, a token and the folder."""
    (tmp_path / "helper.py").write_text("def double(n): return 2 * n\n")
    script = tmp_path / "submit.py"
    script.write_text(
        "import os, sys, helper, shoal\n"
        "def work(n): return helper.double(n), helper.__file__, os.getcwd()\n"
        "with shoal.Client(sys.argv[1], sys.argv[2]) as client:\n"
        "    for size in (1, 300_000):\n"
        "        data = os.urandom(size)\n"
        "        found, file, here = client.call(work, data).result()\n"
        "        assert found == 2 * data\n"
        "        assert file == here + '/helper.py' and '/packages/' in file, (file, here)\n"
    )
    token = (live.home.path / "token").read_text().strip()
    words = [sys.executable, str(script), live.client.url, token]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=300)


def test_a_call_outlives_its_program_a_kill_of_the_head_and_a_failed_attempt(
    cluster: Client, live: Live, tmp_path: Path
) -> None:
    script = tmp_path / "submit.py"
    script.write_text(
        textwrap.dedent("""
        import os, pathlib, shoal

        def late(folder):
            while not os.path.exists(f"{folder}/go"):
                pass
            if os.environ["SHOAL_ATTEMPT"] == "1":
                raise OSError("not yet")
            return {"from": pathlib.Path(folder)}

        print(shoal.run(late, os.getcwd(), retries=1, backoff="0s").id)
        """)
    )
    job = subprocess.check_output([sys.executable, script], cwd=tmp_path, text=True).strip()
    call = shoal.Call[dict[str, Path]](cluster, job)
    with pytest.raises(TimeoutError):
        call.result(timeout_s=0.2)
    live.kill_controller()
    (tmp_path / "go").touch()
    assert call.result() == {"from": tmp_path}
    assert call.wait().attempt == 2
    live.kill_controller()
    assert call.result() == {"from": tmp_path}


def test_large_arguments_and_results_travel_within_their_bounds(
    cluster: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    large = os.urandom(9_000_000)
    call = shoal.run(lambda data: (data[::-1], os.getcwd()), large)
    assert call.result() == (large[::-1], str(tmp_path))
    monkeypatch.setattr(calling, "CALL_BYTES_MAX", 1_000_000)
    with pytest.raises(shoal.ShoalError, match=r"9,000,\d+ bytes, and 1,000,000 can be sent"):
        shoal.run(len, large)
