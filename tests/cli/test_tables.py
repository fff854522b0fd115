"""Tables on narrow terminals: a row is one line that fits, and what matters least is cut or left
out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.calls.lines import WhyLines
from shoal.cli.checks import network, storage
from shoal.cli.screen import show, sim_tables
from shoal.cli.screen.show import plain_lines
from shoal.cli.screen.tables import Cell, Column, Line, cells_of, lay_out, shown, widths
from shoal.cli.verbs import (
    check,
    explain,
    inside,
    nodes,
    notify,
    ps,
    report,
    schedule,
    services,
    status,
    tenant,
    token,
    up,
)
from shoal.model.fabric import FabricView
from shoal.model.joining import KeyView
from shoal.model.kept import FilesView
from shoal.model.ledger import AccountSum, LedgerRow, LedgerView
from shoal.model.notice import RulesView
from shoal.model.people import TenantView, TokenView, UserView
from shoal.model.schedule import ScheduleView
from shoal.model.secret import SecretView
from shoal.model.storage import StorageView
from shoal.model.supply import SuppliesView
from shoal.model.views import CheckView, HeadView, JobRow, NodeView, ServiceView, StatusView
from shoal.model.workflow import WorkflowEdge, WorkflowNode, WorkflowView
from tests.cli.filled import MOMENT_MS, filled, long_name

CLI = Path(show.__file__).parents[1]
Table = tuple[Sequence[Column], Sequence[Sequence[str | Cell]]]


def check_lines(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int) -> None:
    lines = lay_out(columns, rows, width)
    for line in lines:
        ends = 0
        for piece in sorted(line):
            assert piece.at >= ends, f"two cells overlap: {line}"
            ends = piece.at + cells_of(piece.text)
        assert ends <= width, f"a line is wider than {width}: {line}"
    if not any(column.wraps for column in columns):
        assert len(lines) == len(rows) + 1, "a row takes more than one line"
    room = widths(columns, [[shown(cell) for cell in row] for row in rows], width)
    for number, column in enumerate(columns):
        texts = [shown(row[number]) for row in rows]
        pieces = [piece.text for line in lines for piece in line]
        if column.right and number and room[number]:
            assert set(texts) <= set(pieces), "a number was cut"
        if not room[number]:
            assert number, "the first column was left out"
            better = [n for n, other in enumerate(columns) if n and other.rank < column.rank]
            empty = [n for n in better if all(shown(row[n]) == "-" for row in rows)]
            assert not any(room[n] for n in empty), "an empty, less important column stays"


WORDS = st.text("ab-", min_size=1, max_size=70)
CELLS = st.one_of(WORDS, st.lists(WORDS, max_size=9).map(" ".join), st.just("鱼" * 9))


@settings(max_examples=60)
@given(st.data(), st.integers(20, 130))
def test_whatever_is_in_a_table_it_fits(data: st.DataObject, width: int) -> None:
    count = data.draw(st.integers(1, 9))
    columns = [
        Column(
            f"T{number}",
            right=data.draw(st.booleans()),
            wraps=data.draw(st.booleans()),
            flexible=data.draw(st.booleans()),
            rank=data.draw(st.integers(-1, 2)),
        )
        for number in range(count)
    ]
    drawn = data.draw(st.lists(st.lists(CELLS, min_size=count, max_size=count), max_size=4))
    check_lines(columns, [[Cell(text) for text in row] for row in drawn], width)


def text_of(lines: list[Line]) -> list[str]:
    return [show.rich_line(line).plain for line in lines]


def test_a_command_is_cut_first_then_a_name_in_its_middle_and_then_columns_go_by_rank() -> None:
    columns = [
        Column("ID"),
        Column("NAME", rank=2),
        Column("TRY", right=True, rank=-1),
        Column("STATE", rank=2),
        Column("COMMAND", flexible=True),
    ]
    name = long_name("name", 60) + "-17"
    command = "python train.py --lr 3 " * 9
    rows = [[Cell(text) for text in ("j1", "short", "1", "running", command)]]
    rows += [[Cell(text) for text in ("j200", name, "12", "waiting", "true")]]
    assert text_of(lay_out(columns, rows, 80)) == [
        "ID    NAME                                        TRY  STATE    COMMAND",
        "j1    short                                         1  running  python train.py…",
        "j200  name-long-long-long-long-…ong-long-long-17   12  waiting  true",
    ]
    assert text_of(lay_out(columns, rows, 40)) == [
        "ID    NAME                       STATE",
        "j1    short                      running",
        "j200  name-long-long-…g-long-17  waiting",
    ]
    assert name in text_of(lay_out(columns, rows, 140))[2], "nothing is cut where there is room"
    assert plain_lines(rows, columns)[1].split()[1] == name, "nor in a pipe"


class People:
    """Answers with one of each."""

    def tenants(self) -> list[TenantView]:
        return [filled(TenantView)]

    def users(self) -> list[UserView]:
        return [filled(UserView)]

    def tokens(self) -> list[TokenView]:
        return [filled(TokenView)]

    def keys(self) -> list[KeyView]:
        return [filled(KeyView)]

    def status(self) -> StatusView:
        return filled(StatusView)


def jobs() -> list[JobRow]:
    short = filled(JobRow, id="j100123", state="running", name="train", nodes=["n1", "n2"])
    return [short, filled(JobRow, id="j1", state="waiting", name=long_name("name", 55))]


def flow() -> WorkflowView:
    found = [filled(WorkflowNode, id=name, why="it waits") for name in ("j1", "j2")]
    edge = filled(WorkflowEdge, before="j1", after="j2")
    return filled(WorkflowView, nodes=found, edges=[edge])


def ledger(by: str) -> LedgerView:
    accounts = [filled(AccountSum, account=name, group=name) for name in report.GROUPS]
    rows = [filled(LedgerRow, account=name) for name in report.GROUPS]
    return filled(LedgerView, by=by, accounts=accounts, currency="EUR", rows=rows)


PRINTERS: dict[str, Callable[[], Any]] = {
    "ps": lambda: ps.print_jobs(jobs(), MOMENT_MS, labels=True),
    "nodes": lambda: nodes.print_nodes([filled(NodeView, gpus=8, gpu_milli_free=100)], True),
    "services": lambda: services.print_services([filled(ServiceView), filled(ServiceView)]),
    "service": lambda: services._print_whole(
        filled(ServiceView), filled(WhyLines).events, MOMENT_MS
    ),
    "supply": lambda: status._print_supplies(filled(SuppliesView, currency="EUR")),
    "schedule": lambda: schedule._list([filled(ScheduleView, timezone="Europe/Berlin")], False),
    "secret": lambda: notify._show_secrets([filled(SecretView)], False),
    "check": lambda: check.print_check(filled(CheckView)),
    "storage": lambda: storage.print_storage(filled(StorageView)),
    "network": lambda: network._print_collectives(filled(FabricView)),
    "workflow": lambda: schedule.print_workflow(flow()),
    "tenants": lambda: tenant._list_tenants(People(), False),  # type: ignore[arg-type]
    "users": lambda: tenant._list_users(People(), False),  # type: ignore[arg-type]
    "tokens": lambda: token._list(People(), False),  # type: ignore[arg-type]
    "keys": lambda: token._keys(People(), False),  # type: ignore[arg-type]
    "ls": lambda: inside._show(filled(FilesView), ""),
    "notify": lambda: notify._show(filled(RulesView), False),
    "why": lambda: explain._print(filled(WhyLines), MOMENT_MS),
    "report": lambda: report._print(ledger("account")),
    "report --by": lambda: report._print(ledger("user")),
    "report --tokens": lambda: report._print_tokens(ledger("account")),
}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[Table]:
    """What is handed to `show.table`, as on a terminal of 80 columns."""
    found: list[Table] = []
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for module in (show, sim_tables):
        monkeypatch.setattr(module, "table", lambda columns, rows: found.append((columns, rows)))
    return found


@pytest.mark.parametrize("verb", PRINTERS)
def test_the_tables_of_the_verbs_with_long_values(verb: str, tables: list[Table]) -> None:
    PRINTERS[verb]()
    assert tables, "it printed no table"
    for columns, rows in tables:
        assert rows
        cells = [[one if isinstance(one, Cell) else Cell(one) for one in row] for row in rows]
        for width in (40, 80, 120):
            check_lines(columns, cells, width)


def test_there_is_one_place_that_makes_tables() -> None:
    """Others draw while they work: they are no lists that somebody reads or copies from."""
    live = {"demo/screen.py", "up/hosts.py"}
    for path in CLI.rglob("*.py"):
        own = "from rich.table" in path.read_text()
        assert not own or str(path.relative_to(CLI)) in live, path


def test_a_head_has_a_name_that_can_be_copied() -> None:
    row = up._row(filled(HeadView))
    titles = ("HEAD", "URL", "VERSION", "STATE", "BEHIND", "SEEN")
    check_lines([Column(title) for title in titles], [[Cell(text) for text in row]], 80)
