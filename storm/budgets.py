"""Budgets in the storm: what tenants have spent is drawn, and in the calm a new month begins."""

from __future__ import annotations

import random
from collections import Counter

from shoal.core.features.budget import GPU_US_PER_GPU_HOUR
from shoal.model.budget import BudgetPeriod, Spending
from storm.budgettruth import BudgetTruth
from storm.world import World

TENANTS = ("red", "blue", "default")
REPORT_EVERY_MS = 700


class Budgets:
    """Spends in leaps, so that limits are crossed in every order; sometimes a month ends."""

    def __init__(
        self, world: World, truth: BudgetTruth, rng: random.Random, counts: Counter[str]
    ) -> None:
        self._world = world
        self._truth = truth
        self._rng = rng
        self._counts = counts
        self._planned = False
        self._spent = dict.fromkeys(TENANTS, 0)

    def plan(self, until_ms: int) -> None:
        self._planned = True
        for at_ms in range(REPORT_EVERY_MS, until_ms, REPORT_EVERY_MS):
            self._world.timeline.at(at_ms, self._spend)

    def calm_down(self) -> None:
        """A new month: no tenant is held any more. Reported until a controller hears it."""
        self._spent = dict.fromkeys(TENANTS, 0)
        timeline = self._world.timeline
        if not self._planned:
            return
        for late_ms in range(0, 120_000, 1_000):
            timeline.at(timeline.now_ms + late_ms, self._report)

    def _spend(self) -> None:
        tenant = self._rng.choice(TENANTS)
        leap = self._rng.choice((0, 0, 1, 1, 2, 5))
        self._spent[tenant] += leap * GPU_US_PER_GPU_HOUR
        if self._rng.random() < 0.05:
            self._spent = dict.fromkeys(TENANTS, 0)
            self._counts["a month ended"] += 1
        self._report()

    def _report(self) -> None:
        if self._world.controller.up:
            spendings = [
                _spending(tenant, period, spent)
                for tenant, spent in self._spent.items()
                for period in BudgetPeriod
            ]
            tokens = self._spent["red"] // GPU_US_PER_GPU_HOUR
            day = BudgetPeriod.DAY
            quota = Spending(tenant="red", period=day, gpu_us=0, key="k", limit=10, tokens=tokens)
            spendings.append(quota)
            self._truth.reported(tuple(spendings))
            self._world.controller.spent(tuple(spendings))


def _spending(tenant: str, period: BudgetPeriod, spent: int) -> Spending:
    """Every third hour ran on a GPU that has no price."""
    unpriced = spent // (3 * GPU_US_PER_GPU_HOUR) * GPU_US_PER_GPU_HOUR
    money = (spent - unpriced) // 1000
    return Spending(
        tenant=tenant, period=period, gpu_us=spent, money_milli=money, unpriced_us=unpriced
    )
