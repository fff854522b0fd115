"""Nodes that go: until when they live, as they, their engine or an operator say; the drain before
that; nodes that ask to leave, whose order is over, or that are lost; and jobs that they are too
short-lived for."""

from __future__ import annotations

from collections.abc import Collection

from shoal.core.features.identity import void_keys
from shoal.core.scheduling.ends import end_text, goes_on, left_ms, need_ms, too_short
from shoal.core.scheduling.fit import members_here
from shoal.core.state.ends import leaving_times, margin_ms
from shoal.core.state.events.nodes import NodeEnding, NodeIntended, NodeLost
from shoal.core.state.queue import gang_of
from shoal.core.state.round import Round
from shoal.core.state.state import Node, State
from shoal.model.commands import Command, Dismiss
from shoal.model.durations import duration_text
from shoal.model.health import Standing
from shoal.model.job import Job
from shoal.model.node import ENDS_WHY_MAX, TOLD_TO_END, End, NodeHealth, NodeIntent
from shoal.model.reason import quoted
from shoal.model.report import Accepted, Answer, NodeReport, Refused, SetEnd
from shoal.model.supply import SupplyReport

# A report that was on its way for long makes the end look later than it is; smaller changes than
# these are not worth an event.
SOONER_MS = 1_000
LATER_MS = 5_000
OPEN = (NodeIntent.OPEN, NodeIntent.CORDONED)  # jobs may be there


def hear_notes(round_: Round, report: SupplyReport) -> None:
    """An engine sees what a node cannot: a spot notice, an eviction. It counts like the node's own
    word."""
    state = round_.state
    before = state.heard.announced.get(report.engine, {})
    ends = {
        note.node: _end_in(round_, note.ends_in_ms, note.ends_why)
        for note in report.notes
        if note.ends_in_ms is not None
    }
    state.heard.announced[report.engine] = ends
    for name in dict.fromkeys((*before, *ends)):
        node = state.nodes.get(name)
        if node is not None and node.health is not NodeHealth.LOST:
            _note(round_, node)


def note_end(round_: Round, node: Node, inventory: NodeReport) -> None:
    """Note what the node says about its own end."""
    said = round_.state.heard.own_ends
    said.pop(node.id, None)
    if inventory.ends_in_ms is not None:
        said[node.id] = _end_in(round_, inventory.ends_in_ms, inventory.ends_why)
    _note(round_, node)


def _note(round_: Round, node: Node) -> None:
    """The earliest of what the node and its engine say."""
    heard, known = round_.state.heard, node.own_end
    said = [
        ends[node.id] for ends in (heard.own_ends, *heard.announced.values()) if node.id in ends
    ]
    order = round_.state.orders.get(node.spec.order)
    if order is not None and known is not None and order.supply.engine not in heard.announced:
        # Since this controller started, the engine has not spoken, and may still know of the end.
        said.append(known)
    if not said or node.intent is NodeIntent.REMOVED:
        if known is not None:
            _emit(round_, node, None, own=True, why="it no longer has an end time")
        elif node.closed_from is not None and node.end is None:  # that was the end of its last life
            _intend(round_, node, node.closed_from, "it no longer has an end time")
        return
    end = min(said, key=lambda end: end.at_ms)
    if known is None or known.why != end.why:
        _emit(round_, node, end, own=True, why=end_text(end, round_.now_ms))
    elif not known.at_ms - SOONER_MS < end.at_ms < known.at_ms + LATER_MS:
        which = "sooner" if end.at_ms < known.at_ms else "later"
        why = f"{end_text(end, round_.now_ms)}, {which} than announced"
        _emit(round_, node, end, own=True, why=why)


def reason(text: str) -> str:
    """What an operator gave as a reason, for the end of a sentence."""
    words = quoted(" ".join(text.split()))
    return f": {words}" if words else ""


