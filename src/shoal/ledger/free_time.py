"""GPU time that no job holds: free, wanted but unusable, set aside or out of reach."""

from __future__ import annotations

from shoal.ledger.accounts import HOUR_MS, Account
from shoal.ledger.book_state import BookState, GpuKind, Hardware, Job, Node, Want
from shoal.ledger.postings import Postings
from shoal.model.resources import WHOLE_GPU_MILLI


def settle_nodes(postings: Postings) -> None:
    for node_id, node in postings.cluster.nodes.items():
        settle_node(postings, node_id, node)


def settle_node(postings: Postings, node_id: str, node: Node) -> None:
    """Book the node's free time and capacity up to now. This never spans two hours, because all
    nodes are settled when an hour ends."""
    now_ms = postings.cluster.now_ms
    passed_ms = now_ms - node.mark_ms
    kind = postings.cluster.kinds[node.kind]
    wanted_ms, node.wanted_at = kind.wanted_ms - node.wanted_at, kind.wanted_ms
    hour, node.mark_ms = node.mark_ms // HOUR_MS, now_ms
    if not passed_ms or not node.known or not node.gpus:
        return
    capacity = postings.adds.capacity
    key = (hour, node_id)
    capacity[key] = capacity.get(key, 0) + node.gpus * WHOLE_GPU_MILLI * passed_ms
    free, claimed = room_of(node)
    if node.away is not None:
        postings.add(hour, node_id, "", node.away, (free + claimed) * passed_ms)
        return
    postings.add(hour, node_id, "", Account.RESERVED, claimed * passed_ms)
    if node.whole:
        postings.add(hour, node_id, "", Account.FRAGMENTED, free * passed_ms)
    elif node.reserved:
        postings.add(hour, node_id, "", Account.RESERVED, free * passed_ms)
    else:
        postings.add(hour, node_id, "", Account.FRAGMENTED, free * wanted_ms)
        postings.add(hour, node_id, "", Account.FREE, free * (passed_ms - wanted_ms))


def new_node(postings: Postings, node_id: str, model: str, gpus: int, memory_mb: int) -> Node:
    """A node, or its next life, joins; its time is booked from now on."""
    cluster = postings.cluster
    key = f"{model}/{memory_mb}"
    if key not in cluster.kinds:
        cluster.kinds[key] = GpuKind(model, memory_mb)
        judge_wants(postings.cluster)
    before = cluster.nodes.get(node_id)
    node = Node(
        gpus=gpus,
        kind=key,
        mark_ms=cluster.now_ms,
        wanted_at=cluster.kinds[key].wanted_ms,
        held=[0] * gpus,
        claimed=[0] * gpus,
    )
    if before is not None:
        node.quarantined, node.reserved = before.quarantined, before.reserved
        node.intent = "open" if before.intent == "removed" else before.intent
    cluster.nodes[node_id] = node
    postings.turn()  # its time so far belongs to its old hardware
    postings.adds.machines[node_id] = Hardware(model, gpus)
    return node


def room_of(node: Node) -> tuple[int, int]:
    """The thousandths of its GPUs that no job holds: free, and claimed for a job."""
    if not any(node.claimed):  # nearly always true, and much cheaper
        return node.gpus * WHOLE_GPU_MILLI - sum(node.held), 0
    free = claimed = 0
    for held, wanted in zip(node.held, node.claimed, strict=True):
        left = WHOLE_GPU_MILLI - held
        taken = min(wanted, left)
        claimed += taken
        free += left - taken
    return free, claimed


def stands(cluster: BookState, job: Job) -> None:
    """The job wants GPUs from now on."""
    if job.gpus and not job.queued:
        job.queued = True
        _want(cluster, job, 1)


def leaves(cluster: BookState, job: Job) -> None:
    if job.queued:
        job.queued = False
        _want(cluster, job, -1)


def _want(cluster: BookState, job: Job, change: int) -> None:
    wants = cluster.wants
    key = "\n".join((job.owner.tenant, str(job.memory_mb), *job.models))
    want = wants.get(key)
    if want is None:
        want = wants[key] = Want(job.owner.tenant, job.models, job.memory_mb)
    want.jobs += change
    if want.jobs == 0:
        del wants[key]
    if want.jobs <= 1:
        judge_wants(cluster)


def is_held(cluster: BookState, tenant: str) -> bool:
    """Whether its budget, or that of a tenant above it, is used up."""
    for _ in range(len(cluster.parents) + 1):
        if tenant in cluster.held:
            return True
        tenant = cluster.parents.get(tenant, "")
    return False


def judge_wants(cluster: BookState) -> None:
    """Update which kinds of GPUs are wanted by a job that may start."""
    wants = [w for w in cluster.wants.values() if not is_held(cluster, w.tenant)]
    for kind in cluster.kinds.values():
        kind.wanted = any(
            kind.memory_mb >= want.memory_mb and (not want.models or kind.model in want.models)
            for want in wants
        )
