"""What the demo promised, and whether it was so."""

from __future__ import annotations

import msgspec

from shoal.cli.demo.board import Board
from shoal.model.job import Outcome
from shoal.model.resources import plural


class Promise(msgspec.Struct, frozen=True):
    text: str
    kept: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
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


def report(board: Board, submitted: int, took_ms: int, left_behind: str) -> Report:
    finished = sum(job.outcome is not None for job in board.submitted)
    wrong = [job.name for job in board.submitted if job.outcome is not Outcome.SUCCEEDED]
    hit = [job for job in board.submitted if job.hit]
    healed = [job.healed_ms for job in hit if job.healed_ms is not None]
    return Report(
        submitted=submitted,
        finished=finished,
        retried=board.retried,
        killed_node=board.killed_node,
        noticed_ms=_since_kill(board, board.noticed_ms),
        healed_ms=_since_kill(board, max(healed, default=None)),
        back_ms=_since_kill(board, board.back_ms),
        hit=len(hit),
        took_ms=took_ms,
        promises=[
            Promise("every job submitted has finished", finished == submitted),
            Promise(
                "all ended as asked" + (f", but not {', '.join(wrong[:5])}" if wrong else ""),
                not wrong,
            ),
            Promise("the killed node was noticed", board.noticed_ms is not None),
            Promise(
                f"{plural(len(hit), 'job')} hit by it ran again",
                bool(hit) and len(healed) == len(hit),
            ),
            Promise("the node came back", board.back_ms is not None),
            Promise("the job that failed at first was run again", board.retried > 0),
            Promise(left_behind or "no process and no file is left behind", not left_behind),
        ],
    )


def _since_kill(board: Board, moment_ms: int | None) -> int | None:
    if board.killed_ms is None or moment_ms is None:
        return None
    return max(moment_ms - board.killed_ms, 0)


def numbers(result: Report) -> list[str]:
    lines = [
        f"{result.finished} of {plural(result.submitted, 'job')} finished in "
        f"{result.took_ms / 1000:.1f} s, coming up and going down included"
    ]
    if result.killed_node:
        lines.append(
            f"{result.killed_node} was killed: noticed after {_seconds(result.noticed_ms)}, "
            f"back after {_seconds(result.back_ms)}"
        )
        lines.append(
            f"{plural(result.hit, 'job')} lost members with it: "
            f"all running again after {_seconds(result.healed_ms)}"
        )
    return lines


def promises(result: Report) -> list[tuple[str, bool]]:
    return [(f"{'yes' if p.kept else 'NO '}  {p.text}", p.kept) for p in result.promises]


def _seconds(ms: int | None) -> str:
    return "(never)" if ms is None else f"{ms / 1000:.2f} s"
