"""What happened to a job, from its events: its attempts and how each ended. The ledger has
costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shoal.core.answers.bound import judge
from shoal.core.state.events.log import Event
from shoal.core.state.events.neighbors import JobHanded, JobReturned, JobRunsAway, JobSettled
from shoal.core.state.events.nodes import NodeChecked, NodeJudged, NodeLost
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import (
    JobAdopted,
    JobBegan,
    JobCheckpointed,
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobRunning,
    JobStopping,
    MemberExited,
    MemberLost,
)
from shoal.core.state.events.services import ReplicaReady
from shoal.core.state.events.sleep import JobAwake, JobDozing
from shoal.model.explanation import AttemptRecord, Cause, ColdStart, FirstFailure, Learned
from shoal.model.job import Outcome, StopCause
from shoal.model.last_error import own_lines
from shoal.model.progress import Spent
from shoal.model.resources import Slice

KILLED_CODE = 137
# A check that fails this soon after a job failed points to the same cause.
CHECK_AFTER_MS = 3_600_000
NAPS_TOLD_MAX = 64  # one that takes turns sleeps often

CAUSES = {
    StopCause.CANCEL.value: Cause.CANCELLED,
    StopCause.TIME_LIMIT.value: Cause.TIME_LIMIT,
    StopCause.FAILURE.value: Cause.OWN_ERROR,
    StopCause.NODE_LOSS.value: Cause.NODE_LOST,
    StopCause.DRAIN.value: Cause.DRAINED,
    StopCause.PREEMPT.value: Cause.PREEMPTED,
    StopCause.RESIZE.value: Cause.RESIZED,
    StopCause.MOVE.value: Cause.MOVED,
    StopCause.HANG.value: Cause.HANG,
    "budget": Cause.BUDGET,
    StopCause.HALVING.value: Cause.STOPPED_EARLY,
    StopCause.LEASE.value: Cause.LEASE,
}
OUTCOMES = {
    Outcome.SUCCEEDED: Cause.SUCCEEDED,
    Outcome.FAILED: Cause.OWN_ERROR,
    Outcome.CANCELLED: Cause.CANCELLED,
    Outcome.TIMED_OUT: Cause.TIME_LIMIT,
}
# In the last lines of a member, ignoring case: what programs print when memory is short, and when a
# GPU or its link is broken.
MEMORY_WORDS = (
    "cuda out of memory",
    "outofmemoryerror",
    "memoryerror",
    "cannot allocate memory",
    "std::bad_alloc",
    "cublas_status_alloc_failed",
    "oom-kill",
    "ran out of memory",  # as an agent says it
)
HARDWARE_WORDS = (
    "uncorrectable ecc error",
    "hardware error",
    "gpu is lost",
    "fallen off the bus",
    "nvlink error",
    "xid 79",
    "xid 48",
    "input/output error",
)

Tail = Callable[[int, int], str]  # attempt, member -> the end of its output


def no_tail(attempt: int, member: int) -> str:  # noqa: ARG001
    """For callers that do not need the last output of members."""
    return ""


class _Attempt:
    """One attempt while its events are read."""

    def __init__(self, event: JobPlaced | JobHanded, from_step: int) -> None:
        self.slices = event.slices if isinstance(event, JobPlaced) else ()
        self.over_ms: dict[int, int] = {}
        self.firsts: list[FirstFailure] = []
        self.spent: dict[int, Spent] = {}
        self.told = AttemptRecord(
            attempt=event.attempt,
            nodes=list(dict.fromkeys(slice_.node for slice_ in self.slices)),
            members=len(self.slices),
            gpu_milli=sum(map(_gpu_milli, self.slices)),
            placed_ms=event.at_ms,
            from_step=from_step,
            cluster=event.neighbor if isinstance(event, JobHanded) else "",
        )

    def over(self, member: int, at_ms: int) -> None:
        if 0 <= member < len(self.slices):
            self.over_ms.setdefault(member, at_ms)


def attempts_of(events: Iterable[Event], tail: Tail) -> list[AttemptRecord]:
    """From the job's events and those of its nodes, in the order of the log."""
    found: list[_Attempt] = []
    checks: list[NodeChecked] = []
    saved_step, serves, waits_ms = 0, False, None
    for event in events:
        if isinstance(event, JobSubmitted):
            serves, waits_ms = bool(event.spec.service), event.at_ms
        elif isinstance(event, JobPlaced | JobHanded):
            found.append(_Attempt(event, saved_step))
            if serves:
                waited_ms = event.at_ms - waits_ms if waits_ms is not None else None
                found[-1].told.cold = ColdStart(waited_ms=waited_ms)
        elif isinstance(event, NodeChecked):
            checks.append(event)
        elif found:
            _take(found[-1], event)
            waits_ms = event.at_ms if isinstance(event, JobRequeued) else waits_ms
            saved_step = found[-1].told.saved_step or saved_step
    for attempt in found:
        _judge(attempt, checks, tail)
    return [attempt.told for attempt in found]


