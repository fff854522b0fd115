"""The passive half of a step: what do the nodes' inventories report that is new to the state?"""

from __future__ import annotations

from shoal.core.features.ends import lose, note_end, note_leaving
from shoal.core.features.health import UNSTARTED, take_faults
from shoal.core.features.lease import lease_ended
from shoal.core.features.service.cold import hear_starts
from shoal.core.features.sleep import hear_sleep
from shoal.core.scheduling.hangs import hear_hangs
from shoal.core.state.events.nodes import NodeJoined, NodeReady, NodeSilent
from shoal.core.state.events.runs import (
    JobAdopted,
    JobRunning,
    MemberExited,
    MemberLost,
    MembersStarted,
)
from shoal.core.state.own_members import Strays, present, split
from shoal.core.state.round import Round
from shoal.core.state.state import Node, State
from shoal.model.commands import Command, Fence
from shoal.model.durations import DAY_MS, duration_text
from shoal.model.health import Standing
from shoal.model.job import Job, MemberRef, MemberStatus, Phase
from shoal.model.node import NodeHealth, NodeIntent, kind_text
from shoal.model.progress import Beat, spent_of
from shoal.model.reason import quoted
from shoal.model.report import MemberExit, NodeReport, Report, Still

OUTDATED = "by an outdated command"
FENCE_MS = 10_000  # time for the engine to end a node
SUPPLIER_FENCE_MS = 60_000  # time for whoever brought a node to end its machine
FORGOTTEN_MS = 30 * DAY_MS  # a node that is lost for so long may be forgotten ...
GONE_MAX = 1_000  # ... and if there are more of them than this, sooner


def observe(round_: Round, report: Report) -> list[NodeReport]:
    """Record what changed; return the inventories that were new, with the members of their own
    nodes. All phases see these alone; `Round.strays` has the members that do not belong there."""
    for gone in report.gone:
        node = round_.state.nodes.get(gone.node)
        if node is not None and node.incarnation == gone.incarnation and not node.dead:
            why = "its agent was stopped" if node.leaving else gone.why
            _take_ends(round_, node, gone.exits)
            lose(round_, node, dead=True, why=why)
    for copied in report.copied:
        if copied.job in round_.state.jobs:
            round_.state.heard.copied[copied.job] = copied
    fresh = [own for said in report.nodes if (own := _hear(round_, said)) is not None]
    for still in report.still:
        _note_contact(round_, still)
    _expire_silent(round_, fences=report.fences)
    return fresh


def _hear(round_: Round, said: NodeReport) -> NodeReport | None:
    """Take in one inventory, unless something newer was already heard from that node."""
    state, node_id = round_.state, said.spec.id
    if _stale(state, said):
        return None
    _meet(round_, said)
    inventory, strays = split(said, state.placed[node_id])
    round_.strays[node_id] = strays
    state.heard.contacts.pop(node_id, None)  # the latest heard stands last
    state.heard.contacts[node_id] = round_.now_ms
    before = state.heard.getting.pop(node_id, None)
    if inventory.getting:
        state.heard.getting[node_id] = {one.ref: one.what for one in inventory.getting}
    if inventory.hangs or node_id in state.heard.hangs:
        hear_hangs(round_, node_id, inventory.hangs)
    state.heard.said[node_id] = (inventory.incarnation, inventory.sequence)
    if inventory.leases is None:
        state.heard.leasing.pop(node_id, None)
    else:
        state.heard.leasing[node_id] = round_.now_ms
    state.heard.versions[node_id] = inventory.shoal
    if inventory.holdings or node_id in state.heard.holdings:
        state.heard.hold(node_id, inventory.holdings)
    listens = inventory.listens
    state.heard.listens[node_id] = None if listens is None else frozenset(listens)
    if state.heard.starts and (before or inventory.getting or listens):
        getting = state.heard.getting.get(node_id, {})
        hear_starts(state, before or {}, getting, listens or (), round_.now_ms)
    node = state.nodes[node_id]
    _take_starts(round_, node, [*inventory.alive, *_ran(inventory.exits)])
    take_faults(round_, node, inventory.exits)
    _take_exits(round_, node, inventory.exits)
    _take_vanished(round_, node, inventory)
    hear_sleep(round_, node, inventory)
    if node.health is not NodeHealth.READY and not _strangers(state, inventory, strays):
        why = "heard again" if node.health is NodeHealth.SILENT else "healthy"
        round_.emit(NodeReady(at_ms=round_.now_ms, node=node_id, why=why))
    note_leaving(round_, node, inventory)
    note_end(round_, node, inventory)
    return inventory


