"""A request reaches only its sender's tenant, whatever happens between the request and its step."""

from __future__ import annotations

import msgspec

from shoal.model.commands import Launch
from shoal.model.job import JobSpec
from shoal.model.policy import Tenant
from shoal.model.report import (
    Accepted,
    AddTenant,
    Refused,
    RemoveTenant,
    Retry,
    SetService,
    StopService,
    Submit,
)
from shoal.model.service import Scale, ServiceSpec
from shoal.model.sweep import IndexRange, Sweep
from tests.core.build import Cluster

OWN = JobSpec(command=("true",), tenant="lab")


def service(tenant: str, command: str = "serve") -> ServiceSpec:
    replica = JobSpec(command=(command,), tenant=tenant)
    return ServiceSpec(name="web", replica=replica, scale=Scale(least=1, most=1))


def cluster() -> Cluster:
    made = Cluster()
    made.join("a", gpus=1)
    for tenant in ("lab", "rival"):
        made.ask(AddTenant(tenant))
    return made


def test_a_tenant_that_was_removed_meanwhile_gets_no_job_of_the_agents_user() -> None:
    made = cluster()
    assert isinstance(made.ask(Submit(OWN, scope="lab")), Accepted)
    made = cluster()
    _, answer = made.step(requests=(RemoveTenant("lab"), Submit(OWN, scope="lab"))).answers
    assert answer == Refused("tenant", "is not yours, or was removed; ask an admin")
    set_ = SetService(service("rival"), scope="rival")
    _, answer = made.step(requests=(RemoveTenant("rival"), set_)).answers
    assert isinstance(answer, Refused)
    assert not made.state.jobs


def test_nothing_of_a_removed_tenant_runs_again_as_the_agents_user() -> None:
    """Not even for the operator, where the policy names the tenant or no other is left."""
    made = cluster()
    made.policy = msgspec.structs.replace(made.policy, tenants=(Tenant(name="lab"),))
    array = made.submit(tenant="lab", sweep=Sweep(ranges=(IndexRange(0, 0, 1),)))
    made.deliver()
    made.end(f"{array}.0", code=1)
    assert array in made.finished
    for tenant in ("lab", "rival"):
        assert isinstance(made.ask(RemoveTenant(tenant)), Accepted)
    for request in (Submit(OWN), SetService(service("lab"))):
        answer = made.ask(request)
        assert isinstance(answer, Refused)
        assert answer.message.endswith("add it again with: shoal tenant add lab")
    for _ in range(2):  # the next tenant of that name is another one
        for job in (array, f"{array}.0"):
            answer = made.ask(Retry(job))
            assert isinstance(answer, Refused)
            assert answer.message.endswith("is of a tenant lab that was removed")
        assert not made.state.jobs
        made.ask(AddTenant("lab"))
    made.ask(Submit(OWN))
    (launch,) = [one for one in made.last.commands if isinstance(one, Launch)]
    assert launch.uid == made.state.identity.tenants["lab"].uid


def test_a_job_for_another_tenant_is_refused_by_the_step_too() -> None:
    assert isinstance(cluster().ask(Submit(OWN, scope="rival")), Refused)


def test_a_service_is_changed_and_stopped_by_its_own_tenant_alone() -> None:
    made = cluster()
    made.ask(SetService(service("lab"), scope="lab"))
    answer = made.ask(SetService(service("rival", "steal"), scope="rival"))
    assert answer == Refused("name", "web is taken in this cluster; choose another name")
    none = Refused("service", "there is no service web", missing=True)
    assert made.ask(StopService("web", scope="rival")) == none
    assert made.state.services["web"].spec == service("lab")
    assert isinstance(made.ask(StopService("web", scope="lab")), Accepted)