def set_end(round_: Round, request: SetEnd) -> Answer:
    """An operator wants the node to be free at some time, or takes that back."""
    node = round_.state.nodes.get(request.node)
    if node is None or node.intent is NodeIntent.REMOVED:
        return Refused("node", f"there is no node {request.node}", missing=True)
    if request.at_ms is None:
        if node.set_end is None:
            return Accepted(node.id, "no drain is scheduled")
        _emit(round_, node, None, own=False, why=f"taken back by {request.who}")
        return Accepted(node.id)
    if node.intent is NodeIntent.DRAINING and node.closed_from is None:
        return Accepted(node.id, "it is already draining")
    said = f"drain scheduled by {request.who}{reason(request.why)}"
    end = End(max(request.at_ms, round_.now_ms), said[:ENDS_WHY_MAX])
    _emit(round_, node, end, own=False, why=end_text(end, round_.now_ms))
    return Accepted(node.id)


def forget_set_end(round_: Round, node: Node, who: str) -> bool:
    """An operator who opens a node wants no drain of it either. Was one planned?"""
    if node.set_end is None:
        return False
    _emit(round_, node, None, own=False, why=f"opened by {who}")
    return True


def close_ending(round_: Round) -> None:
    """Nodes whose end is near: `heal` and `serve` look at the jobs that have to leave by now, and a
    node that has only its margin left is drained."""
    state, now_ms = round_.state, round_.now_ms
    look_ms = state.agenda.ends_ms
    if not state.endings or look_ms is None or now_ms < look_ms:
        return
    state.agenda.ends_ms = None
    for at_ms, index in list(state.endings):
        node = state.order[index]
        if at_ms - margin_ms(round_.policy) <= now_ms and node.intent in OPEN:
            assert node.end is not None
            _intend(round_, node, NodeIntent.DRAINING, end_text(node.end, now_ms), ending=True)
        for when_ms, job_id in leaving_times(state, node):
            if when_ms > now_ms:
                state.agenda.look_at_ends(when_ms)
            elif job_id:
                state.agenda.attention[job_id] = None


def has_ended(node: Node) -> bool:
    """It was drained for an end of its own: if it is gone now, it is gone for good. A machine that
    nobody lent us and that was shut down may be started again, and then needs its key."""
    if node.closed_from is None or node.own_end is None or node.own_end is not node.end:
        return False
    return bool(node.spec.order) or node.own_end.why != TOLD_TO_END


def _end_in(round_: Round, in_ms: int, why: str) -> End:
    return End(round_.now_ms + max(0, in_ms), why[:ENDS_WHY_MAX])


def _emit(round_: Round, node: Node, end: End | None, *, own: bool, why: str) -> None:
    """A node that was drained for its end is open again if that is far away now."""
    now_ms = round_.now_ms
    round_.emit(NodeEnding(at_ms=now_ms, node=node.id, end=end, own=own, why=why))
    before, end = node.closed_from, node.end
    if before is None or (end is not None and end.at_ms - 2 * margin_ms(round_.policy) < now_ms):
        return
    why = end_text(end, now_ms) if end is not None else "it no longer has an end time"
    _intend(round_, node, before, why)


def _intend(
    round_: Round,
    node: Node,
    intent: NodeIntent,
    why: str,
    *,
    ending: bool = False,
    leaving: bool = False,
) -> None:
    round_.emit(
        NodeIntended(
            at_ms=round_.now_ms,
            node=node.id,
            intent=intent,
            leaving=leaving,
            ending=ending,
            why=why,
        )
    )


def note_leaving(round_: Round, node: Node, inventory: NodeReport) -> None:
    """Note what the node asks for. It is removed when nothing runs there and all exits are in."""
    if inventory.leaving and not node.leaving:
        _intend(round_, node, NodeIntent.DRAINING, "leaving the cluster", leaving=True)
    elif not inventory.leaving and node.leaving:
        _intend(round_, node, NodeIntent.OPEN, "no longer leaving the cluster")
    empty = not (inventory.alive or inventory.exits or round_.state.placed[node.id])
    if inventory.leaving and empty and node.intent is NodeIntent.DRAINING:
        _intend(round_, node, NodeIntent.REMOVED, "left the cluster", leaving=True)


