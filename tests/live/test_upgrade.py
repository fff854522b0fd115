"""A cluster of the version before is taken over by this one, while a job runs. The version before
is its real code, from the repository's history."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import until

from shoal.control.home import Home
from shoal.control.lifecycle import take_down
from tests.live.cluster import Live

BEFORE = "ecc422976f8de4dfbf9b91de06af0f6d91b91b38"  # the last commit of 0.5.0
FIRST = "d7947bf359b09f83997474f69812d504e334f842"  # 0.1.0
ROOT = Path(__file__).parents[2]
STEPS = 'n=0; until [ -e "$GO" ]; do n=$((n+1)); echo step $n; sleep 0.05; done; echo done $n'


@pytest.fixture(scope="module")
def old_source() -> Iterator[Path]:
    with source_of(BEFORE) as source:
        yield source


@contextlib.contextmanager
def source_of(commit: str) -> Iterator[Path]:
    git = ["git", "-C", str(ROOT)]
    if subprocess.run(
        [*git, "cat-file", "-e", commit], capture_output=True, check=False
    ).returncode:
        pytest.skip("needs the repository's history: git fetch --unshallow")
    with tempfile.TemporaryDirectory(prefix="shoal-old-") as folder:
        archive = subprocess.run([*git, "archive", commit, "src"], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder) / "src"


@pytest.fixture
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="shoal-test-"))
    try:
        yield path
    finally:
        take_down(Home(path), lambda _: None)
        shutil.rmtree(path, ignore_errors=True)


def shoal(home: Path, *words: str, source: Path | None = None) -> Any:
    done = run(home, *words, source=source)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run(home: Path, *words: str, source: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if source is not None:
        env["PYTHONPATH"] = str(source)
    command = [sys.executable, "-m", "shoal.main", *words, "--home", str(home), "--json"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd="/")


def test_a_new_version_takes_over_while_a_job_runs_and_nodes_follow_when_they_are_idle(
    old_source: Path, home: Path, tmp_path: Path
) -> None:
    shoal(home, "up", "--nodes", "2", "--gpus", "1", "--port", "0", source=old_source)
    cluster = Live(Home(home))
    go = tmp_path / "go"
    job = cluster.run(STEPS, env={"GO": str(go)}, gpus=1)
    cluster.wait(job, "running")
    busy = cluster.client.job(job).nodes[0]
    idle = "n2" if busy == "n1" else "n1"
    assert [one["version"] for one in shoal(home, "upgrade", "--check")] == ["0.5.0", "", ""]

    said = {one["part"]: one for one in shoal(home, "upgrade")}
    assert {name: one["state"] for name, one in said.items()} == {
        "head": "upgraded",
        busy: "busy",
        idle: "upgraded",
    }
    assert job in said[busy]["why"]
    versions = {one.id: one.version for one in cluster.client.nodes()}
    assert versions[busy] == "" and versions[idle] != ""

    # The old agent obeys the new head: it starts, ends and stops members, and ships their output.
    assert cluster.client.job(job).state == "running"
    far = cluster.output(job).count("\n")
    until(lambda: cluster.output(job).count("\n") > far, "output goes on")
    short = cluster.run("echo short; exit 3", where=[f"node={busy}"])
    assert cluster.wait(short) == "failed"
    assert (cluster.output(short), cluster.client.job(short).nodes) == ("short\n", [busy])
    long = cluster.run("echo long; sleep 1000", where=[f"node={busy}"])
    cluster.wait(long, "running")
    cluster.client.cancel(long)
    assert cluster.wait(long) == "cancelled"

    go.touch()
    assert cluster.wait(job) == "succeeded"
    lines = cluster.output(job).splitlines()
    steps = len(lines) - 1
    assert lines == [*(f"step {number}" for number in range(1, steps + 1)), f"done {steps}"]
    assert cluster.client.job(job).attempt == 1, "it never started again"

    again = {one["part"]: one["state"] for one in shoal(home, "upgrade")}
    assert (again[busy], again[idle]) == ("upgraded", "unchanged")
    assert {one.intent for one in cluster.client.nodes()} == {"open"}
    cluster.client.close()

    take_down(Home(home), lambda _: None)
    back = run(home, "up", source=old_source)
    assert back.returncode == 1, "the version before may not open it any more"
    assert "unknown field" in back.stderr and back.stderr.count("\n") == 1


# As its command did; that needs a package which later versions do not have.
BEGIN = """
import sys
from pathlib import Path
from shoal.client import Client
from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import bring_up
from shoal.model.job import JobSpec
from shoal.model.node import NodeSpec
home, go, steps = sys.argv[1:]
nodes = tuple(NodeSpec(id=name, cpu_milli=4000, memory_mb=1000, gpus=1) for name in ("n1", "n2"))
bring_up(Home(Path(home)), ClusterConfig(nodes=nodes, port=0), lambda _: None)
spec = JobSpec(command=("sh", "-c", steps), gpus=1, env={"GO": go})
print(Client.at_home(Path(home)).submit(spec).id)
"""


def test_the_first_version_is_taken_over_while_a_job_runs(home: Path, tmp_path: Path) -> None:
    """Its head cannot be asked anything: it has no socket in its home."""
    go = tmp_path / "go"
    with source_of(FIRST) as source:
        env = {**os.environ, "PYTHONPATH": str(source)}
        words = [sys.executable, "-c", BEGIN, str(home), str(go), STEPS]
        begun = subprocess.run(words, env=env, capture_output=True, text=True, check=False, cwd="/")
        assert begun.returncode == 0, begun.stderr
        job = begun.stdout.strip()
        refused = run(home, "ps")
        assert (refused.returncode, refused.stderr.count("\n")) == (3, 1)
        assert refused.stderr.endswith("take it over with: shoal upgrade\n")
        assert [one["version"] for one in shoal(home, "upgrade", "--check")] == [""]
        said = {one["part"]: one for one in shoal(home, "upgrade")}
        cluster = Live(Home(home))
        view = cluster.client.job(job)
        assert (said["head"]["state"], said["head"]["why"]) == ("upgraded", "it was 0.1")
        assert (said[view.nodes[0]]["state"], view.state) == ("busy", "running")
        far = cluster.output(job).count("\n")
        until(lambda: cluster.output(job).count("\n") > far, "it goes on")
        go.touch()
        assert cluster.wait(job) == "succeeded"
        lines = cluster.output(job).splitlines()
        assert lines[0] == "step 1" and lines[-1] == f"done {len(lines) - 1}"
        assert cluster.client.job(job).attempt == 1, "it never started again"
        cluster.client.close()
        take_down(Home(home), lambda _: None)
