"""What is said to help a waiting job is true: so changed, it would start."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import msgspec
import pytest
from storm.fuzz import Run, Size

from shoal.api.forms import from_fields, from_form, to_fields, to_form
from shoal.core.answers.advice import advise
from shoal.core.answers.why import waiting_reason
from shoal.core.invariants import verify
from shoal.core.policies import SHIPPED
from shoal.core.state.state import State
from shoal.core.step import step
from shoal.model.job import Job, JobSpec, Phase
from shoal.model.node import NodeIntent
from shoal.model.policy import Policy
from shoal.model.reason import render
from shoal.model.report import Accepted, Report, Request, SetIntent, Submit
from shoal.model.views import Remedy
from tests.core.build import Cluster, job_spec


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster()
    made.join("a", gpus=4)
    made.join("b", gpus=4)
    made.run(gpus=3)
    made.run(gpus=3)
    return made


def advice(cluster: Cluster, **fields: object) -> list[str]:
    job_id = cluster.submit(**fields)
    return [one.text for one in advise(cluster.state, cluster.job(job_id), cluster.now_ms)]


def test_the_least_change_of_each_kind_is_told(cluster: Cluster) -> None:
    assert advice(cluster, members=2, gpus=4) == [
        "with 1 GPU per member instead of 4, it would start now",
    ]
    assert advice(cluster, members=4, gpus=1) == [
        "with 2 members instead of 4, it would start now",
    ]


def test_a_remedy_is_a_change_of_the_jobs_form(cluster: Cluster) -> None:
    """Its fields, filled in and submitted in the job's place, let it start."""
    for fields in (
        {"members": 2, "gpus": 4},
        {"members": 4, "gpus": 1},
        {"members": 2, "gpus": 1, "within": "node", "within_required": True},
        {"gpus": 1, "where": ("zone=x",)},
        {"gpus": 1, "whole_nodes": True},
        {"gpus": 1, "gpu_models": ("H100",)},
        {"members": 2, "gpus": 1, "members_per_node": 2},
    ):
        spec = job_spec(**fields)
        if spec.where or spec.gpu_models:
            cluster.join("z", gpus=1, labels={"zone": "x"}, gpu_model="H100")
            cluster.run(gpus=1, where=("zone=x",))
        job_id = cluster.submit(**fields)
        (remedy, *_) = advise(cluster.state, cluster.job(job_id), cluster.now_ms)
        form = {**(to_form(to_fields(spec)) or {}), **remedy.fields}
        changed = from_fields(from_form(form), {"user": spec.user})
        answer = cluster.ask(Submit(changed, instead=job_id))
        assert isinstance(answer, Accepted), answer
        assert cluster.state.live(job_id) is None
        assert cluster.job(answer.id).phase is Phase.STARTING, (fields, remedy)
        cluster.cancel(answer.id)
        cluster.deliver()
        cluster.hear(*cluster.state.nodes)


def test_a_tenant_without_budget_is_told_where_it_can_be_raised(cluster: Cluster) -> None:
    job_id = cluster.submit(gpus=4, tenant="lab")
    cluster.state.accounts.held_by = lambda tenant: tenant  # type: ignore[method-assign]
    (remedy,) = advise(cluster.state, cluster.job(job_id), cluster.now_ms)
    assert (remedy.tenant, remedy.fields) == ("lab", {})


def test_nothing_is_told_where_nothing_small_helps(cluster: Cluster) -> None:
    cluster.run(gpus=1)
    cluster.run(gpus=1)
    assert advice(cluster, gpus=2) == []


def test_a_closed_node_with_room_is_named(cluster: Cluster) -> None:
    cluster.join("c", gpus=4)
    cluster.ask(SetIntent("c", NodeIntent.CORDONED))
    assert advice(cluster, gpus=4)[-1] == "if c is uncordoned, it would start now"


def test_what_somebody_closed_for_a_reason_is_not_one_click_away(cluster: Cluster) -> None:
    cluster.join("c", gpus=4)
    cluster.join("d", gpus=4)
    cluster.ask(SetIntent("c", NodeIntent.DRAINING, "ada", "replacing a memory module"))
    cluster.ask(SetIntent("d", NodeIntent.CORDONED, "ben"))
    cluster.wait(3_600_000)
    cluster.hear("a", "b", "c", "d")
    job_id = cluster.submit(gpus=4)
    *_, remedy = advise(cluster.state, cluster.job(job_id), cluster.now_ms)
    assert (remedy.how, remedy.node, remedy.nodes) == ("uncordon", "d", ["d"])
    cluster.ask(SetIntent("d", NodeIntent.DRAINING, "ben", "a fan is loud"))
    *_, remedy = advise(cluster.state, cluster.job(job_id), cluster.now_ms)
    assert (remedy.how, remedy.node, remedy.nodes) == ("uncordon", "", ["c"])
    assert remedy.cost == "c was drained 1h ago by ada: replacing a memory module"


