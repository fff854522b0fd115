"""Reasons name a reader's own jobs; of others they say at most the tenant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.api.principal import THE_OPERATOR, Principal, acting
from shoal.api.reach import Reach
from shoal.model.health import Record, Standing
from shoal.model.identity import Identity, Role, TenantRecord
from shoal.model.job import Job, JobSpec
from shoal.model.policy import Others, Policy

LAB = Principal(user="anna", tenant="lab", role=Role.MEMBER, token="abcdefgh")


def job(number: int, tenant: str) -> Job:
    return Job(id=f"j{number}", number=number, spec=JobSpec(command=("true",), tenant=tenant))


def reach(who: Principal = LAB, others: Others = Others.NOTHING) -> Reach:
    jobs = [job(1, "lab"), job(2, "lab"), job(3, "rival"), job(4, "rival"), job(12, "lab")]
    sick = Record(standing=Standing.QUARANTINED, why="cannot write /rival/secret")
    known = {one.id: one for one in jobs}
    state = SimpleNamespace(
        live=known.get, pending=lambda _: False, order=[SimpleNamespace(record=sick)]
    )
    store = SimpleNamespace(job=lambda _: None)
    loop: Any = SimpleNamespace(state=state, store=store, policy=Policy(others=others))
    return Reach(loop, who)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("waits for j1 (own.name) and j12", "waits for j1 (own.name) and j12"),
        ("for j3, which is ahead", "for another tenant's job, which is ahead"),
        ("for j3 (secret) (priority 5, tenant rival); lost", "for another tenant's job; lost"),
        ("held by j1-j2", "held by j1-j2"),
        ("held by j1-j4", "held by other tenants' jobs"),
        ("held by j1-j999999999", "held by other tenants' jobs"),
        ("aside for j3, j4, j1", "aside for other tenants' jobs, j1"),
        ("member j3.1.0 vanished", "member another tenant's job vanished"),
        ("behind j3.14 (secret) now", "behind another tenant's job now"),
        ("lost j3.14.1.0; j1.2 waits", "lost another tenant's job; j1.2 waits"),
        ("j77 never was", "another tenant's job never was"),
        ("n1 is quarantined (cannot write /rival/secret); wait", "n1 is quarantined; wait"),
        ("proj3 and j3x are words", "proj3 and j3x are words"),
    ],
)
def test_a_reason_without_the_jobs_of_others(text: str, told: str) -> None:
    assert reach().text(text) == told
    assert reach(THE_OPERATOR).text(text) == text


def test_the_policy_may_let_tenants_be_named() -> None:
    told = reach(others=Others.TENANTS).text(
        "makes room for j3 (secret) (priority 5, tenant rival)"
    )
    assert told == "makes room for a job of tenant rival"
    assert reach(others=Others.TENANTS).text("after j77") == "after another tenant's job"


def test_an_admin_with_a_token_for_one_tenant_acts_there_unless_another_is_named() -> None:
    ada = Principal(user="ada", tenant="lab", role=Role.ADMIN, token="abcdefgh")
    spec = JobSpec(command=("true",))
    assert (reach(ada).spec(spec).tenant, reach(ada).spec(spec).user) == ("lab", "ada")
    assert reach(ada).tenant == "*"
    assert reach(THE_OPERATOR).spec(spec) == spec


def test_whoever_acts_for_a_tenant_sees_no_job_of_an_earlier_one_of_its_name() -> None:
    record = TenantRecord(name="lab", uid=61_001, since_ms=9, first_job=7)
    ann = acting(Identity(tenants={"lab": record}), "ann", "lab", Role.MEMBER)
    seen = [job for job in ("", "j6", "j6.7", "j7", "j7.0", "j70") if ann.sees_job("lab", job)]
    assert seen == ["j7", "j7.0", "j70"]
    assert not ann.sees_job("rival", "j70")
    assert THE_OPERATOR.sees_job("lab", "j6")
