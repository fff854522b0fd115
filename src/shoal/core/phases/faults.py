"""Exits caused by the node, which could not run the job. It runs elsewhere; no retry is used."""

from __future__ import annotations

from shoal.core.books import quarantine
from shoal.core.books.quarantine import rule_of
from shoal.core.scheduling.again import lacking
from shoal.core.scheduling.capacity import held_when_empty
from shoal.core.state.queue import gang_of
from shoal.core.state.round import Round
from shoal.core.state.state import Node, State
from shoal.model.events import MemberLost, NodeJudged
from shoal.model.job import Fault, Job, MemberStatus, Phase
from shoal.model.reason import quoted
from shoal.model.report import MemberExit

# A job that failed on a full disk may have filled the disk itself: it must not do so on every node
# of the cluster.
SICK_MAX = 3
UNSTARTED = (Fault.START, Fault.MISSING, Fault.PORT)


def take_faults(round_: Round, node: Node, exits: tuple[MemberExit, ...]) -> None:
    """Exits that the node itself is to blame for, before the others are counted as failures."""
    for exit_ in exits:
        job = round_.state.placed[node.id].get(exit_.ref)
        if job is None or not exit_.fault or exit_.stopped:
            continue
        if exit_.fault in (Fault.START, Fault.SICK):  # others may concern this job alone
            _distrust(round_, node, exit_)
        if job.phase is not Phase.STOPPING and _is_nodes(round_.state, job, node, exit_):
            round_.emit(
                MemberLost(
                    at_ms=round_.now_ms,
                    job=job.id,
                    attempt=job.attempt,
                    member=exit_.ref.member,
                    node=node.id,
                    why=_text(job, node, exit_),
                    fault=exit_.fault,
                )
            )


def _distrust(round_: Round, node: Node, exit_: MemberExit) -> None:
    rule = rule_of(round_.policy)
    record = quarantine.faulted(node.record, quoted(exit_.why), round_.now_ms, rule)
    if record != node.record:
        round_.emit(NodeJudged(at_ms=round_.now_ms, node=node.id, record=record, why=record.why))


def _is_nodes(state: State, job: Job, node: Node, exit_: MemberExit) -> bool:
    match exit_.fault:
        case Fault.START | Fault.PORT | Fault.TAKEN:
            return True
        case Fault.SICK | Fault.WAKE:
            return job.faults < SICK_MAX
        case _:
            return _may_be_elsewhere(state, job, node)


def _may_be_elsewhere(state: State, job: Job, node: Node) -> bool:
    """One node cannot know whether a program is missing here or everywhere. If the job has run
    somewhere, it exists; if not, the job gets one more try on another node, if there is one."""
    ran = job.told >= 0 or any(
        member.status is MemberStatus.ALIVE or member.started for member in job.members
    )
    if job.missing_on and not ran:
        return False
    gang = gang_of(job)
    without = lacking(state, job) | ({node.index} if node.schedulable else set())
    return held_when_empty(state, gang, open_only=True, avoid=without) >= gang.members


def _text(job: Job, node: Node, exit_: MemberExit) -> str:
    who = f"member {exit_.ref.member}" if len(job.members) > 1 else "it"
    how = "could not start"
    if exit_.fault in (Fault.SICK, Fault.WAKE, Fault.TAKEN):
        how = f"exited {exit_.code}" if exit_.fault is Fault.SICK else "ended"
    return f"{who} {how} on {node.id} ({quoted(exit_.why)})"
