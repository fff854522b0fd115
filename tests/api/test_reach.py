"""Reasons name a reader's own jobs; of others they say at most the tenant."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.api.principal import THE_OPERATOR, Principal, acting
from shoal.api.reach import Reach
from shoal.model.identity import Identity, Role, TenantRecord
from shoal.model.job import Job, JobSpec
from shoal.model.policy import Others, Policy, Tenant
from shoal.model.reason import WITHHELD, job_part, tenant_part
from tests.api.server import OPERATORS, serving
from tests.api.world import POLICY, World

LAB = Principal(user="anna", tenant="lab", role=Role.MEMBER, token="abcdefgh")


def job(number: int, tenant: str) -> Job:
    return Job(id=f"j{number}", number=number, spec=JobSpec(command=("true",), tenant=tenant))


def reach(
    who: Principal = LAB, others: Others = Others.NOTHING, tenants: tuple[Tenant, ...] = ()
) -> Reach:
    jobs = [job(1, "lab"), job(2, "lab"), job(3, "rival"), job(4, "rival"), job(12, "lab")]
    known = {one.id: one for one in jobs}
    state = SimpleNamespace(live=known.get, pending=lambda _: False)
    store = SimpleNamespace(job=lambda _: None)
    policy = Policy(others=others, tenants=tenants)
    loop: Any = SimpleNamespace(state=state, store=store, policy=policy)
    return Reach(loop, who)


RIVALS = job_part("rival", "j3", "j3 (secret) (priority 5, tenant rival)")


def test_a_reason_without_the_jobs_of_others() -> None:
    reason = f"makes room for {RIVALS}; lost {job_part('lab', 'j1')}"
    assert reach().text(reason) == "makes room for another tenant's job; lost j1"
    told = "makes room for j3 (secret) (priority 5, tenant rival); lost j1"
    assert reach(THE_OPERATOR).text(reason) == told


def test_the_policy_may_let_tenants_be_named() -> None:
    told = reach(others=Others.TENANTS).text(f"makes room for {RIVALS}")
    assert told == "makes room for a job of tenant rival"


def test_a_tenant_knows_those_above_it() -> None:
    tenants = (Tenant(name="science"), Tenant(name="lab", parent="science"), Tenant(name="rival"))
    lab = reach(tenants=tenants)
    assert lab.text(f"the budget of {tenant_part('science')}") == "the budget of science"
    assert lab.text(f"the budget of {tenant_part('rival')}") == "the budget of another tenant"


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        ("waits for j1 (own.name) and j12", True),
        ("for j3, which is ahead", False),
        ("for j3 (secret) (priority 5, tenant rival); lost", False),
        ("held by j1-j2", True),
        ("held by j1-j4", False),
        ("member j3.1.0 vanished", False),
        ("j77 never was", False),
        ("proj3 and j3x are words", True),
    ],
)
def test_a_reason_stored_without_parts_is_read_by_those_who_may_see_its_jobs(
    stored: str, shown: bool
) -> None:
    assert reach().text(stored) == (stored if shown else WITHHELD)
    assert reach(THE_OPERATOR).text(stored) == stored


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


def test_a_job_that_has_ended_is_not_read_on_the_event_loop(tmp_path: Path) -> None:
    with serving(tmp_path / "home", POLICY) as server:
        world = World(server)
        loops, threads = server.run(threading.current_thread), []
        read = server.store.job

        def job(job_id: str) -> Job | None:
            threads.append(threading.current_thread())
            return read(job_id)

        server.store.job = job  # type: ignore[method-assign]
        for token in (OPERATORS, world.tokens["member"]):
            path = f"/v1/jobs/{world.ours['done']}"
            assert server.call(token, "GET", path).status == 200
            assert server.call(token, "GET", f"{path}/cost").status == 200
        assert len(threads) == 4 and loops not in threads
