"""`shoal top` in a terminal, with a real cluster and keys that are typed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest

from tests.cli.glass import terminal
from tests.live.cluster import Live, live_cluster

pytestmark = pytest.mark.outside("a real terminal is drawn by the clock")
LOOP = 'i=0; while true; do i=$((i+1)); echo "row $i"; sleep 0.05; done'

BROKEN = """
import sys, shoal.cli.screen.top_loop as loop
from shoal.cli.app import call
loop.draw = None
sys.exit(call(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def busy() -> Iterator[Live]:
    """Two jobs that write, and one that waits."""
    with live_cluster(nodes=2, gpus=4) as live:
        for name in ("writes-one", "writes-two"):
            live.client.submit(live.spec("sh", "-c", LOOP, gpus=3, name=name))
        live.client.submit(live.spec("true", gpus=4, members=2, name="does-not-fit"))
        yield live


def test_map_filter_logs_cancel_and_a_smaller_terminal(busy: Live) -> None:
    with terminal(busy.home.path, "top") as top:
        text = top.until("j3", "running", "waiting")
        assert re.search(r"^j1 +b +running", text, re.M) and re.search(
            r"^j2 +c +running", text, re.M
        )
        assert "bbb·" in text and "ccc·" in text, "each GPU is the letter of its job"
        top.press("/writes-t\r")
        top.until("/writes-t  1 match", "writes-two", gone="does-not-fit")
        top.press("\r")
        top.until("following", "row ")
        top.press("\x1b[5~")
        top.until("  line ", gone="following")
        top.press("G")
        top.until("following")
        top.press("\x1b")
        top.until("/writes-t  1 match", gone="following")
        top.press("\x1b")
        top.until("j3", "does-not-fit")
        top.press("\x1b[B\x1b[B")
        top.until("j3 does-not-fit: ")
        top.press("cn")
        top.until("not cancelled")
        top.resize(60, 12)
        top.until("j3", "waiting")
        assert max(map(len, top.glass.rows)) <= 60
        top.press("cy")
        top.until("j3 is being cancelled")
        top.until(gone="waiting")
        top.press("q")
        assert top.end() == 0
        assert top.sane
        assert top.raw.count("\x1b[2J") <= 5, "it is not cleared for every picture"


def test_the_controller_goes_away_and_comes_back(busy: Live) -> None:
    with terminal(busy.home.path, "top", columns=100, TERM="screen", NO_COLOR="1") as top:
        top.until("j1", "running")
        busy.kill_controller()
        top.until("no answer since ", "j1")
        top.until("Shoal 0", "j1", "running", gone="no answer since")
        assert not re.search(r"\x1b\[[\d;]*[349]\dm", top.raw), "NO_COLOR"
        os.kill(top.process.pid, signal.SIGTERM)
        assert top.end() == 128 + signal.SIGTERM
        assert top.sane


def test_ctrl_c_and_an_error_give_the_terminal_back(busy: Live) -> None:
    with terminal(busy.home.path, "top", "--view", "nodes") as top:
        top.until("n1", "ready")
        top.press("\x03")
        assert top.end() in (0, 130)
        assert top.sane
    with terminal(busy.home.path, "top", program=("-c", BROKEN)) as top:
        assert top.end() == 1
        assert top.sane
        assert "this should not happen: TypeError" in top.glass.text
