"""Jobs fall asleep and wake: all members of a gang, or none."""

from __future__ import annotations

from shoal.core.state.round import Round
from shoal.core.state.state import Node
from shoal.model.durations import duration_text
from shoal.model.events import (
    JobAsleep,
    JobAwake,
    JobTouched,
    MemberExited,
    MemberLost,
    MembersAsleep,
    MembersAwake,
    NodeLost,
    SleepRefused,
    WakeRefused,
)
from shoal.model.job import Job, MemberRef, Phase
from shoal.model.reason import quoted
from shoal.model.report import NodeReport

FULL_MS = 60_000  # a sleeper whose GPU is full is tried again after this long


def touch(round_: Round, job: Job, why: str, *, wants: bool = True) -> None:
    round_.emit(
        JobTouched(at_ms=round_.now_ms, job=job.id, attempt=job.attempt, why=why, wants=wants)
    )


def hear_sleep(round_: Round, node: Node, inventory: NodeReport) -> None:
    """What the node reports of members that fall asleep, sleep or wake."""
    state = round_.state
    before = state.heard.uses.pop(node.id, {})
    if inventory.uses:
        uses = {one.ref: one.gpu_mb for one in inventory.uses}
        state.heard.uses[node.id] = uses
        if uses.keys() - before.keys():  # until now it was taken to have the whole GPU
            round_.look_again(round_.now_ms)
    _hear_touches(round_, node, inventory)
    if not state.napping:
        return
    here = state.placed[node.id]
    for job in {job.id: job for job in here.values() if job.napping}.values():
        if job.phase is Phase.DOZING:
            _fall_asleep(round_, node, job, inventory)
        elif job.phase is Phase.WAKING and not _stays_asleep(round_, node, job, inventory):
            _awake(round_, job, inventory)


def _hear_touches(round_: Round, node: Node, inventory: NodeReport) -> None:
    """Somebody typed into a session with a sleeper, or connected to a port of it. Each touch counts
    once, because its job may have been put to sleep again since."""
    state = round_.state
    before = state.heard.touched.pop(node.id, {})
    if not inventory.touched:
        return
    state.heard.touched[node.id] = {one.ref: one.times for one in inventory.touched}
    for ref, times in state.heard.touched[node.id].items():
        job = state.placed[node.id].get(ref)
        asleep = job is not None and job.phase in (Phase.DOZING, Phase.ASLEEP)
        if job is not None and asleep and not job.wants and before.get(ref) != times:
            touch(round_, job, "is to wake, because an open session of it was used")


def _refuse(round_: Round, job: Job, number: int, why: str) -> None:
    node_id = job.members[number].slice.node
    round_.emit(
        SleepRefused(
            at_ms=round_.now_ms,
            job=job.id,
            attempt=job.attempt,
            member=number,
            node=node_id,
            why=f"member {number} on {node_id} could not be put to sleep: {why}",
        )
    )
    round_.state.heard.naps.pop(job.id, None)


def _fall_asleep(round_: Round, node: Node, job: Job, inventory: NodeReport) -> None:
    for refusal in inventory.refused:
        if refusal.ref[:2] == (job.id, job.attempt):
            _refuse(round_, job, refusal.ref.member, quoted(refusal.why))
            return
    new = {
        slept.ref.member: slept
        for slept in inventory.asleep
        if slept.ref[:2] == (job.id, job.attempt) and not job.members[slept.ref.member].asleep
    }
    more_mb = sum(slept.memory_mb - job.members[n].host_mb for n, slept in new.items())
    left_mb = round_.state.rooms[node.index].memory_mb
    if more_mb > max(0, left_mb):  # of what was set aside for it; nothing is promised twice
        why = f"it took {more_mb} MB more of the node's memory than was set aside for it"
        _refuse(round_, job, min(new), f"{why}, and {max(0, left_mb)} MB are left")
        return
    if new:
        numbers = tuple(sorted(new))
        round_.emit(
            MembersAsleep(
                at_ms=round_.now_ms,
                job=job.id,
                attempt=job.attempt,
                members=numbers,
                host_mb=tuple(new[number].memory_mb for number in numbers),
            )
        )
        round_.state.heard.naps.setdefault(job.id, {}).update(
            {number: slept.took_ms for number, slept in new.items()}
        )
    if all(member.asleep or member.over for member in job.members):
        _asleep(round_, job)


