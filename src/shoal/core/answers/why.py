"""Why a job waits: the truth of this moment, computed on request."""

from __future__ import annotations

import enum
from bisect import bisect_left
from typing import NamedTuple

from shoal.core.features.array import first_waiting, progress_text
from shoal.core.features.ends import ends_first
from shoal.core.features.fabric.rdma import fallback
from shoal.core.features.labels import label_note
from shoal.core.features.lease import lease_note
from shoal.core.features.neighbors import away_text, neighbors_note
from shoal.core.features.sleep import sleepers_note
from shoal.core.features.supply.orders import asked_for
from shoal.core.features.workflow import awaited, begins
from shoal.core.invariants import Violation
from shoal.core.scheduling.again import kept_from, shunned, spares_kept_from
from shoal.core.scheduling.backfill import GAP_TRIES_MAX, SAFE, Reserved, delayed_by, set_aside
from shoal.core.scheduling.beds import asleep_reason
from shoal.core.scheduling.capacity import held_when_empty
from shoal.core.scheduling.fit import fit, shortage
from shoal.core.scheduling.hangs import hung_for, hung_note, hung_text
from shoal.core.scheduling.holding import holds_queue
from shoal.core.scheduling.keep import keeper_of
from shoal.core.scheduling.order import place_in_line
from shoal.core.state.expect import run_ms
from shoal.core.state.gpu_caps import cap_text, capped_by
from shoal.core.state.queue import gang_of
from shoal.core.state.state import Node, State
from shoal.model.durations import duration_text
from shoal.model.job import Job, MemberRef, Phase
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.policy import Policy
from shoal.model.reason import private, quoted, tenant_part
from shoal.model.resources import WHOLE_GPU_MILLI, plural

NO_NODES = "no node has joined the cluster yet"


class Waits(enum.StrEnum):
    """What a job waits for; the value is worded for several jobs at once."""

    RETRY = "before a retry"
    BEGIN = "for a scheduled start"
    AFTER = "for other jobs to end"
    CLAIM = "for room that is being freed"
    BUDGET = "for the budget of"
    CAP = "for the cap on GPUs of"
    NO_NODES = "for the first node to join"
    CLOSED = "for nodes that are closed or lost"
    LABELS = "for nodes with matching labels and taints"
    ROOM = "for room"
    SUPPLY = "for nodes on order"
    TURN = "behind"
    SPARES = "because spare nodes are reserved"
    NEIGHBOR = "for a neighbor to take them"
    ENDS = "for nodes that stay up long enough"
    HANGS = "for mounts that do not answer"


class Reason(NamedTuple):
    """`whom`: the tenant or job that it waits for, if there is one, as a part of a reason."""

    kind: Waits
    text: str
    whom: str = ""


def explain(state: State, job: Job, policy: Policy, now_ms: int) -> str:
    """A sentence for people. For a waiting job, an empty one means a bug."""
    text = _explain(state, job, policy, now_ms)
    return "; ".join(filter(None, (text, lease_note(job, now_ms)))) if job.until_ms else text


def _explain(state: State, job: Job, policy: Policy, now_ms: int) -> str:
    if job.elements is not None:
        return _array(state, job, policy, now_ms)
    if job.phase is Phase.STARTING:
        return _getting(state, job) or job.why
    if job.phase is Phase.ASLEEP and job.wants:
        reason = asleep_reason(state, job, policy, now_ms)
        return f"{job.why}; {reason or 'it is about to be woken'}"
    if job.phase is Phase.AWAY:
        return away_text(state, job)
    if job.phase is not Phase.WAITING:
        hung = hung_note(state, job, now_ms) if state.heard.hangs else ""
        slow = fallback(state, job) if job.phase is Phase.RUNNING else ""
        return "; ".join(filter(None, (job.why, hung, slow)))
    text = waiting_reason(state, job, policy, now_ms) or "it is next in line to start"
    if state.heard.neighbors and job.number not in state.queue.outbound:
        text = "; ".join(filter(None, (text, neighbors_note(state, job, policy, now_ms))))
    return text


def _array(state: State, array: Job, policy: Policy, now_ms: int) -> str:
    if array.phase is Phase.FINISHED:
        return array.why
    text, next_one = progress_text(state, array), first_waiting(state, array)
    if next_one is None or array.phase is Phase.STOPPING:
        return text
    return f"{text}; {next_one.mention}: {explain(state, next_one, policy, now_ms)}"


def _getting(state: State, job: Job) -> str:
    """What members of a starting gang still wait for, as their nodes report it."""
    whats = []
    for number, member in enumerate(job.members if state.heard.getting else ()):
        here = state.heard.getting.get(member.slice.node, {})
        what = here.get(MemberRef(job.id, job.attempt, number))
        if what is not None:
            whats.append(f"{member.slice.node} {quoted(what)}")
    different = list(dict.fromkeys(whats))
    others = len(different) - 1
    more = f"; {plural(others, 'other node')} too" if others else ""
    return f"{different[0]}{more}" if different else ""


