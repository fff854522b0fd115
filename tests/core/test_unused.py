"""What a job does not use costs it nothing: a step calls as many functions for a plain job with a
feature's facts in the state as without them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec
import pytest

from shoal import tick
from shoal.core.step import Step, step
from shoal.model.identity import Role, Token, User
from shoal.model.node import LabelChange
from shoal.model.notice import Rule
from shoal.model.policy import Policy, Tenant
from shoal.model.report import (
    Accepted,
    AddTenant,
    Request,
    SetEnd,
    SetLabels,
    SetRule,
    SetSchedule,
    SetService,
    SetToken,
    SetUser,
    SleepJob,
    SubmitWorkflow,
)
from shoal.model.schedule import ScheduleSpec
from shoal.model.supply import Supply
from shoal.model.sweep import IndexRange, Sweep
from shoal.model.workflow import WorkflowJob
from tests.core import build
from tests.core.build import Cluster, job_spec
from tests.core.serving import service_spec
from tests.core.test_sleep import nap

MANY = 20
WARM_UP = 60
NOTHING = 12  # calls: a few questions whether there is anything to do
NEVER_MS = 10**9
HASH = "0" * 64
CALM = Policy(silent_after_ms=NEVER_MS, grace_ms=NEVER_MS, run_ms_min=0)
TEAMS = tuple(Tenant(name=f"t{number}", quota_gpus=1) for number in range(MANY))

Feature = Callable[[Cluster], None]


class Counted:
    """The step of a tick, with the functions that it calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __call__(self, *arguments: Any) -> Step:
        with self._profiled():
            return step(*arguments)

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            self.calls[argument.__qualname__] += 1


def ask(made: Cluster, request: Request) -> None:
    answer = made.ask(request)
    assert isinstance(answer, Accepted), answer


def change(made: Cluster, **fields: Any) -> None:
    made.policy = msgspec.structs.replace(made.policy, **fields)
    made.step()


def quotas(made: Cluster) -> None:
    change(made, tenants=TEAMS)


def budgets(made: Cluster) -> None:
    change(made, tenants=tuple(Tenant(name=team.name, budget_gpu_hours=9) for team in TEAMS))


def people(made: Cluster) -> None:
    for number in range(MANY):
        user, tenant = f"u{number}", f"t{number}"
        ask(made, AddTenant(tenant))
        ask(made, SetUser(User(name=user, roles={tenant: Role.MEMBER}), add=True))
        token = f"abcdef{number:02}"
        ask(made, SetToken(Token(id=token, user=user, tenant=tenant, role=Role.MEMBER, hash=HASH)))


def labels(made: Cluster) -> None:
    for node in made.books:
        ask(made, SetLabels(node, LabelChange(labels={f"l{n}": "x" for n in range(MANY)})))


def taints(made: Cluster) -> None:
    ask(made, SetLabels("n3", LabelChange(taints={"own": "x"})))


def notices(made: Cluster) -> None:
    people(made)
    for number in range(MANY):
        rule = Rule(id="", owner=f"u{number}", tenant=f"t{number}", wish="ended,waiting:5m=@hook")
        ask(made, SetRule(rule))


def schedules(made: Cluster) -> None:
    for number in range(MANY):
        spec = ScheduleSpec(
            name=f"s{number}", cron="0 0 * * *", jobs=(WorkflowJob("w", job_spec()),)
        )
        ask(made, SetSchedule(spec, next_ms=NEVER_MS))


def service(made: Cluster) -> None:
    ask(made, SetService(service_spec(scale={"least": 3, "most": 3})))
    made.deliver()
    made.hear(*made.books)


def supply(made: Cluster) -> None:
    change(made, supply=(Supply(name="more", engine="slurm", gpus=8, cpu_milli=8_000, most=9),))


def reclaim(made: Cluster) -> None:
    change(made, idle_warn_ms=60_000, idle_reclaim_ms=120_000)


def turns(made: Cluster) -> None:
    change(made, turn_cost_percent=10)


def asleep(made: Cluster) -> None:
    sleeper = made.run(gpus=1, tenant="team")
    ask(made, SleepJob(sleeper))
    nap(made, sleeper)


def spares(made: Cluster) -> None:
    change(made, spares=1)


def ends(made: Cluster) -> None:
    ask(made, SetEnd("n3", NEVER_MS))


def array(made: Cluster) -> None:
    made.submit(tenant="team", gpus=8, members=2, sweep=Sweep(ranges=(IndexRange(0, MANY),)))
    made.deliver()
    made.hear(*made.books)


def workflow(made: Cluster) -> None:
    first = made.run(tenant="team")
    jobs = [WorkflowJob("a", job_spec(tenant="team", after=(first,)))]
    jobs += [WorkflowJob(f"b{n}", job_spec(tenant="team"), ("a",)) for n in range(MANY)]
    ask(made, SubmitWorkflow(tuple(jobs)))


def running(made: Cluster) -> None:
    for _ in range(MANY):
        made.run(tenant="team", cpu_milli=100)


def waiting(made: Cluster) -> None:
    for number in range(MANY):
        made.submit(tenant="team", gpus=8, members=3 + number % 2)


FEATURES: dict[str, Feature] = {
    "quotas of tenants": quotas,
    "budgets of tenants": budgets,
    "tenants, users and tokens": people,
    "labels of nodes": labels,
    "a tainted node": taints,
    "rules for notices": notices,
    "schedules": schedules,
    "a service with replicas": service,
    "a supply of nodes": supply,
    "unused GPUs are reclaimed": reclaim,
    "jobs may take turns": turns,
    "a job is asleep": asleep,
    "spare nodes": spares,
    "a node that ends": ends,
    "an array of another tenant": array,
    "a workflow of another tenant": workflow,
    "jobs of another tenant run": running,
    "jobs of another tenant wait": waiting,
}


# More calls that are allowed, and what they are for.
MORE = {
    "a service with replicas": 30,  # one of them is on its node; is an event about a replica?
    "a job is asleep": 60,  # its node reports it each time
    "spare nodes": 55,  # a job that may be moved is put on one
    "an array of another tenant": 260,  # its elements wait, too
    "a workflow of another tenant": 25,  # one of its jobs runs
    "jobs of another tenant run": 25,  # their node is filled first
    "jobs of another tenant wait": 550,  # room that is free again is offered to them
}


def cost(feature: Feature | None) -> Counter[str]:
    """Of a plain job, from its submission to its end, when estimates and caches are filled."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "verify_all", tick.verify_nothing)
        made = Cluster(CALM)
    for number in range(4):
        made.join(f"n{number}", gpus=8, sleep="freeze")
    if feature is not None:
        feature(made)
    costs = []
    for number in range(WARM_UP + 5):
        counted = Counted()
        with pytest.MonkeyPatch.context() as patched:
            if number >= WARM_UP:
                patched.setattr(tick, "step", counted)
            made.end(made.run())
        costs.append(counted.calls)
    return min(costs[WARM_UP:], key=Counter.total)


@pytest.fixture(scope="module")
def plain() -> Counter[str]:
    return cost(None)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_costs_a_plain_job_nothing(feature: str, plain: Counter[str]) -> None:
    calls = cost(FEATURES[feature])
    most = plain.total() + MORE.get(feature, NOTHING)
    more = calls.copy()
    more.subtract(plain)
    assert calls.total() <= most, f"called more often: {more.most_common(12)}"
