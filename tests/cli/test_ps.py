"""`shoal ps`: columns of choice, and their order."""

from __future__ import annotations

from shoal.cli.screen.job_columns import in_order_of, table_of
from shoal.model.columns import COLUMNS
from shoal.model.views import JobRow
from tests.cli.conftest import Shoal, assert_one_clear_line
from tests.cli.filled import MOMENT_MS, filled


def test_what_cannot_be_is_one_line_that_names_the_columns(shoal: Shoal) -> None:
    for args in (
        ("-o", "moon"),
        ("--sort", "-moon"),
        ("-o", ","),
        ("-o", "id", "--json"),
        ("--watch", "soon"),
        ("--watch", "nan"),
        ("--watch", "0"),
    ):
        result = shoal("ps", *args)
        assert_one_clear_line(result)
        assert result.code == 2
    assert "they are id, name, state," in shoal("ps", "-o", "moon").err
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
