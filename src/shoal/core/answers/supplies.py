"""What supplies do for jobs that wait, in sentences."""

from __future__ import annotations

from shoal.core.features.ends import too_long
from shoal.core.scheduling.ends import outlives
from shoal.core.scheduling.packing import fits_empty
from shoal.core.state.queue import gang_of
from shoal.core.state.state import State
from shoal.core.state.supplied import headroom, kind_of, next_try_ms, orders_of
from shoal.model.durations import duration_text
from shoal.model.job import Job
from shoal.model.resources import plural
from shoal.model.supply import Order, OrderPhase, Supply

LINES_MAX = 3


def supplier_text(state: State, supply: Supply) -> str:
    """`Slurm`, or `Slurm (big)` if the supply has a name of its own."""
    engine = state.functions.suppliers.get(supply.engine, supply.engine)
    return engine if supply.name == supply.engine else f"{engine} ({supply.name})"


def asked_for(state: State, job: Job, now_ms: int) -> tuple[bool, str]:
    """Whether nodes that suit the job are on their way; and a clause about that, or about why none
    are, empty if no supply could bring any."""
    gang = gang_of(job)
    suiting = [one for one in state.policy.supply if fits_empty(gang, kind_of(state, one))]
    lasting = [one for one in suiting if not outlives(state, job, one)]
    coming = [text for one in lasting if (text := _coming(state, one, now_ms))]
    if coming:
        return True, "; ".join(coming[:LINES_MAX])
    texts = [
        obstacle(state, one, now_ms) if one in lasting else _short_lived(state, job, one)
        for one in suiting
    ]
    return False, "; ".join(texts[:LINES_MAX])


def _short_lived(state: State, job: Job, one: Supply) -> str:
    lives = f"nodes of {supplier_text(state, one)} live {duration_text(one.lasts_ms)}"
    return f"{lives}, and {too_long(state, job)}"


def _coming(state: State, one: Supply, now_ms: int) -> str:
    pending = [
        order
        for order in orders_of(state, one.name)
        if not order.release and len(state.brought.get(order.id, ())) < len(order.nodes)
    ]
    if not pending:
        return ""
    first = min(pending, key=lambda order: order.at_ms)
    nodes = sum(len(order.nodes) - len(state.brought.get(order.id, ())) for order in pending)
    ago = duration_text(now_ms - first.at_ms)
    text = f"asked {supplier_text(state, one)} for {plural(nodes, 'node')} {ago} ago"
    return f"{text}: {stage_text(state, first)}"


def stage_text(state: State, order: Order) -> str:
    """What an order waits for."""
    heard = state.heard.supplied.get(order.supply.engine)
    if heard is not None and heard.problem:
        return heard.problem
    if order.phase is OrderPhase.RUNNING:
        return "it has machines, and Shoal starts there"
    if order.phase is OrderPhase.PENDING:
        return order.reason or "it waits for machines"
    return "it has not answered yet"


def obstacle(state: State, one: Supply, now_ms: int) -> str:
    """Why the supply brings no more nodes now."""
    who = supplier_text(state, one)
    heard = state.heard.supplied.get(one.engine)
    if heard is None:
        return f"{who} has not been reached yet"
    if heard.problem:
        return f"{who} cannot be asked: {heard.problem}"
    again_ms = next_try_ms(state, one.name)
    if again_ms > now_ms:
        setback = state.setbacks[one.name]
        return f"{who} failed: {setback.why}; next try in {duration_text(again_ms - now_ms)}"
    if headroom(state, one) < one.lot:
        return f"{who} may bring no more nodes ({_bound(state, one)})"
    return f"{who} could bring nodes, but not enough of them within its limits"


def _bound(state: State, one: Supply) -> str:
    count = sum(len(order.nodes) for order in orders_of(state, one.name))
    if one.most - count < one.lot:
        return f"most is {one.most}"
    return "its price ceiling is reached"


def state_text(state: State, one: Supply, now_ms: int) -> str:
    """What the supply does now, in a few words."""
    if not any(known.name == one.name for known in state.policy.supply):
        return "no longer in the policy: its orders end when they are idle"
    coming = _coming(state, one, now_ms)
    if coming:
        return coming
    heard = state.heard.supplied.get(one.engine)
    troubled = heard is None or heard.problem or next_try_ms(state, one.name) > now_ms
    if troubled or headroom(state, one) < one.lot:
        return obstacle(state, one, now_ms)
    return "ready"


def supply_lines(state: State, now_ms: int) -> list[str]:
    """One line for each supply that does something or cannot, for a screen of the cluster."""
    lines = []
    for one in state.policy.supply:
        text = state_text(state, one, now_ms)
        count = sum(len(state.brought.get(order.id, ())) for order in orders_of(state, one.name))
        if count or text != "ready":
            lines.append(f"{one.name}: {plural(count, 'node')} of at most {one.most}; {text}")
    return lines
