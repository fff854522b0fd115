"""What a person sees of health: checks of real nodes, bad nodes with why, how far a job is."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from harness.waiting import until

from shoal.api.principal import THE_OPERATOR
from shoal.api.reach import Reach
from shoal.api.views import node_view
from shoal.cli.verbs.nodes import print_nodes
from shoal.control.loop import ControlLoop
from shoal.model.columns import progress_text
from shoal.model.node import NodeIntent
from shoal.model.views import ProgressView
from shoal.tick import Doubts
from tests.cli.conftest import Shoal
from tests.core.training import Training, policy
from tests.live.cluster import Live

# Tells of a step each tenth of a second, until it is stopped.
BEATS = """
import os, socket, time, msgspec
from shoal.model.progress import Beat
out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
for step in range(1, 600):
    beat = Beat(ref=os.environ["SHOAL_REF"], step=step, steps=step, steps_total=100_000, loss=1.875)
    out.sendto(msgspec.msgpack.encode(beat), "\\0" + os.environ["SHOAL_BEATS"])
    time.sleep(0.1)
"""


def test_a_real_node_is_checked_and_its_figures_are_shown(live_shoal: Shoal) -> None:
    result = live_shoal("check", "n2", "--json")
    (view,) = json.loads(result.out)
    assert (view["node"], view["verdict"]["passed"], result.code) == ("n2", True, 0)
    figures = {stand["figure"]: stand["value"] for stand in view["verdict"]["stands"]}
    assert figures["cpu_one_mbs"] > 0
    assert figures["memory_mbs"] > 0
    assert live_shoal("check", "n2").out.startswith("n2: ok, ")


def test_how_far_a_real_job_is_stands_in_ps_and_why(live_shoal: Shoal, cluster: Live) -> None:
    source = os.pathsep.join(sys.path)  # the member imports what this test does
    spec = cluster.spec(sys.executable, "-c", BEATS, env={"PYTHONPATH": source})
    job_id = cluster.client.submit(spec).id
    try:
        until(lambda: _left_is_known(cluster, job_id), "it was never heard")
        told = live_shoal("why", job_id).out
        assert "/100000, loss 1.88, " in told
        assert " left" in told
        rows = live_shoal("ps").out.splitlines()
        assert "PROGRESS" in rows[0]
        (mine,) = [row for row in rows if row.startswith(f"{job_id} ")]
        assert "step " in mine
        (row,) = [r for r in json.loads(live_shoal("ps", "--json").out) if r["id"] == job_id]
        assert row["progress"]["steps_total"] == 100_000
    finally:
        live_shoal("cancel", job_id)


def _left_is_known(cluster: Live, job_id: str) -> bool:
    progress = cluster.client.job(job_id).progress
    return progress is not None and progress.left_ms is not None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "step 7"),
        ({"steps_total": 600, "loss": 1.9, "left_ms": 240_000}, "step 7/600, loss 1.9, 4m left"),
        ({"slow": [2]}, "step 7; member 2 is slow"),
        ({"slow": [0, 2]}, "step 7; 2 members are slow"),
    ],
)
def test_progress_in_words(fields: dict[str, Any], text: str) -> None:
    known: dict[str, Any] = {
        "step": 7,
        "steps_total": 0,
        "step_us": 0,
        "left_ms": None,
        "saved_step": 0,
        "loss": None,
        "metrics": {},
        "slow": [],
    }
    assert progress_text(ProgressView(**{**known, **fields})) == text


def listed(cluster: Training, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    clock = SimpleNamespace(now_ms=lambda: cluster.now_ms)
    tick = SimpleNamespace(doubts=Doubts())
    loop = cast(ControlLoop, SimpleNamespace(state=cluster.state, clock=clock, tick=tick))
    print_nodes([node_view(Reach(loop, THE_OPERATOR), node) for node in cluster.state.order])
    lines = capsys.readouterr().out.splitlines()[1:]
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines}


def test_a_node_in_quarantine_and_a_suspect_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Training(policy(silent_after_ms=60_000), "abcd", gpus=1)
    job_id = cluster.run(gpus=1, members=3)
    (idle,) = {*"abcd"} - {*cluster.nodes_of(job_id)}
    cluster.walk(job_id, 8)
    cluster.walk(job_id, 30, slow={1: 3})
    suspect = cluster.nodes_of(job_id)[1]
    cluster.quarantine(idle)
    lines = listed(cluster, capsys)
    assert lines[idle].startswith("quarantined ")
    assert lines[idle].endswith("check failed: a fault")
    assert lines[suspect].startswith("ready ")
    assert f"suspect: member 1 of {job_id} takes 3000 ms" in lines[suspect]


def test_a_lost_node_in_quarantine_says_why_it_is_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = Training(nodes="abcd")
    cluster.quarantine("a")
    cluster.learn_gone("a")
    assert listed(cluster, capsys)["a"].endswith("its agent died")
    assert cluster.node("a").intent is NodeIntent.OPEN


def test_a_node_shows_when_it_ends_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Training(nodes="ab")
    cluster.books["a"].ends_in_ms = 40 * 60_000
    cluster.books["a"].ends_why = "Slurm time limit"
    cluster.hear("a")
    lines = listed(cluster, capsys)
    assert lines["a"].endswith("ends in 40m: Slurm time limit")
    assert "ends" not in lines["b"]


def test_between_several_machines_nodes_says_what_is_not_encrypted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    several = listed(Training(policy(), "ab", gpus=1), capsys)
    assert several["not"].startswith("encrypted between nodes: what members of a gang send")
    assert "not" not in listed(Training(policy(), "a", gpus=1), capsys), "one machine"
