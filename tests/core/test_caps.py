"""Caps: how many jobs a tenant may have at a time; nothing that runs is ever stopped for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from shoal.core.features import caps
from shoal.core.state.accounts import Accounts
from shoal.core.state.events.schedules import ScheduleRan, ScheduleSkipped
from shoal.core.state.load import restore
from shoal.core.state.tally import Tally
from shoal.model.identity import Role, User
from shoal.model.job import Job, Phase
from shoal.model.policy import Policy, Tenant
from shoal.model.report import (
    Accepted,
    AddTenant,
    Answer,
    Full,
    NoteJob,
    Refused,
    Request,
    Requeue,
    Retry,
    RunSchedule,
    SetSchedule,
    SetService,
    SetUser,
    StopService,
    Submit,
    SubmitWorkflow,
)
from shoal.model.schedule import ScheduleSpec
from shoal.model.service import Scale, ServiceSpec
from shoal.model.sweep import IndexRange, Sweep
from shoal.model.workflow import WorkflowJob
from tests.core.build import Cluster, job_spec

TENANTS = (
    Tenant(name="lab", jobs_max=4),
    Tenant(name="red", parent="lab", jobs_max=3, waiting_max=2),
    Tenant(name="blue", parent="lab"),
)


def cluster(*tenants: Tenant, gpus: int = 1) -> Cluster:
    made = Cluster(Policy(tenants=tenants or TENANTS))
    made.join("a", gpus=gpus)
    return made


def ask(made: Cluster, tenant: str, **fields: Any) -> Answer:
    return made.ask(Submit(job_spec(tenant=tenant, gpus=1, **fields)))


def service(name: str, tenant: str, most: int) -> ServiceSpec:
    replica = job_spec(tenant=tenant, gpus=1)
    return ServiceSpec(name=name, replica=replica, scale=Scale(least=1, most=most))


def full(answer: Answer) -> str:
    assert isinstance(answer, Refused), answer
    assert answer.full is Full.TENANT, answer
    return answer.message


def test_a_tenant_has_no_more_jobs_than_its_cap_and_gets_the_next_when_one_ends() -> None:
    made = cluster()
    first = made.submit(tenant="red", gpus=1)
    second = made.submit(tenant="red", gpus=1)
    made.submit(tenant="red", gpus=1)
    said = full(ask(made, "red"))
    assert said.startswith("red has 3 of at most 3 live jobs (jobs_max in the policy); try again")
    made.cancel(second)
    assert isinstance(ask(made, "red"), Accepted)
    assert made.job(first).phase is Phase.STARTING


def test_the_cap_on_waiting_jobs_does_not_count_those_that_run() -> None:
    made = cluster(Tenant(name="red", waiting_max=2))
    made.run(tenant="red", gpus=1)
    for _ in range(2):
        assert isinstance(ask(made, "red"), Accepted)
    assert "2 of at most 2 waiting jobs (waiting_max" in full(ask(made, "red"))
    assert isinstance(ask(made, "other"), Accepted)


def test_the_cap_of_a_parent_covers_its_branches() -> None:
    made = cluster()
    for tenant in ("blue", "blue", "blue", "red"):
        assert isinstance(ask(made, tenant), Accepted)
    assert full(ask(made, "red")).startswith("lab has 4 of at most 4 live jobs")
    assert full(ask(made, "blue")).startswith("lab has 4 of at most 4 live jobs")


def test_a_submission_that_was_accepted_is_accepted_again_at_the_cap() -> None:
    made = cluster(Tenant(name="red", jobs_max=1))
    again = Submit(job_spec(tenant="red"), "key")
    first, second = made.ask(again), made.ask(again)
    assert isinstance(first, Accepted)
    assert isinstance(second, Accepted)
    assert first.id == second.id


def test_requests_of_one_step_are_counted_one_by_one() -> None:
    made = cluster(Tenant(name="red", jobs_max=2))
    wanted = [Submit(job_spec(tenant="red")) for _ in range(5)]
    answers = made.step(requests=wanted).answers
    assert [isinstance(answer, Accepted) for answer in answers] == [True, True, False, False, False]


def test_jobs_that_wait_again_may_be_more_than_the_cap_and_are_not_touched() -> None:
    made = cluster(Tenant(name="red", waiting_max=1), gpus=2)
    one, two = made.run(tenant="red", gpus=1), made.run(tenant="red", gpus=1)
    made.learn_gone("a")
    assert [made.job(job).phase for job in (one, two)] == [Phase.WAITING, Phase.WAITING]
    assert "2 of at most 1 waiting" in full(ask(made, "red"))


def test_a_service_counts_as_its_most_replicas_and_heals_at_the_cap() -> None:
    made = cluster(Tenant(name="red", jobs_max=3), gpus=4)
    assert "0 of at most 3" in full(made.ask(SetService(service("big", "red", most=4))))
    assert isinstance(made.ask(SetService(service("web", "red", most=2))), Accepted)
    assert "2 of at most 3" in full(made.ask(SetService(service("next", "red", most=2))))
    assert isinstance(ask(made, "red"), Accepted)
    assert "3 of at most 3" in full(ask(made, "red"))
    replica = next(iter(made.state.replicas["web"]))
    made.cancel(replica)
    made.wait(120_000)
    made.step()
    healed = next(iter(made.state.replicas["web"]))
    assert healed != replica, "the cap does not keep a service from healing"
    assert "3 of at most 3" in full(made.ask(SetService(service("web", "red", most=3))))
    assert isinstance(made.ask(SetService(service("web", "red", most=1))), Accepted)
    assert isinstance(ask(made, "red"), Accepted)
    made.ask(StopService("web"))
    for job in list(made.state.replicas.get("web", ())):
        made.cancel(job)
    made.step()
    assert made.state.tally.live["red"] == 2


def test_a_new_policy_and_a_restart_count_the_same_jobs() -> None:
    made = cluster()
    for tenant in ("blue", "red", "red"):
        made.submit(tenant=tenant, gpus=1)
    made.ask(SetService(service("web", "blue", most=1)))
    before = (made.state.tally.live, made.state.tally.waiting)
    assert before[0] == {"": 4, "lab": 4, "red": 2, "blue": 2}
    restored = restore(made.state.snapshot())
    assert (restored.tally.live, restored.tally.waiting) == before
    made.policy = Policy(tenants=(Tenant(name="red", jobs_max=2),))
    made.step()
    assert made.state.tally.live == {"": 4, "red": 2, "blue": 2}
    assert full(ask(made, "red")).startswith("red has 2 of at most 2")


def test_the_cluster_has_a_bound_for_all_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caps, "CLUSTER_JOBS_MAX", 4)
    made = cluster(Tenant(name="red"))
    for tenant in ("default", "red", "blue"):
        made.submit(tenant=tenant)
    answer = ask(made, "green")
    assert isinstance(answer, Refused)
    assert answer.full is Full.CLUSTER
    assert answer.message.startswith("the cluster takes at most 4 live jobs; try again")


def test_who_has_most_jobs_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caps, "CLUSTER_JOBS_MAX", 100)
    made = cluster(Tenant(name="red"))
    answers = made.step(requests=[Submit(job_spec(tenant="red")) for _ in range(120)]).answers
    assert sum(isinstance(answer, Accepted) for answer in answers) == 80
    assert "red has 80 of them, its share" in full(answers[-1])
    answers = made.step(requests=[Submit(job_spec(tenant="blue")) for _ in range(20)]).answers
    assert sum(isinstance(answer, Accepted) for answer in answers) == 16
    assert "at most 100 live jobs" in full(ask(made, "red"))


def heavy(tenant: str, **fields: Any) -> Any:
    """Half a kilobyte of variables; bounds are set in kilobytes here."""
    return job_spec(tenant=tenant, env={"TEXT": "x" * 500}, **fields)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caps, "SPEC_BYTES_MAX", 100_000)


def accepted(answers: Sequence[Answer]) -> int:
    return sum(isinstance(answer, Accepted) for answer in answers)


@pytest.mark.usefixtures("small")
def test_large_jobs_of_one_tenant_leave_memory_for_others() -> None:
    made = cluster(Tenant(name="red"))
    answers = made.step(requests=[Submit(heavy("red")) for _ in range(300)]).answers
    assert 50 < accepted(answers) < 200
    said = full(answers[-1])
    assert "red has 0.1 MiB of them, its share; put large values into files" in said
    assert accepted(made.step(requests=[Submit(heavy("blue")) for _ in range(10)]).answers) == 10
    assert made.state.sizes.held["red"] <= 80_000
    restored = restore(made.state.snapshot())
    sizes = made.state.sizes
    assert (restored.sizes.held, restored.sizes.of) == (sizes.held, sizes.of)
    for job in list(made.state.jobs):
        made.cancel(job)
    assert set(made.state.sizes.of) == set(made.state.jobs), "those that have ended take nothing"


@pytest.mark.usefixtures("small")
def test_every_way_to_bring_large_specs_is_bounded() -> None:
    """Arrays, elements, workflows, schedules, services, replacements and notes."""
    big = {"TEXT": "x" * 500}
    made = cluster(Tenant(name="red"))
    sweep = Sweep(rows=tuple({"V": "y" * 900} for _ in range(100)))
    jobs = tuple(WorkflowJob(f"a{n}", heavy("red")) for n in range(300))
    plan = ScheduleSpec(name="s", cron="* * * * *", jobs=jobs, workflow=True)
    web = ServiceSpec(name="w", replica=heavy("red"), scale=Scale(least=1, most=300))
    for request in (
        Submit(job_spec(tenant="red", sweep=sweep)),
        SubmitWorkflow(jobs),
        SetSchedule(plan, next_ms=1),
        SetService(web),
    ):
        answer = made.ask(request)
        assert isinstance(answer, Refused), request
        assert "too much at any time; put large values into files" in answer.message
        assert answer.full is None, "to try again is in vain"
    elements = Sweep(ranges=(IndexRange(0, 999),))
    made.ask(Submit(job_spec(tenant="red", env=big, sweep=elements)))
    for _ in range(20):
        made.step()
    assert made.state.sizes.held["red"] <= 50_000, "elements leave half of the room"
    while isinstance(made.ask(Submit(heavy("red"))), Accepted):
        pass
    last = [job.id for job in made.state.jobs.values() if not job.spec.array][-1]
    full(made.ask(NoteJob(last, "z" * 999, "ann")))
    assert isinstance(made.ask(Submit(heavy("blue"))), Accepted)


def test_a_job_of_a_tenant_without_a_name_is_counted_once() -> None:
    """Traces have such jobs."""
    tally, accounts = Tally(), Accounts(Policy())
    job = Job(id="j1", number=1, spec=msgspec.structs.replace(job_spec(), tenant=""))
    tally.job(accounts, job, 1)
    assert tally.live == tally.waiting == {"": 1}


def above(answer: Answer) -> None:
    assert isinstance(answer, Refused), answer
    assert answer.field.endswith("priority"), answer
    assert answer.message == "is at most 5 for the tenant red, not 6; an admin may ask for more"


HIGH = {"tenant": "red", "gpus": 1, "priority": 6}
FLOW = (WorkflowJob("one", job_spec(**HIGH)),)
SWEEP = Sweep(ranges=(IndexRange(0, 2),))
HIGH_SCHEDULE = ScheduleSpec(name="hourly", cron="0 * * * *", jobs=FLOW)
ASKS: dict[str, Request] = {
    "a job": Submit(job_spec(**HIGH)),
    "an array": Submit(job_spec(**HIGH, sweep=SWEEP)),
    "a changed job": Submit(job_spec(**HIGH), instead="j1"),
    "a workflow": SubmitWorkflow(FLOW),
    "a service": SetService(ServiceSpec(name="s", replica=job_spec(**HIGH))),
    "a schedule": SetSchedule(HIGH_SCHEDULE, 3_600_000, "ann"),
}


def prioritized() -> Cluster:
    """The tenant red may ask for a priority of 5; ann is a member of it."""
    made = cluster(Tenant(name="red", priority_max=5), gpus=4)
    made.ask(AddTenant("red"))
    made.ask(SetUser(User(name="ann", roles={"red": Role.MEMBER}), add=True))
    return made


@pytest.mark.parametrize("what", ASKS)
def test_a_priority_above_the_tenants_is_for_admins(what: str) -> None:
    made, request = prioritized(), ASKS[what]
    made.ask(Submit(job_spec(tenant="red", gpus=4, begin_ms=9_000_000)))  # j1, which waits
    above(made.ask(msgspec.structs.replace(request, scope="red")))
    assert isinstance(made.ask(request), Accepted), "an admin's word"


def test_a_cap_that_was_lowered_holds_for_what_comes_back() -> None:
    made = prioritized()
    made.policy = Policy(tenants=(Tenant(name="red", priority_max=6),))
    array = made.ask(Submit(job_spec(**HIGH, sweep=SWEEP, retries=0), scope="red"))
    job = made.ask(Submit(job_spec(**HIGH), scope="red"))
    planned = SetSchedule(HIGH_SCHEDULE, made.now_ms + 3_600_000, "ann", scope="red")
    assert all(isinstance(one, Accepted) for one in (array, job, made.ask(planned)))
    made.hear("a")
    made.deliver()
    made.hear("a")
    made.policy = Policy(tenants=(Tenant(name="red", priority_max=5),))
    assert isinstance(job, Accepted) and isinstance(array, Accepted)
    above(made.ask(Requeue(job.id, scope="red")))
    above(made.ask(Retry(array.id, scope="red")))
    above(made.ask(RunSchedule("red/hourly", scope="red")))
    made.wait(3_600_000)
    made.step()
    (skipped,) = [one for one in made.last.events if isinstance(one, ScheduleSkipped)]
    assert "priority is at most 5 for the tenant red" in skipped.why
    made.ask(SetUser(User(name="ann", roles={"*": Role.ADMIN})))
    made.wait(3_600_000)
    made.step()
    assert any(isinstance(one, ScheduleRan) for one in made.last.events)
