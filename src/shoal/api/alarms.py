"""What `shoal status` warns of: what was raised, and what the state shows."""

from __future__ import annotations

from shoal.control.loop import ControlLoop
from shoal.core.scheduling.hangs import hung_text
from shoal.model.resources import plural

SHOWN = 3  # nodes with mounts that do not answer, and jobs that cannot save


def alarm_lines(loop: ControlLoop) -> tuple[str, ...]:
    return (*loop.alarms.texts, *_hanging(loop), *unsaved_lines(loop))


def _hanging(loop: ControlLoop) -> list[str]:
    nodes, now_ms = list(loop.state.heard.hangs), loop.clock.now_ms()
    lines = [f"{node}: {hung_text(loop.state, node, now_ms)}" for node in nodes[:SHOWN]]
    more = len(nodes) - len(lines)
    return [*lines, f"mounts of {plural(more, 'other node')} do not answer"] if more else lines


def unsaved_lines(loop: ControlLoop) -> list[str]:
    """Jobs whose newest saves have failed."""
    watches = loop.state.heard.watches.items()
    found = [(job, watch.unsaved) for job, watch in watches if watch.unsaved]
    lines = []
    for job, count in found[:SHOWN]:
        what = "last save" if count == 1 else f"last {count} saves"
        lines.append(f"{job}: its {what} failed; see: shoal logs {job}")
    more = len(found) - len(lines)
    return [*lines, f"{plural(more, 'other job')} cannot save"] if more else lines