def learned_of(events: Iterable[Event], job: str) -> list[Learned]:
    """Changes of nodes' standing, those caused by this job first."""
    found: list[Learned] = []
    last: dict[str, str] = {}
    for event in events:
        if not isinstance(event, NodeJudged):
            continue
        record = event.record
        if last.get(event.node, "ok") == record.standing.value:
            continue
        last[event.node] = record.standing.value
        found.append(
            Learned(
                at_ms=event.at_ms,
                node=event.node,
                standing=record.standing.value,
                why=record.why or event.why,
                about_this_job=any(one.job == job for one in record.suspicions),
            )
        )
    return found


def _take(attempt: _Attempt, event: Event) -> None:
    told = attempt.told
    if isinstance(event, JobStopping | JobRequeued | JobFinished):
        _end_nap(told, event.at_ms)
    match event:
        case JobRunning() | JobRunsAway():
            told.running_ms = event.at_ms
        case JobBegan() if event.startup_ms >= told.startup_ms:
            told.startup_ms, told.startup_by = event.startup_ms, event.by
        case ReplicaReady() if not told.naps:
            told.cold = cold = told.cold or ColdStart()
            cold.got_ms, cold.listened_ms = event.got_ms, event.listened_ms
            cold.ready_ms = event.at_ms
        case JobDozing():
            told.naps, told.dozed_ms = told.naps + 1, event.at_ms
        case JobAwake():
            _end_nap(told, event.at_ms)
        case MemberExited():
            attempt.over(event.member, event.at_ms)
            if event.step is not None:
                told.to_step = max(told.to_step or 0, event.step)
            if event.spent is not None:
                attempt.spent[event.member] = event.spent
            if event.code != 0 or event.why:
                _first(attempt, event.member, event.node, event.at_ms, event)
        case MemberLost():
            attempt.over(event.member, event.at_ms)
            _first(attempt, event.member, event.node, event.at_ms, event)
        case NodeLost():
            _lose(attempt, event)
        case JobCheckpointed():
            told.saved_step = event.step
            told.to_step = max(told.to_step or 0, event.step)
        case JobStopping():
            told.cause, told.why = CAUSES.get(event.cause.value, Cause.UNKNOWN), event.why
            told.stopping_ms = event.at_ms
        case JobRequeued():
            told.cause, told.why = CAUSES.get(event.cause.value, Cause.UNKNOWN), event.why
            told.ended_ms = event.at_ms
        case JobReturned():
            told.cause, told.why, told.ended_ms = Cause.RETURNED, event.why, event.at_ms
            told.owed_gpu_ms, told.owed_money = event.gpu_ms, event.money
        case JobSettled() if event.attempt == told.attempt:
            told.owed_gpu_ms, told.owed_money = event.gpu_ms, event.money
        case JobAdopted():  # it was not lost after all, and its members never ended
            told.cause, told.why = Cause.NONE, ""
            told.stopping_ms = told.ended_ms = None
            attempt.over_ms.clear()
            attempt.spent.clear()
            attempt.firsts.clear()
        case JobFinished():
            early = told.cause is Cause.STOPPED_EARLY and told.why == event.why
            if told.cause is Cause.NONE or (event.outcome is Outcome.SUCCEEDED and not early):
                told.cause = OUTCOMES.get(event.outcome, Cause.UNKNOWN)
            told.why, told.ended_ms = event.why, event.at_ms
        case _:
            pass


