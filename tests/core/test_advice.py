"""What is said to help a waiting job is true: so changed, it would start."""

from __future__ import annotations

import pytest

from shoal.api.forms import from_fields, from_form, to_fields, to_form
from shoal.core.answers.advice import advise
from shoal.model.job import Phase
from shoal.model.node import NodeIntent
from shoal.model.report import Accepted, SetIntent, Submit
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
        "with 1 GPU per member instead of 4 it would start now",
    ]
    assert advice(cluster, members=4, gpus=1) == [
        "with 2 members instead of 4 it would start now",
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
    assert advice(cluster, gpus=4)[-1] == "c would have room: shoal uncordon c"
