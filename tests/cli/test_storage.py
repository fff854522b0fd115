"""`shoal check --storage`: whether it feeds a job, in words, and a real one on two nodes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from shoal.cli.checks.storage import Needs, findings, print_storage
from shoal.model.storage import Rates, StorageView
from tests.cli.conftest import Shoal, assert_one_clear_line

# It reports three checkpoints.
SAVES = """
import time
from shoal.train.beats import Beats
beats = Beats()
for step in (1, 2, 3):
    beats.send(step=step, steps=step, saved_step=step, steps_total=3)
    time.sleep(1.2)
"""


def view_of(*writes: int, problem: str = "") -> StorageView:
    rates = [
        Rates(node=f"n{number}", write_mbs=write, read_mbs=2 * write, small_per_s=100)
        for number, write in enumerate(writes, 1)
    ]
    together = [*rates, Rates(node="n9", problem=problem)] if problem else rates
    return StorageView(
        id="s1",
        target="/data",
        nodes=[one.node for one in together],
        ended_ms=1,
        alone=rates,
        together=together,
    )


def test_checkpoints_and_data_are_compared_with_what_the_nodes_reach_together() -> None:
    needs = Needs(read_mbs=2000, checkpoint_mb=500_000, every_ms=600_000)
    reads, saves = findings(view_of(70, 70, 70), needs)
    assert reads.text == (
        "together 3 nodes read 420 MB/s; the job needs 2 GB/s: it would run at 21 %"
    )
    assert saves.text == (
        "together 3 nodes write 210 MB/s: a checkpoint of 500 GB takes 39m 40s; with one every "
        "10m, a job that waits for its saves would wait 80 % of the time; for 5 %, 15.8 GB/s are "
        "needed; to save in the background, 833 MB/s"
    )
    assert not reads.ok
    assert not saves.ok
    assert all(one.ok for one in findings(view_of(9000, 9000), needs))


def test_weak_nodes_and_nodes_that_cannot_use_it_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = view_of(300, 320, 60, problem="there is no folder /data")
    texts = [one.text for one in findings(view, Needs())]
    assert texts[0] == "n9: there is no folder /data"
    assert "n3: writes 60 MB/s alone, where 300 MB/s is usual" in texts
    print_storage(view)
    out = capsys.readouterr().out.splitlines()
    assert out[4].split() == ["n9"] + ["-"] * 6
    assert out[5].startswith("together 3 nodes write 680 MB/s, read 1.4 GB/s")
    assert max(map(len, out[:5])) <= 80, "the table fits; sentences wrap"


def test_bad_amounts_and_flags_are_one_clear_line(live_shoal: Shoal) -> None:
    for args in (
        ["--storage", "data"],
        ["--storage", "/data", "--network"],
        ["--storage", "/data", "--needs-read", "fast"],
        ["--storage", "/data", "--checkpoint", "500"],
        ["--storage", "/data", "--checkpoint", "0GB"],
        ["--storage", "/data", "--checkpoint", "5GB", "--every", "0"],
        ["--storage", "/data", "--every", "10min"],
        ["--storage", "/data", "--job", "j999999"],
        ["--storage", "/data", "n99"],
        ["--checkpoint", "5GB"],
    ):
        assert_one_clear_line(live_shoal("check", *args, "--json"))


def test_a_real_folder_is_measured_from_two_nodes_alone_and_together(
    live_shoal: Shoal, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    ran = live_shoal("run", "--wait", "--json", "--", sys.executable, "-c", SAVES)
    assert ran.code == 0, ran
    job = json.loads(ran.out)["id"]
    args = ("--storage", str(tmp_path / "data"), "n1", "n2", "--json")
    found = live_shoal("check", *args, "--checkpoint", "1PB", "--job", job)
    assert found.code == 1, found
    told = json.loads(found.out)
    for how in ("alone", "together"):
        assert [one["node"] for one in told["storage"][how]] == ["n1", "n2"]
        assert all(one["write_mbs"] and one["read_mbs"] for one in told["storage"][how])
    assert "a checkpoint of 1000 TB takes" in told["findings"][-1]["text"]
    assert told["needs"]["every_ms"] >= 400
    assert told["needs"]["notes"][0].startswith(f"{job} saves about every")
    assert os.listdir(tmp_path / "data") == []


def test_what_all_nodes_have_in_common_is_said_once() -> None:
    rates = [Rates(node=f"n{number}", problem="there is no folder /data") for number in range(9)]
    view = StorageView(id="s1", nodes=[one.node for one in rates], together=rates)
    (one,) = findings(view, Needs())
    assert one.text == "n0, n1, n2, n3, n4 and 4 more: there is no folder /data"
