"""Who has used how much: it decays, adds up along the tree, and decides who is next."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.state.accounts import Account, Accounts, share_of
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobPlaced
from shoal.model.policy import Policy, Tenant, problem_with
from shoal.model.resources import Demand, Kind
from tests.core.build import Cluster, examples

HOUR_MS = 3_600_000
GPU = 1_000_000


def accounts(*tenants: Tenant, half_life_ms: int = HOUR_MS) -> Accounts:
    return Accounts(Policy(tenants=tenants, half_life_ms=half_life_ms))


def use(book: Accounts, tenant: str, shares: int, from_ms: int, to_ms: int) -> None:
    book.change(tenant, shares * GPU, shares * 1000, from_ms, 0)
    book.change(tenant, -shares * GPU, -shares * 1000, to_ms, 0)


def in_line(book: Accounts, *names: str, now_ms: int) -> list[str]:
    return sorted(names, key=lambda name: book.standing(name, now_ms))


# -- usage ---------------------------------------------------------------------------------


def test_what_was_used_a_half_life_ago_counts_half() -> None:
    account = Account(usage=1_000.0)
    assert account.usage_at(HOUR_MS, HOUR_MS) == pytest.approx(500)
    assert account.usage_at(10 * HOUR_MS, HOUR_MS) == pytest.approx(1_000 / 1024)


def test_what_is_held_for_a_short_while_counts_as_share_times_time() -> None:
    account = Account(share=7)
    assert account.usage_at(1_000, 1_000 * HOUR_MS) == pytest.approx(7_000, rel=1e-5)


def test_what_is_held_for_ever_counts_for_no_more_than_a_few_half_lives() -> None:
    account = Account(share=1)
    assert account.usage_at(1_000 * HOUR_MS, HOUR_MS) == pytest.approx(HOUR_MS * 1.442695)


@examples
@given(
    usage=st.integers(0, 10**9),
    share=st.integers(0, 10**6),
    first_ms=st.integers(0, 10**8),
    then_ms=st.integers(0, 10**8),
)
def test_it_does_not_matter_how_often_one_looks(
    usage: int, share: int, first_ms: int, then_ms: int
) -> None:
    once, twice = (Account(usage=float(usage), share=share) for _ in range(2))
    once.advance(first_ms + then_ms, HOUR_MS)
    twice.advance(first_ms, HOUR_MS)
    twice.advance(first_ms + then_ms, HOUR_MS)
    assert once.usage == pytest.approx(twice.usage, rel=1e-9, abs=1e-3)


def test_a_share_is_of_whatever_the_job_takes_most_of() -> None:
    totals = Kind(10, 100_000, 1_000)
    assert share_of(Demand(1, 50_000, 0), 1000, totals) == 500_000_000
    assert share_of(Demand(1, 1_000, 0), 1000, totals) == 100_000_000
    assert share_of(Demand(1, 1_000, 0), 300, totals) == 30_000_000
    assert share_of(Demand(0, 0, 1), 1000, Kind(0, 0, 0)) == 0


# -- who comes first -----------------------------------------------------------------------


def test_the_tenant_that_used_less_for_its_weight_comes_first() -> None:
    book = accounts(Tenant(name="a", weight=3), Tenant(name="b"))
    use(book, "a", 2, 0, 1_000)
    use(book, "b", 1, 0, 1_000)
    assert in_line(book, "a", "b", now_ms=1_000) == ["a", "b"]
    use(book, "a", 2, 1_000, 2_000)
    assert in_line(book, "a", "b", now_ms=2_000) == ["b", "a"]


def test_a_tenant_nobody_heard_of_has_used_nothing() -> None:
    book = accounts()
    use(book, "a", 1, 0, 1_000)
    assert in_line(book, "a", "new", now_ms=1_000) == ["new", "a"]


def test_siblings_are_compared_with_each_other_and_their_parents_before_them() -> None:
    """One of the light branch comes first even if it used more than one of the heavy branch."""
    book = accounts(
        Tenant(name="lab"),
        Tenant(name="anna", parent="lab"),
        Tenant(name="ben", parent="lab"),
        Tenant(name="shop"),
        Tenant(name="carl", parent="shop"),
    )
    use(book, "anna", 8, 0, 1_000)
    use(book, "ben", 1, 0, 1_000)
    use(book, "carl", 3, 0, 1_000)
    assert in_line(book, "anna", "ben", "carl", now_ms=1_000) == ["carl", "ben", "anna"]


def test_a_branch_has_used_what_its_members_used_whatever_the_policy_was() -> None:
    book = accounts()
    use(book, "anna", 2, 0, 1_000)
    use(book, "ben", 1, 500, 2_000)
    book.obey(Policy(half_life_ms=HOUR_MS, tenants=tenants_of("lab", "anna", "ben")))
    own = [book.own[name].usage_at(5_000, HOUR_MS) for name in ("anna", "ben")]
    assert book.sums["lab"].usage_at(5_000, HOUR_MS) == pytest.approx(sum(own))


def tenants_of(parent: str, *children: str, **quota: Any) -> tuple[Tenant, ...]:
    return Tenant(name=parent, **quota), *(Tenant(name=name, parent=parent) for name in children)


def test_who_holds_less_than_its_quota_comes_before_all_who_do_not() -> None:
    book = accounts(Tenant(name="a", quota_gpus=2), Tenant(name="b"))
    use(book, "a", 100, 0, 1_000)
    assert in_line(book, "a", "b", now_ms=1_000) == ["a", "b"]
    book.change("a", 2 * GPU, 2_000, 1_000, 0)
    assert in_line(book, "a", "b", now_ms=1_000) == ["b", "a"]


def test_a_quota_is_shared_by_a_branch_unless_a_tenant_has_its_own() -> None:
    book = accounts(
        *tenants_of("lab", "anna", "ben", quota_gpus=4),
        Tenant(name="carl", parent="lab", quota_gpus=1),
    )
    book.change("anna", 0, 3_000, 0, 0)
    assert book.within_quota("ben", 1_000)
    assert not book.within_quota("ben", 2_000)
    assert not book.within_quota("carl", 2_000)
    assert book.within_quota("carl", 1_000)
    assert not book.within_quota("nobody", 0)


# -- in a cluster --------------------------------------------------------------------------


def placed_in_order(cluster: Cluster) -> list[str]:
    """Tenants of the jobs that were placed, in order."""
    tenants = {
        event.job: event.spec.tenant for event in cluster.log if isinstance(event, JobSubmitted)
    }
    return [tenants[event.job] for event in cluster.log if isinstance(event, JobPlaced)]


def test_a_burst_of_one_tenant_does_not_outrun_the_accounts() -> None:
    """What a start counts at once lets two tenants who never used anything take turns."""
    cluster = Cluster(Policy(entry_penalty_ms=60_000))
    for tenant in ("a", "a", "a", "a", "b", "b"):
        cluster.submit(gpus=1, tenant=tenant)
    cluster.join("n", gpus=4)
    assert placed_in_order(cluster) == ["a", "b", "a", "b"]


def test_without_an_entry_penalty_a_burst_comes_in_order_of_submission() -> None:
    cluster = Cluster(Policy(entry_penalty_ms=0))
    for tenant in ("a", "a", "a", "b"):
        cluster.submit(gpus=1, tenant=tenant)
    cluster.join("n", gpus=4)
    assert placed_in_order(cluster) == ["a", "a", "a", "b"]


def test_priority_comes_before_fairness() -> None:
    cluster = Cluster(Policy())
    cluster.join("n", gpus=1)
    first = cluster.run(gpus=1, tenant="a")
    cluster.submit(gpus=1, tenant="b")
    cluster.submit(gpus=1, tenant="a", priority=1)
    cluster.wait(1_000)
    cluster.end(first)
    assert placed_in_order(cluster) == ["a", "a"]


def test_all_that_was_held_is_given_back() -> None:
    cluster = Cluster(Policy(tenants=tenants_of("lab", "anna")))
    cluster.join("n", gpus=4)
    jobs = [cluster.run(gpus=1, gpu_milli=300, tenant="anna"), cluster.run(gpus=2, tenant="anna")]
    assert cluster.state.accounts.sums["lab"].gpu_milli == 2_300
    for job_id in jobs:
        cluster.end(job_id)
    for account in (*cluster.state.accounts.own.values(), *cluster.state.accounts.sums.values()):
        assert (account.share, account.gpu_milli) == (0, 0)
        assert account.usage > 0


@pytest.mark.parametrize(
    ("tenants", "problem"),
    [
        ((Tenant(name="a"), Tenant(name="a")), "named twice"),
        ((Tenant(name="a", parent="b"),), "is not named"),
        ((Tenant(name="a", parent="b"), Tenant(name="b", parent="a")), "its own ancestor"),
        ((Tenant(name="a"), Tenant(name="b", parent="a")), ""),
    ],
)
def test_a_tree_of_tenants_that_is_none_is_found_out(
    tenants: tuple[Tenant, ...], problem: str
) -> None:
    found = problem_with(Policy(tenants=tenants))
    assert (problem in found) if found else not problem
