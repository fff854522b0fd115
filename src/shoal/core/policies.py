"""The policies that come with Shoal, each a few words of composition."""

from __future__ import annotations

from shoal.model.policy import Policy, Preempt

SHIPPED: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        # First come, first served: nobody overtakes, nobody is stopped for another.
        Policy(name="fifo", order="fifo", preempt=Preempt.NEVER, reservations=1, patience_ms=0),
        # The same order, but gaps are filled as long as that delays nobody at the front.
        Policy(name="backfill", order="fifo", preempt=Preempt.NEVER, reservations=4),
        # Tenants share by quota and weight; gaps are filled; priority and quota preempt.
        Policy(),
        # Told how long jobs run, the shortest first and at any moment; the yardsticks for the rest.
        Policy(name="srtf", order="srtf", preempt=Preempt.RANK, reservations=0, run_ms_min=0),
        Policy(name="srsf", order="srsf", preempt=Preempt.RANK, reservations=0, run_ms_min=0),
        # Least attained service in three levels.
        Policy(name="tiresias", order="tiresias", preempt=Preempt.RANK, reservations=0),
        # As `fair`, and more jobs than GPUs take turns: one sleeps while another runs.
        Policy(name="time-slice", turn_cost_percent=5),
    )
}
