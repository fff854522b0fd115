"""A job that prints without end: its neighbors, its node's disk, and the end of its own log."""

from __future__ import annotations

from pathlib import Path

from harness.waiting import until

from tests.live.cluster import Live, live_cluster

MIB = 1024 * 1024
PRINTED = 512 * MIB

LOUD = """
echo it begins
yes "what nobody will ever read, again and again and again" & printer=$!
while ! test -e {go}; do sleep 0.05; done
kill $printer; wait
echo it ends
"""


def test_a_job_that_prints_without_end_harms_nobody(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with live_cluster(nodes=1, gpus=2) as live:
        loud = live.run(LOUD.format(go=go), gpus=1)
        try:
            output = live.home.node("n1") / "members" / f"{loud}.1.0" / "output"
            until(lambda: output.exists() and output.stat().st_size > PRINTED // 4)
            quiet = live.run("echo done", gpus=1)
            assert live.wait(quiet, timeout_s=60) == "succeeded", "beside the other's flood"
            assert live.output(quiet) == "done\n"
            until(lambda: output.stat().st_size > PRINTED)
            until(lambda: disk(output) < PRINTED // 2, "its disk use is bounded")
        finally:
            go.touch()
        assert live.wait(loud, timeout_s=120) == "succeeded", "it is not killed for printing"
        assert live.output(loud).startswith("it begins\n")
        until(lambda: tail(live, loud).endswith("it ends\n"))
        kept = live.home.logs / loud / "1.0.log"
        assert disk(kept) < 300 * MIB
        until(lambda: not output.exists(), "nothing stays on the node")
        gang = live.run("true", members=2)
        broken = live.client.submit(live.spec("/no/such/program")).id
        saver = live.run("echo 1 > $SHOAL_CHECKPOINT_DIR/step")
        for job in (gang, broken, saver):
            live.wait(job, timeout_s=60)
        until(lambda: folders(live) == [saver], "who saved nothing leaves no folder")


def folders(live: Live) -> list[str]:
    return [path.name for path in live.home.checkpoints.glob("j*")]


def disk(path: Path) -> int:
    return path.stat().st_blocks * 512


def tail(live: Live, job: str) -> str:
    return live.client.logs(job, offset=-200).data.decode()