def _stays_asleep(round_: Round, node: Node, job: Job, inventory: NodeReport) -> bool:
    """Somebody else has filled its GPU. A gang of which a part may be awake keeps its GPUs, and its
    nodes are told to wake it again and again."""
    living = [number for number, member in enumerate(job.members) if not member.over]
    slept = {one.ref for one in inventory.asleep}
    for refusal in inventory.refused:
        ref = refusal.ref
        if ref[:2] == (job.id, job.attempt) and ref in slept and [ref.member] == living:
            why = (
                f"stays asleep, because there is no room for it on {node.id}: {quoted(refusal.why)}"
            )
            round_.emit(
                WakeRefused(
                    at_ms=round_.now_ms,
                    job=job.id,
                    attempt=job.attempt,
                    member=ref.member,
                    node=node.id,
                    again_ms=round_.now_ms + FULL_MS,
                    why=why,
                )
            )
            return True
    return False


def _asleep(round_: Round, job: Job) -> None:
    took_ms = max(round_.state.heard.naps.pop(job.id, {}).values(), default=0)
    round_.emit(
        JobAsleep(
            at_ms=round_.now_ms,
            job=job.id,
            attempt=job.attempt,
            took_ms=took_ms,
            memory_mb=max((member.host_mb for member in job.members), default=0),
            why=job.why,
        )
    )


def _awake(round_: Round, job: Job, inventory: NodeReport) -> None:
    still = {*inventory.dozing, *inventory.waking, *(one.ref for one in inventory.asleep)}
    new = [
        ref.member
        for ref in inventory.alive
        if ref[:2] == (job.id, job.attempt)
        and ref not in still
        and job.members[ref.member].asleep
        and not job.members[ref.member].over
    ]
    if new:
        numbers = tuple(sorted(new))
        round_.emit(
            MembersAwake(at_ms=round_.now_ms, job=job.id, attempt=job.attempt, members=numbers)
        )
        woke = {one.ref.member: one.took_ms for one in inventory.woke if one.ref.job == job.id}
        round_.state.heard.naps.setdefault(job.id, {}).update(woke)
    if not any(member.asleep and not member.over for member in job.members):
        awake(round_, job)


def awake(round_: Round, job: Job) -> None:
    took_ms = max(round_.state.heard.naps.pop(job.id, {}).values(), default=0)
    slept = duration_text(round_.now_ms - (job.dozed_ms or 0))
    why = f"goes on after {slept} of sleep"
    if job.refused:
        why = f"goes on: {job.refused}"
    round_.emit(
        JobAwake(at_ms=round_.now_ms, job=job.id, attempt=job.attempt, took_ms=took_ms, why=why)
    )


def settle_naps(round_: Round) -> None:
    """The last member that was waited for may have ended instead."""
    if not round_.state.napping:
        return
    ended = (event.job for event in round_.events if isinstance(event, MemberExited | MemberLost))
    nodes = any(type(event) is NodeLost for event in round_.events)
    for job_id in list(round_.state.napping if nodes else dict.fromkeys(ended)):
        if job_id not in round_.state.napping:
            continue
        job = round_.state.jobs[job_id]
        living = [member for member in job.members if not member.over]
        if not living:
            continue
        if job.phase is Phase.DOZING and all(member.asleep for member in living):
            _asleep(round_, job)
        elif job.phase is Phase.WAKING and not any(member.asleep for member in living):
            awake(round_, job)


def naps_wanted(job: Job, ref: MemberRef, inventory: NodeReport) -> bool | None:
    """Whether the node has to be told that the member should sleep (True) or wake (False)."""
    asleep = any(one.ref == ref for one in inventory.asleep)
    if job.phase in (Phase.DOZING, Phase.ASLEEP):
        ends = ref in inventory.ended or ref in inventory.stopping
        busy = ends or ref in inventory.dozing or ref in inventory.waking
        refused = any(one.ref == ref for one in inventory.refused)
        if asleep and refused:
            return True  # what it said about waking is known
        return None if asleep or busy or refused or ref not in inventory.alive else True
    if job.phase in (Phase.RUNNING, Phase.WAKING):
        return False if asleep or any(one.ref == ref for one in inventory.refused) else None
    return None
