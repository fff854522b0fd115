"""A package of somebody else's is installed, and its supplier, probe and policy function work in a
real cluster; those who use it from elsewhere need not install it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.engines import On
from harness.packages import install

from shoal.model.job import JobSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "extension"
SUPPLY = {"engine": "lender", "gpus": 2, "least": 1, "most": 1}


@pytest.fixture
def head(tmp_path: Path) -> Iterator[On]:
    """A cluster whose head has the package."""
    packages = tmp_path / "packages"
    packages.mkdir()
    install(EXAMPLE, packages)
    path = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    on = On("lender", tmp_path)
    on.env = {"PYTHONPATH": os.pathsep.join(path)}
    on.shoal("up", "--port", "0", "--nodes", "0")
    yield on
    on.shoal("down")


def from_elsewhere(on: On, *words: str, refused: str = "") -> None:
    """A command on a machine without the package; the start of the line with which it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "shoal.main", *words],
        env={**os.environ, "SHOAL_HOME": str(on.home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert bool(done.returncode) == bool(refused), done.stderr
    assert refused in done.stderr


def test_a_package_brings_a_supplier_a_probe_and_a_policy_function(
    head: On, tmp_path: Path
) -> None:
    file = tmp_path / "policy.json"
    supply = {**SUPPLY, "folder": str(tmp_path)}
    file.write_text(json.dumps({"order": "largest", "supply": [supply]}))
    from_elsewhere(head, "policy", "check", str(file), refused="there is no order 'largest'")
    from_elsewhere(head, "policy", "set", str(file))
    with head.client() as client:
        head.until(lambda: [node.state for node in client.nodes()] == ["ready"], "a node")
        (node,) = client.nodes()
        assert node.id == "lender-1"
        (view,) = json.loads(head.shoal("check", node.id, "--json"))
        figures = [stand["figure"] for stand in view["verdict"]["stands"]]
        assert "open_files" in figures and "cpu_one_mbs" in figures

        for gpus in (2, 1, 2):  # the first one holds the node
            client.submit(JobSpec(command=("sleep", "1000"), gpus=gpus))
        head.until(lambda: client.job("j1").state == "running", "the first job")
        rows = client.request("GET", "/v1/queue", dict[str, Any])["rows"]
        assert [row["id"] for row in rows] == ["j3", "j2"]
        assert "the lender may bring no more nodes (most is 1)" in client.why("j3").why
        assert not client.status().alarms


def test_a_name_that_the_head_does_not_know_is_refused_with_those_there_are(
    head: On, tmp_path: Path
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("supply: [{engine: pbs, queue: gpu}]\n")
    known = "there is no supplier 'pbs'; there are ec2, kubernetes, lender, ray, slurm"
    from_elsewhere(head, "policy", "set", str(file), refused=known)
    file.write_text("supply: [{engine: lender, fodler: /tmp}]\n")
    wrong = "supply.lender.fodler: lender has no such word; it has folder"
    from_elsewhere(head, "policy", "set", str(file), refused=wrong)
