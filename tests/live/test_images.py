"""Jobs and services in an image, on a real cluster with a real podman."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.waiting import until

from shoal.core.state.events.runs import JobCheckpointed
from shoal.model.service import Probe, Scale
from tests.gateway.world import ROOT
from tests.live.cluster import Live, live_cluster
from tests.live.serving import Serving, need_gateway, replica_ports
from tests.podman import IMAGE, Podman, podman

# Where the loader of programs is differs between kinds of processors.
LIBRARIES = [path for path in ("/lib", "/lib64", "/usr/lib") if Path(path).exists()]
PYTHON_FOLDERS = [sys.prefix, sys.base_prefix, str(ROOT), *LIBRARIES]


@pytest.fixture(scope="module")
def store() -> Iterator[Podman]:
    with podman() as made:
        yield made


@pytest.fixture(scope="module")
def cluster(store: Podman) -> Iterator[Live]:
    """Its operator gives every container this machine's Python, in podman's own configuration."""
    settings = store.folder / "containers.conf"
    settings.write_text(
        f"[containers]\nvolumes = {json.dumps([f'{path}:{path}:ro' for path in PYTHON_FOLDERS])}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**store.env, "CONTAINERS_CONF": str(settings)}.items():
            patch.setenv(name, value)
        with live_cluster(nodes=2, gpus=4) as live:
            policy = live.client.policy()
            live.client.set_policy(msgspec.structs.replace(policy, **replica_ports()))
            yield live


def kill_first_process(live: Live, job: str, attempt: int, member: int) -> None:
    """Of the member's container, once there is one."""
    pattern = f"nodes/*/containers/*-{job}.{attempt}.{member}/pid"

    def found() -> list[int]:
        return [int(file.read_text()) for file in live.home.path.glob(pattern)]

    until(lambda: bool(found()))
    os.kill(found()[0], signal.SIGKILL)


def test_a_gang_in_an_image_goes_on_from_its_checkpoint_when_a_member_is_killed(
    cluster: Live,
) -> None:
    script = """
        cd $SHOAL_CHECKPOINT_DIR
        echo rank $RANK of $WORLD_SIZE on $SHOAL_NODE
        [ $RANK = 1 ] && [ $SHOAL_ATTEMPT = 2 ] && [ -e saved ] && echo goes on
        touch saved
        [ $SHOAL_ATTEMPT = 2 ] || exec sleep 1000
    """
    job = cluster.run(
        script, image=IMAGE, members=2, members_per_node=1, gpus=1, restart="on-failure", retries=1
    )
    assert cluster.wait(job, "running") == "running"
    until(lambda: "rank 1 of 2" in cluster.output(job, member=1))
    kill_first_process(cluster, job, 1, 0)
    assert cluster.wait(job) == "succeeded"
    assert "rank 0 of 2" in cluster.output(job, member=0, attempt=2)
    assert "goes on" in cluster.output(job, member=1, attempt=2)


def test_steps_are_reported_from_within_an_image(cluster: Live) -> None:
    """Python, Shoal and the socket for beats are all there is to it."""
    stepper = Path(__file__).with_name("stepper.py")
    pace = cluster.home.path / "pace"
    pace.write_text("")
    spec = cluster.spec(
        *(sys.executable, str(stepper), "40", str(pace)),
        image=IMAGE,
        workdir=str(cluster.home.path),
        members=2,
        gpus=1,
    )
    job = cluster.client.submit(spec).id
    assert cluster.wait(job) == "succeeded", cluster.output(job)
    events = [record.event for record in cluster.client.why(job).events]
    assert any(isinstance(event, JobCheckpointed) for event in events)


def test_an_elastic_gang_in_an_image_takes_what_is_free(cluster: Live) -> None:
    script = "echo $WORLD_SIZE members; exec sleep 1000"
    job = cluster.run(script, image=IMAGE, members=1, members_max=2, gpus=4, preemptible=True)
    until(lambda: "2 members" in cluster.output(job))
    cluster.client.cancel(job)
    assert cluster.wait(job) == "cancelled"


def test_a_replica_in_an_image_answers_behind_the_gateway_and_heals(cluster: Live) -> None:
    need_gateway()
    serving = Serving(cluster, "site")
    script = "mkdir /site; echo hello > /site/index.html; exec httpd -f -p $PORT -h /site"
    spec = cluster.spec("sh", "-c", script, image=IMAGE, cpu_milli=100)
    serving.put(spec, Scale(least=1, most=1), Probe(path="/index.html"))
    (replica,) = serving.settles().replicas
    assert serving.ask("index.html").body == "hello\n"
    kill_first_process(cluster, replica.job, 1, 0)
    until(lambda: replica.job not in [one.job for one in serving.view().replicas])
    serving.settles()
    assert serving.ask("index.html").body == "hello\n"
    cluster.client.stop_service("site")
    until(serving.gone)


def test_a_wrong_name_fails_with_a_reason(cluster: Live) -> None:
    job = cluster.run("true", image="localhost/absent:1")
    assert cluster.wait(job) == "failed"
    assert "there is no image localhost/absent:1 on this node" in cluster.client.job(job).why
    views = cluster.client.nodes()
    assert {view.containers for view in views} == {"podman"}


def test_the_command_line_runs_an_image(cluster: Live, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("from the folder\n")
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("shoal")),
            "run",
            "--image",
            IMAGE,
            "--wait",
            "cat",
            "note",
        ],
        cwd=tmp_path,
        env={**os.environ, "SHOAL_HOME": str(cluster.home.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "from the folder" in done.stdout, done.stderr
    assert done.returncode == 0


def test_exec_enters_the_container_and_leaves_nothing_in_it(cluster: Live) -> None:
    job = cluster.run("echo here > /tmp/inside; exec sleep 1000", image=IMAGE, gpus=1)
    cluster.wait(job, "running")
    script = "echo $SHOAL_JOB_ID $CUDA_VISIBLE_DEVICES; cat /tmp/inside; echo apart >&2; exit 6"
    env = {**os.environ, "SHOAL_HOME": str(cluster.home.path)}
    words = [sys.executable, "-m", "shoal.main", "exec", job, "--"]
    until(lambda: subprocess.run([*words, "true"], env=env, capture_output=True).returncode == 0)
    for more in ([], ["-t"]):
        done = subprocess.run(
            [*words[:-1], *more, "--", "sh", "-c", script],
            env=env,
            capture_output=True,
            timeout=120,
        )
        out, err = done.stdout.replace(b"\r", b""), done.stderr
        said = f"{job} 0\nhere\n".encode()
        expected = (said + b"apart\n", b"") if more else (said, b"apart\n")
        assert (done.returncode, out, err) == (6, *expected)
    left = subprocess.Popen([*words, "sh", "-c", "echo begun; sleep 1234"], env=env, stdout=-1)
    assert left.stdout and left.stdout.readline() == b"begun\n"
    left.send_signal(signal.SIGTERM)
    left.communicate(timeout=120)
    shown = [*words, "sh", "-c", "ps | grep -c '[s]leep 1234'"]
    until(lambda: subprocess.run(shown, env=env, capture_output=True).stdout.strip() == b"0")
    cluster.client.cancel(job)
