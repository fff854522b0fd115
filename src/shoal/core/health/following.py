"""Does slowness follow the node, or the rank that happened to run there?

A rank may have more to do than its peers: the last stage of a pipeline, longer sequences, the one
that writes the checkpoint. It is slow wherever it runs. A slow node is slow whoever runs there.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

RUNS_KEPT = 8  # per job, and only of jobs in which somebody was slow


class Run(msgspec.Struct, frozen=True):
    """One attempt that was measured: where each member ran, and which were slow at its end."""

    job: str
    attempt: int
    nodes: tuple[str, ...]  # by member
    slow: tuple[int, ...] = ()


class Follows(enum.StrEnum):
    NODE = "node"
    RANK = "rank"
    UNKNOWN = "unknown"  # the same ranks have always been there


def follows(node: str, runs: Sequence[Run]) -> Follows:
    """NODE: a rank slow here ran well elsewhere, or different ranks were slow here in different
    runs. RANK: whoever was slow here was slow elsewhere too."""
    here = sorted(
        {
            (run.job, run.attempt, member)
            for run in runs
            for member in run.slow
            if run.nodes[member] == node
        }
    )
    suspicious = []
    for job, attempt, member in here:
        elsewhere = [
            member in run.slow
            for run in runs
            if run.job == job and member < len(run.nodes) and run.nodes[member] != node
        ]
        if any(elsewhere):
            continue  # this rank brings its slowness along
        if elsewhere:
            return Follows.NODE
        suspicious.append((job, attempt, member))
    for job, attempt, member in suspicious:
        if any(
            other != job or (other_attempt != attempt and other_member != member)
            for other, other_attempt, other_member in suspicious
        ):
            return Follows.NODE
    return Follows.UNKNOWN if suspicious or not here else Follows.RANK
