"""`shoal top` and `shoal ps` in a terminal, with a real cluster and keys that are typed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.screen import paint
from tests.cli.conftest import Shoal
from tests.cli.glass import terminal
from tests.live.cluster import Live, live_cluster

LOOP = 'i=0; while true; do i=$((i+1)); echo "row $i"; sleep 0.05; done'

IMPATIENT = """
import sys, shoal.cli.screen.paint as watching
from shoal.cli.app import call
watching.GONE_S = watching.SLOW_S = 0.5
sys.exit(call(sys.argv[1:]))
"""

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
        for name, gpus in (("writes-one", 2), ("writes-two", 3)):
            live.client.submit(live.spec("sh", "-c", LOOP, gpus=gpus, name=name))
        live.client.submit(live.spec("true", gpus=4, members=2, name="does-not-fit"))
        live.wait("j2", "running")
        yield live


def test_columns_and_order_of_choice(shoal: Shoal, busy: Live) -> None:
    def told(*args: str) -> list[list[str]]:
        out = shoal("ps", "--name", "writes-*", *args, home=busy.home.path).out
        return [line.split() for line in out.splitlines()]

    assert told("-o", "name,ID,gpus", "--sort", "-gpus") == [
        ["NAME", "ID", "GPUS"],
        ["writes-two", "j2", "3"],
        ["writes-one", "j1", "2"],
    ]
    assert told("-o", "id", "--sort", "-name", "-n", "1") == [["ID"], ["j2"]], "sorted, then cut"
    rows = json.loads(shoal("ps", "--json", home=busy.home.path).out)
    assert [row["id"] for row in rows][:2] == ["j1", "j2"]


def test_ps_is_drawn_in_place_and_ends_with_q_or_with_the_cluster(
    busy: Live, tmp_path: Path
) -> None:
    home = busy.home.path
    with terminal(home, "ps", "-w", "0.2", "--sort", "-id", program=("-c", IMPATIENT)) as ps:
        ps.until("every 0.2s", "writes-one", "3 jobs")
        more = busy.client.submit(busy.spec("sleep", "9", name="comes-later")).id
        ps.until("comes-later", "4 jobs")
        busy.client.cancel(more)
        ps.until("3 jobs", gone="comes-later")
        controller = json.loads((home / "controller.json").read_bytes())["pid"]
        os.kill(controller, signal.SIGSTOP)
        try:
            ps.until("no answer since ")
            ps.press("q")
            assert ps.end() == 0
        finally:
            os.kill(controller, signal.SIGCONT)
        assert ps.sane
        assert "writes-one" in ps.glass.text, "the last table stays"
    for needed in ("controller.json", "token"):  # a home that can go away while the other stays
        shutil.copy(home / needed, tmp_path / needed)
    (tmp_path / "controller.sock").symlink_to(home / "controller.sock")
    with terminal(tmp_path, "ps", "-w", "0.2", program=("-c", IMPATIENT)) as ps:
        ps.until("every 0.2s", "writes-one")
        (tmp_path / "controller.json").unlink()
        assert ps.end() == 3
        assert ps.sane
        assert "error: " in ps.glass.text
    assert paint.GONE_S >= 60


def test_map_filter_logs_cancel_and_a_smaller_terminal(busy: Live) -> None:
    with terminal(busy.home.path, "top") as top:
        text = top.until("j3", "running", "waiting")
        assert re.search(r"^j1 +b +running", text, re.M) and re.search(
            r"^j2 +c +running", text, re.M
        )
        assert "bb··" in text and "ccc·" in text, "each GPU is the letter of its job"
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
        top.press("\x03")
        assert top.end() in (0, 130)
        assert top.sane
        assert top.raw.count("\x1b[2J") <= 5, "it is not cleared for every picture"


def test_the_controller_goes_away_and_comes_back(busy: Live) -> None:
    args = ("top", "--view", "nodes")
    with terminal(busy.home.path, *args, columns=100, TERM="screen", NO_COLOR="1") as top:
        top.until("n1", "ready")
        top.press("j")
        top.until("j1", "running")
        supervisor = int(busy.home.supervisor_lock.read_text().split()[0])
        os.kill(supervisor, signal.SIGSTOP)  # else the next one may answer before this is drawn
        try:
            busy.kill_controller()
            top.until("no answer since ", "j1")
        finally:
            os.kill(supervisor, signal.SIGCONT)
        top.until("Shoal 0", "j1", "running", gone="no answer since")
        assert not re.search(r"\x1b\[[\d;]*[349]\dm", top.raw), "NO_COLOR"
        os.kill(top.process.pid, signal.SIGTERM)
        assert top.end() == 128 + signal.SIGTERM
        assert top.sane


def test_an_error_gives_the_terminal_back(busy: Live) -> None:
    with terminal(busy.home.path, "top", program=("-c", BROKEN)) as top:
        assert top.end() == 1
        assert top.sane
        assert "this should not happen: TypeError" in top.glass.text


LISTS: tuple[str, ...] = ("ps", "ps -a --labels", "status", "nodes --labels", "services", "report")
LISTS += ("why j1", "explain j1", "events", "supply", "token list", "user list", "schedule list")
SCREENS = """
import shlex, sys
from shoal.cli.app import call
for number, line in enumerate(sys.argv[1:]):
    print(f"== {number}", flush=True)
    call(shlex.split(line))
print("== done")
"""


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_no_list_is_wider_than_the_terminal_and_status_is_one_screen(
    columns: int, busy: Live
) -> None:
    """In what is sent; a single long word is left to the terminal, so that it can be copied."""
    long = "a-name-that-is-so-long-that-no-terminal-has-room-for-all-of-it"
    busy.client.submit(busy.spec("sh", "-c", f"sleep 900; echo {long}", gpus=4, name=long))
    with terminal(busy.home.path, *LISTS, columns=columns, program=("-c", SCREENS)) as screen:
        assert screen.end() == 0
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.raw).replace("\r", "")
    parts = dict(zip(LISTS, re.split(r"== \w+\n", text)[1:], strict=False))
    for verb, part in parts.items():
        wide = [line for line in part.splitlines() if len(line) > columns and " " in line.strip()]
        assert not wide, f"shoal {verb} at {columns} columns"
        assert "should not happen" not in part, part
    assert parts["ps"].splitlines()[0].split()[:2] == ["ID", "NAME"]
    assert "a-name-t" in parts["ps"], "a long name is cut, not left out"
    assert len(parts["status"].splitlines()) < 24, "there is room for the prompt"


def test_who_watches_sees_what_a_requeue_and_a_cancel_do(shoal: Shoal, busy: Live) -> None:
    home = busy.home.path

    def seen(*args: str) -> str:
        with terminal(home, *args, columns=120) as here:
            assert here.end() == 0, here.raw
            return " ".join(here.glass.text.split())

    job = busy.client.submit(busy.spec("sleep", "99", gpus=1, name="to-be-ended")).id
    after = busy.client.submit(busy.spec("true", name="next", after=(job,))).id
    busy.wait(job, "running")
    assert f"1 job stops and waits in the queue again: {job} (to-be-ended)" in seen("requeue", job)
    busy.wait(job, "running")
    assert f"is cancelled, too: {after} (next)" in seen("cancel", "to-be-ended")
    assert busy.wait(after) == "cancelled"
    quiet = busy.client.submit(busy.spec("sleep", "99", name="quiet")).id
    busy.wait(quiet, "running")
    assert shoal("cancel", quiet, home=home).err == "", "a script gets no more than it asked for"
