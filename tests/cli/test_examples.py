"""Every example does what its first line says."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.request import assemble
from shoal.forms.request import JOB
from tests.cli.conftest import Shoal
from tests.live.cluster import Live

EXAMPLES = Path(__file__).parents[2] / "examples"


def submit(name: str, cluster: Live) -> str:
    return cluster.client.submit(assemble(JOB, [str(EXAMPLES / name)], {}).spec).id


def test_the_gang_starts_together_and_knows_of_each_other(cluster: Live) -> None:
    job = submit("hello_gang.yaml", cluster)
    assert cluster.wait(job) == "succeeded"
    for member in range(4):
        lines = cluster.output(job, member=member).splitlines()
        assert lines[0] == f"member {member} of 4, attempt 1"
        assert lines[1].startswith("  on node n")
    meetings = {cluster.output(job, member=member).splitlines()[3] for member in range(4)}
    assert len(meetings) == 1


def test_the_flaky_job_succeeds_at_its_third_attempt(cluster: Live) -> None:
    job = submit("retry.yaml", cluster)
    assert cluster.wait(job) == "succeeded"
    assert cluster.client.job(job).attempt == 3
    assert "no luck" in cluster.output(job, attempt=1)
    assert cluster.output(job).endswith("done\n")


def test_the_primes_are_right(cluster: Live) -> None:
    job = submit("primes.toml", cluster)
    assert cluster.wait(job) == "succeeded"
    assert cluster.output(job).startswith("[2, 3, 5, 7, 11, 13")


def test_flags_override_an_example_from_any_folder(
    live_shoal: Shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(EXAMPLES / "hello_gang.yaml")
    result = live_shoal("run", "--wait", file, "-n", "2", "-g", "8")
    assert result.code == 0
    assert "[1] member 1 of 2, attempt 1" in result.out
    assert "with GPUs [0,1,2,3,4,5,6,7]" in result.out


def test_each_example_is_run_here() -> None:
    tested = {"hello_gang.yaml", "retry.yaml", "primes.toml"}
    jobs = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".yaml", ".toml", ".json")}
    assert jobs == tested
