"""What the demo promised, and whether it kept it."""

from __future__ import annotations

import msgspec

from shoal.cli.demo.state import DemoState
from shoal.model.job import Outcome
from shoal.model.resources import plural


class Promise(msgspec.Struct, frozen=True):
    text: str
    kept: bool


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    submitted: int
    finished: int
    retried: int
    killed_node: str
    noticed_ms: int | None  # since the kill, as the others
    healed_ms: int | None
    back_ms: int | None
    hit: int
    took_ms: int
    promises: list[Promise]

    @property
    def kept(self) -> bool:
        return all(promise.kept for promise in self.promises)


def result_of(state: DemoState, submitted: int, took_ms: int, left_behind: str) -> DemoResult:
    finished = sum(job.outcome is not None for job in state.submitted)
    wrong = [job.name for job in state.submitted if job.outcome is not Outcome.SUCCEEDED]
    hit = [job for job in state.submitted if job.hit]
    healed = [job.healed_ms for job in hit if job.healed_ms is not None]
    return DemoResult(
        submitted=submitted,
        finished=finished,
        retried=state.retried,
        killed_node=state.killed_node,
        noticed_ms=_since_kill(state, state.noticed_ms),
        healed_ms=_since_kill(state, max(healed, default=None)),
        back_ms=_since_kill(state, state.back_ms),
        hit=len(hit),
        took_ms=took_ms,
        promises=[
            Promise("every submitted job finished", finished == submitted),
            Promise(
                "every job succeeded" + (f", except {', '.join(wrong[:5])}" if wrong else ""),
                not wrong,
            ),
            Promise("the loss of the node was noticed", state.noticed_ms is not None),
            Promise(
                f"{plural(len(hit), 'job')} on that node ran again",
                bool(hit) and len(healed) == len(hit),
            ),
            Promise("the node came back", state.back_ms is not None),
            Promise("the job that failed at first ran again", state.retried > 0),
            Promise(left_behind or "no process and no file remains", not left_behind),
        ],
    )


def _since_kill(state: DemoState, moment_ms: int | None) -> int | None:
    if state.killed_ms is None or moment_ms is None:
        return None
    return max(moment_ms - state.killed_ms, 0)


def numbers(result: DemoResult) -> list[str]:
    lines = [
        f"{result.finished} of {plural(result.submitted, 'job')} finished in "
        f"{result.took_ms / 1000:.1f} s, including start and stop"
    ]
    if result.killed_node:
        lines.append(
            f"{result.killed_node} was killed: noticed after {_seconds(result.noticed_ms)}, "
            f"back after {_seconds(result.back_ms)}"
        )
        lines.append(
            f"{plural(result.hit, 'job')} lost members with it; "
            f"all ran again after {_seconds(result.healed_ms)}"
        )
    return lines


def promises(result: DemoResult) -> list[tuple[str, bool]]:
    return [(f"{'yes' if p.kept else 'NO '}  {p.text}", p.kept) for p in result.promises]


def _seconds(ms: int | None) -> str:
    return "(never)" if ms is None else f"{ms / 1000:.2f} s"
