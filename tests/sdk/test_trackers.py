"""Experiment trackers in jobs, with the real packages: MLflow, and TensorBoard as a service."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.waiting import until

import shoal
from tests.live.cluster import MARK, Live
from tests.live.serving import serving_cluster
from tests.needs import need

EXAMPLES = Path(__file__).parents[2] / "examples" / "track"
PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Live]:
    with serving_cluster() as live:
        yield live


def test_a_job_that_restarts_continues_its_run_of_mlflow(cluster: Live, tmp_path: Path) -> None:
    need("mlflow")
    place = tmp_path / "mlruns"
    env = {
        MARK: str(cluster.home.path),
        "PATH": PATH,
        "MLFLOW_TRACKING_URI": f"file://{place}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    with shoal.Client(home=cluster.home.path) as client:
        job = client.run("python with_mlflow.py", workdir=EXAMPLES, env=env, retries=1, name="fit")
        view = client.wait(job.id)
        assert (view.state, view.attempt) == ("succeeded", 2), list(client.follow(job.id))
    runs = list(place.glob("0/*/metrics/loss"))
    assert len(runs) == 1, "both attempts are one run"
    steps = [int(line.split()[2]) for line in runs[0].read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4, 5]
    tags = {path.name: path.read_text() for path in (runs[0].parents[1] / "tags").iterdir()}
    assert (tags["shoal.job"], tags["shoal.tenant"]) == (job.id, "default")


def test_tensorboard_is_a_service_that_shows_what_a_job_wrote(
    cluster: Live, tmp_path: Path
) -> None:
    need("tensorboard")
    need("torch")
    env = {MARK: str(cluster.home.path), "PATH": PATH, "LOGDIR": str(tmp_path)}
    with shoal.Client(home=cluster.home.path) as client:
        job = client.run("python with_tensorboard.py", workdir=EXAMPLES, env=env)
        command = f"exec tensorboard --logdir {tmp_path} --host 127.0.0.1 --port $PORT"
        client.serve("tb", ["sh", "-c", command], env=env, probe="/data/logdir")
        assert client.wait(job.id).state == "succeeded", list(client.follow(job.id))
        until(lambda: client.service("tb").ready == 1, more=lambda: client.service("tb").why)
        url = f"{client.service('tb').url.rstrip('/')}/data/plugin/scalars/tags"

        def shown() -> dict[str, dict[str, object]]:
            with urllib.request.urlopen(url, timeout=60) as answer:
                found: dict[str, dict[str, object]] = json.load(answer)
                return found

        until(lambda: bool(shown()), "TensorBoard has read no run")
        (run,) = shown()
        assert run.startswith(f"{job.id}-") and "loss" in shown()[run]
        client.stop_service("tb")
