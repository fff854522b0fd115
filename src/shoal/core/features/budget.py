"""Budgets: warn at 80 %, hold at 100 %. The ledger reports what was spent; crossing a line is an
event, so a replay of the log needs no ledger. Keys with a quota of tokens are held the same way."""

from __future__ import annotations

from typing import NamedTuple

from shoal.core.features.neighbors import withdraw
from shoal.core.state.ending import stop
from shoal.core.state.events.budgets import (
    BudgetFreed,
    BudgetHeld,
    BudgetWarned,
    KeyFreed,
    KeyHeld,
)
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.budget import BudgetLevel, BudgetPeriod, Spending
from shoal.model.job import Phase, Restart, StopCause
from shoal.model.policy import Tenant
from shoal.model.reason import tenant_part

WARNED_MILLI = 800
HELD_MILLI = 1000
GPU_US_PER_GPU_HOUR = 3_600_000_000

WHEN = {
    BudgetPeriod.DAY: "today",
    BudgetPeriod.MONTH: "this month",
    BudgetPeriod.TOTAL: "in all",
}

Totals = dict[tuple[str, BudgetPeriod], Spending]  # by tenant, with its sub-tenants


def budget(round_: Round, spendings: tuple[Spending, ...]) -> None:
    """`spendings` are complete: a tenant that is not among them has spent nothing. If they are
    empty, nothing was reported and nothing changes."""
    state = round_.state
    for name in list(state.accounts.budgets):
        if not round_.policy.tenant(name).has_budget:
            _free(round_, name, "the policy no longer sets a budget for it")
    if not spendings:
        return
    _judge_keys(round_, {one.key: one for one in spendings if one.key})
    totals = spent_by_branch(state, spendings)
    for tenant in round_.policy.tenants:
        if tenant.has_budget:
            _judge(round_, tenant, totals)
    if round_.policy.budget_stops:
        _stop_held(round_)


def _judge(round_: Round, tenant: Tenant, totals: Totals) -> None:
    state, now_ms = round_.state, round_.now_ms
    milli, text, unpriced = used(tenant, totals)
    before = state.accounts.budgets.get(tenant.name)
    if milli >= HELD_MILLI:
        if before is not BudgetLevel.HELD:
            why = f"{text}: its jobs wait until there is more budget"
            round_.emit(BudgetHeld(at_ms=now_ms, tenant=tenant.name, why=why))
        return
    warned = milli >= WARNED_MILLI or unpriced  # a budget that cannot count all of it warns
    if before is BudgetLevel.HELD or (before is not None and not warned):
        _free(round_, tenant.name, text)
    if warned and tenant.name not in state.accounts.budgets:
        round_.emit(BudgetWarned(at_ms=now_ms, tenant=tenant.name, why=text))


def _judge_keys(round_: Round, keys: dict[str, Spending]) -> None:
    now_ms, held = round_.now_ms, round_.state.accounts.held_keys
    for key, (tenant, _) in list(held.items()):
        one = keys.get(key)
        if one is None or one.tokens < one.limit or not one.limit:
            why = (
                "it has no quota any more" if one is None else "its quota began again or is larger"
            )
            round_.emit(KeyFreed(at_ms=now_ms, key=key, tenant=tenant, why=why))
    for key, one in keys.items():
        if one.limit and one.tokens >= one.limit and key not in held:
            why = f"{one.tokens} of {one.limit} tokens"
            until_ms = one.until_ms
            round_.emit(
                KeyHeld(at_ms=now_ms, key=key, tenant=one.tenant, until_ms=until_ms, why=why)
            )


def _free(round_: Round, tenant: str, why: str) -> None:
    round_.emit(BudgetFreed(at_ms=round_.now_ms, tenant=tenant, why=why))


class Used(NamedTuple):
    """The part of its budget that a tenant and its sub-tenants have used, in thousandths and in
    words. `unpriced`: the budget is in money, and some of the time has no price."""

    milli: int
    text: str
    unpriced: bool = False


