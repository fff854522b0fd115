"""Budgets: warn at 80 %, hold at 100 %. What was spent is told from outside; that a line was
crossed is an event, so a replay needs no ledger."""

from __future__ import annotations

from shoal.core.ending import stop
from shoal.core.round import Round
from shoal.core.state import State
from shoal.model.budget import BudgetLevel, BudgetPeriod, Spending
from shoal.model.events import BudgetFreed, BudgetHeld, BudgetWarned
from shoal.model.job import Phase, Restart, StopCause
from shoal.model.policy import Tenant

WARNED_MILLI = 800
HELD_MILLI = 1000
GPU_US_PER_GPU_HOUR = 3_600_000_000


def budget(round_: Round, spendings: tuple[Spending, ...]) -> None:
    """`spendings` are complete: a tenant that is not among them has spent nothing. Empty: nothing
    was told, and all stays as it is."""
    state = round_.state
    for name in list(state.accounts.budgets):
        if not round_.policy.tenant(name).has_budget:
            _free(round_, name, "the policy sets it no budget any more")
    if not spendings:
        return
    for tenant in round_.policy.tenants:
        if tenant.has_budget:
            _judge(round_, tenant, spendings)
    if round_.policy.budget_stops:
        _stop_held(round_)


def _judge(round_: Round, tenant: Tenant, spendings: tuple[Spending, ...]) -> None:
    state, now_ms = round_.state, round_.now_ms
    milli, text = used(state, tenant, spendings)
    before = state.accounts.budgets.get(tenant.name)
    if milli >= HELD_MILLI:
        if before is not BudgetLevel.HELD:
            why = f"{text}: its jobs wait until there is more"
            round_.emit(BudgetHeld(at_ms=now_ms, tenant=tenant.name, why=why))
        return
    if before is BudgetLevel.HELD or (before is not None and milli < WARNED_MILLI):
        _free(round_, tenant.name, text)
    if milli >= WARNED_MILLI and tenant.name not in state.accounts.budgets:
        round_.emit(BudgetWarned(at_ms=now_ms, tenant=tenant.name, why=text))


def _free(round_: Round, tenant: str, why: str) -> None:
    round_.emit(BudgetFreed(at_ms=round_.now_ms, tenant=tenant, why=why))


def used(state: State, tenant: Tenant, spendings: tuple[Spending, ...]) -> tuple[int, str]:
    """The part of its budget that it and its branches have used, in thousandths, and in words."""
    mine = [
        spending
        for spending in spendings
        if spending.period is tenant.budget_period
        and any(one.name == tenant.name for one in state.accounts.lineage(spending.tenant))
    ]
    when = "this month" if tenant.budget_period is BudgetPeriod.MONTH else "in all"
    found = [(0, f"{tenant.name} has spent nothing of its budget {when}")]
    if tenant.budget_gpu_hours:
        spent = sum(spending.gpu_us for spending in mine)
        whole = tenant.budget_gpu_hours * GPU_US_PER_GPU_HOUR
        hours = f"{spent / GPU_US_PER_GPU_HOUR:.1f} of {tenant.budget_gpu_hours} GPU-hours"
        found.append((spent * 1000 // whole, f"{tenant.name} has used {hours} {when}"))
    costs = [spending.money_milli for spending in mine]
    if tenant.budget_money and all(cost is not None for cost in costs):
        paid = sum(cost for cost in costs if cost is not None)
        money = f"{paid / 1000:.2f} of {tenant.budget_money}"
        found.append((paid // tenant.budget_money, f"{tenant.name} has spent {money} {when}"))
    return max(found)


def _stop_held(round_: Round) -> None:
    """The policy wants it: who is held does not go on either, but for who must not run twice."""
    for job in list(round_.state.jobs.values()):
        if (
            job.phase in (Phase.STARTING, Phase.RUNNING)
            and job.spec.gpus
            and job.spec.restart is not Restart.NEVER
            and round_.state.accounts.held_by(job.spec.tenant)
        ):
            why = f"the budget of {round_.state.accounts.held_by(job.spec.tenant)} is used up"
            stop(round_, job, StopCause.BUDGET, why)
