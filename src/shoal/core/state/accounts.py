"""How much each tenant has used: a decaying sum, kept as jobs take and give back resources."""

from __future__ import annotations

import math

import msgspec

from shoal.model.budget import BudgetLevel
from shoal.model.job import JobSpec
from shoal.model.policy import Policy, Tenant
from shoal.model.resources import WHOLE_GPU_MILLI, Demand, Kind

PARTS = 1_000_000_000  # shares of the cluster are in billionths: one GPU of 100,000 is 10,000


class Account(msgspec.Struct):
    """`usage` is share x time, in billionths x ms, halved every half-life; `share` is what is
    held now, `gpu_milli` the same in GPUs. All of it is as of `at_ms`."""

    usage: float = 0.0
    share: int = 0
    gpu_milli: int = 0
    at_ms: int = 0

    def advance(self, now_ms: int, half_life_ms: int) -> None:
        self.usage = self.usage_at(now_ms, half_life_ms)
        self.at_ms = max(now_ms, self.at_ms)

    def usage_at(self, now_ms: int, half_life_ms: int) -> float:
        """A share held since `at_ms` adds its integral under the same decay."""
        elapsed_ms = now_ms - self.at_ms
        if elapsed_ms <= 0:
            return self.usage
        kept = math.exp2(-elapsed_ms / half_life_ms)
        return self.usage * kept + self.share * (1.0 - kept) * half_life_ms / math.log(2)


class Accounts:
    """`own` is what each tenant's own jobs use; `sums` adds up whole branches of the tree."""

    def __init__(self, policy: Policy, own: dict[str, Account] | None = None) -> None:
        self.own: dict[str, Account] = own or {}
        self.budgets: dict[str, BudgetLevel] = {}  # tenants that have used most of their budget
        # Keys that have used up their tokens: the tenant, and when they begin again.
        self.held_keys: dict[str, tuple[str, int]] = {}
        self._lineages: dict[str, tuple[Tenant, ...]] = {}  # of tenants with jobs
        self._policy = policy
        self._add_up()

    def obey(self, policy: Policy) -> None:
        """A new policy may have another tree or half-life; past usage stays."""
        before, self._policy = self._policy, policy
        if before.tenants != policy.tenants or before.half_life_ms != policy.half_life_ms:
            self._add_up()

    def _add_up(self) -> None:
        policy = self._policy
        self._half_life_ms = policy.half_life_ms
        self.quotas = any(tenant.quota_gpus for tenant in policy.tenants)
        self.caps = any(tenant.gpus_max for tenant in policy.tenants)
        self._lineages = {name: policy.lineage(name) for name in self._lineages}
        self.sums: dict[str, Account] = {}
        now_ms = max((account.at_ms for account in self.own.values()), default=0)
        for name, account in self.own.items():
            usage = account.usage_at(now_ms, self._half_life_ms)
            for ancestor in self.lineage(name):
                total = self.sums.setdefault(ancestor.name, Account(at_ms=now_ms))
                total.usage += usage
                total.share += account.share
                total.gpu_milli += account.gpu_milli

    def forget(self, tenant: str) -> None:
        """It was removed: another one of its name begins with nothing."""
        if self.own.pop(tenant, None) is not None:
            self._add_up()

    def meet(self, tenant: str) -> None:
        """Remember the lineage of a tenant with jobs: it is needed often."""
        if tenant not in self._lineages:
            self._lineages[tenant] = self._policy.lineage(tenant)

    def lineage(self, tenant: str) -> tuple[Tenant, ...]:
        """The tenant and its ancestors, the root first."""
        if tenant in self._lineages:
            return self._lineages[tenant]
        return self._policy.lineage(tenant)

    def held_by(self, tenant: str) -> str:
        """The tenant or ancestor whose budget is used up; empty if none is."""
        if self.budgets:
            for ancestor in self.lineage(tenant):
                if self.budgets.get(ancestor.name) is BudgetLevel.HELD:
                    return ancestor.name
        return ""

    def change(self, tenant: str, share: int, gpu_milli: int, now_ms: int, penalty: int) -> None:
        """The tenant holds this much more from now on (less, if negative)."""
        holders = [(self.own, tenant)]
        for one in self.lineage(tenant):
            holders.append((self.sums, one.name))
        for accounts, name in holders:
            account = accounts.get(name)
            if account is None:
                account = accounts[name] = Account()
            account.advance(now_ms, self._half_life_ms)
            account.share += share
            account.gpu_milli += gpu_milli
            account.usage += penalty

    def standing(self, tenant: str, now_ms: int) -> tuple[float, ...]:
        """Lower comes first: tenants below their quota, and then, at each level of the tree, usage
        by weight among siblings."""
        sums, half_life_ms = self.sums, self._half_life_ms
        usages = [
            sums[ancestor.name].usage_at(now_ms, half_life_ms) / ancestor.weight
            if ancestor.name in sums
            else 0.0
            for ancestor in self.lineage(tenant)
        ]
        return (float(not self.within_quota(tenant, 1)), *usages)

    def within_quota(self, tenant: str, gpu_milli: int) -> bool:
        """Would it stay within its guaranteed GPUs with this much more? Without a quota everything
        is borrowed."""
        if not self.quotas:
            return False
        guarantor = self.guarantor(tenant)
        if guarantor is None:
            return False
        account = self.sums.get(guarantor.name)
        held = account.gpu_milli if account is not None else 0
        return held + gpu_milli <= guarantor.quota_gpus * WHOLE_GPU_MILLI

    def guarantor(self, tenant: str) -> Tenant | None:
        """The tenant whose quota applies: itself or its nearest ancestor that has one."""
        if not self.quotas:
            return None
        for ancestor in reversed(self.lineage(tenant)):
            if ancestor.quota_gpus:
                return ancestor
        return None


def share_of(demand: Demand | JobSpec, share_milli: int, totals: Kind) -> int:
    """The dominant share of one member: the largest part it takes of any resource."""
    gpus_milli = totals.gpus * WHOLE_GPU_MILLI
    gpus = demand.gpus * share_milli * PARTS // gpus_milli if gpus_milli else 0
    cpus = demand.cpu_milli * PARTS // totals.cpu_milli if totals.cpu_milli else 0
    memory = demand.memory_mb * PARTS // totals.memory_mb if totals.memory_mb else 0
    return max(gpus, cpus, memory)
