"""Until when nodes live: what they say of it, what operators want, and the drain before it."""

from __future__ import annotations

from shoal.core.scheduling.ends import end_text
from shoal.core.state.ends import leaving_times, margin_ms
from shoal.core.state.round import Round
from shoal.core.state.state import Node
from shoal.model.events import NodeEnding, NodeIntended
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
            _emit(round_, node, None, own=True, why="it no longer says that it ends")
        elif node.closed_from is not None and node.end is None:  # that was the end of its last life
            _intend(round_, node, node.closed_from, "it does not end any more")
        return
    end = min(said, key=lambda end: end.at_ms)
    if known is None or known.why != end.why:
        _emit(round_, node, end, own=True, why=end_text(end, round_.now_ms))
    elif not known.at_ms - SOONER_MS < end.at_ms < known.at_ms + LATER_MS:
        which = "sooner" if end.at_ms < known.at_ms else "later"
        why = f"{end_text(end, round_.now_ms)}, {which} than it said before"
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
            return Accepted(node.id, "no drain is planned for it")
        _emit(round_, node, None, own=False, why=f"taken back by {request.who}")
        return Accepted(node.id)
    if node.intent is NodeIntent.DRAINING and node.closed_from is None:
        return Accepted(node.id, "it is already draining")
    said = f"drain planned by {request.who}{reason(request.why)}"
    end = End(max(request.at_ms, round_.now_ms), said[:ENDS_WHY_MAX])
    _emit(round_, node, end, own=False, why=end_text(end, round_.now_ms))
    return Accepted(node.id)


def forget_set_end(round_: Round, node: Node, who: str) -> bool:
    """An operator who opens a node wants no drain of it either. Was one planned?"""
    if node.set_end is None:
        return False
    _emit(round_, node, None, own=False, why=f"set open by {who}")
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
    why = end_text(end, now_ms) if end is not None else "it does not end any more"
    _intend(round_, node, before, why)


def _intend(
    round_: Round, node: Node, intent: NodeIntent, why: str, *, ending: bool = False
) -> None:
    round_.emit(
        NodeIntended(at_ms=round_.now_ms, node=node.id, intent=intent, ending=ending, why=why)
    )
