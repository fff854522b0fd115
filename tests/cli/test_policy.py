"""`shoal policy`: seen, checked, compared and changed, on a real cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.verbs.policy import SUMMARIES
from shoal.core.policies import SHIPPED
from shoal.model.policy import Policy
from tests.cli.conftest import Shoal, assert_one_clear_line
from tests.live.cluster import Live, live_cluster

EXAMPLES = Path(__file__).parents[2] / "examples" / "policies"


@pytest.fixture
def restored(cluster: Live) -> Iterator[Live]:
    before = cluster.client.policy()
    yield cluster
    cluster.client.set_policy(before)


def test_the_shipped_ones_are_listed_and_shown_without_a_cluster(shoal: Shoal) -> None:
    assert set(SUMMARIES) == set(SHIPPED)
    lines = shoal("policy", "show", "--shipped").out.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", *SHIPPED]
    assert "order: fifo" in shoal("policy", "show", "fifo").out
    assert json.loads(shoal("policy", "show", "fifo", "--json").out)["order"] == "fifo"
    assert len(json.loads(shoal("policy", "--shipped", "--json").out)) == len(SHIPPED)


def test_what_is_shown_is_a_file_that_says_the_same(shoal: Shoal, tmp_path: Path) -> None:
    for name in SHIPPED:
        (tmp_path / "mine.yaml").write_text(shoal("policy", "show", name).out)
        result = shoal("policy", "diff", name, str(tmp_path / "mine.yaml"))
        assert (result.code, result.out, result.err) == (0, "", "the policies are the same\n")


def test_a_difference_is_told_field_by_field(shoal: Shoal) -> None:
    lines = shoal("policy", "diff", "fifo", "backfill").out.splitlines()
    assert lines[0].split() == ["FIELD", "fifo", "backfill"]
    assert ["name", "fifo", "backfill"] in [line.split() for line in lines]
    rows = json.loads(shoal("policy", "diff", "fifo", "backfill", "--json").out)
    wanted = [str(SHIPPED[name].reservations) for name in ("fifo", "backfill")]
    assert {"field": "reservations", "from": wanted[0], "to": wanted[1]} in rows


def test_a_good_file_is_told_in_a_line_and_a_bad_one_is_refused(
    shoal: Shoal, tmp_path: Path
) -> None:
    assert "labs.toml is fine" in shoal("policy", "check", str(EXAMPLES / "labs.toml")).out
    (tmp_path / "bad.yaml").write_text("patience: 10")
    result = shoal("policy", "check", str(tmp_path / "bad.yaml"))
    assert_one_clear_line(result)
    assert "bad.yaml: patience: 10 of what?" in result.err
    assert result.code == 1


def test_a_policy_is_set_and_the_change_is_an_event(live_shoal: Shoal, restored: Live) -> None:
    assert live_shoal("policy", "set", "fair").code == 0
    result = live_shoal("policy", "set", str(EXAMPLES / "labs.toml"))
    assert result.code == 0, result.err
    assert "the policy is now 'labs': order fair" in result.out
    assert "  half_life: 7d -> 3d" in result.out
    assert "the policy is now 'labs'" in live_shoal("events", "-n", "5").out
    assert "vision: {parent: research, quota_gpus: 8}" in live_shoal("policy").out
    assert restored.client.policy().tenant("vision").parent == "research"
    assert "nothing changed" in live_shoal("policy", "set", str(EXAMPLES / "labs.toml")).out
    lines = live_shoal("policy", "diff", "fair").out.splitlines()
    assert lines[0].split() == ["FIELD", "IN", "FORCE", "fair"]
    assert json.loads(live_shoal("policy", "set", "fair", "--json").out)["name"] == "fair"
    assert restored.client.policy() == Policy()


def test_a_module_that_the_controller_cannot_find_is_told(
    live_shoal: Shoal, restored: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = restored.client.policy()
    result = live_shoal("policy", "set", str(EXAMPLES / "small_first.yaml"))
    assert_one_clear_line(result)
    assert "order: my_policies:small_first cannot be loaded" in result.err
    assert restored.client.policy() == before


def test_functions_of_ones_own_decide(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs are spread over two nodes; of two that wait the smaller goes first."""
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    file = str(EXAMPLES / "small_first.yaml")
    assert "is fine: order my_policies:small_first" in shoal("policy", "check", file).out
    with live_cluster(nodes=2, gpus=2) as live:
        assert shoal("policy", "set", file, home=live.home.path).code == 0
        spread = [live.run("sleep 60", gpus=1) for _ in range(2)]
        for job in spread:
            live.wait(job, "running")
        assert {live.client.job(job).nodes[0] for job in spread} == {"n1", "n2"}
        large = live.run("sleep 60", members=2, gpus=2)
        small = live.run("sleep 60", gpus=2)
        for job in spread:
            live.client.cancel(job)
        assert live.wait(small, "running") == "running"
        assert live.client.job(large).state == "waiting"


def test_each_example_is_run_here() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert files == {"labs.toml", "small_first.yaml", "my_policies.py"}