def dismissals(state: State, inventories: list[NodeReport]) -> list[Command]:
    """Sent after each report until the node is gone."""
    found: list[Command] = []
    for inventory in inventories:
        node = state.nodes[inventory.spec.id]
        if node.intent is NodeIntent.REMOVED and (inventory.leaving or is_stray(state, node)):
            found.append(Dismiss(node=node.id, incarnation=inventory.incarnation))
    return found


def is_stray(state: State, node: Node) -> bool:
    """Was it brought by an order that is over? Its supplier knows of nothing to end there."""
    return bool(node.spec.order) and node.spec.order not in state.orders


def lose(round_: Round, node: Node, *, dead: bool, why: str, back: bool = False) -> None:
    """A node that wanted to leave and is gone has left, even if jobs still ran on it. So has one
    that ended when it said it would. `back`: its next life speaks already, so it has not ended for
    good."""
    ended = not back and has_ended(node)
    round_.emit(
        NodeLost(
            at_ms=round_.now_ms,
            node=node.id,
            incarnation=node.incarnation,
            dead=dead,
            why=why,
        )
    )
    if ended or (node.leaving and node.intent is not NodeIntent.REMOVED):
        left = "left the cluster while jobs ran on it"
        left = "ended as announced" if ended else left
        _intend(round_, node, NodeIntent.REMOVED, left, leaving=True)
    void_keys(round_, node)


def ends_first(state: State, job: Job, other: Collection[int], now_ms: int) -> str:
    """For instance "n3 has room, but ends in 40m (Slurm time limit), and this job is expected to
    run 2h"; empty if no such node has room. `other`: nodes that are closed to it anyway."""
    gang = gang_of(job)
    found = [
        state.order[index]
        for index in sorted(too_short(state, job, now_ms) - set(other))
        if gang.demand.suits((room := state.rooms[index]).kind)
        and members_here(gang, room.kind, room.level)
    ]
    ends = [(node.end, node.id) for node in found if node.end is not None]
    if not ends:
        return ""
    end, name = max(ends, key=lambda entry: entry[0].at_ms)
    more = len(ends) - 1
    have = f"{name} and {more} more have room, but {name}" if more else f"{name} has room, but"
    return f"{have} {end_text(end, now_ms)}, and {too_long(state, job)}"


def too_long(state: State, job: Job) -> str:
    left = left_ms(state, job)
    if goes_on(job):
        return f"a start pays only if {duration_text(need_ms(state, job) or 0)} are left"
    advice = "give it a time limit or an estimate" if left is None else "give it a shorter one"
    if left is not None and not job.spec.time_limit_ms:
        advice = "give it a time limit"
    advice += ", or save its work and make it preemptible"
    if left is None:
        needs = need_ms(state, job)
        only = f", so {duration_text(needs)} have to be left" if needs is not None else ""
        return f"the run time of this job is unknown{only}; {advice}"
    return f"this job is expected to run {duration_text(left)}; {advice}"


# -- what always holds, in code that shares nothing with the code above ----------------------------


def ends_violation(state: State) -> str:
    ends = [
        (
            sorted(end.at_ms for end in (node.own_end, node.set_end) if end is not None)[0],
            node.index,
        )
        for node in state.order
        if node.own_end is not None or node.set_end is not None
    ]
    offered = [
        (at_ms, index)
        for at_ms, index in sorted(ends)
        if state.order[index].health is NodeHealth.READY
        and state.order[index].intent is NodeIntent.OPEN
        and state.order[index].record.standing is not Standing.QUARANTINED
    ]
    if (sorted(ends), offered) != (state.endings, state.open_endings):
        return "the nodes that end are not in the order of their ends"
    for node in state.order:
        if node.closed_from is not None and node.intent is not NodeIntent.DRAINING:
            return f"{node.spec.id} was drained for its end, but is {node.intent.value}"
    return ""
