"""What draining nodes, or stopping jobs, would do to jobs: tried in an overlay, nothing changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from shoal.core.scheduling.again import again, kept_from
from shoal.core.scheduling.fit import fit, slices
from shoal.core.state.apply_room import Overlay
from shoal.core.state.ending import is_served
from shoal.core.state.queue import gang_of
from shoal.core.state.saving import unsaved_ms
from shoal.core.state.state import Node, State
from shoal.model.after import conditions
from shoal.model.durations import duration_text
from shoal.model.job import Job, Phase, Restart
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.preview import Deed
from shoal.model.resources import Slice, plural

NAMED_MAX = 5  # jobs in a sentence
TRIED_MAX = 200  # jobs for which another place is looked for
HOUR_MS = 3_600_000


class Effect(NamedTuple):
    """`gpu_ms`: GPU time since its last save, which may be lost."""

    job: Job
    deed: Deed
    unsaved_ms: int = 0
    gpu_ms: int = 0
    to: tuple[str, ...] = ()


# -- nodes -----------------------------------------------------------------------------------------


def drained(state: State, nodes: Sequence[Node], now_ms: int) -> list[Effect]:
    """What a drain of all these nodes does to the jobs there, with the places that they would get
    if nobody else took them: the first in line chooses first."""
    here = {job.id: job for node in nodes for job in state.placed[node.id].values()}
    jobs = sorted(here.values(), key=lambda job: (-job.spec.priority, job.number))
    effects = {job.id: _left_there(state, job) for job in jobs}
    moving = [job for job in jobs if effects[job.id] is None]
    avoid = {node.index for node in nodes}
    with Overlay(state) as room:
        for job in moving:
            for member in job.members:
                if not member.over:
                    own = job.spec.whole_nodes and not member.lent
                    room.change(member.held, +1, exclusive=own, asleep=member.lent)
        for place, job in enumerate(moving):
            given = _place(state, job, avoid, now_ms) if place < TRIED_MAX else ()
            for slice_ in given:
                room.change(slice_, -1, exclusive=job.spec.whole_nodes)
            effects[job.id] = _stopped(job, Deed.MOVES if given else Deed.WAITS, now_ms, given)
    return [effect for effect in effects.values() if effect is not None]


def _left_there(state: State, job: Job) -> Effect | None:
    """Of a job that a drain does not stop."""
    if job.phase is Phase.STOPPING:
        return Effect(job, Deed.UNCHANGED)
    if is_served(state, job):
        return Effect(job, Deed.REPLACED)
    if job.spec.restart is Restart.NEVER:
        return Effect(job, Deed.STAYS)
    return None


def _place(state: State, job: Job, avoid: set[int], now_ms: int) -> tuple[Slice, ...]:
    """As the scheduler places a job that ran before."""
    closed, gang = kept_from(state, job, now_ms) | avoid, gang_of(job)
    before = again(state, job, gang, closed)
    if before is not None:
        return before[0]
    plan = fit(state, gang, closed)
    return slices(state, plan, gang.demand) if plan is not None else ()


def drain_lines(nodes: Sequence[Node], effects: Sequence[Effect]) -> list[str]:
    if not effects:
        return [f"no job runs on {_names(node.id for node in nodes)}"]
    return [
        *_line(effects, Deed.MOVES, "{} to a node with room: {}", "moves", "move"),
        *_line(effects, Deed.WAITS, "{} and {wait} for room: {}", "stops", "stop"),
        *_line(effects, Deed.REPLACED, "{} by another replica first: {}", "is replaced"),
        *_line(effects, Deed.STAYS, "{} until it ends (restart: never): {}", "keeps running"),
        *_line(effects, Deed.UNCHANGED, "{} already: {}", "is stopping", "are stopping"),
        *loss_lines(effects),
    ]


def cordon_lines(state: State, nodes: Sequence[Node]) -> list[str]:
    jobs = {job.id: job for node in nodes for job in state.placed[node.id].values()}
    names = _names(node.id for node in nodes)
    if not jobs:
        return [f"no job runs on {names}, and none starts there"]
    running = f"{plural(len(jobs), 'job')} on {names} {_verb(jobs, 'keeps', 'keep')} running"
    return [f"{running}; no new job starts there"]


def uncordon_lines(nodes: Sequence[Node], now_ms: int) -> list[str]:
    """Who closed them, when and why."""
    lines = []
    for node in nodes:
        closed = closed_text(node, now_ms)
        lines.append(f"{node.id} was {closed}" if closed else f"{node.id} is open")
    return lines


def closed_text(node: Node, now_ms: int) -> str:
    """ "drained 3h ago by ada: replacing a memory module"; empty if nobody closed it."""
    if node.set_end is not None and node.intent is NodeIntent.OPEN:
        return f"to be free in {duration_text(node.set_end.at_ms - now_ms)}: {node.set_end.why}"
    if node.intent is NodeIntent.OPEN:
        return "" if node.schedulable or node.health is not NodeHealth.READY else "in quarantine"
    ago = f" {duration_text(now_ms - node.intent_ms)} ago" if node.intent_ms else ""
    for word in ("cordoned", "drained"):
        if node.intent_why.startswith(f"{word} by "):
            return f"{word}{ago}{node.intent_why.removeprefix(word)}"
    said = f": {node.intent_why}" if node.intent_why else ""
    return f"{'drained' if node.intent is NodeIntent.DRAINING else node.intent.value}{ago}{said}"


# -- jobs ------------------------------------------------------------------------------------------


def cancelled(state: State, jobs: Iterable[Job], now_ms: int) -> list[Effect]:
    return [_stopped(job, Deed.ENDS, now_ms) for job in _with_elements(state, jobs)]


def requeued(state: State, jobs: Iterable[Job], now_ms: int) -> list[Effect]:
    return [
        _stopped(job, Deed.UNCHANGED if job.phase is Phase.WAITING else Deed.WAITS, now_ms)
        for job in _with_elements(state, jobs)
    ]


def _with_elements(state: State, jobs: Iterable[Job]) -> Iterator[Job]:
    """Live jobs; those of an array for the array. Each once."""
    known: set[str] = set()
    for job in jobs:
        parts = state.unfolded[job.id].jobs if job.id in state.unfolded else ()
        for one in (job, *(state.jobs[part] for part in parts)):
            if one.id not in known and one.phase is not Phase.FINISHED:
                known.add(one.id)
                yield one


def dependents_of(state: State, effects: Sequence[Effect]) -> tuple[list[Job], list[Job]]:
    """Jobs that wait for one of these and are cancelled with it, and those that may start then."""
    ended = {effect.job.id: None for effect in effects}
    lost: dict[str, Job] = {}
    freed: dict[str, Job] = {}
    for job_id in ended:
        for other in state.dependents.get(job_id, ()):
            job = state.live(other)
            if job is None or other in ended:
                continue
            mine = [one for one in conditions(job.spec.after) if one.job in ended]
            goes_on = all(one.holds(succeeded=False) for one in mine)
            (freed if goes_on else lost)[other] = job
    return (
        sorted(lost.values(), key=lambda job: job.number),
        sorted(freed.values(), key=lambda job: job.number),
    )


def cancel_lines(state: State, effects: Sequence[Effect]) -> list[str]:
    jobs = [effect for effect in effects if effect.job.elements is None]
    lost, freed = dependents_of(state, effects)
    waiting = [one for one in jobs if one.job.phase is Phase.WAITING]
    running = [one for one in jobs if one.job.phase is not Phase.WAITING]
    lines = _line(running, Deed.ENDS, "{}: {}", "stops", "stop") if running else []
    if waiting:
        lines += _line(waiting, Deed.ENDS, "{} the queue: {}", "leaves", "leave")
    lines += loss_lines(jobs)
    if lost:
        lines.append(
            f"{_counted(lost)} {_verb(lost, 'depends', 'depend')} on {_it(effects)} and "
            f"{_verb(lost, 'is', 'are')} cancelled, too: {_titles(lost)}"
        )
    if freed:
        lines.append(
            f"{_counted(freed)} {_verb(freed, 'waits', 'wait')} for {_it(effects)} to end "
            f"and may start then: {_titles(freed)}"
        )
    return lines or ["nothing changes: no such job is live"]


def requeue_lines(effects: Sequence[Effect]) -> list[str]:
    jobs = [effect for effect in effects if effect.job.elements is None]
    lines = _line(jobs, Deed.WAITS, "{} and {wait} in the queue again: {}", "stops", "stop")
    lines += _line(jobs, Deed.UNCHANGED, "{} already: {}", "waits", "wait")
    return [*lines, *loss_lines(jobs)] or ["nothing changes: no such job is live"]


def loss_lines(effects: Sequence[Effect]) -> list[str]:
    """What of the work since the last save is lost or done again, at most."""
    stopped = [one for one in effects if one.deed in (Deed.MOVES, Deed.WAITS, Deed.ENDS)]
    gpu_ms = sum(one.gpu_ms for one in stopped)
    longest_ms = max((one.unsaved_ms for one in stopped), default=0)
    if gpu_ms and all(one.deed is Deed.ENDS for one in stopped):
        lines = [f"{gpu_hours_text(gpu_ms)} since the last save will be lost"]
    elif gpu_ms:
        lines = [f"up to {gpu_hours_text(gpu_ms)} since the last save may be lost"]
    elif longest_ms:
        lines = [f"up to {duration_text(longest_ms)} of work since the last save may be lost"]
    else:
        return []
    fresh = [one.job for one in stopped if one.unsaved_ms and not saves(one.job)]
    if fresh and any(one.deed is not Deed.ENDS for one in stopped):
        over = f"{_verb(fresh, 'has', 'have')} no checkpoint and {_verb(fresh, 'starts', 'start')}"
        lines.append(f"{_counted(fresh)} {over} over: {_titles(fresh)}")
    return lines


def gpu_hours_text(gpu_ms: int) -> str:
    if gpu_ms < HOUR_MS // 10:
        return f"{duration_text(gpu_ms)} of GPU time"
    tenths = (gpu_ms * 10 + HOUR_MS // 2) // HOUR_MS
    hours = f"{tenths // 10:,}" if tenths >= 1000 or tenths % 10 == 0 else f"{tenths / 10:.1f}"
    return f"{hours} GPU-hour" + "s" * (hours != "1")


def _stopped(job: Job, deed: Deed, now_ms: int, given: Sequence[Slice] = ()) -> Effect:
    if not job.active or job.phase is Phase.STOPPING or deed is Deed.UNCHANGED:
        return Effect(job, deed)
    unsaved = unsaved_ms(job, now_ms)
    to = tuple(dict.fromkeys(slice_.node for slice_ in given))
    return Effect(job, deed, unsaved, unsaved * _gpu_milli(job) // 1000, to)


def _gpu_milli(job: Job) -> int:
    return sum(len(one.slice.gpus) * one.slice.gpu_milli for one in job.members)


def saves(job: Job) -> bool:
    return bool(job.spec.checkpoint_ms) or job.saved_ms is not None


def _line(
    effects: Sequence[Effect], deed: Deed, sentence: str, one: str, many: str = ""
) -> list[str]:
    chosen = [effect for effect in effects if effect.deed is deed]
    if not chosen:
        return []
    verb = one if len(chosen) == 1 else many or one.replace("is ", "are ").replace("keeps", "keep")
    sentence = sentence.replace("{wait}", "waits" if len(chosen) == 1 else "wait")
    sentence = sentence if len(chosen) == 1 else sentence.replace("it ends", "they end")
    names = [_moved(effect) for effect in chosen[:NAMED_MAX]]
    more = f" and {len(chosen) - NAMED_MAX} more" if len(chosen) > NAMED_MAX else ""
    counted = f"{plural(len(chosen), 'job')} {verb}"
    return [sentence.format(counted, ", ".join(names) + more)]


def _moved(effect: Effect) -> str:
    where = f" to {_names(effect.to)}" if effect.to else ""
    return f"{effect.job.label}{where}"


def _names(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - NAMED_MAX} more" if len(known) > NAMED_MAX else ""
    return ", ".join(known[:NAMED_MAX]) + more


def _titles(jobs: Sequence[Job]) -> str:
    more = f" and {len(jobs) - NAMED_MAX} more" if len(jobs) > NAMED_MAX else ""
    return ", ".join(job.label for job in jobs[:NAMED_MAX]) + more


def _counted(jobs: Sequence[Job]) -> str:
    return plural(len(jobs), "job")


def _verb(jobs: Sequence[Job] | dict[str, Job], one: str, many: str) -> str:
    return one if len(jobs) == 1 else many


def _it(effects: Sequence[Effect]) -> str:
    return "it" if len(effects) == 1 else "them"