def _end_nap(told: AttemptRecord, at_ms: int) -> None:
    if told.dozed_ms is not None:
        told.slept_at = [*told.slept_at, (told.dozed_ms, at_ms)][-NAPS_TOLD_MAX:]
        told.slept_ms, told.dozed_ms = told.slept_ms + at_ms - told.dozed_ms, None


def _first(
    attempt: _Attempt, member: int, node: str, at_ms: int, event: MemberExited | MemberLost
) -> None:
    exited = isinstance(event, MemberExited)
    attempt.firsts.append(
        FirstFailure(
            member=member,
            node=node,
            at_ms=at_ms,
            code=event.code if isinstance(event, MemberExited) else None,
            step=event.step if isinstance(event, MemberExited) else None,
            said=event.why if exited or event.why else "",
            lines=[],
        )
    )


def _lose(attempt: _Attempt, event: NodeLost) -> None:
    """A lost node takes all its live members with it."""
    if attempt.told.ended_ms is not None:
        return
    for member, slice_ in enumerate(attempt.slices):
        if slice_.node == event.node and member not in attempt.over_ms:
            attempt.over(member, event.at_ms)
            attempt.firsts.append(
                FirstFailure(
                    member=member,
                    node=event.node,
                    at_ms=event.at_ms,
                    code=None,
                    step=None,
                    said=event.why,
                    lines=[],
                )
            )


def _judge(attempt: _Attempt, checks: Sequence[NodeChecked], tail: Tail) -> None:
    """Choose the member that stands for the attempt, and look for a more exact cause."""
    told = attempt.told
    if not told.naps:  # a nap is within a step, and would count as its time
        nodes = [slice_.node for slice_ in attempt.slices]
        told.bound = judge(attempt.spent, nodes, whole=True)
    if told.cause is Cause.NODE_LOST:
        lost = [one for one in attempt.firsts if one.code is None]
        told.first = next(iter(lost or attempt.firsts), None)
    elif told.cause is Cause.HANG:
        told.first = next((one for one in attempt.firsts if one.said), None)
    elif told.cause is Cause.OWN_ERROR:
        told.first = next((one for one in attempt.firsts if one.code), None)
    if told.first is None:
        return
    text = tail(told.attempt, told.first.member)
    told.first.lines = last_lines(text)
    if told.cause is Cause.OWN_ERROR:
        _name_error(told, told.first, text, checks)
    elif told.cause is Cause.NODE_LOST:
        _name_hardware(told, told.first, checks)


def _name_error(
    told: AttemptRecord, first: FirstFailure, text: str, checks: Sequence[NodeChecked]
) -> None:
    words = f"{first.said}\n{text}".lower()
    memory = next((word for word in MEMORY_WORDS if word in words), "")
    broken = next((word for word in HARDWARE_WORDS if word in words), "")
    if memory:
        told.cause, told.sure = Cause.OUT_OF_MEMORY, False
        told.evidence = f"it printed {memory!r}"
        if memory == MEMORY_WORDS[-1]:
            told.evidence = "the kernel killed processes there at that moment: memory ran out"
    elif broken:
        told.cause, told.sure, told.evidence = Cause.HARDWARE, False, f"it printed {broken!r}"
    elif first.code == KILLED_CODE:
        told.sure = False
        told.evidence = "it got SIGKILL, and the kernel did not report running out of memory"
    _name_hardware(told, first, checks)


def _name_hardware(told: AttemptRecord, first: FirstFailure, checks: Sequence[NodeChecked]) -> None:
    """A check of its node that found a fault soon after."""
    for check in checks:
        late_ms = check.at_ms - first.at_ms
        faults = check.result.faults
        if check.node == first.node and faults and 0 <= late_ms <= CHECK_AFTER_MS:
            told.cause, told.sure = Cause.HARDWARE, False
            told.evidence = f"a check of {check.node} soon after found: {faults[0]}"
            return


def _gpu_milli(slice_: Slice) -> int:
    return len(slice_.gpus) * slice_.gpu_milli


def last_lines(text: str, most: int = 8, width: int = 300) -> list[str]:
    lines = own_lines(text)[-most:]
    return [line if len(line) <= width else line[: width - 3] + "..." for line in lines]