def waiting_reason(state: State, job: Job, policy: Policy, now_ms: int) -> str:
    """Empty if nothing keeps the job from starting, which must not happen after a step."""
    reason = reason_of(state, job, policy, now_ms)
    return reason.text if reason is not None else ""


def verify_reasons(state: State, policy: Policy, now_ms: int) -> None:
    """Every job that waits has a reason, after a step that left no work over."""
    for job in state.jobs.values():
        if job.phase is Phase.WAITING and not waiting_reason(state, job, policy, now_ms):
            raise Violation(f"{job.id} waits without a reason")
        if job.id in state.wakeful and not asleep_reason(state, job, policy, now_ms):
            raise Violation(f"{job.id} is to wake, and sleeps without a reason")


def reason_of(state: State, job: Job, policy: Policy, now_ms: int) -> Reason | None:
    if job.awaits:
        return Reason(Waits.AFTER, awaited(state, job, now_ms))
    if job.not_before_ms > now_ms and not job.attempt:
        return Reason(Waits.BEGIN, begins(job, now_ms))
    if job.not_before_ms > now_ms:
        left = duration_text(job.not_before_ms - now_ms)
        return Reason(Waits.RETRY, f"retries in {left}: {job.why}")
    if job.id in state.claims:
        return Reason(Waits.CLAIM, f"room is being freed for it: {job.why}")
    if tenant := state.accounts.held_by(job.spec.tenant):
        payer = tenant_part(tenant)
        text = f"the budget of {payer} is used up; see: shoal report --by tenant"
        return Reason(Waits.BUDGET, text, payer)
    if job.number in state.queue.outbound:
        text = neighbors_note(state, job, policy, now_ms)
        return Reason(Waits.NEIGHBOR, text or f"only {job.spec.cluster} may run it")
    if job.number in state.queue.capped_lane:
        return _capped(state, job)
    if not state.nodes:
        return _ordered(state, job, now_ms) or Reason(Waits.NO_NODES, NO_NODES)
    if job.number not in state.queue.lane:
        return None  # its time has come since the last step; the next one puts it into a lane
    return (
        _no_room(state, job, now_ms)
        or _queue_held(state, job, policy, now_ms)
        or _set_aside(state, job, now_ms)
        or _spared(state, job, now_ms)
    )


def barrier(state: State, job: Job, now_ms: int) -> Reason | None:
    """What would keep a job that is not there yet from starting, whatever else waits."""
    if state.accounts.held_by(job.spec.tenant) or not state.nodes:
        return reason_of(state, job, state.policy, now_ms)
    return _capped(state, job) or _no_room(state, job, now_ms)


def _capped(state: State, job: Job) -> Reason | None:
    need_milli = gang_of(job).gpu_milli
    top = capped_by(state, job.spec.tenant, need_milli)
    if not top:
        return None
    text = f"{cap_text(state, top)}, and it needs {need_milli / WHOLE_GPU_MILLI:g}"
    return Reason(Waits.CAP, text, tenant_part(top))


def _spared(state: State, job: Job, now_ms: int) -> Reason | None:
    """The job fits, but only where the policy keeps nodes for gangs that lose one, or on nodes that
    end too early for it."""
    spares, avoid = spares_kept_from(state, job, now_ms), kept_from(state, job, now_ms)
    position = _position(state, job)
    picky = state.policy.spares or state.endings or state.wakeful or state.heard.hangs
    picky = picky or _shun_in_front(state, job)
    if position >= GAP_TRIES_MAX and picky:
        text = f"number {position + 1} among jobs like it, some of which wait for other nodes"
        return Reason(Waits.SPARES, text)
    if not avoid or fit(state, gang_of(job), avoid) is not None:
        return None
    hung = hung_for(state, job)
    if hung and fit(state, gang_of(job), avoid - hung.keys()) is not None:
        texts = [f"{node}: {hung_text(state, node, now_ms, job.spec)}" for node in hung.values()]
        more = f"; {plural(len(texts) - 3, 'other node')} too" if len(texts) > 3 else ""
        text = f"it fits only where a mount hangs: {'; '.join(texts[:3])}{more}"
        return Reason(Waits.HANGS, text)
    if text := ends_first(state, job, spares, now_ms):
        coming, more = asked_for(state, job, now_ms)
        if coming:
            return Reason(Waits.SUPPLY, f"{more}; {text}")
        return Reason(Waits.ENDS, f"{text}; {more}" if more else text)
    names = ", ".join(state.order[index].id for index in sorted(spares)[:5])
    text = f"it fits only on {names}, kept as spares by the policy for gangs that lose a node"
    if keepers := keeper_of(state, job, now_ms):
        index, other = next(iter(keepers.items()))
        waited = duration_text(now_ms - (other.wanted_ms or now_ms))
        where = state.order[index].id
        text = f"{where} is kept for {other.label}, which sleeps there and has waited {waited}"
        return Reason(Waits.TURN, f"{text} to wake", other.mention)
    if spares <= shunned(state, job):
        text = f"it fits only on {names}, where its program or folder is missing"
    return Reason(Waits.SPARES, text)


