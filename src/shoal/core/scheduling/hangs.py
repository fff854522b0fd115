"""Mounts of nodes that do not answer: jobs that need them start elsewhere until they do (ADR 135).

Nothing of it is stored: nodes say it again, to whichever controller they report to.
"""

from __future__ import annotations

from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.durations import duration_text
from shoal.model.job import Job, JobSpec
from shoal.model.reason import quoted
from shoal.model.report import Hung
from shoal.model.volume import parse

HANGS_MAX = 64  # of a node
PATH_MAX = 200  # characters that are shown
# Variables of a job that its node looks at before a member starts.
PLACES = ("SHOAL_CHECKPOINT_DIR", "SHOAL_OUTPUT")


def hear_hangs(round_: Round, node: str, hangs: tuple[Hung, ...]) -> None:
    """A change may let a job start, or keep it from a node."""
    heard, agenda = round_.state.heard, round_.state.agenda
    known = heard.hangs.pop(node, {})
    now = {hung: known.get(hung, round_.now_ms) for hung in hangs[:HANGS_MAX]}
    if now:
        heard.hangs[node] = now
    if now.keys() != known.keys():
        agenda.other_gaps()
        agenda.look_again(round_.now_ms)


def hung_for(state: State, job: Job) -> dict[int, str]:
    """Open nodes where something that the job needs does not answer, by index, and what it is."""
    found: dict[int, str] = {}
    for node_id, hangs in state.heard.hangs.items():
        node = state.nodes.get(node_id)
        if node is not None and node.schedulable:
            for hung in hangs:
                if hung.whole or _needs(job.spec, hung.path or hung.mount):
                    found[node.index] = node_id
    return found


def hung_text(state: State, node: str, now_ms: int, spec: JobSpec | None = None) -> str:
    """What does not answer on the node; only what such a job needs."""
    mounts = {
        hung.mount: since_ms
        for hung, since_ms in state.heard.hangs.get(node, {}).items()
        if spec is None or hung.whole or _needs(spec, hung.path or hung.mount)
    }
    return "; ".join(
        f"{quoted(mount[:PATH_MAX])} has not answered for {duration_text(now_ms - since_ms)}"
        for mount, since_ms in mounts.items()
    )


def hung_note(state: State, job: Job, now_ms: int) -> str:
    """What its members wait for, if their nodes say so."""
    nodes = dict.fromkeys(member.slice.node for member in job.members)
    for node in nodes if state.heard.hangs else ():
        if text := hung_text(state, node, now_ms, job.spec):
            return f"{node}: {text}"
    return ""


def _needs(spec: JobSpec, path: str) -> bool:
    named = ["" if spec.package else spec.workdir, *spec.command[:1]]
    named += [parse(text).source for text in spec.volumes]
    named += [spec.env.get(name, "") for name in PLACES]
    return any(f"{one}/".startswith(f"{path}/") for one in named)