def spent_by_branch(state: State, spendings: tuple[Spending, ...]) -> Totals:
    """What each tenant has spent together with its sub-tenants, in each period."""
    totals: Totals = {}
    for one in spendings:
        if one.key:
            continue  # is among those of its tenant
        for name in dict.fromkeys(above.name for above in state.accounts.lineage(one.tenant)):
            sum_ = totals.get((name, one.period)) or Spending(
                tenant=name, period=one.period, gpu_us=0
            )
            totals[name, one.period] = Spending(
                tenant=name,
                period=one.period,
                gpu_us=sum_.gpu_us + one.gpu_us,
                money_milli=sum_.money_milli + one.money_milli,
                unpriced_us=sum_.unpriced_us + one.unpriced_us,
                tokens=sum_.tokens + one.tokens,
            )
    return totals


def used(tenant: Tenant, totals: Totals) -> Used:
    """Time without a price costs nothing here, so the text always mentions it."""
    nothing = Spending(tenant=tenant.name, period=tenant.budget_period, gpu_us=0)
    mine = totals.get((tenant.name, tenant.budget_period), nothing)
    when = WHEN[tenant.budget_period]
    found = [Used(0, f"{tenant.name} has spent nothing of its budget {when}")]
    if tenant.budget_gpu_hours:
        spent = mine.gpu_us
        whole = max(1, round(tenant.budget_gpu_hours * GPU_US_PER_GPU_HOUR))
        hours = f"{_shown(spent / GPU_US_PER_GPU_HOUR, tenant.budget_gpu_hours)} GPU-hours"
        found.append(Used(spent * 1000 // whole, f"{tenant.name} has used {hours} {when}"))
    unpriced_us = 0
    if tenant.budget_money:
        paid = mine.money_milli
        money = f"{paid / 1000:.2f} of {tenant.budget_money}"
        found.append(
            Used(int(paid // tenant.budget_money), f"{tenant.name} has spent {money} {when}")
        )
        unpriced_us = mine.unpriced_us
    if tenant.budget_tokens:
        share = mine.tokens * 1000 // tenant.budget_tokens
        tokens = f"{mine.tokens:,} of {tenant.budget_tokens:,} tokens"
        found.append(Used(share, f"{tenant.name} has used {tokens} {when}"))
    most = max(found)
    return most._replace(text=most.text + _unpriced(unpriced_us), unpriced=unpriced_us > 0)


def _shown(spent: float, whole: float) -> str:
    """A small budget is used in small parts."""
    return f"{spent:.{1 if whole >= 1 else 4}f} of {whole}"


def _unpriced(unpriced_us: int) -> str:
    if not unpriced_us:
        return ""
    few = unpriced_us * 20 < GPU_US_PER_GPU_HOUR
    amount = "some time has" if few else f"{unpriced_us / GPU_US_PER_GPU_HOUR:.1f} GPU-hours have"
    return f"; {amount} no price and cannot count: shoal prices --help"


def _stop_held(round_: Round) -> None:
    """If the policy says so, running jobs of a tenant on hold are stopped too, wherever they run,
    except jobs that must not run twice."""
    for job in list(round_.state.jobs.values()):
        if (
            job.phase in (Phase.STARTING, Phase.RUNNING, Phase.AWAY)
            and job.spec.gpus
            and job.spec.restart is not Restart.NEVER
            and (payer := round_.state.accounts.held_by(job.spec.tenant))
        ):
            why = f"the budget of {tenant_part(payer)} is used up"
            if job.away is None:
                stop(round_, job, StopCause.BUDGET, why)
            elif not job.away.withdrawn:
                withdraw(round_, job, why)


def refused_keys(state: State) -> dict[str, int]:
    """Whose requests get 429, and until when: keys that have used up their own tokens, and (0, not
    known) all keys and tokens of tenants that have used up their budget, if that is one of
    tokens."""
    found: dict[str, int] = {}
    held = {
        name: bool(payer and state.policy.tenant(payer).budget_tokens)
        for name in (state.identity.tenants if state.accounts.budgets else ())
        for payer in [state.accounts.held_by(name)]
    }
    if any(held.values()):
        keys, tokens = state.identity.api_keys.values(), state.identity.tokens.values()
        found |= {key.id: 0 for key in keys if held.get(key.tenant)}
        found |= {token.id: 0 for token in tokens if held.get(token.tenant)}
    return found | {key: until_ms for key, (_, until_ms) in state.accounts.held_keys.items()}
