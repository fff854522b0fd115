"""`shoal ps`: columns of choice, their order, and a table that is drawn again."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from shoal.cli.screen import watching
from shoal.cli.screen.job_columns import COLUMNS, in_order_of, table_of
from shoal.model.views import JobRow
from tests.cli.conftest import Shoal, assert_one_clear_line
from tests.cli.filled import MOMENT_MS, filled
from tests.cli.glass import terminal
from tests.live.cluster import Live, live_cluster


@pytest.fixture(scope="module")
def listed() -> Iterator[Live]:
    with live_cluster(nodes=1, gpus=4) as live:
        live.client.submit(live.spec("sleep", "1000", gpus=1, name="small"))
        live.client.submit(live.spec("sleep", "1000", gpus=3, name="large"))
        live.client.submit(live.spec("sleep", "1000", gpus=4, name="waits"))
        live.wait("j2", "running")
        yield live


def test_columns_and_order_of_choice(shoal: Shoal, listed: Live) -> None:
    home = listed.home.path
    told = shoal("ps", "-o", "name,ID,gpus", "--sort", "-gpus", home=home).out
    assert [line.split() for line in told.splitlines()] == [
        ["NAME", "ID", "GPUS"],
        ["waits", "j3", "4"],
        ["large", "j2", "3"],
        ["small", "j1", "1"],
    ]
    told = shoal("ps", "-o", "id", "--sort", "name", "-n", "2", home=home).out
    assert told.split() == ["ID", "j2", "j1"], "sorted first, then cut"
    told = shoal("ps", "-o", "id,why", "--state", "waiting", home=home).out
    assert told.splitlines()[1].startswith("j3  ")
    rows = json.loads(shoal("ps", "--json", home=home).out)
    assert [row["id"] for row in rows] == ["j1", "j2", "j3"]


def test_what_cannot_be_is_one_line_that_names_the_columns(shoal: Shoal, listed: Live) -> None:
    for args in (
        ("-o", "moon"),
        ("--sort", "-moon"),
        ("-o", ","),
        ("-o", "id", "--json"),
        ("--watch", "soon"),
        ("--watch", "nan"),
        ("--watch", "0"),
    ):
        result = shoal("ps", *args, home=listed.home.path)
        assert_one_clear_line(result)
        assert result.code == 2
    assert "they are id, name, user," in shoal("ps", "-o", "moon").err
    known = shoal("ps", "-o", "help")
    assert known.code == 0
    assert [line.split()[0] for line in known.out.splitlines()] == list(COLUMNS)


def test_every_column_can_be_shown_and_sorted_by() -> None:
    rows = [filled(JobRow, id="j2"), filled(JobRow, id="j10", running_ms=None, name="")]
    columns, cells = table_of(rows, list(COLUMNS), MOMENT_MS)
    assert len(columns) == len(COLUMNS) == len(cells[0])
    for name in COLUMNS:
        assert len(in_order_of(rows, name, MOMENT_MS)) == 2
    assert [row.id for row in in_order_of(rows, "-id", MOMENT_MS)] == ["j10", "j2"]
    for by in ("name", "-name", "started", "-started"):
        assert in_order_of(rows, by, MOMENT_MS)[-1].id == "j10", "what has no value comes last"


@pytest.mark.outside("a real terminal is drawn by the clock")
def test_watch_draws_in_place_and_ends_with_q_or_with_the_cluster(listed: Live) -> None:
    home = listed.home.path
    with terminal(home, "ps", "--watch", "0.2", "--sort", "-id") as ps:
        ps.until("every 0.2s", "small", "waits")
        more = listed.client.submit(listed.spec("sleep", "9", gpus=1, name="comes-later")).id
        ps.until("comes-later", "4 jobs")
        listed.client.cancel(more)
        ps.until("3 jobs", gone="comes-later")
        ps.press("q")
        assert ps.end() == 0
        assert ps.sane
        assert "waits" in ps.glass.text, "the last table stays"
    code = (
        "import sys, shoal.cli.screen.watching as w; w.GONE_S = 0.5; from shoal.cli.app import call"
    )
    program = ("-c", f"{code}; sys.exit(call(sys.argv[1:]))")
    with terminal(home, "ps", "-w", program=program) as ps:
        ps.until("every 2s", "small")
        listed.home.path.rename(home.with_name("elsewhere-for-a-while"))
        try:
            assert ps.end() == 3
        finally:
            home.with_name("elsewhere-for-a-while").rename(home)
        assert ps.sane
        assert "error: " in ps.glass.text
    assert watching.GONE_S >= 60
