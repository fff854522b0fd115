"""Every query of every store has run on PostgreSQL: its text is in the source, and it was sent."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from harness.postgres import Postgres

from shoal.database.postgres import PostgresCursor, PostgresDatabase
from tests.control import test_store
from tests.control.history import test_history
from tests.database import test_stores
from tests.database.two_heads import Cluster
from tests.ledger import test_owed, test_tokens
from tests.ledger import test_store as test_ledger
from tests.past import test_databases

SOURCE = Path(__file__).parents[2] / "src" / "shoal"
QUERY = re.compile(r"\s*(SELECT|INSERT INTO|UPDATE|DELETE FROM|WITH)\s")
# They speak to one kind of database only, and have tests of their own.
OF_ONE_KIND = ("database/lease.py", "database/postgres.py", "database/server.py")
# The stores' own tests, which run in a file, too. A new store adds its tests here.
TESTS: list[Callable[..., None]] = [
    test_stores.test_settings_are_bytes_by_name,
    test_stores.test_notices_wait_in_order_each_once_within_bounds,
    test_stores.test_samples_are_read_as_they_were_written_and_the_oldest_make_room,
    test_stores.test_one_chain_holds_the_lines_of_all_heads_also_of_one_that_was_deposed,
    test_stores.test_the_table_is_bounded_and_its_rest_can_be_verified,
    test_history.test_a_killed_controller_loses_seconds_and_the_next_goes_on,
    test_history.test_a_finished_jobs_curve_stays_and_leaves_memory,
    test_ledger.test_moves_take_what_came_before_them_and_leave_what_is_firm,
    test_ledger.test_power_naps_and_owners_are_read_as_they_were_put,
    test_ledger.test_a_ledger_of_before_keeps_what_its_machines_drew,
    test_ledger.test_old_hours_become_days_and_old_jobs_are_forgotten_but_their_time_is_not,
    test_tokens.test_old_hours_become_days_and_old_callers_one,
    test_owed.test_debts_are_kept_by_the_hour_and_old_hours_become_days,
    test_databases.test_bars_and_moments_are_the_same_in_a_file_and_on_a_server,
    test_store.test_what_was_stored_is_loaded_again_from_the_beginning_or_a_snapshot,
    test_store.test_a_standby_follows_and_its_state_is_where_the_next_leader_begins,
    test_store.test_old_history_goes_with_a_snapshot,
    test_store.test_who_has_most_finished_jobs_gives_first,
    test_store.test_large_records_of_one_tenant_do_not_push_out_others,
    test_store.test_a_flood_of_events_leaves_what_others_want_to_know_of_their_jobs,
    test_store.test_old_snapshots_are_thinned_and_go_with_their_events,
    test_store.test_a_key_stays_with_the_first_job_and_a_retried_element_replaces_its_record,
    test_store.test_numbers_are_never_given_out_twice,
    test_store.test_reads_answer_as_a_simple_list_would,
]


def written() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Where each query is, and what it looks like when it is sent."""
    for path in sorted(SOURCE.rglob("*.py")):
        text, name = path.read_text(), path.relative_to(SOURCE).as_posix()
        if name in OF_ONE_KIND or "import sqlite3" in text:
            continue
        tree = ast.parse(text)
        joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        inside = {id(part) for node in joined for part in ast.walk(node) if part is not node}
        for node in ast.walk(tree):
            parts = _parts(node)
            if id(node) not in inside and parts and QUERY.match(parts[0]):
                pattern = ".*".join(re.escape(part) for part in parts)
                yield f"{name}:{node.lineno}", re.compile(pattern, re.DOTALL)  # type: ignore[attr-defined]


def _parts(node: ast.AST) -> list[str]:
    """The fixed parts of a text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        fixed = [one for one in node.values if isinstance(one, ast.Constant)]
        return [str(one.value) for one in fixed] if node.values[:1] == fixed[:1] else []
    return []


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The queries that a server has got and not refused."""
    found: set[str] = set()
    for owner, name in (
        (PostgresDatabase, "read"),
        (PostgresCursor, "execute"),
        (PostgresCursor, "executemany"),
    ):
        real = getattr(owner, name)

        def seen(self: Any, query: str, *rest: Any, real: Any = real) -> Any:
            answer = real(self, query, *rest)
            found.add(query)
            return answer

        monkeypatch.setattr(owner, name, seen)
    return found


def test_every_query_of_every_store_runs_on_postgresql(
    sent: set[str], postgres_server: Postgres, tmp_path: Path
) -> None:
    for number, test in enumerate(TESTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        _run(test, postgres_server, folder)
    missing = [
        where for where, pattern in written() if not any(pattern.search(one) for one in sent)
    ]
    assert missing == [], "never sent to a server: let a test in TESTS do that"


def _run(test: Callable[..., None], server: Postgres, folder: Path) -> None:
    """With what its fixtures would give it, and no database that it does not use."""
    of_events = test.__module__ in (test_store.__name__, test_databases.__name__)
    with ExitStack() as closing:
        patch = closing.enter_context(pytest.MonkeyPatch.context())

        @functools.cache
        def cluster() -> Cluster:
            made = Cluster(server)
            closing.callback(made.close)
            return made

        def place() -> object:
            if not of_events:
                return cluster().head("a")[0]
            made = test_store.Place(folder, server)
            closing.callback(made.closing.close)
            return made

        fixtures: dict[str, Callable[[], object]] = {
            "place": place,
            "stage": lambda: test_history.Stage(cluster().head("a")[0]),
            "cluster": cluster,
            "tmp_path": lambda: folder,
            "monkeypatch": lambda: patch,
            "kind": lambda: "table",
        }
        test(**{name: fixtures[name]() for name in inspect.signature(test).parameters})
