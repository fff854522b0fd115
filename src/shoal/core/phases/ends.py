"""Until when nodes live: what they say of it, and what operators want (ADR 38)."""

from __future__ import annotations

from shoal.core.phases.round import Round
from shoal.core.state.state import Node
from shoal.model.durations import duration_text
from shoal.model.events import NodeEnding
from shoal.model.node import ENDS_WHY_MAX, End, NodeIntent
from shoal.model.report import Accepted, Answer, NodeReport, Refused, SetEnd
from shoal.model.supply import SupplyReport

# A report that was on its way for long makes the end look later than it is; smaller changes than
# these are not worth an event.
SOONER_MS = 1_000
LATER_MS = 5_000


def hear_notes(round_: Round, report: SupplyReport) -> None:
    """An engine sees what a node cannot: a spot notice, an eviction. It counts like the node's own
    word, with the node's next report."""
    round_.state.heard.announced[report.engine] = {
        note.node: _end_in(round_, note.ends_in_ms, note.ends_why)
        for note in report.notes
        if note.ends_in_ms is not None
    }


def note_end(round_: Round, node: Node, inventory: NodeReport) -> None:
    """Note what the node says about its own end, or the engine that brought it."""
    known = node.own_end
    said = [ends[node.id] for ends in round_.state.heard.announced.values() if node.id in ends]
    if inventory.ends_in_ms is not None:
        said.append(_end_in(round_, inventory.ends_in_ms, inventory.ends_why))
    if not said or node.intent is NodeIntent.REMOVED:
        if known is not None:
            _emit(round_, node, None, own=True, why="it no longer says that it ends")
        return
    end = min(said, key=lambda end: end.at_ms)
    if known is None or known.why != end.why:
        _emit(round_, node, end, own=True, why=end_text(end, round_.now_ms))
    elif not known.at_ms - SOONER_MS < end.at_ms < known.at_ms + LATER_MS:
        which = "sooner" if end.at_ms < known.at_ms else "later"
        why = f"{end_text(end, round_.now_ms)}, {which} than it said before"
        _emit(round_, node, end, own=True, why=why)


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
    end = End(max(request.at_ms, round_.now_ms), f"drain planned by {request.who}")
    _emit(round_, node, end, own=False, why=end_text(end, round_.now_ms))
    return Accepted(node.id)


def forget_set_end(round_: Round, node: Node, who: str) -> None:
    """An operator who opens a node wants no drain of it either."""
    if node.set_end is not None:
        _emit(round_, node, None, own=False, why=f"set open by {who}")


def end_text(end: End, now_ms: int) -> str:
    """For instance "ends in 40m (Slurm time limit)"."""
    why = f" ({end.why})" if end.why else ""
    left_ms = end.at_ms - now_ms
    return f"ends in {duration_text(left_ms)}{why}" if left_ms > 0 else f"ends now{why}"


def _end_in(round_: Round, in_ms: int, why: str) -> End:
    return End(round_.now_ms + max(0, in_ms), why[:ENDS_WHY_MAX])


def _emit(round_: Round, node: Node, end: End | None, *, own: bool, why: str) -> None:
    round_.emit(NodeEnding(at_ms=round_.now_ms, node=node.id, end=end, own=own, why=why))