def test_a_gang_is_told_of_all_nodes_that_it_needs() -> None:
    cluster = Cluster()
    for name in "abcd":
        cluster.join(name, gpus=8)
    for name in "bcd":
        cluster.intend(name, NodeIntent.CORDONED)
    job_id = cluster.submit(gpus=8, members=3, members_per_node=1)
    *_, remedy = advise(cluster.state, cluster.job(job_id), cluster.now_ms)
    assert (remedy.node, remedy.nodes) == ("", ["b", "c"])
    cluster.intend("b", NodeIntent.OPEN)
    assert cluster.job(job_id).phase is Phase.WAITING
    *_, remedy = advise(cluster.state, cluster.job(job_id), cluster.now_ms)
    assert remedy.node == "c"
    cluster.intend("c", NodeIntent.OPEN)
    assert cluster.job(job_id).phase is Phase.STARTING


def test_a_job_that_has_run_is_to_be_submitted_as_a_new_one(cluster: Cluster) -> None:
    job_id = cluster.run(gpus=1, members=2, restart="on-failure", retries=3, backoff_ms=1000)
    for member in range(2):
        cluster.exit(job_id, 1, member)
    cluster.hear("a", "b")
    other = cluster.run(gpus=1)
    cluster.wait(3_000)
    cluster.step()
    job = cluster.job(job_id)
    assert (job.phase, job.attempt) == (Phase.WAITING, 1), other
    (remedy,) = advise(cluster.state, job, cluster.now_ms)
    assert (remedy.how, remedy.fields) == ("resubmit", {"members": "1"})
    assert remedy.text == "with 1 member instead of 2, a new job would start now"


def test_a_remedy_says_whom_it_delays() -> None:
    cluster = Cluster(SHIPPED["backfill"])
    cluster.join("a", gpus=4)
    cluster.run(gpus=3, estimate_ms=600_000)
    job_id = cluster.submit(gpus=2, estimate_ms=7_200_000, priority=1)
    later = cluster.submit(gpus=4, estimate_ms=60_000)
    remedies = advise(cluster.state, cluster.job(job_id), cluster.now_ms)
    assert [render(one.cost) for one in remedies] == [f"{later} starts about 110m later"]


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(more, marks=pytest.mark.soak) for more in range(4, 60, 4))]
)
def test_in_any_state_of_the_storm_a_remedy_lets_the_job_start(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is done in a copy of the state, by the request that does it. Asking changes nothing."""
    from storm import controller

    seen: set[tuple[int, str, str]] = set()
    seed, size = first, msgspec.structs.replace(Size(), services_part=0)

    def look(state: State, policy: Policy, _: object, now_ms: int) -> None:
        for job in list(state.jobs.values()):
            for remedy in advise(state, job, now_ms):
                if (seed, job.id, remedy.text) not in seen:
                    seen.add((seed, job.id, remedy.text))
                    assert_starts(state, policy, job, remedy, now_ms)
        verify(state)

    monkeypatch.setattr(controller, "verify_changes", look)
    for seed in range(first, first + 4):
        asked = Run(seed, size).finish()
        if seed == first:
            assert Run(seed, size, checked=False).finish().digest == asked.digest
    assert seen or first


def assert_starts(state: State, policy: Policy, job: Job, remedy: Remedy, now_ms: int) -> None:
    if remedy.how == "policy":
        return
    copied = deepcopy(state)
    job_id = job.id
    requests: list[Request] = [SetIntent(node, NodeIntent.OPEN) for node in remedy.nodes]
    if not requests:
        changed = changed_by(job.spec, remedy.fields)
        instead = job_id if remedy.how == "change" else ""
        requests, job_id = [Submit(changed, instead=instead)], f"j{state.next_job}"
    done = step(copied, Report(requests=tuple(requests)), policy, now_ms, state.functions)
    assert all(isinstance(answer, Accepted) for answer in done.answers), (remedy, done.answers)
    while done.wake_ms is not None and done.wake_ms <= now_ms:  # it has more to do at once
        done = step(copied, Report(), policy, now_ms, state.functions)
    started = copied.jobs[job_id]
    assert started.phase is not Phase.WAITING, (
        remedy,
        started.why,
        waiting_reason(copied, started, policy, now_ms),
    )


def changed_by(spec: JobSpec, fields: dict[str, Any]) -> JobSpec:
    """As the form does it; not all that the storm submits can be written in one."""
    other: dict[str, Any] = {}
    for name, value in fields.items():
        match name:
            case "members":
                other |= {"members": int(value), "members_max": 0}
            case "gpus":
                other["gpus"] = int(value)
            case "strict":
                other["within_required"] = False
            case "per_node":
                other["members_per_node"] = 0
            case "gpu_model":
                other["gpu_models"] = ()
            case "where":
                other["where"] = ()
            case _:
                other[name] = value
    on_its_own = {"array": "", "index": 0, "after": (), "workflow": "", "schedule": ""}
    return msgspec.structs.replace(spec, **on_its_own, scheduled_ms=0, **other)
