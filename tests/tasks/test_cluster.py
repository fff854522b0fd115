"""Maps over a real cluster: the same promises as on one machine, wherever workers are lost."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import until

import shoal
from shoal.tasks import Cluster, InitFailed, TaskFailed, WorkerDied
from shoal.tasks.cluster import ClusterPool
from shoal.tasks.stream import HandshakeFailed, greet, introduce
from tests.cli.conftest import Result
from tests.live.cluster import Live, all_pids, live_cluster

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_cluster(nodes=2, gpus=0) as cluster:
        yield cluster


@pytest.fixture
def cluster(live: Live) -> Iterator[Cluster]:
    yield Cluster(home=live.home.path)
    until(lambda: not live.client.jobs(), "the job of a map outlived it")


def square(number: int) -> int:
    return number * number


def large(number: int) -> bytes:
    return bytes([number]) * 3_000_000


def measure(data: bytes) -> tuple[int, str]:
    return len(data), hashlib.sha256(data).hexdigest()


def test_results_come_in_order_and_the_job_ends_with_the_map(live: Live, cluster: Cluster) -> None:
    found = list(shoal.map(square, range(20_000), cluster=cluster, workers=3))
    assert found == [number * number for number in range(20_000)]
    until(lambda: not live.client.jobs())
    last = live.client.jobs(finished=True)[0]
    assert (last.name, last.state, last.members, last.members_max) == ("map", "succeeded", 1, 3)


def test_what_is_large_travels_in_both_directions(cluster: Cluster) -> None:
    assert list(shoal.map(large, range(6), cluster=cluster, workers=2)) == [
        large(number) for number in range(6)
    ]
    sent = [large(number) for number in range(6)]
    assert list(shoal.map(measure, sent, cluster=cluster, workers=2)) == [
        measure(data) for data in sent
    ]


def test_a_task_that_kills_its_worker_or_its_host_is_isolated(cluster: Cluster) -> None:
    def poison(number: int) -> int:
        if number == 70:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 30:
            os.kill(os.getppid(), signal.SIGKILL)
        return number

    found = list(shoal.map(poison, range(100), cluster=cluster, workers=2, on_error="return"))
    bad = [one for one in found if isinstance(one, TaskFailed)]
    assert [one for one in found if not isinstance(one, TaskFailed)] == [
        number for number in range(100) if number not in (30, 70)
    ]
    assert [(one.index, one.tries) for one in bad] == [(30, 3), (70, 3)]
    assert "was killed by SIGKILL during the task" in str(bad[1].error)
    assert "was lost" in str(bad[0].error)


def test_init_is_called_once_in_each_worker_and_its_failure_is_told(cluster: Cluster) -> None:
    def init() -> list[int]:
        return [os.getpid()]

    def use(number: int) -> tuple[int, int]:
        import shoal.tasks

        held = shoal.tasks.context()
        held.append(number)
        return held[0], os.getpid()

    found = list(shoal.map(use, range(500), cluster=cluster, workers=2, init=init))
    assert len(found) == 500 and all(built == here for built, here in found)

    def fails() -> None:
        raise ValueError("no model there")

    with pytest.raises(InitFailed, match="ValueError: no model there"):
        list(shoal.map(square, range(5), cluster=cluster, workers=2, init=fails))


def hosts_of(live: Live) -> list[int]:
    """Processes that connect workers of this cluster's maps."""
    needle = os.fsencode(live.home.path)
    return [
        pid
        for pid in all_pids()
        if b"shoal.tasks.host" in _file(pid, "cmdline") and needle in _file(pid, "environ")
    ]


