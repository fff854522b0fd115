"""What people see of a job that a neighbor has: in lists, on the page, in its reason, and later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from shoal.api.feed_rows import job_line
from shoal.api.jobs import _reached
from shoal.api.metrics import _jobs
from shoal.api.principal import acting
from shoal.api.reach import Reach, seen_events
from shoal.api.views import row_fields
from shoal.cli.screen.explanation import _attempt
from shoal.cli.screen.job_columns import csv_of, table_of
from shoal.cli.screen.top_rows import Seen, _where
from shoal.cli.screen.words import waiting_lines
from shoal.cli.slurm.commands import long_state
from shoal.core.answers.explain import attempts_of, no_tail
from shoal.core.state.events.log import Recorded
from shoal.model.columns import COLUMNS, elapsed_ms
from shoal.model.explanation import Cause, Explanation
from shoal.model.finding import JobFilter, Order
from shoal.model.identity import Role
from shoal.model.neighbor import HandedJob, Neighbor
from shoal.model.policy import Policy
from shoal.model.views import JobRow
from tests.core.test_neighbors import Home


@pytest.fixture
def home() -> Home:
    """j1 runs at b; j2 waits."""
    made = Home()
    made.join("n1", gpus=1)
    job = made.submit(gpus=1, cluster="b", tenant="red")
    made.wait(10_000)
    made.offered(job, start_ms=500, price=2_500_000)
    made.submit(gpus=1, cluster="any", begin_ms=10**9)
    return made


def runs(home: Home) -> None:
    home.wait(5_000)
    home.told("j1", id="j93", phase="running")
    home.wait(60_000)


def loop_of(home: Home) -> Any:
    clock = SimpleNamespace(now_ms=lambda: home.now_ms)
    return SimpleNamespace(state=home.state, policy=home.policy, clock=clock)


def row_of(home: Home, job: str = "j1") -> JobRow:
    return JobRow(**row_fields(home.job(job)), why=home.job(job).why, progress=None)


def test_a_list_names_the_neighbor_and_counts_run_time_from_its_start_there(home: Home) -> None:
    row = row_of(home)
    assert (row.state, row.running_ms, row.size, row.nodes) == ("away", None, 0, [])
    assert elapsed_ms(row, home.now_ms) == 10_000, "it waits"
    runs(home)
    row = row_of(home)
    assert row.away
    assert (row.away.neighbor, row.away.id, row.away.price) == ("b", "j93", 2.5)
    assert elapsed_ms(row, home.now_ms) == 60_000
    rank = Order(by="time", at_ms=home.now_ms).mark(home.job("j1"))
    assert rank[0] == 60_000
    home.ended("j1")
    home.wait(9_000)
    row = row_of(home)
    assert (row.state, elapsed_ms(row, home.now_ms)) == ("succeeded", 60_000)
    assert row.away, "where it ran is still known"
    assert row.away.neighbor == "b"


def test_a_job_that_is_here_says_nothing_of_neighbors(home: Home) -> None:
    assert b"away" not in msgspec.json.encode(row_of(home, "j2"))
    assert b"cluster" not in msgspec.json.encode(job_line(loop_of(home), home.job("j2")))
    assert b"cells" not in msgspec.json.encode(row_of(home, "j2"))


def test_the_column_is_there_if_a_job_is_at_a_neighbor(home: Home) -> None:
    rows = [row_of(home), row_of(home, "j2")]
    titles = [column.title for column in table_of(rows, [], home.now_ms)[0]]
    assert "CLUSTER" in titles
    assert "CLUSTER" not in [one.title for one in table_of(rows[1:], [], home.now_ms)[0]]
    lines = [*csv_of(rows, ["id", "state", "cluster"], home.now_ms)]
    assert lines[1:] == [["j1", "away", "b"], ["j2", "waiting", ""]]
    ranks = [COLUMNS["cluster"].rank_of(home.job(job), 0, 0) for job in ("j1", "j2")]
    assert ranks == ["b", ""]


def test_jobs_at_neighbors_are_found_and_counted(home: Home) -> None:
    found = [job.id for job in home.state.jobs.values() if JobFilter(states=("away",)).matches(job)]
    assert found == ["j1"]
    assert 'shoal_jobs{state="away",tenant="red"} 1\n' in "".join(_jobs(loop_of(home)))
    line = job_line(loop_of(home), home.job("j1"))
    assert (line.state, line.cluster, line.why) == ("away", "b", "b would start it in a moment")
    assert _where(Seen(status=cast(Any, None), now_ms=0), line) == "at b", "as shoal top shows it"
    rows = [row_of(home), row_of(home, "j2")]
    assert waiting_lines(rows)[0] == "0 jobs on 0 GPUs; 1 job waiting; 1 job at neighbors"


def test_the_reason_says_where_it_is_and_what_its_host_says(home: Home) -> None:
    assert home.why("j1") == "b would start it in a moment; it has not said yet that it has it"
    home.told("j1", id="j93", phase="waiting", why="no node has 1 free GPU")
    assert home.why("j1") == "waits at b as j93: no node has 1 free GPU"
    runs(home)
    assert home.why("j1") == "runs at b as j93"
    home.step(neighbors=[msgspec.structs.replace(home.word("b"), clock_ms=0, problem="no route")])
    assert home.why("j1") == "runs at b as j93; b cannot be asked: no route"
    home.cancel("j1")
    home.step(neighbors=[home.word("b", jobs=(HandedJob(job="j1", attempt=1, id="j93"),))])
    assert home.why("j1") == "is being cancelled at b: cancelled by a user"


def test_whoever_waits_for_a_job_to_run_need_not_know_where(home: Home) -> None:
    assert not _reached(home.job("j1"), "running")
    runs(home)
    assert _reached(home.job("j1"), "running")
    assert long_state(home.job("j1").state) == "RUNNING", "as squeue shows it"


def test_an_explanation_has_a_stay_at_a_neighbor_as_an_attempt(home: Home) -> None:
    runs(home)
    home.ended("j1", "cancelled", why="its owner wants it back", started=True)
    home.wait(3_600_000)
    home.offered("j1", price=2_000_000)
    home.told("j1", id="j94", phase="running")
    home.wait(5_400_000)
    home.ended("j1", gpu_ms=5_400_000, money=3_000_000, started=True)
    events = [event for event in home.log if getattr(event, "job", "") == "j1"]
    first, second = attempts_of(events, no_tail)
    assert (first.cluster, first.nodes, first.cause) == ("b", [], Cause.RETURNED)
    assert (second.cause, second.owed_gpu_ms, second.owed_money) == (
        Cause.SUCCEEDED,
        5_400_000,
        3_000_000,
    )
    explanation = cast(Explanation, SimpleNamespace(now_ms=home.now_ms, attempts=[first, second]))
    lines = _attempt(explanation, first, [], None)
    assert ", at b: ran 1m, came back" in lines[0]
    assert "b ended it: its owner wants it back" in lines[1]
    lines = _attempt(explanation, second, [], None)
    assert ", at b: ran 1h 30m, succeeded" in lines[0]
    assert lines[1].strip() == "owed to b: 1.50 GPU-hours, 3.00 of its currency"


def test_a_tenant_reads_of_its_own_jobs_at_neighbors_only(home: Home) -> None:
    runs(home)
    told = [Recorded(seq, event) for seq, event in enumerate(home.log)]
    about = [one for one in told if "at b" in one.event.sentence()]
    assert about
    for tenant, sees in (("red", about), ("blue", [])):
        who = acting(home.state.identity, "anna", tenant, Role.MEMBER)
        reach = Reach(cast(Any, SimpleNamespace(**vars(loop_of(home)), store=None)), who)
        owners = {job.id: job.spec.tenant for job in home.state.jobs.values()}
        assert seen_events(reach, about, owners) == sees


def test_a_tenant_sees_which_neighbors_its_jobs_may_go_to(home: Home) -> None:
    west = Neighbor(name="west", tenants=("red", "blue"))
    east, north = Neighbor(name="east", tenants=("blue",)), Neighbor(name="north")
    home.policy = Policy(neighbors=(west, east, north))
    who = acting(home.state.identity, "anna", "red", Role.MEMBER)
    seen = Reach(cast(Any, SimpleNamespace(policy=home.policy)), who).policy().neighbors
    assert seen == (Neighbor(name="west", tenants=("red",)), north)
