"""What the waiting jobs wait for, in counts: a queue of thousands in a few lines."""

from __future__ import annotations

from collections import Counter

from shoal.core.answers.why import Reason, Waits, reason_of
from shoal.core.state.state import State
from shoal.model.policy import Policy
from shoal.model.resources import plural

# Jobs of one lane wait for the same reason. At most this many lanes are read, the longest first.
LANES_LOOKED = 24
LINES_MAX = 6


def waits_of(state: State, policy: Policy, now_ms: int, tenant: str = "") -> list[str]:
    """'412 jobs wait for j43, which is ahead of them', most jobs first; `tenant`: its own only."""
    queue, of_number = state.queue, state.job_numbered
    counts: Counter[str] = Counter()
    budgets = Counter(
        state.accounts.held_by(job.spec.tenant)
        for job in map(of_number, queue.held)
        if tenant in ("", job.spec.tenant)
    )
    for payer, count in budgets.items():
        counts[f"for the budget of {payer}"] += count
    delayed = [of_number(number) for _, number in queue.delayed]
    parked, claims = len(queue.parked), len(state.claims)
    if tenant:
        delayed = [job for job in delayed if job.spec.tenant == tenant]
        parked = sum(of_number(number).spec.tenant == tenant for number in queue.parked)
        claims = sum(state.jobs[job_id].spec.tenant == tenant for job_id in state.claims)
    again = sum(job.attempt > 0 for job in delayed)
    counts[Waits.RETRY.value] += again
    counts[Waits.BEGIN.value] += len(delayed) - again
    counts[Waits.AFTER.value] += parked
    counts[Waits.CLAIM.value] += claims
    own = [line for lane, line in queue.lanes.items() if tenant in ("", lane.tenant)]
    lanes = sorted(own, key=len, reverse=True)
    for line in lanes[:LANES_LOOKED]:
        job = state.job_numbered(line[0][1])
        reason = reason_of(state, job, policy, now_ms)
        counts[_what(reason)] += sum(
            state.job_numbered(number).id not in state.claims for _, number in line
        )
    if left := sum(map(len, lanes[LANES_LOOKED:])):
        counts["for other reasons: shoal why JOB"] += left
    lines = [
        f"{plural(count, 'job')} {'waits' if count == 1 else 'wait'} {what}"
        for what, count in counts.most_common()
        if count
    ]
    rest = len(lines) - LINES_MAX
    return lines if rest <= 0 else [*lines[:LINES_MAX], f"and {plural(rest, 'reason')} more"]


def _what(reason: Reason | None) -> str:
    if reason is None:
        return "for the next scheduling cycle"
    if reason.kind is Waits.TURN:
        return f"for {reason.whom}, which is ahead of them"
    if reason.kind in (Waits.ROOM, Waits.CLOSED):
        need = reason.text.partition(";")[0].partition(": the emptiest")[0]
        return f"{reason.kind.value}: {'' if need.startswith('no node') else 'each '}{need}"
    return reason.kind.value