def _note_contact(round_: Round, still: Still) -> None:
    """The node is there, and nothing has changed since the inventory that we know. Whatever else
    it means to say, its next complete report does."""
    heard, node = round_.state.heard, round_.state.nodes.get(still.node)
    if heard.said.get(still.node) != (still.incarnation, still.sequence):
        return
    if node is not None and node.health is NodeHealth.READY and still.node in heard.contacts:
        del heard.contacts[still.node]
        heard.contacts[still.node] = round_.now_ms


def _stale(state: State, inventory: NodeReport) -> bool:
    said = state.heard.said.get(inventory.spec.id)
    if said is not None and (inventory.incarnation, inventory.sequence) <= said:
        return True
    node = state.nodes.get(inventory.spec.id)
    if node is None or inventory.incarnation > node.incarnation:
        return False
    return node.dead or inventory.incarnation < node.incarnation


def _meet(round_: Round, inventory: NodeReport) -> None:
    """A node that is new, that restarted, or that was given up joins (again)."""
    state, now_ms = round_.state, round_.now_ms
    node = state.nodes.get(inventory.spec.id)
    same = node is None or node.spec == inventory.spec
    instead = ""
    if node is None:
        why = f"new node with {kind_text(inventory.spec)}"
        if instead := long_gone(state, now_ms):
            gone_ms = now_ms - state.nodes[instead].since_ms
            why += f"; {instead}, gone for {duration_text(gone_ms)}, is forgotten"
    elif inventory.incarnation > node.incarnation:
        why = "restarted"
        if node.health is not NodeHealth.LOST:
            _take_ends(round_, node, inventory.exits)
            why_lost = "restarted; no processes are left from before"
            lose(round_, node, dead=True, why=why_lost, back=True)
    elif node.health is NodeHealth.LOST:
        why = f"heard again {duration_text(now_ms - node.since_ms)} after it was given up"
    else:
        return
    round_.emit(
        NodeJoined(
            at_ms=now_ms,
            node=inventory.spec.id,
            spec=inventory.spec,
            incarnation=inventory.incarnation,
            instead=instead,
            why=why,
        )
    )
    if same:  # otherwise the jobs that were given up may not even fit it now
        _adopt(round_, state.nodes[inventory.spec.id], inventory)


def _take_ends(round_: Round, node: Node, exits: tuple[MemberExit, ...]) -> None:
    """Before a life of a node is written off: members that ended in it are not lost."""
    _take_starts(round_, node, _ran(exits))
    take_faults(round_, node, exits)
    _take_exits(round_, node, exits)


def _adopt(round_: Round, node: Node, inventory: NodeReport) -> None:
    """A job that was given up with this node and still waits goes on, if all of it is here.

    Not if it was asked to stop: its processes end by our own command, which is not a result."""
    own = (one.ref for one in inventory.exits if not one.stopped and not one.fault)
    here = {*inventory.alive, *own}
    here.difference_update(inventory.stopping)
    # Nor if it sleeps: its GPUs may be another's by now.
    here.difference_update(inventory.dozing, inventory.waking)
    here.difference_update(one.ref for one in inventory.asleep)
    for job_id in sorted({ref.job for ref in here}):
        job = round_.state.jobs.get(job_id)
        if job is None or job.phase is not Phase.WAITING:
            continue
        whole = job.members and all(
            MemberRef(job.id, job.attempt, number) in here
            and member.status is MemberStatus.LOST
            and member.slice.node == node.id
            for number, member in enumerate(job.members)
        )
        if whole and _still_free(round_.state, node, job):
            round_.emit(
                JobAdopted(
                    at_ms=round_.now_ms,
                    job=job.id,
                    attempt=job.attempt,
                    node=node.id,
                    why=_adoption(node, job, inventory),
                )
            )


