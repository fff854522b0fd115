"""What members' beats and nodes' checks show: saved work, slow members, hangs, bad nodes. Exits
that a node is to blame for: the job runs elsewhere, and no retry is used."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.books import hang, quarantine, scoring, spending
from shoal.core.books.baseline import judge
from shoal.core.books.hang import Pace
from shoal.core.books.quarantine import rule_of
from shoal.core.books.scoring import Change
from shoal.core.scheduling.again import lacking
from shoal.core.scheduling.capacity import held_when_empty
from shoal.core.state.events.nodes import NodeChecked, NodeJudged
from shoal.core.state.events.runs import JobStopping, JobUnsaved, MemberExited, MemberLost
from shoal.core.state.heard import Watch
from shoal.core.state.queue import gang_of
from shoal.core.state.round import Round
from shoal.core.state.state import Node, State
from shoal.model.commands import Check
from shoal.model.health import CheckResult, HealthRule, Record, Standing, Suspicion
from shoal.model.job import Fault, Job, MemberStatus, Phase, StopCause
from shoal.model.node import NodeIntent
from shoal.model.policy import Policy
from shoal.model.progress import Progress
from shoal.model.reason import quoted
from shoal.model.report import MemberExit, NodeReport

# A gang that has to stay on a node in quarantine, because there is no room elsewhere, is looked
# at again after this long.
STILL_THERE_MS = 30_000
# A node answers each command with a report, and a check takes seconds: repeated with every report,
# the two would answer each other as fast as they can.
CHECK_AGAIN_MS = 1_000
# A member may save as often as it likes, but each save that is noted is an event forever. Those in
# between are noted with the next one, or before anything else happens to the job.
SAVED_MS = 5_000
# What could not be saved is said again after twice this; then more rarely, up to an hour.
UNSAVED_MS, UNSAVED_MS_MAX = 30_000, 3_600_000
# A job that failed on a full disk may have filled the disk itself: it must not do so on every node
# of the cluster.
SICK_MAX = 3
UNSTARTED = (Fault.START, Fault.MISSING, Fault.PORT, Fault.HANGS, Fault.LEASE)


def watch(round_: Round, inventories: list[NodeReport]) -> None:
    """Take in what was reported, and what the time alone shows."""
    for inventory in inventories:
        node = round_.state.nodes[inventory.spec.id]
        for progress in inventory.progress:
            _hear(round_, node, progress)
        for ref in inventory.ended:
            watch_ = round_.state.heard.watches.get(ref.job)
            if watch_ is not None and watch_.attempt == ref.attempt:
                watch_.ended = True
        for result in inventory.checks:
            _take_check(round_, node, result)
    _let_go(round_)
    _find_hangs(round_)
    _pass_time(round_)


def _let_go(round_: Round) -> None:
    """Members that go on are no longer compared with members that have ended."""
    if not round_.state.heard.watches:
        return
    for event in round_.events:
        if type(event) is MemberExited:
            watch_ = round_.state.heard.watches.get(event.job)
            if watch_ is not None and watch_.attempt == event.attempt:
                hang.leave(watch_.pace, event.member)
                scoring.leave(watch_.gang, event.member, rule_of(round_.policy))
                watch_.slow.pop(event.member, None)
                watch_.recent.pop(event.member, None)


def check_id(record: Record) -> str:
    """The id of the check that the record wants: the same until it is answered or given up."""
    return f"h{record.check_since_ms}"


def paced(round_: Round, checks: Sequence[Check]) -> list[Check]:
    """Without those that were sent a moment ago. A command that got lost is sent again after a
    later report."""
    sent, now_ms = round_.state.heard.checks_sent, round_.now_ms
    if not sent and not checks:
        return []
    for key in [key for key, at_ms in sent.items() if not 0 <= now_ms - at_ms < CHECK_AGAIN_MS]:
        del sent[key]
    due = [check for check in checks if (check.node, check.id) not in sent]
    sent.update({(check.node, check.id): now_ms for check in due})
    return due


def checks_wanted(round_: Round, inventories: list[NodeReport]) -> list[Check]:
    """For nodes that are suspected now, and for those that reported and have not answered yet; sent
    again after every report."""
    state = round_.state
    wanted: list[Check] = []
    if not state.heard.asked and not state.troubled:
        return wanted
    checked = {one.spec.id: {result.id for result in one.checks} for one in inventories}
    judged = (event.node for event in round_.events if type(event) is NodeJudged)
    for node_id in dict.fromkeys((*checked, *judged)):
        node = state.nodes[node_id]
        ids = [state.heard.asked[node.id]] if node.id in state.heard.asked else []
        if quarantine.wants_check(node.record) and not node.record.network:
            ids.append(check_id(node.record))
        wanted += [
            Check(node=node.id, incarnation=node.incarnation, id=id_)
            for id_ in ids[:1]
            if id_ not in checked.get(node_id, ())
        ]
    return wanted


def next_look_ms(state: State, policy: Policy) -> int | None:
    """When something is due even if nothing is reported."""
    if not state.troubled:
        return state.agenda.watch_ms
    times = [] if state.agenda.watch_ms is None else [state.agenda.watch_ms]
    rule = rule_of(policy)
    for node_id in state.troubled:
        node = state.nodes[node_id]
        due_ms = quarantine.wake_ms(node.record, rule)
        if waits_for_tour(state, node.record):
            continue
        if due_ms is not None and node.intent is not NodeIntent.REMOVED:
            times.append(due_ms)
    return min(times, default=None)


def waits_for_tour(state: State, record: Record) -> bool:
    """Only one tour runs at a time: the check of its links is not late while another runs."""
    running = any(tour.ended_ms is None for tour in state.heard.tours.values())
    return running and record.network and quarantine.wants_check(record)


def suspect(round_: Round, node: Node, news: Suspicion) -> None:
    rule = rule_of(round_.policy)
    record = quarantine.suspected(node.record, news, rule, room=room_left(round_, rule))
    judge_node(round_, node, record)


def judge_node(round_: Round, node: Node, record: Record) -> None:
    if record != node.record:
        round_.emit(NodeJudged(at_ms=round_.now_ms, node=node.id, record=record, why=record.why))


def room_left(round_: Round, rule: HealthRule) -> bool:
    """May one more node be quarantined? Where many seem slow at once, no node is to blame."""
    state = round_.state
    quarantined = sum(
        state.nodes[node_id].record.standing is Standing.QUARANTINED
        for node_id in state.troubled
        if node_id in state.heard.contacts
    )
    # Nodes that are lost or removed are not counted on either side.
    return quarantine.room_for(quarantined, len(state.heard.contacts), rule)


def _hear(round_: Round, node: Node, progress: Progress) -> None:
    state, now_ms = round_.state, round_.now_ms
    job = state.placed[node.id].get(progress.ref)
    if job is None or job.phase is not Phase.RUNNING:
        return
    watch_ = state.heard.watches.get(job.id)
    if watch_ is None or watch_.attempt != job.attempt:
        watch_ = Watch(attempt=job.attempt, pace=Pace(began_ms=now_ms))
        state.heard.watches[job.id] = watch_
    rule = rule_of(round_.policy)
    member, beat = progress.ref.member, progress.beat
    watch_.beats[member] = beat
    spending.hear(watch_.recent, member, beat, now_ms, rule, naps=job.naps)
    quiet_ms, timed = progress.quiet_ms, True
    if job.naps and job.awake_ms is not None:  # its sleep is not a part of a step
        awake_ms = max(0, now_ms - job.awake_ms)
        quiet_ms, timed = min(quiet_ms, awake_ms), quiet_ms < awake_ms
    hang.hear(watch_.pace, member, beat, quiet_ms, now_ms, timed=timed)
    due_ms = hang.wake_ms(watch_.pace, rule, job.hangs)
    if state.agenda.watch_ms is None or due_ms < state.agenda.watch_ms:
        state.agenda.watch_ms = due_ms
    if beat.saved_step > max(job.saved_step, state.heard.unsaved.get(job.id, 0)):
        state.heard.unsaved[job.id] = beat.saved_step
    if not member and (beat.unsaved or watch_.unsaved):
        _hear_unsaved(round_, job, watch_, beat.unsaved)
    if job.id in state.heard.unsaved and (
        job.saved_ms is None or now_ms - job.saved_ms >= SAVED_MS or now_ms < job.saved_ms
    ):
        round_.note_saved(job)
    for change in scoring.hear(watch_.gang, member, beat, now_ms, rule):
        _take_change(round_, job, watch_, change)


def _hear_unsaved(round_: Round, job: Job, watch_: Watch, failed: int) -> None:
    """Said at once, and then ever more rarely."""
    if failed > watch_.unsaved and round_.now_ms >= watch_.unsaved_ms:
        event = JobUnsaved(at_ms=round_.now_ms, job=job.id, attempt=job.attempt, failed=failed)
        round_.emit(event)
        watch_.unsaved_ms = round_.now_ms + min(UNSAVED_MS << min(failed, 16), UNSAVED_MS_MAX)
    watch_.unsaved = failed


def _take_change(round_: Round, job: Job, watch_: Watch, change: Change) -> None:
    if not change.slow:
        watch_.slow.pop(change.member, None)
        return
    watch_.slow[change.member] = change
    node = round_.state.nodes[job.members[change.member].slice.node]
    why = (
        f"member {change.member} of {job.label} takes {change.own_us / 1000:.0f} ms of its own a "
        f"step where the gang takes {change.gang_us / 1000:.0f} ms"
    )
    suspect(
        round_,
        node,
        Suspicion(
            at_ms=round_.now_ms,
            why=why,
            job=job.id,
            attempt=job.attempt,
            member=change.member,
            # Tenants that are kept apart might agree with themselves; the operator does not.
            owner=job.spec.owner if job.spec.tenant in round_.state.identity.tenants else "",
        ),
    )


def _take_check(round_: Round, node: Node, result: CheckResult) -> None:
    state, now_ms = round_.state, round_.now_ms
    by_hand = state.heard.asked.get(node.id) == result.id
    wanted = quarantine.wants_check(node.record) and check_id(node.record) == result.id
    if result.pairs or result.collectives:
        return  # they belong to a tour, and never enter the log
    if not by_hand and not wanted:
        return
    verdict = judge(state.fleet, node.id, node.spec.kind, result)
    if by_hand:
        del state.heard.asked[node.id]
        state.heard.verdicts[node.id] = (result.id, result, verdict)
    round_.emit(
        NodeChecked(
            at_ms=now_ms, node=node.id, result=result, passed=verdict.passed, why=verdict.why
        )
    )
    rule = rule_of(round_.policy)
    # A probe that cannot run says nothing against a node, and nothing for one in quarantine.
    in_quarantine = node.record.standing is Standing.QUARANTINED
    passed = verdict.passed and not (result.error and in_quarantine)
    if in_quarantine and not passed and not wanted:
        return  # checking it by hand does not make it stay longer
    record = quarantine.checked(
        node.record, passed, verdict.why, now_ms, rule, room=room_left(round_, rule)
    )
    judge_node(round_, node, record)


def _find_hangs(round_: Round) -> None:
    """Look at all watched jobs, but only when one of them may be due."""
    state, now_ms = round_.state, round_.now_ms
    if state.agenda.watch_ms is None or now_ms < state.agenda.watch_ms:
        return
    state.agenda.watch_ms = None
    rule = rule_of(round_.policy)
    for job_id, watch_ in list(state.heard.watches.items()):
        job = state.jobs[job_id]
        over = watch_.ended or any(member.over for member in job.members)
        if job.phase is not Phase.RUNNING or over:
            continue
        found = hang.hang(watch_.pace, now_ms, rule, job.hangs)
        if found is not None and all(
            _heard_of(round_, member.slice.node) for member in job.members
        ):
            watch_.stuck = found.stuck
            round_.emit(
                JobStopping(
                    at_ms=now_ms,
                    job=job.id,
                    attempt=job.attempt,
                    cause=StopCause.HANG,
                    why=found.why,
                )
            )
            continue
        due_ms = max(now_ms + 1_000, hang.wake_ms(watch_.pace, rule, job.hangs))
        if state.agenda.watch_ms is None or due_ms < state.agenda.watch_ms:
            state.agenda.watch_ms = due_ms


def _heard_of(round_: Round, node_id: str) -> bool:
    """A node out of contact reports no steps: that is not a hang."""
    heard_ms = round_.state.heard.contacts.get(node_id, 0)
    return round_.now_ms - heard_ms < round_.policy.silent_after_ms


def _pass_time(round_: Round) -> None:
    state, now_ms = round_.state, round_.now_ms
    if not state.troubled:
        return
    rule = rule_of(round_.policy)
    for node_id in list(state.troubled):
        node = state.nodes[node_id]
        if node.intent is NodeIntent.REMOVED:
            continue  # nobody answers there; its quarantine waits for it
        if not waits_for_tour(state, node.record):
            judge_node(round_, node, quarantine.passed_by(node.record, now_ms, rule))
        if node.record.standing is Standing.QUARANTINED and state.placed[node_id]:
            for job in state.placed[node_id].values():
                state.agenda.attention[job.id] = None
            round_.look_again(now_ms + STILL_THERE_MS)


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
    judge_node(round_, node, record)


def _is_nodes(state: State, job: Job, node: Node, exit_: MemberExit) -> bool:
    match exit_.fault:
        case Fault.START | Fault.PORT | Fault.TAKEN | Fault.HANGS:
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
