"""Homes that released versions have left are opened by this version: everything in them is found,
and what waited runs. `tests/golden/homes/README.md` says how a release adds its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import until

import shoal
from shoal.client import Client
from shoal.control.home import Home
from shoal.control.lifecycle import bring_up, take_down
from shoal.control.store.sqlite import SqliteStore
from shoal.core.invariants import verify
from shoal.model.ledger import By
from tests.live.cluster import Live


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


HOMES = Path(__file__).parents[1] / "golden/homes"
VERSIONS = sorted((one.name for one in HOMES.iterdir() if one.is_dir()), key=_number)
# Where the cluster was: another program of this machine may have these ports by now.
OF_THE_MACHINE = ("controller.json", "gateway.port")

# What a job that ran when the cluster went down had worked is done again as soon as its node's
# loss is known, which is at some moment while this test looks.
WORKED = ("useful", "recompute")


class Found:
    """A copy of a home, and what is known about it."""

    def __init__(self, version: str, path: Path) -> None:
        self.home = Home(path)
        self.facts: dict[str, Any] = json.loads((HOMES / version / "facts.json").read_bytes())
        with tarfile.open(HOMES / version / "home.tar.xz") as archive:
            archive.extractall(path, filter="tar")
        path.chmod(0o700)
        for one in (path, *path.rglob("*")):
            os.chown(one, os.geteuid(), os.getegid())
        for name in OF_THE_MACHINE:
            (path / name).unlink(missing_ok=True)


# Those of the first and of the last version in every run.
BETWEEN = (pytest.param(one, marks=pytest.mark.soak) for one in VERSIONS[1:-1])


@pytest.fixture(params=[VERSIONS[0], *BETWEEN, VERSIONS[-1]])
def found(request: pytest.FixtureRequest) -> Iterator[Found]:
    path = Path(tempfile.mkdtemp(prefix="shoal-test-"))
    try:
        yield Found(request.param, path)
    finally:
        take_down(Home(path), lambda _: None)
        shutil.rmtree(path, ignore_errors=True)


def test_the_version_before_this_one_has_left_a_home() -> None:
    lines = (HOMES.parents[2] / "CHANGELOG.md").read_text().splitlines()
    told = [line.split()[1] for line in lines if line.startswith("## ") and line[3].isdigit()]
    before = [one for one in told if _number(one) < _number(shoal.__version__)]
    assert before, "CHANGELOG.md names no earlier version"
    missing = [one for one in before if one not in VERSIONS]
    assert not missing, f"no home of {missing}: see {HOMES / 'README.md'}"


def test_everything_in_a_home_of_an_earlier_version_is_there_and_goes_on(found: Found) -> None:
    home, facts = found.home, found.facts
    store = SqliteStore(home.database)
    state, _ = store.load()
    verify(state)
    live = {job: phase for job, phase in facts["jobs"].items() if phase in ("running", "waiting")}
    assert set(live) <= set(state.jobs)
    over = {job.id: job.outcome.value for job in store.finished(1000) if job.outcome}
    assert facts["jobs"].items() - live.items() <= over.items()
    assert len(store.events(0, 100_000)) > 20
    store.close()

    before_ms = _cost_ms(facts)
    bring_up(home, None, lambda _: None)
    cluster = Live(home)
    client = cluster.client
    _find_people_and_settings(client, cluster, facts)
    assert cluster.output(facts["good"]) == "hello\n"
    ledger = client.ledger(by=By.ACCOUNT, from_ms=facts["report"]["began_ms"])
    worked_us = sum(one.gpu_us for one in ledger.accounts if one.account in WORKED)
    assert worked_us >= before_ms * 1000, "time that was accounted for is gone"
    assert sum(one.gpu_us for one in ledger.accounts) == ledger.capacity_gpu_us
    for job in live.keys() - {facts["waits"]}:
        client.cancel(job)
    assert cluster.wait(facts["waits"]) == "succeeded"
    assert cluster.output(facts["waits"]).startswith("late\n")
    _use_secrets(cluster, facts)
    client.close()
    take_down(home, lambda _: None)
    until(lambda: not cluster.processes())


def _cost_ms(facts: dict[str, Any]) -> float:
    said = facts["report"]["accounts"]
    return float(sum(one["gpu_ms"] for one in said if one["account"] in WORKED))


def _find_people_and_settings(client: Client, cluster: Live, facts: dict[str, Any]) -> None:
    assert {one.name for one in client.policy().tenants} >= set(facts["tenants"])
    assert client.prices().currency == "EUR"
    assert [one.name for one in client.services()] == facts["services"]
    for name, token in facts.get("users", {}).items():
        assert name in [one.name for one in client.users()]
        url = json.loads(cluster.home.address.read_bytes())["url"]
        with Client(url, token) as own:
            assert own.me().user == name
    for node, labels in facts.get("node_labels", {}).items():
        labeled = {one.id: one.labels for one in client.nodes()}
        assert labels.items() <= labeled[node].items()
    for job, labels in facts.get("labels", {}).items():
        assert client.job(job).labels == labels
    assert [one.name for one in client.schedules()] == facts.get("schedules", [])
    assert len(client.rules().rules) == facts.get("notices", 0)


def _use_secrets(cluster: Live, facts: dict[str, Any]) -> None:
    for name, value in facts.get("secrets", {}).items():
        script = f'test "$KEY" = {value}'
        words = ["run", "--wait", "--secret", f"{name}=KEY", "--home", str(cluster.home.path)]
        run = [sys.executable, "-m", "shoal.main", *words, "--", "sh", "-c", script]
        assert subprocess.run(run, check=False).returncode == 0