def _file(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def slowly(number: int) -> int:
    time.sleep(0.02)
    return number


def in_the_middle(results: Iterator[Any], act: Callable[[], None]) -> list[Any]:
    """All results; `act` is called after the first few."""
    found = []
    for result in results:
        found.append(result)
        if len(found) == 20:
            act()
    return found


def test_hosts_nodes_and_the_controller_may_die_meanwhile(live: Live, cluster: Cluster) -> None:
    def kill_host() -> None:
        hosts = hosts_of(live)
        assert hosts
        os.kill(hosts[0], signal.SIGKILL)

    for act in (kill_host, live.kill_controller, lambda: live.kill_agent("n1")):
        results = shoal.map(slowly, range(400), cluster=cluster, workers=4)
        assert in_the_middle(results, act) == list(range(400))  # type: ignore[arg-type]


def test_an_executor_of_the_cluster_runs_each_task_at_most_once(cluster: Cluster) -> None:
    with shoal.Executor(2, cluster=cluster) as executor:
        assert executor.submit(square, 7).result(60) == 49
        with pytest.raises(WorkerDied, match="ended with exit code 4"):
            executor.submit(os._exit, 4).result(60)
        with pytest.raises(WorkerDied, match="was lost"):
            executor.submit(_kill_parent).result(60)
        assert list(executor.map(square, range(5))) == [0, 1, 4, 9, 16]


def _kill_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def test_a_map_takes_room_that_becomes_free_and_that_nobody_waits_for(
    live: Live, cluster: Cluster, tmp_path: Path
) -> None:
    """The cluster is full but for one CPU when it begins."""
    flag = tmp_path / "flag"
    block = f"until test -e {flag}; do sleep 0.05; done"
    blocks = [live.run(block, cpu_milli=cpus * 1000) for cpus in (15, 16)]
    for job in blocks:
        live.wait(job, "running")
    seen: set[int] = set()

    def until_all_are_there() -> Iterator[int]:
        for number in range(20_000):
            if len(seen) >= 3:
                return
            yield number

    results = shoal.map(_who, until_all_are_there(), cluster=cluster, workers=3, chunk=1)
    for count, pid in enumerate(results):
        seen.add(pid)
        if count == 20:
            assert [job.size for job in live.client.jobs() if job.name == "map"] == [1]
            flag.touch()
    assert len(seen) == 3
    for job in blocks:
        live.wait(job)


def _who(_: int) -> int:
    time.sleep(0.05)
    return os.getpid()


SCRIPT = """
import os, time
from pathlib import Path
import helper

def work(value):
    with open(os.environ["TALLY"], "a") as tally:
        tally.write(f"{value}\\n")
    time.sleep(0.01)
    return {"value": value, "doubled": helper.double(value), "where": os.getcwd()}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "work.py").write_text(SCRIPT)
    (root / "sub" / "helper.py").write_text("def double(x): return 2 * x\n")
    (root / "inputs.jsonl").write_text("".join(f"{number}\n" for number in range(300)))
    return root


def command(project: Path, live: Live, *more: str) -> list[str]:
    tally = project.parent / "tally"
    return [
        *(sys.executable, "-m", "shoal.main", "map", "sub/work.py:work", "inputs.jsonl"),
        *("-o", str(project.parent / "out.jsonl"), "--cluster", "-n", "2"),
        *("--env", f"TALLY={tally}", *more),
    ]


def run(words: list[str], project: Path, live: Live) -> Result:
    env = {**os.environ, "SHOAL_HOME": str(live.home.path)}
    done = subprocess.run(
        words, cwd=project, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    return Result(done.returncode, done.stdout, done.stderr)


def test_a_client_that_is_killed_takes_its_job_along_and_goes_on_later(
    project: Path, live: Live, cluster: Cluster
) -> None:
    words = command(project, live)
    env = {**os.environ, "SHOAL_HOME": str(live.home.path)}
    client = subprocess.Popen(words, cwd=project, env=env, stderr=subprocess.DEVNULL)
    journal = project.parent / "out.jsonl.part"
    until(lambda: journal.exists() and journal.stat().st_size > 1000)
    client.kill()
    client.wait()
    until(lambda: not live.client.jobs(), "the job lingers")
    result = run(words, project, live)
    assert result.code == 0, result.err
    assert "continuing" in result.err
    lines = [json.loads(line) for line in (project.parent / "out.jsonl").read_text().splitlines()]
    assert [(line["value"], line["doubled"]) for line in lines] == [
        (number, 2 * number) for number in range(300)
    ]
    begun = (project.parent / "tally").read_text().split()
    assert set(begun) == {str(number) for number in range(300)}
    assert len(begun) < 400, "what was done is not done again"


def test_the_script_and_what_is_beside_it_travel(
    project: Path, live: Live, cluster: Cluster
) -> None:
    result = run(command(project, live, "--pack", "--json"), project, live)
    assert result.code == 0, result.err
    lines = [json.loads(line) for line in (project.parent / "out.jsonl").read_text().splitlines()]
    assert [line["doubled"] for line in lines] == [2 * number for number in range(300)]
    assert all("/packages/" in line["where"] for line in lines)


def test_bad_input_is_one_clear_line(project: Path, live: Live, tmp_path: Path) -> None:
    base = command(project, live)
    assert "--gpus: is for workers on the cluster; add --cluster" in (
        run(
            [
                *(
                    word
                    for word in base
                    if word != "--cluster" and "TALLY" not in word and word != "--env"
                ),
                "--gpus",
                "1",
            ],
            project,
            live,
        ).err
    )
    refused = run([*base, "--gpus", "1"], project, live)
    assert refused.code != 0
    assert "no workers from the cluster: gpus: asks for 1 GPUs per member" in refused.err
    assert "Traceback" not in refused.err
    nowhere = run([*base, "--home", str(tmp_path / "none")], project, live)
    assert "no cluster is up in" in nowhere.err
    assert "Traceback" not in nowhere.err


def test_strangers_learn_nothing_and_cost_nothing() -> None:
    """Whoever does not know the secret is not listened to, whichever end it is."""
    for ours, theirs in ((b"a" * 32, b"b" * 32), (b"a" * 32, b"a" * 32)):
        left, right = socket.socketpair()
        seen: list[object] = []

        def worker(end: socket.socket, secret: bytes, seen: list[object]) -> None:
            try:
                introduce(end, secret, {"node": "n1"})
                seen.append("welcome")
            except HandshakeFailed as error:
                seen.append(str(error))
            end.close()

        thread = threading.Thread(target=worker, args=(right, theirs, seen))
        thread.start()
        if ours == theirs:
            assert greet(left, ours) == {"node": "n1"}
        else:
            with pytest.raises(HandshakeFailed, match="does not know the secret"):
                greet(left, ours)
        left.close()
        thread.join(60)
        assert seen == ["welcome" if ours == theirs else "went away"]
    left, right = socket.socketpair()
    right.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 64)
    with pytest.raises(HandshakeFailed, match="speaks another protocol"):
        greet(left, b"a" * 32)
    left.close()
    right.close()


def test_another_python_is_refused_with_both_versions(live: Live) -> None:
    pool = ClusterPool(1, None, Cluster(home=live.home.path))
    left, right = socket.socketpair()
    pool._join(left, {"python": [2, 7], "node": "n9"})
    assert isinstance(pool.broken, InitFailed)
    assert "n9 has Python 2.7, this is 3." in str(pool.broken)
    right.close()
    pool._end()


def test_a_host_ends_when_somebody_else_has_the_clients_port() -> None:
    """The client is gone, and what listens there now is no client: a host must not stay for it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = [sys.executable, "-m", "shoal.tasks.host", "127.0.0.1", str(port)]
        env = {**os.environ, "SHOAL_TASKS_SECRET": "00" * 32}
        host = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
        other.settimeout(60)
        for _ in range(3):
            connection, _ = other.accept()
            connection.sendall(b"220 mail.example.org ESMTP\r\n")
            connection.close()
        out, _ = host.communicate(timeout=60)
        assert (host.returncode, out.count("cannot reach the map's client")) == (1, 1)
    ended = subprocess.run(words, env=env, timeout=60, check=False).returncode
    assert ended == 0, "nobody there: the map has ended"
