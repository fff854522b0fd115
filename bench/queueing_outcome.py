"""The outcome of each job, and the figures that summarize them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.queueing_policies import Live


class Outcome(msgspec.Struct, frozen=True):
    number: int
    jct_ms: int  # from submission to the end
    wait_ms: int  # all of that except useful work: waiting, stopped, starting again
    end_ms: int
    preemptions: int

    @classmethod
    def of(cls, live: Live, now_ms: int) -> Outcome:
        jct_ms = now_ms - live.job.submitted_ms
        return cls(live.job.number, jct_ms, jct_ms - live.job.work_ms, now_ms, live.preemptions)


class Summary(msgspec.Struct, frozen=True):
    avg_jct_s: float
    makespan_s: float
    p99_jct_s: float
    p99_wait_s: float
    preemptions: int


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    return Summary(
        avg_jct_s=round(sum(outcome.jct_ms for outcome in outcomes) / len(outcomes) / 1000, 3),
        makespan_s=max(outcome.end_ms for outcome in outcomes) / 1000,
        p99_jct_s=_p99([outcome.jct_ms for outcome in outcomes]) / 1000,
        p99_wait_s=_p99([outcome.wait_ms for outcome in outcomes]) / 1000,
        preemptions=sum(outcome.preemptions for outcome in outcomes),
    )


def _p99(values: Sequence[int]) -> int:
    """As the published figures take it: index int(0.99 n) of the sorted values."""
    return sorted(values)[len(values) * 99 // 100]
