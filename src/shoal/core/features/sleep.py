"""Jobs fall asleep and wake: all members of a gang, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shoal.core.features.array import no_live_job
from shoal.core.scheduling.fit import members_here
from shoal.core.scheduling.sleepers import beforehand, has_to_finish
from shoal.core.scheduling.sleeping import doze, why_not
from shoal.core.state.apply_array import parts_of
from shoal.core.state.events.cluster import PolicyChanged
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeLost
from shoal.core.state.events.runs import MemberExited, MemberLost
from shoal.core.state.events.sleep import (
    JobAsleep,
    JobAwake,
    JobDozing,
    JobTouched,
    MembersAsleep,
    MembersAwake,
    SleepRefused,
    WakeRefused,
)
from shoal.core.state.queue import Gang
from shoal.core.state.round import Round
from shoal.core.state.state import Node, State
from shoal.model.durations import duration_text
from shoal.model.job import Job, Member, MemberRef, MemberStatus, Phase, SleepCause
from shoal.model.reason import quoted, render
from shoal.model.report import Accepted, Answer, NodeReport, Refused, SleepJob, WakeJob

FULL_MS = 60_000  # a sleeper whose GPU is full is tried again after this long
NODES_LOOKED = 256
NAMED_MAX = 3


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
            touch(round_, job, "is waking because one of its sessions was used")


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


def put_to_sleep(round_: Round, request: SleepJob) -> Answer:
    job = _found(round_, request.job)
    if not isinstance(job, Job):
        return job
    why = f"put to sleep by {request.who}; wakes when it is used, or by: shoal wake {job.mention}"
    if job.phase in (Phase.DOZING, Phase.ASLEEP):
        if node := has_to_finish(round_.state, job, round_.now_ms):
            why = f"it has to wake to finish before {node} is gone"
            return Refused("job", f"{job.id} cannot stay asleep: {why}")
        if job.wants:
            touch(round_, job, why, wants=False)
            return Accepted(job.id, "it was asleep already; now it stays asleep until it is woken")
        asleep = job.phase is Phase.ASLEEP
        return Accepted(job.id, f"it is already {'asleep' if asleep else 'falling asleep'}")
    if reason := why_not(round_.state, job, asked=True):
        return Refused("job", f"{job.id} cannot be put to sleep: {render(reason, job.reader)}")
    doze(round_, job, SleepCause.USER, why + beforehand(round_.state, job, SleepCause.USER))
    return Accepted(job.id)


def wake(round_: Round, request: WakeJob) -> Answer:
    job = _found(round_, request.job)
    if not isinstance(job, Job):
        return job
    if job.phase not in (Phase.DOZING, Phase.ASLEEP):
        if request.why or job.phase is Phase.WAKING:
            return Accepted(job.id, f"it is {job.phase.value}")
        return Refused("job", f"{job.id} is not asleep: it is {job.phase.value}")
    if job.wants:
        return Accepted(job.id, "it wakes as soon as there is room")
    touch(round_, job, request.why or f"is waking because {request.who} asked")
    return Accepted(job.id)


def _found(round_: Round, job_id: str) -> Job | Refused:
    state = round_.state
    if (array := state.arrays.get(job_id)) is not None:
        first = f"{job_id}.{parts_of(array)[0].index_at(0)}"
        return Refused("job", f"{job_id} is an array; name one of its elements, e.g. {first}")
    job = state.jobs.get(job_id)
    return job if job is not None else no_live_job(state, job_id)


def sleepers_note(state: State, gang: Gang) -> str:
    """For instance "500 MB of memory on a are held by j3, which sleeps there": of the first node
    where the gang would have room if nobody slept there. Empty if there is none."""
    if not state.napping or not gang.demand.memory_mb:
        return ""
    nodes = dict.fromkeys(
        member.slice.node
        for job_id in list(state.napping)[:NODES_LOOKED]
        for member in state.jobs[job_id].members
        if member.lent and not member.over
    )
    for name in nodes:
        node = state.nodes[name]
        room = state.rooms[node.index]
        level = room.level._replace(memory_mb=room.memory_mb + room.asleep_mb, asleep_mb=0)
        fits = gang.demand.suits(room.kind) and members_here(gang, room.kind, level)
        if node.schedulable and fits and not members_here(gang, room.kind, room.level):
            owners = dict.fromkeys(
                job.label for ref, job in state.placed[name].items() if job.members[ref.member].lent
            )
            names = ", ".join(list(owners)[:NAMED_MAX])
            verb = "which sleeps there" if len(owners) == 1 else "which sleep there"
            return f"{room.asleep_mb} MB of memory on {name} are held by {names}, {verb}"
    return ""


# -- what always holds, in code that shares nothing with the code above ----------------------------


OVER = (MemberStatus.EXITED, MemberStatus.LOST)
NAPPING = (Phase.DOZING, Phase.ASLEEP, Phase.WAKING)


def sleeper_violation(job: Job) -> str:
    """What is wrong with one job's sleep; empty if nothing is."""
    napping = job.phase in NAPPING
    if napping != (job.dozed_ms is not None):
        return f"is {job.phase.value}, but the time since when it sleeps is {job.dozed_ms}"
    if napping != (job.sleep_cause is not None):
        return f"is {job.phase.value}, but the cause of its sleep is {job.sleep_cause}"
    if job.wants and (not napping or job.wanted_ms is None):
        return f"is {job.phase.value} and is to wake, but since when?"
    living = [member for member in job.members if member.status not in OVER]
    if job.phase in (Phase.STARTING, Phase.RUNNING) and any(
        member.lent or member.asleep or member.host_mb for member in living
    ):
        return f"is {job.phase.value}, but a member of it sleeps"
    if job.phase is Phase.DOZING and living and all(member.asleep for member in living):
        return "is dozing, but all of it sleeps"
    if job.phase is Phase.WAKING and living and not any(member.asleep for member in living):
        return "is waking, but none of it sleeps"
    return ""