def _shun_in_front(state: State, job: Job) -> bool:
    line = state.queue.lanes[state.queue.lane[job.number]]
    return all(state.job_numbered(number).missing_on for _, number in line[:GAP_TRIES_MAX])


def _ordered(state: State, job: Job, now_ms: int) -> Reason | None:
    """Nodes that are on their way for such jobs; or why a supply brings none."""
    if not state.policy.supply:
        return None
    coming, text = asked_for(state, job, now_ms)
    if coming:
        return Reason(Waits.SUPPLY, text)
    return Reason(Waits.CLOSED, f"no node that could take it is there; {text}") if text else None


def _no_room(state: State, job: Job, now_ms: int) -> Reason | None:
    reason = _shortage(state, job)
    if reason is None or not state.policy.supply:
        return reason
    coming, text = asked_for(state, job, now_ms)
    if not text:
        return reason
    if coming:
        need = reason.text.partition(";")[0]
        return Reason(Waits.SUPPLY, f"{text}; {need}")
    return reason._replace(text=f"{reason.text}; {text}")


def _shortage(state: State, job: Job) -> Reason | None:
    gang = gang_of(job)
    short = shortage(state, gang)
    if not short:
        return None
    open_ = held_when_empty(state, gang, open_only=True)
    note = label_note(state, gang) if gang.demand.where or _tainted(state) else ""
    if open_ >= gang.members:
        notes = (short, note, sleepers_note(state, gang))
        return Reason(Waits.ROOM, "; ".join(filter(None, notes)))
    if note:
        return Reason(Waits.LABELS, note)
    need = short.partition(";")[0]
    text = f"{need}; even when empty, the open nodes hold only {open_}{_closed(state)}"
    return Reason(Waits.CLOSED, text)


def _tainted(state: State) -> bool:
    return any(kind.taints for kind in state.open_capacity)


def _closed(state: State) -> str:
    closed = [
        node
        for node in state.order
        if not node.schedulable and node.intent is not NodeIntent.REMOVED
    ]
    names = ", ".join(f"{node.id} is {_why_closed(node)}" for node in closed[:5])
    more = f" and {len(closed) - 5} more are closed" if len(closed) > 5 else ""
    return f"; {names}{more}" if names else ""


def _why_closed(node: Node) -> str:
    if node.health is not NodeHealth.READY:
        return node.health.value
    if node.intent is not NodeIntent.OPEN:
        return node.intent.value
    # What led to a node's standing may quote anybody's jobs.
    return f"{node.record.standing.value}{private(f' ({node.record.why})')}"


def _queue_held(state: State, job: Job, policy: Policy, now_ms: int) -> Reason | None:
    """The job fits, so something ahead of it must hold the queue."""
    mine = place_in_line(state, job, now_ms)
    for line in state.queue.lanes.values():
        ahead = state.job_numbered(line[0][1])
        if (
            place_in_line(state, ahead, now_ms) < mine
            and holds_queue(state, ahead, policy, now_ms)
            and (
                _no_room(state, ahead, now_ms)
                or _set_aside(state, ahead, now_ms)
                or _spared(state, ahead, now_ms)
            )
        ):
            waited = duration_text(now_ms - ahead.since_ms)
            text = (
                f"the queue is held for {ahead.label}, which is ahead of it and has waited {waited}"
            )
            return Reason(Waits.TURN, text, ahead.mention)
    return None


def _set_aside(state: State, job: Job, now_ms: int) -> Reason | None:
    """The job fits, but only where it would delay a job ahead of it."""
    mine = place_in_line(state, job, now_ms)
    ahead = [
        other
        for other in state.reservations
        if other != job.id and place_in_line(state, state.jobs[other], now_ms) < mine
    ]
    delayed = delayed_by(state, job, ahead, now_ms)
    mentions = [state.jobs[other].mention for other in ahead[:3]]
    names = ", ".join(mentions)
    position = _position(state, job)
    if ahead and position >= GAP_TRIES_MAX:
        text = f"number {position + 1} among jobs like it; room is set aside for {names}"
        return Reason(Waits.TURN, text, mentions[0])
    gang, kept = gang_of(job), kept_from(state, job, now_ms) if delayed else set[int]()
    with set_aside(state, gang, Reserved(state, delayed, now_ms)) as aside:
        if not delayed or fit(state, gang, kept | aside.avoid) is not None:
            return None
    expected = run_ms(state, job, SAFE)
    own = "it has no --time-limit or --estimate"
    if expected is not None:
        own = f"it may take {duration_text(expected - job.attained_ms)}"
    text = f"it fits only in room set aside for {names} and might delay them: {own}"
    return Reason(Waits.TURN, text, mentions[0])


def _position(state: State, job: Job) -> int:
    """How many jobs of its lane are before it."""
    line = state.queue.lanes[state.queue.lane[job.number]]
    return bisect_left(line, (state.ordering.job(job), job.number))