def _adoption(node: Node, job: Job, inventory: NodeReport) -> str:
    if any(ref.job == job.id for ref in inventory.alive):
        return f"{node.id} had only lost contact: attempt {job.attempt} still runs there"
    return f"{node.id} is back; attempt {job.attempt} had ended there before the node was given up"


def _still_free(state: State, node: Node, job: Job) -> bool:
    """A late command may have started the job where something else was placed since."""
    room = state.rooms[node.index].copy()
    for member in job.members:
        room.change(member.slice, -1)
    return not room.awaited and not room.exclusive


def _ran(exits: tuple[MemberExit, ...]) -> list[MemberRef]:
    """A member that exited did start, unless its node reports that it could not."""
    return [exit_.ref for exit_ in exits if exit_.fault not in UNSTARTED]


def _take_starts(round_: Round, node: Node, seen: list[MemberRef]) -> None:
    """Members seen for the first time."""
    started: dict[str, list[int]] = {}
    placed = round_.state.placed[node.id]
    for ref in seen:
        if ref in placed and placed[ref].members[ref.member].status is MemberStatus.PENDING:
            started.setdefault(ref.job, []).append(ref.member)
    for job_id, numbers in started.items():
        job = round_.state.jobs[job_id]
        if job.phase is Phase.STARTING and _completes(job, numbers):
            round_.emit(JobRunning(at_ms=round_.now_ms, job=job_id, attempt=job.attempt))
        else:
            round_.emit(
                MembersStarted(
                    at_ms=round_.now_ms,
                    job=job_id,
                    attempt=job.attempt,
                    members=tuple(sorted(numbers)),
                )
            )


def _completes(job: Job, numbers: list[int]) -> bool:
    """All members have started. A gang that lost a member, or in which one could not start, never
    becomes whole."""
    last = job.members[-1]
    if last.status is MemberStatus.PENDING and len(job.members) - 1 not in numbers:
        return False  # often known without a look at all of a large gang
    awaited = 0
    for member in job.members:
        awaited += member.status is MemberStatus.PENDING
        if member.status is MemberStatus.LOST or (
            member.status is MemberStatus.EXITED and not member.started
        ):
            return False
    return awaited == len(numbers)


def _take_exits(round_: Round, node: Node, exits: tuple[MemberExit, ...]) -> None:
    for exit_ in exits:
        job = round_.state.placed[node.id].get(exit_.ref)
        if job is None:
            continue
        if exit_.lease_ms:
            lease_ended(round_, job, exit_.lease_ms)
        if exit_.stopped and job.phase is not Phase.STOPPING:
            how = "because its lease was renewed too late" if exit_.lease_ms else OUTDATED
            why = f"member {exit_.ref.member} was stopped on {node.id} {how}"
            _lose_member(round_, exit_.ref, node, why)
        else:
            if exit_.saved_step > job.saved_step:  # its node may have heard a later beat than we
                round_.state.heard.unsaved[job.id] = exit_.saved_step
            beat = _last_beat(round_.state, exit_.ref)
            last_step = exit_.step if exit_.step is not None or beat is None else beat.step
            spent = exit_.spent if exit_.spent is not None or beat is None else spent_of(beat)
            round_.emit(
                MemberExited(
                    at_ms=round_.now_ms,
                    job=exit_.ref.job,
                    attempt=exit_.ref.attempt,
                    member=exit_.ref.member,
                    node=node.id,
                    code=exit_.code,
                    why=quoted(exit_.why),
                    step=last_step,
                    stopped=exit_.stopped,
                    spent=spent if spent is not None and spent.steps else None,
                )
            )


def _last_beat(state: State, ref: MemberRef) -> Beat | None:
    watch = state.heard.watches.get(ref.job)
    same = watch is not None and watch.attempt == ref.attempt
    return watch.beats.get(ref.member) if watch is not None and same else None


def _take_vanished(round_: Round, node: Node, inventory: NodeReport) -> None:
    alive = set(inventory.alive)
    for ref, job in list(round_.state.placed[node.id].items()):
        if ref not in alive and job.members[ref.member].status is MemberStatus.ALIVE:
            why = f"member {ref.member} vanished from {node.id} without an exit code"
            _lose_member(round_, ref, node, why)