def sleeping_member_violation(job: Job, member: Member) -> str:
    """What is wrong with a member that lives; empty if nothing is."""
    if member.lent and job.phase not in (Phase.ASLEEP, Phase.STOPPING):
        return f"is {job.phase.value} without its GPUs"
    if job.phase is Phase.ASLEEP and not (member.lent and member.asleep):
        return "was not seen asleep, or holds GPUs in its sleep"
    return ""


def doze_violation(state: State, events: Iterable[Event]) -> str:
    """When a job is put to sleep, its nodes stay within the policy's bounds on sleepers. Later the
    policy may have changed, and members may take more or less than was expected."""
    nodes: dict[str, None] = {}
    for event in events:
        if isinstance(event, PolicyChanged):
            nodes = {}  # also in the same step
        elif isinstance(event, JobDozing):
            job = state.jobs.get(event.job)
            if job is not None and job.phase is Phase.DOZING:
                nodes.update(dict.fromkeys(member.slice.node for member in job.members))
    for node_id in nodes:
        here = [
            job.members[ref.member]
            for ref, job in state.placed[node_id].items()
            if job.phase in NAPPING
        ]
        most_mb = state.nodes[node_id].spec.memory_mb * state.policy.sleep_memory_percent // 100
        taken_mb = sum(member.host_mb for member in here)
        if taken_mb > most_mb:
            return f"{node_id} lends {taken_mb} MB to sleepers; the policy allows {most_mb} MB"
        if len(here) > state.policy.sleepers_max:
            return f"{len(here)} members sleep on {node_id}, more than the policy allows"
    return ""


def sleep_violation(state: State) -> str:
    """The indexes of sleepers, and what tenants hold."""
    jobs = state.jobs.values()
    if set(state.napping) != {job.id for job in jobs if job.phase in NAPPING}:
        return "the index of sleepers does not match the jobs"
    if set(state.wakeful) != {job.id for job in jobs if job.phase is Phase.ASLEEP and job.wants}:
        return "the index of sleepers that are to wake does not match the jobs"
    running = {job.id for job in jobs if job.phase is Phase.RUNNING and job.awake_ms is not None}
    if set(state.awake) != running:
        return "the index of jobs that are awake does not match the jobs"
    since = [state.jobs[job_id].awake_ms or 0 for job_id in state.awake]
    if since != sorted(since):
        return "jobs that are awake are not in the order in which they woke"
    if not set(state.agenda.beds) <= set(state.wakeful):
        return "a job has a bed, but is not to wake"
    shares: Counter[str] = Counter()
    gpus: Counter[str] = Counter()
    for job in jobs:
        for member in job.members:
            if member.status not in OVER and not member.lent:
                shares[job.spec.tenant] += job.share
                first = job.members[0].slice  # all are charged alike
                gpus[job.spec.tenant] += len(first.gpus) * first.gpu_milli
    for name, account in state.accounts.own.items():
        if (account.share, account.gpu_milli) != (shares[name], gpus[name]):
            return f"{name} is charged for {account.gpu_milli} of {gpus[name]} GPU-thousandths"
    return ""
