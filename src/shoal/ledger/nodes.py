"""What nobody holds: free, wanted in vain, set aside, or out of reach; and who waits for it."""

from __future__ import annotations

from shoal.ledger.accounts import HOUR_MS, Account
from shoal.ledger.mirror import Job, Kind, Machine, Mirror, Node, Want
from shoal.ledger.pages import Pages
from shoal.model.resources import WHOLE_GPU_MILLI


def settle_nodes(pages: Pages) -> None:
    for node_id, node in pages.mirror.nodes.items():
        settle_node(pages, node_id, node)


def settle_node(pages: Pages, node_id: str, node: Node) -> None:
    """Book what is free on it, and its capacity, up to now. It is within one hour, for all
    nodes are settled when one ends."""
    now_ms = pages.mirror.now_ms
    passed_ms = now_ms - node.mark_ms
    kind = pages.mirror.kinds[node.kind]
    wanted_ms, node.wanted_at = kind.wanted_ms - node.wanted_at, kind.wanted_ms
    hour, node.mark_ms = node.mark_ms // HOUR_MS, now_ms
    if not passed_ms or not node.known or not node.gpus:
        return
    capacity = pages.adds.capacity
    key = (hour, node_id)
    capacity[key] = capacity.get(key, 0) + node.gpus * WHOLE_GPU_MILLI * passed_ms
    free, claimed = room_of(node)
    if node.away is not None:
        pages.add(hour, node_id, "", node.away, (free + claimed) * passed_ms)
        return
    pages.add(hour, node_id, "", Account.RESERVED, claimed * passed_ms)
    if node.whole:
        pages.add(hour, node_id, "", Account.FRAGMENTED, free * passed_ms)
    elif node.reserved:
        pages.add(hour, node_id, "", Account.RESERVED, free * passed_ms)
    else:
        pages.add(hour, node_id, "", Account.FRAGMENTED, free * wanted_ms)
        pages.add(hour, node_id, "", Account.FREE, free * (passed_ms - wanted_ms))


def new_node(pages: Pages, node_id: str, model: str, gpus: int, memory_mb: int) -> Node:
    """A node, or a node's next life; its time is booked from now on."""
    mirror = pages.mirror
    key = f"{model}/{memory_mb}"
    if key not in mirror.kinds:
        mirror.kinds[key] = Kind(model, memory_mb)
        judge_wants(pages.mirror)
    before = mirror.nodes.get(node_id)
    node = Node(
        gpus=gpus,
        kind=key,
        mark_ms=mirror.now_ms,
        wanted_at=mirror.kinds[key].wanted_ms,
        held=[0] * gpus,
        claimed=[0] * gpus,
    )
    if before is not None:
        node.quarantined, node.reserved = before.quarantined, before.reserved
        node.intent = "open" if before.intent == "removed" else before.intent
    mirror.nodes[node_id] = node
    pages.turn()  # what it had before belongs to what it was
    pages.adds.machines[node_id] = Machine(model, gpus)
    return node


def room_of(node: Node) -> tuple[int, int]:
    """What nobody holds of its GPUs, in thousandths: free, and claimed for somebody."""
    if not any(node.claimed):  # nearly always, and much cheaper
        return node.gpus * WHOLE_GPU_MILLI - sum(node.held), 0
    free = claimed = 0
    for held, wanted in zip(node.held, node.claimed, strict=True):
        left = WHOLE_GPU_MILLI - held
        taken = min(wanted, left)
        claimed += taken
        free += left - taken
    return free, claimed


def stands(mirror: Mirror, job: Job) -> None:
    """It wants room from now on."""
    if job.gpus and not job.queued:
        job.queued = True
        _want(mirror, job, 1)


def leaves(mirror: Mirror, job: Job) -> None:
    if job.queued:
        job.queued = False
        _want(mirror, job, -1)


def _want(mirror: Mirror, job: Job, change: int) -> None:
    wants = mirror.wants
    key = "\n".join((job.owner.tenant, str(job.memory_mb), *job.models))
    want = wants.get(key)
    if want is None:
        want = wants[key] = Want(job.owner.tenant, job.models, job.memory_mb)
    want.jobs += change
    if want.jobs == 0:
        del wants[key]
    if want.jobs <= 1:
        judge_wants(mirror)


def is_held(mirror: Mirror, tenant: str) -> bool:
    """Is its budget, or that of a tenant above it, used up?"""
    for _ in range(len(mirror.parents) + 1):
        if tenant in mirror.held:
            return True
        tenant = mirror.parents.get(tenant, "")
    return False


def judge_wants(mirror: Mirror) -> None:
    """For which kinds of GPUs does anybody wait who may start?"""
    wants = [w for w in mirror.wants.values() if not is_held(mirror, w.tenant)]
    for kind in mirror.kinds.values():
        kind.wanted = any(
            kind.memory_mb >= want.memory_mb and (not want.models or kind.model in want.models)
            for want in wants
        )