def _lose_member(round_: Round, ref: MemberRef, node: Node, why: str) -> None:
    round_.emit(
        MemberLost(
            at_ms=round_.now_ms,
            job=ref.job,
            attempt=ref.attempt,
            member=ref.member,
            node=node.id,
            why=why,
        )
    )


def _strangers(state: State, inventory: NodeReport, strays: Strays) -> bool:
    """Does anything run there that should not? Until it is gone, its GPUs are not free."""
    placed = state.placed[inventory.spec.id]
    return any(ref not in placed for ref in present(inventory, strays))


def fences_wanted(round_: Round) -> list[Command]:
    """For the engine: nodes of the controller's own machine that should be ended. Their jobs run
    elsewhere only when the nodes are gone, or cannot be ended."""
    return [
        Fence(node=node.id, incarnation=node.incarnation)
        for node in overdue(round_)
        if not node.spec.origin
    ]


def overdue(round_: Round) -> list[Node]:
    """Nodes that are silent beyond the grace time, longest unheard first."""
    state, latest_ms = round_.state, round_.now_ms - round_.policy.grace_ms
    found: list[Node] = []
    for node_id, heard_ms in state.heard.contacts.items():
        if heard_ms > latest_ms:
            break
        found.append(state.nodes[node_id])
    return found


def fence_ms_of(state: State, node: Node, *, fences: bool = True) -> int:
    """How long its end is waited for: by the supply that brought it, or by the controller on its
    own machine. A machine that joined is its owner's, and is not waited for."""
    if node.spec.order in state.orders:
        return SUPPLIER_FENCE_MS
    return FENCE_MS if fences and not node.spec.origin else 0


def _expire_silent(round_: Round, *, fences: bool) -> None:
    """A node without a report for a while is silent. It is given up only after the policy's grace
    time, and if it can be ended, after some time to end it."""
    state, policy, now_ms = round_.state, round_.policy, round_.now_ms
    overdue = []
    for node_id, heard_ms in state.heard.contacts.items():
        silent_ms = now_ms - heard_ms
        if silent_ms < policy.silent_after_ms:
            break
        overdue.append((state.nodes[node_id], silent_ms))
    for node, silent_ms in overdue:
        if silent_ms >= policy.grace_ms + fence_ms_of(state, node, fences=fences):
            why = f"silent for {duration_text(silent_ms)}, longer than the grace period"
            lose(round_, node, dead=False, why=why)
        elif node.health is not NodeHealth.SILENT:
            grace = duration_text(max(0, policy.grace_ms - silent_ms))
            why = f"silent for {duration_text(silent_ms)}; its jobs are kept for {grace}"
            round_.emit(NodeSilent(at_ms=now_ms, node=node.id, why=why))


def long_gone(state: State, now_ms: int) -> str:
    """The node whose place a new one may take, so that the state does not grow with every machine
    that ever joined: the one that is gone for longest; empty: none."""
    lost = (state.order[index] for index in state.lost)
    gone = sorted((node.since_ms, node.index) for node in lost if _gone(state, node))
    if not gone or (now_ms - gone[0][0] < FORGOTTEN_MS and len(gone) <= GONE_MAX):
        return ""
    named = _named(state)
    nodes = (state.order[index].id for _, index in gone)
    return next((node for node in nodes if node not in named), "")


def _gone(state: State, node: Node) -> bool:
    """Nobody means to have it again: what an operator has set, or found out, about a node stays
    until the node is removed, and so does a node of this machine."""
    if state.placed[node.id] or node.spec.order in state.orders:
        return False
    usual = node.intent is NodeIntent.OPEN and node.record.standing is Standing.OK
    own = not node.spec.origin or node.labels_set or node.taints_set
    return node.intent is NodeIntent.REMOVED or (usual and not own)


def _named(state: State) -> set[str]:
    """Nodes that live jobs remember, or that room is reserved on."""
    named = {
        node
        for job in state.jobs.values()
        for node in (*(member.slice.node for member in job.members), *job.missing_on)
    }
    for slices in state.claims.values():
        named.update(slice_.node for slice_ in slices)
    for reservation in state.reservations.values():
        named.update(state.order[index].id for index in reservation.nodes)
    for failures in state.failures.jobs.values():
        named.update(failure.node for failure in failures)
    return named
