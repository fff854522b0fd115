"""Reported waits and rules, in the step; and which notices an event gives rise to."""

from __future__ import annotations

import msgspec

from shoal.core.features.notices import notices_of
from shoal.core.state.events.budgets import BudgetHeld
from shoal.core.state.events.log import Event, Recorded
from shoal.core.state.events.nodes import NodeLost
from shoal.core.state.events.queue import JobWaited
from shoal.core.state.events.runs import JobFinished
from shoal.core.state.events.schedules import ScheduleMissed
from shoal.model.identity import EVERY_TENANT, OPERATOR, Identity, Role, User
from shoal.model.job import Job, Outcome
from shoal.model.notice import Rule
from shoal.model.reason import WITHHELD, job_part
from shoal.model.report import Accepted, RemoveRule, SetRule
from tests.core.build import Cluster, job_spec

MINUTE_MS = 60_000


def rule(wish: str, owner: str = OPERATOR, tenant: str = "default", everyone: bool = False) -> Rule:
    return Rule(id="", owner=owner, tenant=tenant, wish=wish, everyone=everyone)


def waits(cluster: Cluster) -> list[tuple[str, int]]:
    return [(e.job, e.waited_ms // MINUTE_MS) for e in cluster.log if isinstance(e, JobWaited)]


def test_a_wait_is_reported_once_for_each_time_that_somebody_asked_for() -> None:
    cluster = Cluster()
    asked = cluster.submit(notify=("waiting:10m=@a", "waiting:1h,failed=@b"))
    other = cluster.submit()  # there is no node: both wait
    assert cluster.last.wake_ms == cluster.now_ms + 10 * MINUTE_MS
    cluster.wait(10 * MINUTE_MS)
    cluster.step()
    cluster.step()
    assert waits(cluster) == [(asked, 10)]
    assert isinstance(cluster.ask(SetRule(rule("waiting:20m=@c"))), Accepted)
    cluster.state.agenda.waits = None  # as after a restart
    for _ in range(8):
        cluster.wait(10 * MINUTE_MS)
        cluster.step()
    assert waits(cluster) == [(asked, 10), (asked, 20), (other, 20), (asked, 60)]


def test_a_rule_is_there_once_and_goes_when_its_owner_removes_it() -> None:
    cluster = Cluster()
    first, again = (cluster.ask(SetRule(rule("failed=@a"))) for _ in range(2))
    assert first == Accepted("r1")
    assert again == Accepted("r1", "this rule already exists")
    assert not isinstance(cluster.ask(RemoveRule("r1", owner="eve")), Accepted)
    assert isinstance(cluster.ask(RemoveRule("r1", owner=OPERATOR)), Accepted)
    assert not cluster.state.rules


PEOPLE = Identity(
    users={
        "ada": User(name="ada", roles={"lab": Role.MEMBER}),
        "root": User(name="root", roles={EVERY_TENANT: Role.ADMIN}),
        "eve": User(name="eve", roles={"other": Role.MEMBER}),
    }
)
FAILED = JobFinished(at_ms=9, job="j1", attempt=1, outcome=Outcome.FAILED, code=1, why="after j2")
BECAUSE = f"after {job_part('rival', 'j2', 'j2 (secret)')}"


def receivers(event: Event, rules: list[Rule], **fields: object) -> list[str]:
    job = Job(id="j1", number=1, spec=job_spec(tenant="lab", user="ada", **fields))
    about = job if isinstance(event, JobFinished) else None
    return [one.to for one in notices_of(Recorded(7, event), rules, PEOPLE, about, "cafe")]


def test_nobody_hears_of_jobs_that_they_may_not_see() -> None:
    rules = [
        rule("failed=@own", "ada", "lab"),
        rule("ended=@colleague", "bob", "lab"),  # bob is no user any more
        rule("failed=@stranger", "eve", "lab", everyone=True),
        rule("failed=@admin", "root", EVERY_TENANT, everyone=True),
        rule("failed=@operator", OPERATOR, "default"),
        rule("started=@later", "ada", "lab"),
    ]
    assert receivers(FAILED, rules) == ["@own", "@admin"]
    assert receivers(FAILED, rules, service="chat") == []
    assert receivers(FAILED, [], notify=("@job", "failed=@job", "started=@no")) == ["@job"]


def test_a_notice_does_not_name_the_jobs_of_others() -> None:
    job = Job(id="j1", number=1, spec=job_spec(tenant="lab", notify=("@job",)))
    failed = msgspec.structs.replace(FAILED, why=BECAUSE)
    (notice,) = notices_of(Recorded(7, failed), [], PEOPLE, job, "cafe")
    assert notice.text == "j1 failed with exit code 1: after another tenant's job"
    (old,) = notices_of(Recorded(7, FAILED), [], PEOPLE, job, "cafe")
    assert old.why == WITHHELD, "stored by an earlier version, it may name anybody's job"
    (again,) = notices_of(Recorded(7, failed), [], PEOPLE, job, "cafe")
    assert notice.id == again.id


def test_budgets_are_for_their_tenant_and_nodes_for_those_who_see_all() -> None:
    rules = [
        rule("budget,node-lost=@ada", "ada", "lab"),
        rule("budget,node-lost=@eve", "eve", "other"),
        rule("budget,node-lost=@root", "root", EVERY_TENANT),
    ]
    assert receivers(BudgetHeld(at_ms=9, tenant="lab", why="all"), rules) == ["@ada", "@root"]
    lost = NodeLost(at_ms=9, node="n1", incarnation=1, dead=True, why="power")
    assert receivers(lost, rules) == ["@root"]
    missed = ScheduleMissed(
        at_ms=9, schedule="lab/nightly", count=2, first_ms=1, last_ms=2, next_ms=99, why="down"
    )
    mine = [rule("missed-run=@ada", "ada", "lab"), rule("missed-run=@eve", "eve", "other")]
    assert receivers(missed, mine) == ["@ada"]
